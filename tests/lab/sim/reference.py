"""The plain way: one event per decode iteration, and every token gap in a list.

Prefill nodes take one prompt at a time; KV moves in no time and memory is ample. Placements are taken from the
run to compare with, since it is times that are checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.core.cost import compile_cost
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.records import RequestRecord
from isthmus.lab.sim.workloads import Request


@dataclass
class Timeline:
    """What one request should have seen. Gaps in ps."""

    first_token_ns: int
    end_ns: int = -1
    gaps: list[int] = field(default_factory=list)

    @property
    def tbt_ns(self) -> float:
        count = -(-len(self.gaps) // 10)
        return sum(sorted(self.gaps)[-count:]) / count / 1000 if count else 0.0


def timelines(deployment: Deployment, records: Sequence[RequestRecord]) -> list[Timeline]:
    found = {record.index: Timeline(time) for record, time in _prefills(deployment, records)}
    for slot in range(len(deployment.nodes)):
        here = [record for record in records if record.decode == slot and record.request.output_tokens > 1]
        here.sort(key=lambda record: (found[record.index].first_token_ns, record.index))
        _decode(deployment, slot, [(record.request, found[record.index]) for record in here])
    for timeline in found.values():
        timeline.end_ns = max(timeline.end_ns, timeline.first_token_ns)
    return [found[record.index] for record in records]


def _prefills(deployment: Deployment, records: Sequence[RequestRecord]) -> list[tuple[RequestRecord, int]]:
    """First come, first served. A prompt's full chunks are one run, and its last chunk is another."""
    free = [0] * len(deployment.nodes)
    times = []
    for record in records:
        cost, budget = compile_cost(deployment.nodes[record.prefill].cost), deployment.nodes[0].token_budget
        length, now = record.request.num_tokens, max(free[record.prefill], record.arrival_ns)
        full = (length - 1) // budget
        if full:
            now += sum(cost.step_ps([(budget, at * budget)], 0, 0) for at in range(full)) // 1000
        now += cost.step_ps([(length - full * budget, full * budget)], 0, 0) // 1000
        free[record.prefill] = now
        times.append((record, now))
    return times


def _decode(deployment: Deployment, slot: int, joiners: list[tuple[Request, Timeline]]) -> None:
    """A request joins at the end of the iteration under way; an idle node starts at once, with that one alone."""
    cost = compile_cost(deployment.nodes[slot].cost)
    batch: list[tuple[Request, Timeline, int]] = []  # the time, in ps, of the latest token
    start_ns = elapsed_ps = 0  # of the stretch with the present batch
    while joiners or batch:
        if not batch:
            request, timeline = joiners.pop(0)
            start_ns, elapsed_ps = timeline.first_token_ns, 0
            batch.append((request, timeline, start_ns * 1000))
        context = sum(request.num_tokens + 1 + len(timeline.gaps) for request, timeline, _ in batch)
        duration = cost.step_ps((), len(batch), context)
        elapsed_ps += duration
        now = start_ns + elapsed_ps // 1000
        for request, timeline, latest in batch:
            timeline.gaps.append(duration if timeline.gaps else start_ns * 1000 + elapsed_ps - latest)
            if len(timeline.gaps) == request.output_tokens - 1:
                timeline.end_ns = now
        stay = [entry for entry in batch if entry[1].end_ns < 0]
        join = [entry for entry in joiners if entry[1].first_token_ns <= now]
        if join or len(stay) < len(batch):
            start_ns, elapsed_ps = now, 0
        batch = stay + [(request, timeline, timeline.first_token_ns * 1000) for request, timeline in join]
        joiners = joiners[len(join) :]
