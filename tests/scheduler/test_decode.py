"""The decode clock beside a model that counts each request's tokens one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.scheduler import CountingPool, Limits, Sequence
from isthmus.scheduler.batch import DecodeClock
from isthmus.scheduler.sequence import DECODING
from isthmus.types import RequestId

SIZE, MAX_STEPS = 4, 8


def decodes(number: int, computed: int, answer: int, pool: CountingPool) -> Sequence:
    """Its prompt of `computed` tokens is through, in as few blocks as hold it."""
    sequence = Sequence(RequestId(f"r{number}"), computed, computed + answer)
    sequence.state, sequence.age, sequence.computed = DECODING, number, computed
    sequence.blocks = pool.allocate(-(-computed // SIZE))
    return sequence


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(1, 20), st.integers(2, 30)),
        st.tuples(st.just("stop"), st.integers(0, 7), st.just(0)),
        st.tuples(st.just("run"), st.integers(0, MAX_STEPS), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(st.integers(12, 60), OPS)
def test_runs_are_as_long_as_nobody_ends_or_lacks_a_block(num_blocks: int, ops: list) -> None:
    pool = CountingPool(num_blocks)
    clock = DecodeClock(Limits(num_blocks, SIZE, max_steps=MAX_STEPS))
    computed: dict[Sequence, int] = {}
    for number, (op, first, second) in enumerate(ops):
        if op == "start" and pool.available >= -(-first // SIZE):
            sequence = decodes(number, first, second, pool)
            clock.start(sequence)
            computed[sequence] = first
        elif op == "stop" and computed:
            stop(clock, pool, computed, list(computed)[first % len(computed)])
        elif op == "run" and computed:
            while not clock.make_room(pool):
                assert pool.available == 0, "it gave up with blocks left"
                stop(clock, pool, computed, max(computed, key=lambda each: each.age))
            if computed:
                execute(clock, pool, computed, first)
        clock.check()
        assert clock.context == sum(tokens + 1 for tokens in computed.values())
    for sequence in list(computed):
        stop(clock, pool, computed, sequence)
    assert pool.available == num_blocks


def execute(clock: DecodeClock, pool: CountingPool, computed: dict[Sequence, int], at_most: int) -> None:
    run = clock.run([])
    steps = run.steps
    assert (run.num_decodes, run.context) == (len(computed), clock.context)
    lengths = [(tokens, each.stop_length - 1, len(each.blocks) * SIZE) for each, tokens in computed.items()]
    assert steps == min(MAX_STEPS, *[min(end, room) - tokens for tokens, end, room in lengths]) >= 1
    assert [piece.start for piece in run.pieces] == [
        tokens for each, tokens in sorted(computed.items(), key=lambda item: item[0].age)
    ]
    steps = min(steps, at_most)  # a run may be broken off
    clock.now += steps
    for sequence in list(computed):
        computed[sequence] += steps
        if computed[sequence] == sequence.stop_length - 1:
            stop(clock, pool, computed, sequence)


def stop(clock: DecodeClock, pool: CountingPool, computed: dict[Sequence, int], sequence: Sequence) -> None:
    clock.stop(sequence)
    tokens = computed.pop(sequence)
    assert (sequence.computed, sequence.length) == (tokens, tokens + 1)
    pool.release(sequence.blocks)


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
