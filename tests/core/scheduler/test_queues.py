"""Who is let in next, and who has to wait, without a scheduler."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.attempts import FetchOrder
from isthmus.core.scheduler import Admitted, CountingPool, Limits, Load, Sequence, TierCache
from isthmus.core.scheduler.batch import Batch
from isthmus.core.scheduler.memory import Memory
from isthmus.core.scheduler.prefixes import PoolPrefixes, TierPrefixes
from isthmus.core.scheduler.queues import Admission, promise_order
from isthmus.core.scheduler.sequence import COMPUTING, QUEUED
from isthmus.core.types import NodeId, RequestId

SIZE, MS = 4, 10**6
NAMES = tuple(range(40))


class Door:
    def __init__(self, num_blocks: int = 100, tiers: TierCache | None = None, **others: object) -> None:
        limits = Limits(num_blocks, SIZE, **others)  # type: ignore[arg-type]
        self.pool = CountingPool(num_blocks)
        memory = Memory(limits, self.pool)
        prefixes = TierPrefixes(tiers, memory, SIZE, NodeId("")) if tiers else PoolPrefixes(memory, SIZE)
        self.batch = Batch(limits)
        self.admission = Admission(limits, memory, prefixes, self.batch)

    def arrive(self, request: str, length: int, work_ms: int = 0, **others: object) -> Sequence:
        sequence = Sequence(RequestId(request), length, length + 9, NAMES[: length // SIZE])
        sequence.work_ns = work_ms * MS
        for name, value in others.items():
            setattr(sequence, name, value)
        self.admission.waiting.append(sequence)
        return sequence

    def admits(self, now: int = 0) -> str:
        """Who is let in; "" for nobody."""
        before, actions = len(self.admission.waiting), []
        admitted = self.admission.admit(actions, now)
        self.admission.check()
        self.batch.check(self.batch.prompts)
        assert admitted == (len(self.admission.waiting) < before) == bool(actions)
        return self.batch.prompts[-1].request if admitted else ""


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(15, 60), st.integers(1, 8))
def test_in_order_while_there_are_places_and_a_spare_block_for_each_that_runs(
    lengths: list[int], num_blocks: int, places: int
) -> None:
    door = Door(num_blocks, max_sequences=places)
    for number, length in enumerate(lengths):
        door.arrive(str(number), length)
    for number in range(len(lengths)):
        available, spare = door.pool.available, min(number, num_blocks // 8)
        fits = number < places and -(-lengths[number] // SIZE) + spare <= available
        assert door.admits() == (str(number) if fits else "")
        if not fits:
            return


def test_the_shortest_goes_first_if_that_breaks_no_promise() -> None:
    door = Door(order="promise")
    door.arrive("long", 40, work_ms=50, deadline_ns=70 * MS)
    door.arrive("short", 8, work_ms=10)
    door.arrive("shorter", 4, work_ms=5, fetch=FetchOrder(NodeId("peer"), 0, 1, 30 * MS))
    assert [door.admits(), door.admits(), door.admits()] == ["short", "long", "shorter"]


@pytest.mark.parametrize(("leaves", "first"), [(False, "short"), (True, "long")])
def test_who_leaves_takes_no_memory_that_those_it_overtakes_need(leaves: bool, first: str) -> None:
    door = Door(12, order="promise")
    door.arrive("long", 44, work_ms=50)
    door.arrive("short", 8, work_ms=10, hands_over=leaves)
    assert door.admits() == first


@pytest.mark.parametrize(("num_blocks", "first"), [(28, "long"), (29, "short")])
def test_snapshots_of_a_state_are_part_of_what_those_it_overtakes_need(num_blocks: int, first: str) -> None:
    """11 and 2 blocks of KV, each with as many as four snapshots of two blocks."""
    door = Door(num_blocks, order="promise", state_blocks=2)
    door.arrive("long", 44, work_ms=50, hands_over=True)
    door.arrive("short", 8, work_ms=10, hands_over=True)
    assert door.admits() == first


def test_out_of_order_only_while_all_before_it_could_still_go() -> None:
    door = Door(20)
    door.arrive("first", 40)
    second = door.arrive("second", 44)
    third = door.arrive("third", 36)
    assert not door.admission.overtake(second, [], 0)
    assert door.admission.overtake(third, [], 0)
    assert door.admits() == "first"


def test_who_was_pre_empted_comes_before_all_others() -> None:
    door = Door()
    lost = door.arrive("lost", 8)
    door.arrive("other", 8)
    assert door.admits() == "lost"
    door.batch.remove(lost)
    door.pool.release(lost.blocks)
    door.admission.put_back(lost)
    assert (lost.state, lost.computed, lost.blocks) == (QUEUED, 0, ())
    assert (door.admits(), lost.state) == ("lost", COMPUTING)


def test_what_is_cached_is_loaded_and_one_token_at_least_is_computed() -> None:
    door = Door(tiers=(tiers := TierCache(8, 20)))
    tiers.put(NAMES[:10])
    door.arrive("a", 40)
    actions: list = []
    assert door.admission.admit(actions, 0)
    admitted, load = actions
    assert isinstance(admitted, Admitted) and isinstance(load, Load)
    assert (admitted.cached_tokens, admitted.disk_blocks) == (39, 2)
    assert (load.names, load.blocks, load.num_tokens) == (NAMES[:10], admitted.blocks, 39)


def test_who_was_sent_for_what_is_being_computed_waits_for_it() -> None:
    door = Door(tiers=TierCache(40))
    door.arrive("first", 40)
    door.arrive("second", 44, num_cached=10)
    assert (door.admits(), door.admits()) == ("first", "")


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
