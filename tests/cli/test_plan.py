"""`isthmus plan`: the case study of Prefill-as-a-Service, outputs, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.main import app
from tests.cli.conftest import Command

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan" / "prfaas.yaml"
LENGTHS = ("--lengths", "lognormal:mu=9.9,sigma=1,min=128,max=131072", "--output-tokens", 1024)
QUESTION = ("--lengths", "2000", "--output-tokens", "50")
ONE_CLUSTER = """
roles: {prefill: 3, decode: 2}
engine:
  kv_memory: 100GB
  token_budget: 8192
  cost: {kv_token_bytes: 327680, num_layers: 80, prefill_token_s: 1.0e-4, decode_fixed_s: 0.02}
slo: {ttft_ms: 3000, tbt_ms: 100}
"""
TWO_CLUSTERS = """
clusters:
  far: {roles: {prefill: 1}}
  home: {roles: {prefill: 1, decode: 1}}
engine:
  cost: {kv_token_bytes: 327680, num_layers: 80, prefill_token_s: 1.0e-4, decode_fixed_s: 0.02}
"""
LINK = "links: [{between: [far, home], gbps: 1}]\n"


@pytest.fixture(scope="module")
def case_study(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of the example, with the bandwidths of research's table."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    arguments = [EXAMPLE, *LENGTHS, "--top", 8, "--bandwidth", "1,2,5,10,20,100", "--json", file]
    app(["plan", "--config", *map(str, arguments)], standalone_mode=False)
    found: dict[str, Any] = json.loads(file.read_bytes())
    return found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(ONE_CLUSTER)
    return path


def test_the_published_optimum(case_study: dict[str, Any]) -> None:
    """arXiv 2604.15039, Table 6: threshold 19.4K, split 3/5, 3.24 requests/s, 49.6 % offloaded, about 13 Gbps."""
    paper = case_study["paper"]
    found = paper["representative"]
    assert paper["threshold"] == pytest.approx(19_400, rel=0.015)  # the grid has steps of 200 tokens
    assert (paper["remote"], paper["prefill"], paper["decode"]) == ({"remote": 4}, 3, 5)
    assert found["rate"] == pytest.approx(3.24, rel=0.01)
    assert found["share"] == pytest.approx(0.496, rel=0.02)
    assert found["egress_gbps"] == pytest.approx(13, rel=0.1)
    assert paper["mean_above"] == pytest.approx(44 * 1024, rel=0.02)
    assert found["remote"] == pytest.approx(1.61, rel=0.01)
    assert found["local"] == pytest.approx(1.64, rel=0.01)
    assert found["decode"] == pytest.approx(3.91, rel=0.01)
    assert abs(found["threshold_residual"]) < 0.02 and found["binds"] in ("remote compute", "local compute")
    assert paper["service"]["mean_s"] == pytest.approx(2.22, rel=0.03)


def test_the_published_baselines(case_study: dict[str, Any]) -> None:
    """Table 6: homogeneous 9/3 at 2.11, naive 4/-/8 at 2.45; about 15 % at equal cost, a H200 being two H20."""
    by = {plan["name"]: plan for plan in case_study["baselines"]}
    homogeneous, naive, equal = by["homogeneous"], by["naive"], by["equal cost"]
    assert (homogeneous["prefill"], homogeneous["decode"]) == (9, 3)
    assert homogeneous["representative"]["rate"] == pytest.approx(2.11, rel=0.01)
    assert homogeneous["service"]["mean_s"] == pytest.approx(4.44, rel=0.02)
    assert homogeneous["service"]["p90_s"] == pytest.approx(9.73, rel=0.01)
    assert (naive["prefill"], naive["decode"]) == (0, 8)
    assert naive["representative"]["rate"] == pytest.approx(2.45, rel=0.02)
    best = case_study["paper"]["representative"]["rate"]
    assert best / homogeneous["representative"]["rate"] == pytest.approx(1.54, rel=0.01)
    assert equal["cost"] == 16 and best / equal["representative"]["rate"] == pytest.approx(1.15, rel=0.01)


def test_the_curves_of_the_case_study(case_study: dict[str, Any]) -> None:
    """Over splits at the best threshold, and over bandwidths; `isthmus reproduce prfaas` reckons them too."""
    splits = [point["representative"] for point in case_study["what_if"]["split"]]
    assert splits.index(max(splits)) == 3
    by_gbps = {point["gbps"]: point["representative"] for point in case_study["what_if"]["bandwidth"]}
    for gbps, rate in ((1, 1.56), (2, 1.62), (5, 2.26), (10, 3.03), (20, 3.25), (100, 3.25)):
        assert by_gbps[gbps] == pytest.approx(rate, rel=0.01)
    at = {point["threshold"]: point["representative"] for point in case_study["what_if"]["threshold"]}
    assert all(rate <= case_study["what_if"]["twice"]["rate"] for rate in at.values())
    failure = case_study["what_if"]["link_failure"]
    assert (failure["prefill"], failure["decode"]) == (6, 2)
    assert failure["resplit"] == pytest.approx(1.41, rel=0.06)


def test_what_is_printed_and_written_is_the_same_again(isthmus: Command, config: Path, tmp_path: Path) -> None:
    figures, again, report = (tmp_path / name for name in ("plan.json", "again.json", "plan.html"))
    question = ("plan", "--config", config, *QUESTION, "--report", report, "--simulate", "--requests", 40)
    status, out, err = isthmus(*question, "--json", figures)
    assert (status, err) == (0, "")
    assert "| plan 1" in out and "Highest rate with queues" in out
    isthmus(*question, "--json", again)
    assert again.read_bytes() == figures.read_bytes()
    found = json.loads(figures.read_bytes())
    assert (
        list(found) == "demand clusters batch plans paper baselines what_if simulated notes attention".split()
    )
    assert len(found["plans"]) == 3 and found["clusters"][0]["nodes"] == 5
    simulated = found["simulated"]
    assert {trial["fraction"] for trial in simulated["trials"]} == {0.7, 0.8, 0.9}
    assert {trial["arrivals"] for trial in simulated["trials"]} == {"Poisson", "bursts"}
    for trial in simulated["trials"]:
        assert trial["requests"] == 40
        parts = trial["queue"]["mean"] + trial["prefill"]["mean"]
        assert trial["ttft"]["mean"] == pytest.approx(parts)
    for each in simulated["sustained"]:
        assert each["optimism"] is None or each["optimism"] == pytest.approx(each["formula"] / each["rate"])
    assert report.read_text().startswith("<!DOCTYPE html>")


def test_a_trace_is_planned_for(isthmus: Command, config: Path, tmp_path: Path) -> None:
    trace, figures = tmp_path / "trace.jsonl", tmp_path / "plan.json"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 9, "hash_ids": [1, %d]}\n'
    trace.write_text("".join(line % (500 * number, 2 + number) for number in range(30)))
    status, out, _ = isthmus("plan", "--config", config, "--trace", trace, "--json", figures)
    demand = json.loads(figures.read_bytes())["demand"]
    assert status == 0 and "30 requests" in out
    assert (demand["p50_uncached"], demand["rate"], demand["output_tokens"]) == (88, pytest.approx(2.0), 9)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give one of them"),
        (("--trace", "x.jsonl", *QUESTION), "give one of them"),
        (("--trace", "absent.jsonl"), "absent.jsonl: cannot be read"),
        (("--trace", "{words}"), "no workload"),
        (("--trace", "{trace}", "--output-tokens", "5"), "leave it out"),
        (("--lengths", "2000"), "--output-tokens"),
        (("--lengths", "2000", "--output-tokens", "0"), "at least 1"),
        ((*QUESTION, "--bandwidth", "1,2"), "no link"),
        ((*QUESTION, "--simulate", "--goodput", "0"), "above 0 and at most 1"),
        ((*QUESTION, "--requests", "50"), "give --simulate too"),
        ((*QUESTION, "--json", "nowhere/plan.json"), "no folder nowhere"),
        ((*QUESTION, "--report", "."), "is a folder"),
    ],
)
def test_a_mistake_is_one_line(
    isthmus: Command, config: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}\n')
    words = tmp_path / "words.txt"
    words.write_text("no lengths here\n")
    given = [each.format(words=words, trace=trace) for each in arguments]
    status, out, err = isthmus("plan", "--config", config, *given)
    assert (status, out) == (2, "")
    assert err.startswith("isthmus: error: ") and err.count("\n") == 1 and says in err


@pytest.mark.parametrize(
    ("text", "bandwidth", "says"),
    [
        (TWO_CLUSTERS, "1", "no link joins far and home"),
        (TWO_CLUSTERS + LINK + "slo: {tbt_ms: 5}\n", "1", "slo.tbt_ms"),
        *[(TWO_CLUSTERS + LINK, text, "expected Gbps above 0") for text in ("0", "1,x", "-1", "inf", "")],
    ],
)
def test_a_fleet_that_cannot_be_planned_is_one_line(
    isthmus: Command, tmp_path: Path, text: str, bandwidth: str, says: str
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    status, out, err = isthmus("plan", "--config", path, *QUESTION, "--bandwidth", bandwidth)
    assert (status, out) == (2, "") and err.count("\n") == 1 and says in err


def test_whether_attention_nodes_pay_for_given_prices(isthmus: Command, tmp_path: Path) -> None:
    example, figures = EXAMPLE.parent / "attention.yaml", tmp_path / "plan.json"
    lengths = ("--lengths", 1155, "--output-tokens", 211, "--json", figures)
    status, out, err = isthmus("plan", "--config", example, *lengths)
    assert (status, err) == (0, "") and "it pays" in out and "Memory-bound" in out
    found = json.loads(figures.read_bytes())["attention"]
    assert found["elsewhere"]["price"] == pytest.approx(20.32) and found["alone"]["price"] == 22.12
    assert found["ratio"] == pytest.approx(found["elsewhere"]["per_price"] / found["alone"]["per_price"])
    model = EXAMPLE.parent / "models" / "llama-65b.json"
    status, _, err = isthmus("plan", "--config", example, *lengths, "--model", model)
    assert status == 2 and "does not fit 1 x h100" in err and err.count("\n") == 1
