"""Who is let in next: the order of promises against the plain rule, and what those that are overtaken need."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.attempts import FetchOrder
from isthmus.core.scheduler import Admitted, SchedulerLimits, Stepped
from isthmus.core.scheduler.queues import promise_order
from isthmus.core.types import NodeId, RequestId

from .told import Fact, Told, arrived

MS = 10**6


def prompt(name: str, length: int, work_ms: int, **about: Any) -> Fact:
    return arrived(RequestId(name), length, length + 1, work_ns=work_ms * MS, **about)


def admitted_of(num_blocks: int, *facts: Fact, **limits: Any) -> list[str]:
    """All that wait at once are let in one by one; who decodes ends."""
    scheduler, actions, found = (
        Told(SchedulerLimits(num_blocks, 4, prompt_batch=1, **limits)),
        list[Any](),
        list[str](),
    )
    for fact in facts:
        fact(scheduler, actions)  # type: ignore[operator]
    run = scheduler.plan(actions)
    for _ in facts:
        found += [action.request for action in actions if isinstance(action, Admitted)]
        assert run is not None
        actions = scheduler.on(Stepped(1))
        run = scheduler.run
    return found


def test_the_shortest_goes_first_if_that_breaks_no_promise() -> None:
    late = FetchOrder(NodeId("peer"), 0, 1, 30 * MS)
    facts = (
        prompt("long", 40, 50, deadline_ns=70 * MS),
        prompt("short", 8, 10),
        prompt("shorter", 4, 5, fetch=late),
    )
    assert admitted_of(100, *facts, order="promise") == ["short", "long", "shorter"]


@pytest.mark.parametrize(("leaves", "first"), [(False, "short"), (True, "long")])
def test_who_leaves_takes_no_memory_that_those_it_overtakes_need(leaves: bool, first: str) -> None:
    facts = prompt("long", 44, 50), prompt("short", 8, 10, hands_over=leaves)
    assert admitted_of(12, *facts, order="promise")[0] == first


@pytest.mark.parametrize(("num_blocks", "first"), [(28, "long"), (29, "short")])
def test_snapshots_of_a_state_are_part_of_what_those_it_overtakes_need(num_blocks: int, first: str) -> None:
    """11 and 2 blocks of KV, each with as many as four snapshots of two blocks."""
    facts = [prompt(name, size, size, hands_over=True) for name, size in (("long", 44), ("short", 8))]
    assert admitted_of(num_blocks, *facts, order="promise", state_blocks=2)[0] == first


class Waiting(msgspec.Struct, frozen=True):
    work_ns: int
    deadline_ns: int = 0
    is_ready: bool = True


def chosen(queue: list[Waiting], now: int = 0) -> int:
    return promise_order(queue, now, lambda request: request.is_ready)  # type: ignore[attr-defined]


def plainly(queue: list[Waiting], now: int) -> int:
    """docs: policy 4, written over all pairs. Slack: deadline less the end in order of arrival."""
    best = 0
    for index, request in enumerate(queue):
        ends = [now + sum(other.work_ns for other in queue[: at + 1]) for at in range(index)]
        slacks = [other.deadline_ns - end for other, end in zip(queue, ends, strict=False) if other.deadline_ns]
        fits = all(request.work_ns <= slack for slack in slacks if slack >= 0)
        if fits and request.is_ready and request.work_ns < queue[best].work_ns:
            best = index
    return best


requests = st.builds(
    Waiting,
    st.integers(1, 50),
    st.one_of(st.just(0), st.integers(1, 300)),
    st.sampled_from([True, True, False]),
)


@given(st.lists(requests, min_size=1, max_size=8), st.integers(0, 100))
def test_it_is_the_plain_rule(queue: list[Waiting], now: int) -> None:
    assert chosen(queue, now) == plainly(queue, now)


def run(queue: list[Waiting]) -> list[tuple[Waiting, int]]:
    """Who ends when, in the order of service, when nothing else comes."""
    left, now, ended = list(queue), 0, []
    while left:
        request = left.pop(chosen(left, now))
        now += request.work_ns
        ended.append((request, now))
    return ended


def admitted(random: Random) -> list[Waiting]:
    """Each is promised what first come first served would give it, or more."""
    queue, end = [], 0
    for _ in range(random.randint(1, 9)):
        work = random.randint(1, 50)
        end += work
        queue.append(Waiting(work, end + random.choice([0, 0, 20, 100, 400])))
    return queue


def test_whoever_was_admitted_in_order_of_arrival_keeps_its_promise() -> None:
    random, mean, plain_mean = Random(1), 0.0, 0.0
    for _ in range(500):
        queue = admitted(random)
        ended = run(queue)
        assert all(end <= request.deadline_ns for request, end in ended)
        mean += sum(end for _, end in ended) / len(queue)
        plain_mean += sum(sum(r.work_ns for r in queue[: at + 1]) for at in range(len(queue))) / len(queue)
    assert mean < 0.95 * plain_mean  # what it is for
