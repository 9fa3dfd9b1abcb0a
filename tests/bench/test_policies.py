"""The sweep's own parts, and a whole small one in worker processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.bench import policies
from isthmus.bench.policies import Sweep, alone, overload, total
from isthmus.bench.policy_cells import Cell, Figures, Task, common_of
from isthmus.bench.policy_cells import run_task as run_with
from isthmus.bench.policy_cells import workload_of as workload_with
from isthmus.core.errors import ConfigError
from isthmus.lab.sim.workloads import Workload

SPEC = "poisson:rate=4,num=60,input=3000,output=20,prefixes=5,prefix_tokens=4096"


def task(source: str = SPEC, **fields: object) -> Task:
    given = {"nodes": 2, "decode": 2, "speed": 1.0, "seed": 1, "links": (3_000_000_000,)}
    return Task(source, **(given | {"policies": ("sticky", "isthmus")} | fields))  # type: ignore[arg-type]


def run_task(asked: Task) -> list[Cell]:
    return run_with(asked, common_of(asked))


def workload_of(asked: Task) -> Workload:
    return workload_with(asked, common_of(asked))


def outcome(ttft_s: float, goodput: float) -> Figures:
    return Figures(ttft_s, 2 * ttft_s, 0.5, goodput)


def cell(alone_: dict[str, Figures], overload_: dict[str, Figures] | None = None, seed: int = 1) -> Cell:
    return Cell("a trace", 8, 8, 2.0, 3_000_000_000, False, seed, alone_, overload_ or {})


def trace(folder: Path, *timestamps: int) -> str:
    path = folder / "trace.jsonl"
    lines = [
        {"timestamp": timestamp, "input_length": 600, "output_length": 5, "hash_ids": [number, number + 1000]}
        for number, timestamp in enumerate(timestamps)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": ("isthmus", "stiky")}, "--policies: 'stiky' is not known"),
        ({"policies": ("isthmus",)}, "at least one other"),
        ({"policies": ("sticky", "random")}, "name isthmus"),
        ({"nodes": ()}, "--nodes: give at least one value"),
        ({"speeds": (1.0, 1.0)}, "--speeds: give at least one value, and each once"),
        ({"links": (0.0,)}, "must be above 0"),
        ({"decode": 0}, "at least 1 node must decode"),
    ],
)
def test_a_sweep_without_sense_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sweep(("a trace",), **fields)  # type: ignore[arg-type]


def test_the_best_other_policy_is_chosen_by_its_mean_ttft() -> None:
    found = alone(cell({"sticky": outcome(4, 0.99), "random": outcome(9, 1.0), "isthmus": outcome(3, 0.98)}))
    assert (found.best, found.ratio) == ("sticky", pytest.approx(0.75))
    assert found.goodput_difference == pytest.approx(-0.01)
    assert found.goodput_to_highest == pytest.approx(-0.02)


def test_in_overload_only_equal_goodput_counts() -> None:
    refusing = {
        "random": outcome(2, 0.5),
        "sticky": outcome(20, 0.99),
        "mooncake-1": outcome(19, 0.985),
        "isthmus": outcome(18, 0.99),
        "isthmus, promise": outcome(9.5, 0.98),
    }
    found = overload(cell({"sticky": outcome(99, 0.02)}, refusing))
    assert found is not None
    assert (found.best, found.ratio) == ("mooncake-1", pytest.approx(0.5))
    assert found.goodput_difference == pytest.approx(-0.005)
    assert overload(cell({"sticky": outcome(1, 1)})) is None


def test_totals_take_the_worst_cell() -> None:
    verdicts = [policies.Verdict("a", 0.9, 0.01, 0.0), policies.Verdict("b", 1.02, -0.02, -0.03)]
    found = total(verdicts)
    assert found is not None
    assert (found.cells, found.mean_ratio, found.worst_ratio) == (2, pytest.approx(0.96), 1.02)
    assert (found.worst_goodput_difference, found.worst_goodput_to_highest) == (-0.02, -0.03)
    assert total([]) is None


def test_a_seed_spreads_a_mooncake_trace_and_is_that_of_a_generated_workload(tmp_path: Path) -> None:
    source = trace(tmp_path, 0, 0, 0, 3000, 3000)
    one, two = (workload_of(task(source, seed=seed)) for seed in (1, 2))
    arrivals = [request.arrival_ns for request in one.requests]
    assert len(set(arrivals)) == 5
    assert max(arrivals[:3]) < 3_000_000_000 <= min(arrivals[3:])
    assert arrivals != [request.arrival_ns for request in two.requests]
    one, again, two = (
        workload_of(task(f"{SPEC},seed={given}", seed=seed)) for given, seed in ((9, 1), (3, 1), (1, 2))
    )
    assert one.requests == again.requests != two.requests


def test_who_never_fetches_is_simulated_once_unless_handover_shares_its_links() -> None:
    slow, fast = run_task(task(links=(1_300_000_000, 50_000_000_000)))
    assert slow.alone["sticky"] == fast.alone["sticky"]
    assert slow.alone["sticky"].fetched_bytes == 0
    assert slow.alone["isthmus"] != fast.alone["isthmus"]
    slow, fast = run_task(task(links=(300_000_000, 50_000_000_000), shared=True))
    assert (slow.shared, fast.shared) == (True, True)
    assert slow.alone["sticky"].ttft_s_mean == fast.alone["sticky"].ttft_s_mean
    assert slow.alone["sticky"].goodput < fast.alone["sticky"].goodput, "the first gap waits for the KV"


def test_overload_is_met_with_refusal() -> None:
    (found,) = run_task(task("poisson:rate=4,num=150,input=20000,output=20"))
    assert max(each.goodput for each in found.alone.values()) < 0.9
    assert list(found.overload) == ["sticky", "isthmus", "isthmus, promise"]
    assert found.overload["isthmus"].goodput > found.alone["isthmus"].goodput
    assert found.overload["isthmus, promise"].ttft_s_mean < found.overload["isthmus"].ttft_s_mean


def test_a_deployment_file_gives_costs_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    curve = "{kv_token_bytes: 1000, num_layers: 2, prefill_token_s: 1.0e-3, decode_fixed_s: 0.01}"
    text = f"engine: {{kv_memory: 1GiB, cost: {curve}}}\ncache: {{dram: 1GB}}\n"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"slo.ttft_ms: goodput needs a limit"):
        run_task(task(config=str(path)))
    path.write_text(text + "slo: {ttft_ms: 100000}\n")
    (slower,) = run_task(task(config=str(path)))
    (default,) = run_task(task())
    assert slower.alone["sticky"].ttft_s_mean > 3 * default.alone["sticky"].ttft_s_mean
