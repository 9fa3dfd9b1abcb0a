"""Token gaps from the nodes' logs: the mean of a request's longest tenth, without visiting each gap.

A request's gaps are slices of its node's runs, and within a run they grow evenly: slices are taken from the top, as
many gaps at a time as exceed the next slice's largest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace

from isthmus.lab.sim.job import SimJob
from isthmus.lab.sim.node import Gaps, SimNode


def set_tbt(jobs: Iterable[SimJob], nodes: list[SimNode]) -> None:
    """Fills in `tbt_ns` of every request that decoded."""
    for job in jobs:
        if job.spans:
            gaps, count = _gaps(job, nodes)
            if count:
                job.record.tbt_ns = mean_of_longest(gaps, -(-count // 10)) / 1000


def _gaps(job: SimJob, nodes: list[SimNode]) -> tuple[list[Gaps], int]:
    """All gaps of a request, and how many: those of each stay, and after it that to the token of a new prefill."""
    gaps: list[Gaps] = []
    before, count = job.record.first_token_ns * 1000, 0
    for at, (slot, first, last) in enumerate(job.spans):
        if last > first:
            before = _stay(nodes[slot], first, last, before, gaps)
            count += last - first
        if at < len(job.resumed_ns):
            resumed = job.resumed_ns[at] * 1000
            gaps.append((before - resumed, 0, 1))
            before, count = resumed, count + 1
    return gaps, count


def _stay(node: SimNode, first: int, last: int, before: int, gaps: list[Gaps]) -> int:
    """Adds the gaps of iterations `[first, last)` of a node; returns the time (ps) of the last one's end.

    The first gap began `before`, with a token from elsewhere. A stay begins with a run; where the attempt was given up
    it ended within one.
    """
    runs = node.run_steps
    begin, end = bisect_right(runs, first) - 1, bisect_right(runs, last - 1)
    log = node.run_gaps[begin:end]
    largest, growth, size = log[-1]
    over = last - runs[end - 1]
    log[-1] = largest + growth * (size - over), growth, over
    largest, growth, size = log[0]
    shortest = -largest - growth * (size - 1)
    gaps.append((before - node.run_start[begin] * 1000 - shortest, 0, 1))
    if size > 1:
        gaps.append((largest, growth, size - 1))
    gaps += log[1:]
    largest, growth, size = log[-1]
    shortest = -largest - growth * (size - 1)
    return node.run_start[end - 1] * 1000 + size * shortest + growth * (size * (size - 1) // 2)


def mean_of_longest(gaps: list[Gaps], count: int) -> float:
    """Mean of the `count` longest gaps, at least 1. Consumes `gaps`."""
    heapify(gaps)
    total, left = 0, count
    while True:
        largest, growth, size = gaps[0]
        take = size if size < left else left
        if growth and take > 1 and len(gaps) > 1:
            second = gaps[1][0]
            if len(gaps) > 2 and gaps[2][0] < second:
                second = gaps[2][0]
            ahead = (second - largest) // growth + 1
            if ahead < take:
                take = ahead
        total -= largest * take + growth * (take * (take - 1) // 2)
        left -= take
        if not left:
            return total / count
        if take == size:
            heappop(gaps)
        else:
            heapreplace(gaps, (largest + growth * take, growth, size - take))
