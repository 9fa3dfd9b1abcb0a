"""300 real requests through one vLLM 0.19 instance on an RTX 4090, and the same requests on a simulated node."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.cost_fit import Finding, finding, read
from benchmarks.cost_models import facts
from isthmus.core.conductor import Rules
from isthmus.core.cost import ENGINES, Analytic, Coefficients, engine_coefficients, hardware_named
from isthmus.core.types import NS_PER_S, NodeId, Role
from isthmus.facts import NodeFacts, Sequences
from isthmus.lab.sim.deployment import FAR, Deployment
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import Request, Workload

_BLOCKS, _BLOCK = 2_588, 16  # what the engine reported for this run
_TOKEN_BUDGET, _MAX_RUNNING = 2_048, 256

Times = tuple[float, float, float]
"""When a request arrived, when its first token came and when its last, in seconds from the first arrival."""


def request_findings(profiles: Path) -> Iterator[Finding]:
    rows = list(read(profiles / "llmservingsim/vllm_requests_RTX4090_Llama-3.1-8B.csv"))
    # Engine times are on a monotonic clock: arrival is taken as `queued_ts`, from the same clock.
    rows.sort(key=lambda row: float(row["queued_ts"]))
    names = ("queued_ts", "first_token_ts", "last_token_ts")
    start = float(rows[0]["queued_ts"])
    seconds = [[float(row[name]) - start for name in names] for row in rows]
    measured: list[Times] = [(arrival_s, first_s, last_s) for arrival_s, first_s, last_s in seconds]
    requests = [
        Request(round(arrival_s * NS_PER_S), int(row["input_toks"]), int(row["output_toks"]))
        for row, (arrival_s, _, _) in zip(rows, measured, strict=True)
    ]
    kernel_scaled = engine_coefficients("vllm", hardware_named("rtx4090"), weight_dtype="bf16", kv_dtype="bf16")
    for case, coefficients in (
        ("kernel-scaled", kernel_scaled),
        ("H200 coefficients unchanged", ENGINES["vllm"]),
    ):
        yield from _compare(case, simulated(coefficients, requests), measured)


def simulated(coefficients: Coefficients, requests: Sequence[Request]) -> list[Times]:
    """On one node of the simulator, which prefills and decodes."""
    gpu = hardware_named("rtx4090")
    instance = Analytic(facts("Llama-3.1-8B"), gpu, coefficients, weight_dtype="bf16", kv_dtype="bf16")
    node = NodeFacts(
        NodeId("mixed-0"),
        Role.MIXED,
        instance,
        _BLOCKS,
        _BLOCK,
        token_budget=_TOKEN_BUDGET,
        sequences=Sequences(_MAX_RUNNING, _MAX_RUNNING, _MAX_RUNNING),
        max_steps=FAR,
        max_chunks=FAR,
    )
    workload = Workload("vLLM requests", _BLOCK, list(requests))
    records = Simulation(Deployment((node,), Rules(max_requests=1 << 40)), workload).run().records
    return [(r.arrival_ns / NS_PER_S, r.first_token_ns / NS_PER_S, r.end_ns / NS_PER_S) for r in records]


def _compare(case: str, ours: Sequence[Times], measured: Sequence[Times]) -> Iterator[Finding]:
    table = "llmservingsim, vLLM requests RTX 4090"
    pairs = list(zip(ours, measured, strict=True))
    tpots = [(a[2] - a[1]) / (b[2] - b[1]) - 1 for a, b in pairs]
    yield finding(table, f"TPOT, {case}", "no refit", tpots)
    yield finding(
        table, f"end to end, {case}", "no refit", [(a[2] - a[0]) / (b[2] - b[0]) - 1 for a, b in pairs]
    )
    means = [statistics.fmean(first - arrival for arrival, first, _ in side) for side in (ours, measured)]
    yield finding(table, f"mean TTFT, {case}", "no refit", [means[0] / means[1] - 1])
    spans = [max(last for _, _, last in side) for side in (ours, measured)]
    yield finding(table, f"makespan, {case}", "no refit", [spans[0] / spans[1] - 1])
