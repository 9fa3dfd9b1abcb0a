"""Who is let in next: the order of promises and the turns of tenants against plain rules, and what others need."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.attempts import FetchOrder
from isthmus.core.scheduler import Admitted, SchedulerLimits, Sequence, Stepped
from isthmus.core.scheduler.queues import promise_order
from isthmus.core.scheduler.turns import Turns
from isthmus.core.types import NodeId, RequestId, Tenant

from .driver import Fact, Told, arrived

MS = 10**6


def prompt(name: str, length: int, work_ms: int, **about: Any) -> Fact:
    return arrived(RequestId(name), length, length + 1, work_ns=work_ms * MS, **about)


def admitted_of(num_blocks: int, *facts: Fact, **limits: Any) -> list[str]:
    """All that wait at once are let in one by one, in promise order; who decodes ends."""
    about = {"prompt_batch": 1, "order": "promise", **limits}
    scheduler, actions, found = Told(SchedulerLimits(num_blocks, 4, **about)), list[Any](), list[str]()
    for fact in facts:
        fact(scheduler, actions)  # type: ignore[operator]
    scheduler.plan(actions)
    for _ in facts:
        found += [action.request for action in actions if isinstance(action, Admitted)]
        actions = scheduler.on(Stepped(1)) if scheduler.run is not None else []
    return found


LATE = FetchOrder(NodeId("peer"), 0, 1, 30 * MS)


@pytest.mark.parametrize(
    ("num_blocks", "facts", "order"),
    [
        # The shortest goes first if that breaks no promise and its fetch will have ended.
        (
            100,
            [prompt("a", 40, 50, deadline_ns=70 * MS), prompt("b", 8, 10), prompt("c", 4, 5, fetch=LATE)],
            "bac",
        ),
        # Without tiers nothing was sent anywhere because of what lies there, whatever its route says.
        (100, [prompt("a", 40, 50), prompt("b", 12, 1, names=(1, 2, 3), num_cached=2)], "ba"),
        # Who leaves keeps its blocks until its decode node takes it, which may be after one that it overtook.
        (12, [prompt("a", 44, 50), prompt("b", 8, 10)], "b"),
        (12, [prompt("a", 44, 50), prompt("b", 8, 10, hands_over=True)], "a"),
        # Of 10 blocks "b" and "c" leave 5, as many as "a" needs; "d" would leave 4.
        (
            10,
            [
                prompt(name, length, work, hands_over=True)
                for name, length, work in (("a", 20, 9), ("b", 8, 1), ("c", 12, 2), ("d", 4, 3))
            ],
            "bca",
        ),
    ],
)
def test_who_overtakes_leaves_the_others_what_they_need(num_blocks: int, facts: list[Fact], order: str) -> None:
    assert admitted_of(num_blocks, *facts) == list(order)


@pytest.mark.parametrize(("num_blocks", "order"), [(28, "ab"), (29, "ba")])
def test_snapshots_of_a_state_are_part_of_what_those_it_overtakes_need(num_blocks: int, order: str) -> None:
    """11 and 2 blocks of KV, each with as many as four snapshots of two blocks."""
    facts = [prompt(name, size, size, hands_over=True) for name, size in (("a", 44), ("b", 8))]
    assert admitted_of(num_blocks, *facts, state_blocks=2) == list(order)


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
def test_promise_order_is_the_plain_rule(queue: list[Waiting], now: int) -> None:
    assert chosen(queue, now) == plainly(queue, now)


def test_whoever_was_admitted_in_order_of_arrival_keeps_its_promise() -> None:
    """Each is promised what first come first served would give it, or more; the mean is less."""
    random, mean, plain_mean = Random(1), 0.0, 0.0
    for _ in range(500):
        queue, end, ends = list[Waiting](), 0, list[int]()
        for _ in range(random.randint(1, 9)):
            work = random.randint(1, 50)
            end += work
            ends.append(end)
            queue.append(Waiting(work, end + random.choice([0, 0, 20, 100, 400])))
        plain_mean += sum(ends) / len(ends)
        now, count = 0, len(queue)
        while queue:
            request = queue.pop(chosen(queue, now))
            now += request.work_ns
            assert now <= request.deadline_ns
            mean += now / count
    assert mean < 0.95 * plain_mean


# Turns of tenants.

SIZE = 4
WEIGHTS = {"acme": 1.0, "globex": 1.0, "third": 3.0}


class Queue:
    def __init__(self, **limits: int) -> None:
        self.turns = Turns(SchedulerLimits(100, SIZE, **limits))
        self.waiting: list[Sequence] = []

    def arrive(self, tenant: str, length: int = 8) -> Sequence:
        made = Sequence(RequestId(""), length, length + 1, tenant=Tenant(tenant, WEIGHTS[tenant]))
        self.turns.arrive(made.tenant)
        self.waiting.append(made)
        return made

    def next(self) -> Sequence:
        taken = self.waiting.pop(self.turns.indexes(self.waiting)[0])
        self.turns.take(taken, taken.length)
        return taken

    def order(self, count: int) -> list[str]:
        return [self.next().tenant.name for _ in range(count)]


@given(
    st.lists(
        st.one_of(st.none(), st.tuples(st.sampled_from(sorted(WEIGHTS)), st.integers(1, 200))), max_size=120
    )
)
def test_tenants_that_wait_all_the_time_get_equal_work_for_their_weight(
    told: list[tuple[str, int] | None],
) -> None:
    """None: the next has its turn. Any two tenants that both waited all through a stretch of time get, in it, work that
    differs by a prompt of each at most: the bound of start-time fair queueing. Of one tenant the first comes first."""
    queue, history = Queue(), list[tuple[frozenset[str], str, float]]()
    for what in [*told, *[None] * len(told)]:
        if what is not None:
            queue.arrive(*what)
        elif queue.waiting:
            present = frozenset(each.tenant.name for each in queue.waiting)
            first = {each.tenant.name: each for each in reversed(queue.waiting)}
            assert queue.turns.is_shared or len(present) == 1
            taken = queue.next() if queue.turns.is_shared else queue.waiting.pop(0)
            assert taken is first[taken.tenant.name]
            history.append((present, taken.tenant.name, taken.length / taken.tenant.weight))
    for one, other in (("acme", "globex"), ("acme", "third")):
        most = sum(200 / WEIGHTS[name] for name in (one, other))
        ahead = low = high = 0.0
        for present, name, work in history:
            if not present >= {one, other}:
                ahead = low = high = 0.0
                continue
            ahead += work if name == one else -work if name == other else 0.0
            low, high = min(low, ahead), max(high, ahead)
            assert high - low <= most + 1e-6


def test_who_comes_back_begins_where_the_others_are() -> None:
    queue = Queue()
    for _ in range(30):
        queue.arrive("acme")
    queue.arrive("globex")
    assert "globex" in queue.order(2)
    queue.order(20)
    for _ in range(5):
        queue.arrive("globex")
    assert queue.order(6).count("acme") >= 2


def test_generated_tokens_count_and_who_was_pre_empted_goes_first() -> None:
    queue = Queue()
    first = queue.arrive("acme")
    for tenant in ("globex", "acme", "globex", "globex", "globex"):
        queue.arrive(tenant)
    assert queue.order(2) == ["acme", "globex"]
    queue.turns.serve(first, 16)
    assert queue.order(2) == ["globex"] * 2
    first.age = 1
    queue.waiting.insert(0, first)
    assert queue.order(3) == ["acme", "globex", "acme"]


def may_pass(queue: Queue, index: int, *, holds: bool = True) -> bool:
    return queue.turns.may_pass(queue.waiting, index, lambda each: each.length // SIZE, holds=holds)


def test_those_that_pass_others_leave_enough_for_each_that_they_passed() -> None:
    """Of 100 blocks 12 may be kept free for those that run."""
    queue = Queue()
    for blocks in (40, 30, 49):
        queue.arrive("acme", blocks * SIZE)
    passing = queue.arrive("globex", 39 * SIZE)
    assert may_pass(queue, 3) is (39 + 49 <= 88)
    queue.turns.passed(passing, 39)
    assert queue.turns.has_ahead
    assert not may_pass(queue, 2, holds=True)
    assert may_pass(queue, 2, holds=False), "it waits for nobody, and fits beside the other"
    queue.arrive("third", 50 * SIZE)
    assert not may_pass(queue, 4, holds=False), "it would wait for one that may wait for those it passed"
    queue.turns.gone(passing)
    assert may_pass(queue, 4, holds=False) and not queue.turns.has_ahead
    assert not may_pass(queue, 4)


def test_the_last_place_is_for_who_came_first() -> None:
    queue = Queue(max_sequences=2)
    for tenant in ("acme", "globex", "third"):
        queue.arrive(tenant)
    assert may_pass(queue, 1)
    queue.turns.passed(queue.waiting.pop(1), 2)
    assert not may_pass(queue, 1)
    assert may_pass(queue, 1, holds=False)
