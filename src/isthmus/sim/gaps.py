"""Token gaps from the nodes' logs: the mean of a request's longest tenth, without visiting each gap.

A request's gaps are slices of its node's runs, and within a run they grow evenly: slices are taken from the top, as
many gaps at a time as exceed the next slice's largest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace

from isthmus.sim.job import Job
from isthmus.sim.node import SimNode

Slices = list[tuple[int, int, int]]
"""(minus the largest gap, growth per gap, number of gaps), in ps."""


def set_tbt(jobs: Iterable[Job], nodes: list[SimNode]) -> None:
    """Fills in `tbt_ns` of every request with at least two tokens."""
    for job in jobs:
        if job.spans:
            slices = _slices(job, nodes)
            count = sum(size for _, _, size in slices)
            job.record.tbt_ns = mean_of_longest(slices, -(-count // 10)) / 1000


def _slices(job: Job, nodes: list[SimNode]) -> Slices:
    """All gaps of a request: to the first token of each stay, within it, and to the token that a new prefill gave."""
    slices: Slices = []
    before = job.record.first_token_ns * 1000
    resumed = iter(job.resumed_ns)
    for at, (slot, first, last) in enumerate(job.spans):
        if at:
            time = next(resumed) * 1000
            slices.append((before - time, 0, 1))
            before = time
        if last > first:
            before = _stay(nodes[slot], first, last, before, slices)
    return slices


def _stay(node: SimNode, first: int, last: int, before: int, slices: Slices) -> int:
    """Adds the gaps of iterations `[first, last)` of a node; returns the time of the last one's end."""
    steps, firsts, growths = node.log_steps, node.log_first, node.log_growth
    at = bisect_right(steps, first) - 1
    step, growth = firsts[at], growths[at]
    done = first - steps[at] + 1
    end = node.log_start[at] * 1000 + done * step + growth * (done * (done - 1) // 2)
    slices.append((before - end, 0, 1))
    first += 1
    num_runs = len(steps)
    while first < last:
        begins = steps[at]
        ends = steps[at + 1] if at + 1 < num_runs else last
        if first < ends:
            stop = ends if ends < last else last
            growth = growths[at]
            slices.append((-(firsts[at] + growth * (stop - 1 - begins)), growth, stop - first))
            first = stop
        else:
            at += 1
    done = last - steps[at]
    return node.log_start[at] * 1000 + done * firsts[at] + growths[at] * (done * (done - 1) // 2)


def mean_of_longest(slices: Slices, count: int) -> float:
    """Mean of the `count` longest gaps, at least 1. Consumes `slices`."""
    heapify(slices)
    total, left = 0, count
    while True:
        largest, growth, size = slices[0]
        take = size if size < left else left
        if growth and len(slices) > 1 and take > 1:
            second = min(slices[1], slices[2])[0] if len(slices) > 2 else slices[1][0]
            ahead = (second - largest) // growth + 1
            if ahead < take:
                take = ahead
        total += -largest * take - growth * (take * (take - 1) // 2)
        left -= take
        if not left:
            return total / count
        if take == size:
            heappop(slices)
        else:
            heapreplace(slices, (largest + growth * take, growth, size - take))
