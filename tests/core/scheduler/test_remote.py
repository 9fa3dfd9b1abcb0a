"""KV elsewhere, beside a list that says of each block of a sequence where it lies."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.attempts import Holding, Share
from isthmus.core.scheduler import Sequence
from isthmus.core.scheduler.remote import RemoteKV, Return, Shipment, shares
from isthmus.core.types import NodeId, RequestId

H0, H1, H2 = (NodeId(f"h{number}") for number in range(3))
HOLDERS = st.sampled_from([(H0,), (H1,), (H0, H1), (H2,)])
NUM = 12
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), HOLDERS, st.integers(1, 4), st.booleans()),
        st.tuples(st.just("ship"), HOLDERS, st.integers(1, 4), st.booleans()),
        st.tuples(st.just("return"), HOLDERS, st.integers(1, 4), st.booleans()),
    ),
    max_size=30,
)


@given(OPS)
def test_each_block_lies_at_home_or_where_it_was_to_lie(ops: list) -> None:
    sequence, fresh = Sequence(RequestId("a"), 4 * NUM, 5 * NUM), count(NUM)
    remote = sequence.remote = RemoteKV()
    sequence.blocks = tuple(range(NUM))
    home, there = (
        list(range(NUM)),
        list[tuple[NodeId, ...]](),
    )  # numbers of blocks at home; holders of those elsewhere
    planned = list[tuple[NodeId, ...]]()
    for op, holders, num_blocks, granted in ops:
        if op == "ask" and len(planned) + num_blocks < NUM:
            asked = remote.ask(Holding(holders, num_blocks))
            last = planned[-1:] == [holders]
            others = {holder for each in planned if each != holders or not last for holder in each}
            assert bool(asked) == others.isdisjoint(holders), "what lies with a holder follows each other"
            for index, (holder, room, share) in enumerate(asked):
                assert (holder, share.part, share.parts) == (holders[index], index, len(holders))
                assert room == planned.count(holders) + num_blocks and share.first == len(planned) - (
                    room - num_blocks
                )
                assert not remote.ask(Holding(holders, 1)), "it was asked already"
            for holder, _, _ in asked:
                assert remote.answered(holder, granted, 9)
            planned += [holders] * num_blocks if asked and granted else []
        elif op == "ship" and not remote.is_there:
            to, first, stop = remote.next_span()
            assert to == planned[len(there)] and first == there.count(to)
            assert stop == max(at for at, each in enumerate(planned) if each == to) + 1
            num_blocks = min(num_blocks, stop - len(there))
            remote.arrived(to[0], 99)  # nothing was shipped yet
            remote.shipment = Shipment(num_blocks, dict.fromkeys(to))
            remote.arrived(NodeId("nobody"), 99)
            for holder in to:
                remote.arrived(holder, first + num_blocks - 1)
                assert holder in remote.shipment.to, "not all of it came"
                remote.arrived(holder, first + num_blocks)
            assert not remote.shipment.to
            assert list(sequence.moved(num_blocks)) == home[:num_blocks]
            home, there = home[num_blocks:], there + [to] * num_blocks
        elif op == "return" and there and not remote.is_under_way:
            num_blocks = min(num_blocks, there.count(there[-1]))
            blocks = tuple(next(fresh) for _ in range(num_blocks))
            remote.returning = Return(blocks)
            assert not remote.ask(Holding(holders, 1))
            sequence.returned(blocks)
            assert not remote.is_under_way
            home, there = [*blocks, *home], there[:-num_blocks]
            planned = there[:]
        sequence.check()
        assert list(sequence.blocks) == home and sequence.num_absent == len(there)
        assert [each.holders for each in remote.there for _ in range(each.num_blocks)] == there
        assert [each.holders for each in remote.planned for _ in range(each.num_blocks)] == planned
        assert sequence.table == (0,) * len(there) + tuple(home) and sequence.is_bound == bool(planned)


def test_the_room_that_it_begins_with_is_asked_for_once_and_has_to_be_granted() -> None:
    remote = RemoteKV((Holding((H0, H1), 3), Holding((H2,), 2)))
    assert remote.waits
    asked = remote.ask()
    assert asked == [*shares(remote.planned)]
    assert asked == [(H0, 3, Share(0, 0, 2)), (H1, 3, Share(0, 1, 2)), (H2, 2, Share(3, 0, 1))]
    assert not remote.ask() and list(remote.holders) == [H0, H1, H2]
    for holder in (H0, H1, H2):
        assert remote.waits and remote.answered(holder, True, 0)
    assert not remote.waits and not remote.ask()
    again = RemoteKV(remote.planned)
    again.ask()
    assert not again.answered(H1, False, 0)
