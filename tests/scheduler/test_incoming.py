"""Requests from other nodes, without a scheduler: memory first, then their KV, then a place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.scheduler import CountingPool, Joined, Limits, Sequence
from isthmus.scheduler.batch import Batch
from isthmus.scheduler.memory import Memory
from isthmus.scheduler.queues import Incoming
from isthmus.scheduler.sequence import DECODING, EXPECTED, JOINING, RECEIVING
from isthmus.types import RequestId


@given(
    st.integers(4, 40),
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["expect", "import", "drop", "end"]), st.integers(0, 9)), max_size=50),
)
def test_as_many_may_come_as_may_decode_and_all_blocks_come_back(
    num_blocks: int, places: int, ops: list[tuple[str, int]]
) -> None:
    limits = Limits(num_blocks, 4, max_sequences=places)
    pool = CountingPool(num_blocks)
    memory, batch = Memory(limits, pool), Batch(limits)
    incoming = Incoming(limits, memory, batch)
    here: list[Sequence] = []
    for number, (op, pick) in enumerate(ops):
        if op == "expect":
            here.append(Sequence(RequestId(str(number)), 3 + pick, 20))
            incoming.expect(here[-1])
        states = {"import": [RECEIVING], "drop": [EXPECTED, RECEIVING, JOINING], "end": [DECODING]}
        some = [each for each in here if each.state in states.get(op, ())]
        if some:
            chosen = some[pick % len(some)]
            if op == "import":
                incoming.imported(chosen)
            else:
                (incoming if op == "drop" else batch).remove(chosen)
                memory.release(chosen)
                here.remove(chosen)
        reserve_and_join(incoming, here, pool, batch, places)
        for check in (memory.check, batch.check, incoming.check):
            check(here)
    assert pool.available == num_blocks - sum(len(each.blocks) for each in here)


def reserve_and_join(
    incoming: Incoming, here: list[Sequence], pool: CountingPool, batch: Batch, places: int
) -> None:
    expected = [each for each in here if each.state is EXPECTED]
    actions: list = []
    incoming.join(actions)
    assert all(isinstance(action, Joined) for action in actions)
    assert not incoming.joining or batch.num_placed == places, "it waits, and there is a place"
    incoming.reserve(actions)
    left = [each for each in expected if each.state is EXPECTED]
    assert left == expected[len(expected) - len(left) :], "in the order in which they were expected"
    coming = [each for each in here if each.state in (RECEIVING, JOINING)]
    assert len(coming) <= places
    if left and len(coming) < places:
        assert -(-(left[0].length + 1) // 4) + batch.headroom > pool.available, "it waits, and there is memory"
