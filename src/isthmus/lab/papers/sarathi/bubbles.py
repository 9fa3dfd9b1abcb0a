"""Pipeline bubbles: batches of equal length leave stages idle for less time (SARATHI, GPT-3 on 64 A100)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from statistics import median

import msgspec

from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.sarathi.models import on_a100
from isthmus.lab.papers.sarathi.one_node import WHOLE, Asked, BatchLimits, OneNode, StepTime, serve
from isthmus.lab.papers.table import Cell, Table

_STAGES, _REPLICAS = 8, 8
_STAGED_BATCH, _WHOLE_BATCH, _CHUNK = 27, 11, 256
_ROUNDS = 4
"""How often each place of a batch is taken; the paper serves 10,000 requests."""
_SHORTEST, _LONGEST, _THETA, _RATIO = 1024, 4096, 0.4, 10

_PUBLISHED = {
    "median bubble time of a request": 6.29,
    "throughput over TP-PP with whole prompts": 1.91,
    "throughput over tensor parallelism only": 1.48,
}


class Piped(msgspec.Struct, frozen=True):
    """`took_ps`: from the first batch to the last; `bubbles_ps`: of each request, the time for which stages stood idle
    right before the batches that it was in."""

    took_ps: int
    bubbles_ps: list[int]


def piped(queues: list[list[Asked]], step_ps: StepTime, batch_limits: BatchLimits) -> Piped:
    """Each queue is served in a micro-batch of its own. They pass the stages in turn, and each may enter again, with
    the tokens of its last pass, when it has left the last stage. A stage takes its share of a batch's time;
    communication takes none."""
    nodes = [OneNode(queue, batch_limits, step_ps) for queue in queues]
    free = [0] * _STAGES
    idle_ps: list[list[int]] = [[] for _ in nodes]
    ready: list[tuple[int, int]] = []
    for number, node in enumerate(nodes):
        node.arrive(0)
        heappush(ready, (0, number))
    while ready:
        now, number = heappop(ready)
        node = nodes[number]
        assert node.batch is not None
        took, idle = node.batch.took_ps, 0
        for stage, was_free in enumerate(free):
            begin = max(now, was_free)
            idle += begin - was_free
            now = free[stage] = begin + took // _STAGES
        idle_ps[number].append(idle)
        node.step(now)
        if not node.is_done:
            heappush(ready, (now, number))
    bubbles = []
    for node, idle_of in zip(nodes, idle_ps, strict=True):
        until = [0, *accumulate(idle_of)]
        served = node.served
        bubbles += [until[served.last(at) + 1] - until[begin] for at, begin in enumerate(served.admitted)]
    return Piped(free[-1], bubbles)


def requests_of(count: int) -> list[Asked]:
    """Lengths by Zipf's law between the shortest and the longest; a tenth as many tokens in the answer."""
    sizes = range(_SHORTEST, _LONGEST + 1)
    weights = [rank**-_THETA for rank in range(1, len(sizes) + 1)]
    lengths = Random(1).choices(sizes, weights, k=count)
    answers = [length // (_RATIO + 1) for length in lengths]
    return [Asked(length - answer, answer) for length, answer in zip(lengths, answers, strict=True)]


@cache
def _piped(budget: int) -> Piped:
    requests = requests_of(_STAGES * _STAGED_BATCH * _ROUNDS)
    _, cost = on_a100("GPT-3", 8)
    queues = [requests[number::_STAGES] for number in range(_STAGES)]
    return piped(queues, cost.step_ps, BatchLimits(budget, _STAGED_BATCH, prompt_batch=1))


def _tensor_only_ps() -> int:
    """One of eight replicas, with its share of the requests; batches as Orca forms them at best."""
    requests = requests_of(_STAGES * _STAGED_BATCH * _ROUNDS)[::_REPLICAS]
    _, cost = on_a100("GPT-3", 8)
    return serve(requests, cost.step_ps, BatchLimits(WHOLE, _WHOLE_BATCH, prompt_batch=1)).worked_ps


def _measure(lab: Lab) -> Iterator[Cell]:
    chunked, whole = _piped(_CHUNK), _piped(WHOLE)
    ours = (
        median(whole.bubbles_ps) / median(chunked.bubbles_ps),
        whole.took_ps / chunked.took_ps,
        _tensor_only_ps() / chunked.took_ps,
    )
    for (row, figure), value in zip(_PUBLISHED.items(), ours, strict=True):
        yield Cell(row, "times", figure, value)


TABLE = Table(
    name="sarathi-bubbles",
    title="Pipeline bubbles of GPT-3 on 64 A100",
    source="SARATHI, GPT-3 simulation",
    setup=(
        "Direction only. Eight stages of eight GPUs, eight micro-batches of 27 requests, each with our scheduler; the "
        "analytic cost model, no communication between stages, 864 requests. The paper's packing of micro-batches and "
        "its communication profile are not published, and nothing is fitted."
    ),
    measure=_measure,
)
