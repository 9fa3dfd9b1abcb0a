"""The engine's memory: what a request gets, and when it is free again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.scheduler import BlockPool, CountingPool, Limits, Sequence
from isthmus.core.scheduler.memory import Memory
from isthmus.core.scheduler.sequence import Prefix
from isthmus.core.types import RequestId

SIZE, STATE = 4, 2
A, B = RequestId("a"), RequestId("b")


def memory(num_blocks: int, state_blocks: int = 0) -> Memory:
    return Memory(Limits(num_blocks, SIZE, state_blocks=state_blocks), BlockPool(num_blocks))


@given(num_blocks=st.integers(1, 30), headroom=st.integers(0, 6))
def test_what_is_set_aside_leaves_what_is_kept_for_those_that_run(num_blocks: int, headroom: int) -> None:
    held = memory(24)
    blocks = held.set_aside(num_blocks, headroom)
    assert len(blocks) == (num_blocks if num_blocks + headroom <= 24 else 0)
    held.check([])
    held.put_back(blocks)
    assert held.pool.available == 24


def test_what_is_expected_has_room_for_its_next_token_and_its_state() -> None:
    held, sequence = memory(5, STATE), Sequence(A, 8, 20)
    assert not held.reserve(sequence, 1)
    assert held.reserve(sequence, 0)
    assert (len(sequence.blocks), len(sequence.restore)) == (3, STATE)
    held.release(sequence)
    assert held.pool.available == 5


@given(st.lists(st.sampled_from(["save", "saved", "give"]), max_size=30))
def test_blocks_in_saving_are_nobodys_until_all_is_saved(ops: list[str]) -> None:
    """As often as something began to be saved of a request. Of another one, nothing waits."""
    held = Memory(Limits(100, SIZE), CountingPool(100))
    counts: Counter[str] = Counter()
    waiting = 0
    for op in ops:
        if op == "save":
            held.saving(A)
            counts["saving"] += 1
        elif op == "saved" and counts["saving"]:
            held.saved(A)
            counts["saving"] -= 1
            waiting = waiting if counts["saving"] else 0
        elif op == "give":
            held.give_back(A, held.pool.allocate(2))
            waiting += 2 if counts["saving"] else 0
            held.give_back(B, held.pool.allocate(2))
        assert held.pool.available == 100 - waiting
        held.check([])


def test_a_snapshot_waits_for_its_saving_and_the_one_gone_on_from_does_not() -> None:
    held, sequence = memory(40, STATE), Sequence(A, 41, 50, tuple(range(10)))
    prefix = Prefix(num_tokens=8, num_found=2, loads=True)
    assert held.admit(sequence, prefix, 0)
    assert (len(sequence.restore), [shot.position for shot in sequence.snapshots]) == (STATE, [40])
    held.saving(A)
    held.release(sequence)
    assert held.pool.available == 40 - 11 - STATE
    held.saved(A)
    assert held.pool.available == 40


def test_blocks_that_requests_and_the_pool_do_not_agree_on_are_noticed() -> None:
    held, sequence = memory(10), Sequence(A, 8, 20)
    held.admit(sequence, Prefix(), 0)
    sequence.blocks = sequence.blocks[:1]
    with pytest.raises(AssertionError, match="do not agree"):
        held.check([sequence])
