"""`isthmus simulate`: outputs, and one line for each way it can go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.core.conductor import Rules
from tests.bench.recordings import record
from tests.cli.conftest import Command
from tests.lab.sim.report.pages import Page

CONFIG = """
roles: {prefill: 2, decode: 1}
engine:
  hardware: a800
  gpus: 8
  kv_memory: 100GB
  cost: {kv_token_bytes: 327680, num_layers: 80, prefill_token_s: 1.0e-4, decode_fixed_s: 0.02}
cache: {dram: 100GB}
slo: {ttft_ms: 30000, tbt_ms: 100}
"""
WORKLOAD = "poisson:rate=2,num=60,input=1500,output=20,prefixes=5,prefix_tokens=2048"
LINE = '{"timestamp": %d, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}\n'
TWO = """
clusters:
  dense:
    roles: {prefill: 1}
    cost: {kv_token_bytes: 17280, num_layers: 15, prefill_token_s: 5.0e-5, state_bytes: 1000000}
  local:
    roles: {prefill: 1, decode: {count: 1, max_sequences: 8}}
    cost: {kv_token_bytes: 17280, num_layers: 15, prefill_token_s: 1.0e-4, state_bytes: 1000000, decode_fixed_s: 0.02}
links: [{between: [dense, local], gbps: 1, rtt_ms: 10}]
engine: {hardware: h20, gpus: 8, kv_memory: 100GB, token_budget: 65536, prompt_batch: 1}
offload: {threshold: 4000, control: none}
"""
LONG_AND_SHORT = "even:rate=2,num=60,input=uniform(low=1000,high=9000),output=20"


def test_a_recording_of_the_router_is_simulated_with_the_speed_that_it_teaches(
    isthmus: Command, tmp_path: Path
) -> None:
    one, other, servers = tmp_path / "one.jsonl", tmp_path / "other.jsonl", tmp_path / "servers.yaml"
    for file, rate, seed in ((one, 2.0, 5), (other, 3.0, 6)):
        record(file, rate, 120, seed)
    status, out, err = isthmus("simulate", "--trace", one)
    assert status == 0 and "one: isthmus, admission none" in out
    assert err == (
        f"isthmus: learnt from 120 answers in one; `isthmus profile --recording {one}` writes it down\n"
    )
    assert all(abs(error) < 15 for error in differences(out)), out
    status, out, err = isthmus("profile", "--recording", one, "--out", servers)
    assert status == 0 and out == "" and "TTFT mean" in err
    status, out, err = isthmus("simulate", "--config", servers, "--trace", other, "--policy", "least_loaded")
    assert status == 0 and err == "" and "other: least_loaded" in out and len(differences(out)) == 4
    status, out, _ = isthmus("plan", "--config", servers, "--trace", one)
    assert status == 0 and "requests/s" in out


def differences(out: str) -> list[float]:
    """Percents by which simulated times differ from recorded ones."""
    _, _, table = out.partition("As recorded, of 120 streamed answers, and simulated")
    return [float(line.split("|")[-2]) for line in table.splitlines() if line.startswith(("| TTFT", "| TBT"))]


def test_without_a_deployment_the_trace_is_a_recording(isthmus: Command, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(LINE % 0)
    status, out, err = isthmus("simulate", "--trace", trace)
    assert status and out == "" and err.count("\n") == 1
    assert err.endswith("; without --config, --trace is a recording of `isthmus route`\n")
    status, out, err = isthmus("simulate", "--workload", WORKLOAD)
    assert status and out == "" and "--config FILE: give the deployment" in err


def test_a_policy_of_a_recording_is_not_run_unless_it_is_named(isthmus: Command, tmp_path: Path) -> None:
    file = record(tmp_path / "one.jsonl", 2.0, 30, 5, rules=Rules(policy="bad.py:steal"))
    status, out, err = isthmus("simulate", "--trace", file)
    assert status and out == "" and err.count("\n") == 1
    assert "policy 'bad.py:steal' is one of your own; if it may be run, give --policy bad.py:steal" in err
    status, out, _ = isthmus("profile", "--recording", file)
    assert status == 0 and "policy" not in out
    status, out, _ = isthmus("simulate", "--trace", file, "--policy", "isthmus")
    assert status == 0 and "one: isthmus" in out


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG)
    return path


def test_a_generated_workload_gives_table_json_page_and_recording(
    isthmus: Command, config: Path, tmp_path: Path
) -> None:
    figures, page, log = tmp_path / "out.json", tmp_path / "out.html", tmp_path / "log.jsonl"
    outputs = ("--json", figures, "--report", page, "--log", log)
    status, out, err = isthmus("simulate", "--config", config, "--workload", WORKLOAD, *outputs)
    assert status == 0 and err == ""
    assert "| TTFT (s)" in out and "admission none" in out
    summary = json.loads(figures.read_bytes())
    assert summary["requests"] == summary["completed"] == 60 and summary["goodput_share"] == 1.0
    assert set(summary["ttft_s"]) == set(summary["tbt_s"]) == {"mean", "p50", "p90", "p99"}
    assert summary["hit_rate_tokens"] > 0 and summary["hit_rate_blocks"] > 0
    assert summary["rejected"] == {"prefill": 0, "decode": 0}
    assert summary["bytes_moved"]["handover"] == 60 * 3548 * 327680 and summary["wall_s"] > 0
    shown = Page(page.read_text())
    assert "kv_memory" in shown.text and shown.hashes() == shown.allowed()
    status, out, _ = isthmus("replay", log)
    assert status == 0 and "identical decisions" in out


def test_flags_go_over_the_file_and_are_noted(isthmus: Command, config: Path, tmp_path: Path) -> None:
    trace, figures = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text("".join(LINE % (3000 * number) for number in range(10)))
    flags = ("--speed", 2, "--spread-seed", 1, "--limit", 5, "--policy", "mooncake", "--admission", "early")
    files = ("--config", config, "--trace", trace, "--json", figures)
    status, _, _ = isthmus("simulate", *files, *flags, "--order", "promise")
    summary = json.loads(figures.read_bytes())
    assert status == 0 and summary["requests"] == 5
    assert (summary["policy"], summary["admission"], summary["order"]) == ("mooncake", "early", "promise")
    assert len(summary["notes"]) == 3
    assert summary["makespan_s"] < 9.0


MISTAKES = [
    ((), "give one of them"),
    (("--workload", WORKLOAD, "--trace", "x.jsonl"), "give one of them"),
    (("--trace", "absent.jsonl"), "absent.jsonl: cannot be read"),
    (("--trace", "{bad}"), "bad.jsonl:2: "),
    (("--workload", "poisson:rate=1"), "workload"),
    (("--workload", WORKLOAD, "--policy", "best"), "policy"),
    (("--workload", WORKLOAD, "--admission", "maybe"), "scheduling.admission"),
    (("--workload", WORKLOAD, "--speed", "0"), "speed"),
    (("--workload", WORKLOAD, "--limit", "0"), "limit"),
    (("--workload", WORKLOAD, "--json", "nowhere/out.json"), "--json nowhere/out.json: no folder nowhere"),
    (("--workload", WORKLOAD, "--report", "."), "is a folder"),
    (("--workload", WORKLOAD, "--log", "nowhere/log"), "no folder"),
]
FAULTS = [
    (("--link-fault", "dense:remote:1:2:0"), "no such link; there are: dense:local"),
    (("--link-fault", "dense:local:1:2"), "write ONE:OTHER:START:STOP:FACTOR"),
    (
        ("--node-fault", "dense-decode-0:1:2"),
        "no node or cluster has that name; there are: dense, dense-prefill-0",
    ),
]


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        *[(CONFIG, *mistake) for mistake in MISTAKES],
        *[(TWO, ("--workload", LONG_AND_SHORT, *fault), says) for fault, says in FAULTS],
        ("engine: {hardware: a800, gpus: 8}\n", ("--workload", WORKLOAD), "engine.cost"),
    ],
)
def test_a_mistake_is_one_line(
    isthmus: Command, config: Path, tmp_path: Path, text: str, arguments: tuple[str, ...], says: str
) -> None:
    config.write_text(text)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(LINE % 0 + '{"timestamp": 6000, "input_length": -1}\n')
    given = [each.replace("{bad}", str(bad)) for each in arguments]
    status, out, err = isthmus("simulate", "--config", config, *given)
    assert status == 2 and out == ""
    assert err.startswith("isthmus: error: ") and err.count("\n") == 1 and says in err


def test_neither_torch_nor_a_web_framework_is_loaded(config: Path) -> None:
    asked = {"simulate": ["--workload", WORKLOAD], "plan": ["--lengths", "2000", "--output-tokens", "50"]}
    program = (
        "import sys; from isthmus.cli.main import app\n"
        f"for verb, how in {asked}.items():\n"
        f"    app([verb, '--config', {str(config)!r}, *how], standalone_mode=False)\n"
        "print(sorted({'torch', 'numpy', 'plotly', 'starlette', 'uvicorn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_several_clusters_and_faults_are_in_table_json_and_page(isthmus: Command, tmp_path: Path) -> None:
    config, figures, page = tmp_path / "two.yaml", tmp_path / "out.json", tmp_path / "out.html"
    config.write_text(TWO)
    faults = ("--link-fault", "dense:local:10:12:0.1", "--node-fault", "dense:20:22")
    outputs = ("--json", figures, "--report", page)
    status, out, err = isthmus("simulate", "--config", config, "--workload", LONG_AND_SHORT, *faults, *outputs)
    assert status == 0 and err == ""
    assert "| dense > local |" in out and "Threshold (tokens)" in out
    summary = json.loads(figures.read_bytes())
    assert set(summary["by_route"]) == {"dense > local", "local > local"}
    assert sum(route["requests"] for route in summary["by_route"].values()) == summary["completed"] == 60
    assert summary["by_route"]["dense > local"]["uncached_tokens"] > 4000
    assert summary["between_clusters"]["dense > local"]["gbps"] > 0 and summary["retried"] > 0
    parts = summary["ttft_parts"]
    assert parts["queue"] + parts["load"] + parts["prefill"] == pytest.approx(summary["ttft_s"]["mean"])
    assert summary["ready_s"]["mean"] == pytest.approx(summary["ttft_s"]["mean"] + parts["transfer"])
    assert summary["notes"] == ["fault dense:local:10:12:0.1", "fault dense:20:22"]
    assert summary["threshold"]["first"] == 4000 and summary["threshold"]["most"] is None, "while it was dead"
    assert "dense > local, Gbps of 1" in Page(page.read_text()).charts


def test_shares_of_tenants_that_a_trace_names(isthmus: Command, config: Path, tmp_path: Path) -> None:
    """100 prompts of acme, then 5 of globex, all at once: whose first tokens come when, is said by `auth`."""
    trace, log = tmp_path / "trace.jsonl", tmp_path / "log.jsonl"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 1, "hash_ids": [%d, %d], "tenant": "%s"}\n'
    asked = [(0, 2 * at, 2 * at + 1, "acme") for at in range(100)]
    asked += [(1, 1000 + at, 2000 + at, "globex") for at in range(5)]
    trace.write_text("".join(line % each for each in asked))
    plain = config.read_text()
    means = []
    for auth in ("", "auth: {tenants: {globex: {weight: 4}}}\n"):
        config.write_text(plain + auth)
        figures = tmp_path / f"{len(means)}.json"
        outputs = ("--json", figures, "--log", log)
        status, _, err = isthmus("simulate", "--config", config, "--workload", trace, *outputs)
        assert status == 0, err
        groups = json.loads(figures.read_bytes())["by_tenant"]
        means.append({name: groups[name]["ttft_s"]["mean"] for name in ("acme", "globex")})
    assert means[0]["globex"] > 1.5 * means[0]["acme"]
    assert means[1]["globex"] < 0.2 * means[1]["acme"]
    status, out, _ = isthmus("replay", log)
    assert status == 0 and "identical decisions" in out


@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_what_a_trace_lacks_is_said_in_one_line_and_in_the_figures(
    isthmus: Command, config: Path, tmp_path: Path, verb: str
) -> None:
    trace, figures = tmp_path / "t.jsonl", tmp_path / "out.json"
    trace.write_text('{"timestamp": 0.5, "input_length": 600, "session_id": "a"}\n' + LINE % 1000)
    status, out, err = isthmus(verb, "--config", config, "--trace", trace, "--json", figures)
    note = (
        "t.jsonl: ignored session_id (1 line); with a fraction in timestamp, taken as milliseconds (1 line); "
        "without output_length, taken as 1 (1 line); without hash_ids, sharing nothing (1 line)"
    )
    assert status == 0 and note in json.loads(figures.read_bytes())["notes"]
    assert err == f"isthmus: {note}\n" if verb == "simulate" else f"Note: {note}." in out
