"""The decode clock: who decodes, and when a run ends."""

from __future__ import annotations

from isthmus.core.scheduler import CountingPool, Limits, Sequence
from isthmus.core.scheduler.batch import DecodeClock
from isthmus.core.scheduler.sequence import DECODING
from isthmus.core.types import RequestId

SIZE = 4


def decodes(number: int, computed: int, answer: int, pool: CountingPool) -> Sequence:
    """Its prompt of `computed` tokens is through, in as few blocks as hold it."""
    sequence = Sequence(RequestId(f"r{number}"), computed, computed + answer)
    sequence.state, sequence.age, sequence.computed = DECODING, number, computed
    sequence.blocks = pool.allocate(-(-computed // SIZE))
    return sequence


def test_one_that_stopped_and_comes_again_is_not_taken_for_what_it_was() -> None:
    """Its old entries are in the heaps still, and would end the run of its second life too soon."""
    pool = CountingPool(100)
    clock = DecodeClock(Limits(100, SIZE, max_steps=100))
    sequence = decodes(1, 4, 10, pool)
    sequence.blocks += pool.allocate(9)
    clock.start(sequence)
    clock.now += 3
    clock.stop(sequence)
    sequence.age, sequence.computed = 2, 5
    clock.start(sequence)
    assert clock.run([]).steps == 14 - 1 - 5
    clock.check()


def test_blocks_are_given_ahead_while_half_the_pool_is_left_and_no_longer() -> None:
    pool = CountingPool(20)
    clock = DecodeClock(Limits(20, SIZE, max_steps=16))
    for number in range(4):
        clock.start(decodes(number, 4, 40, pool))
    assert clock.make_room(pool)
    assert sorted(len(each.blocks) for each in clock.sequences) == [2, 2, 2, 5]
    assert pool.available < 10
