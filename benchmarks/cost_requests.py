"""300 real requests through one vLLM 0.19 instance on an RTX 4090, stepped through the mixed-step formula.

The scheduler of vLLM V1, as far as it decides here: running requests first, one token each, prompts in chunks
within the token budget, first come first served, and the latest request gives its blocks up when there are
none.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cost_models import facts
from benchmarks.cost_tables import Finding, finding, read
from isthmus.core.cost import (
    Analytic,
    Coefficients,
    NodeCost,
    compile_cost,
    engine_coefficients,
    hardware_named,
)
from isthmus.core.cost.hardware import ENGINES

_BLOCKS, _BLOCK = 2_588, 16  # what the engine reported for this run
_TOKEN_BUDGET = 2_048
_MAX_RUNNING = 256


@dataclass
class Request:
    """Times in seconds from the first arrival. `computed`: tokens whose KV is there; `blocks`: held."""

    prompt: int
    output: int
    arrival_s: float
    computed: int = 0
    sampled: int = 0
    blocks: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def length(self) -> int:
        return self.prompt + self.sampled

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.output - 1)


def request_findings(profiles: Path) -> Iterator[Finding]:
    path = profiles / "llmservingsim/vllm_requests_RTX4090_Llama-3.1-8B.csv"
    measured = _measured(path)
    gpu = hardware_named("rtx4090")
    cases = (
        ("kernel-scaled", engine_coefficients("vllm", gpu, weight_dtype="bf16", kv_dtype="bf16")),
        ("H200 coefficients unchanged", ENGINES["vllm"]),
    )
    for case, coefficients in cases:
        yield from _compare(case, coefficients, measured)


def _compare(case: str, coefficients: Coefficients, measured: Sequence[Request]) -> Iterator[Finding]:
    instance = Analytic(
        facts("Llama-3.1-8B"), hardware_named("rtx4090"), coefficients, weight_dtype="bf16", kv_dtype="bf16"
    )
    ours = [Request(r.prompt, r.output, r.arrival_s) for r in measured]
    simulate(compile_cost(instance), ours)
    table = "llmservingsim, vLLM requests RTX 4090"
    pairs = list(zip(ours, measured, strict=True))
    yield finding(table, f"TPOT, {case}", "no refit", [a.tpot_s / b.tpot_s - 1 for a, b in pairs])
    ends = [(a.last_s - a.arrival_s) / (b.last_s - b.arrival_s) - 1 for a, b in pairs]
    yield finding(table, f"end to end, {case}", "no refit", ends)
    means = [statistics.fmean(r.first_s - r.arrival_s for r in side) for side in (ours, measured)]
    yield finding(table, f"mean TTFT, {case}", "no refit", [means[0] / means[1] - 1])
    spans = [max(r.last_s for r in side) for side in (ours, measured)]
    yield finding(table, f"makespan, {case}", "no refit", [spans[0] / spans[1] - 1])


def _measured(path: Path) -> list[Request]:
    """Engine times are on a monotonic clock: arrival is taken as `queued_ts`, from the same clock."""
    rows = sorted(read(path), key=lambda row: float(row["queued_ts"]))
    start = float(rows[0]["queued_ts"])
    found = []
    for row in rows:
        request = Request(int(row["input_toks"]), int(row["output_toks"]), float(row["queued_ts"]) - start)
        request.first_s, request.last_s = (
            float(row["first_token_ts"]) - start,
            float(row["last_token_ts"]) - start,
        )
        request.sampled = request.output
        found.append(request)
    return found


def simulate(cost: NodeCost, requests: Sequence[Request]) -> None:
    """Fills `first_s` and `last_s`. Requests are sorted by arrival."""
    coming, waiting = deque(requests), deque[Request]()
    running: list[Request] = []
    free, now_s = _BLOCKS, 0.0
    while coming or waiting or running:
        while coming and coming[0].arrival_s <= now_s:
            waiting.append(coming.popleft())
        if not waiting and not running:
            now_s = coming[0].arrival_s
            continue
        batch, free = _batch(running, waiting, free)
        chunks = [(count, r.computed) for r, count in batch if r.computed < r.length - 1 or not r.computed]
        decodes = [r for r, _ in batch if r.computed and r.computed == r.length - 1]
        now_s += cost.step_ps(chunks, len(decodes), sum(r.computed + 1 for r in decodes)) / 1e12
        for request, count in batch:
            request.computed += count
            if request.computed < request.length:
                continue
            request.sampled += 1
            request.first_s = request.first_s or now_s
            if request.sampled == request.output:
                request.last_s = now_s
                free += request.blocks
                running.remove(request)


def _batch(running: list[Request], waiting: deque[Request], free: int) -> tuple[list[tuple[Request, int]], int]:
    """The next iteration: requests with their new tokens, and the blocks left. Moves between the queues."""
    budget, batch, preempted = _TOKEN_BUDGET, [], False
    index = 0
    while index < len(running) and budget:
        request = running[index]
        count = min(request.length - request.computed, budget)
        needed = -(-(request.computed + count) // _BLOCK) - request.blocks
        while needed > free and running[-1] is not request:
            free += _give_up(running.pop(), waiting)
            preempted = True
        if needed > free:
            free += _give_up(running.pop(), waiting)
            preempted = True
            break
        request.blocks, free, budget = request.blocks + needed, free - needed, budget - count
        batch.append((request, count))
        index += 1
    while waiting and budget and len(running) < _MAX_RUNNING and not preempted:
        request = waiting[0]
        count = min(request.length - request.computed, budget)
        needed = -(-(request.computed + count) // _BLOCK)
        if needed > free:
            break
        running.append(waiting.popleft())
        request.blocks, free, budget = needed, free - needed, budget - count
        batch.append((request, count))
    return batch, free


def _give_up(request: Request, waiting: deque[Request]) -> int:
    """Back to the front of the queue, to be computed again; returns its blocks."""
    blocks, request.blocks, request.computed = request.blocks, 0, 0
    waiting.appendleft(request)
    return blocks
