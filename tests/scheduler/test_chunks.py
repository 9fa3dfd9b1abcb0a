"""How prompts are cut, without a scheduler: what one iteration takes of whom."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.scheduler import CountingPool, Limits, Piece, Sequence
from isthmus.scheduler.batch import Batch
from isthmus.scheduler.chunks import Chunks
from isthmus.scheduler.memory import Memory
from isthmus.scheduler.prefixes import PoolPrefixes
from isthmus.scheduler.queues import Admission
from isthmus.types import RequestId

SIZE = 4


class Prompts:
    """Prompts that are computed as they are cut, and are over with their last chunk."""

    def __init__(self, *lengths: int, num_blocks: int = 10_000, **others: int) -> None:
        limits = Limits(num_blocks, SIZE, **others)
        self.limits, self.memory = limits, Memory(limits, CountingPool(num_blocks))
        self.batch = Batch(limits)
        self.admission = Admission(limits, self.memory, PoolPrefixes(self.memory, SIZE), self.batch)
        self.chunks = Chunks(limits, None, self.batch, self.admission)
        self.all: dict[RequestId, Sequence] = {}
        for length in lengths:
            self.arrive(length)

    def arrive(self, length: int) -> None:
        sequence = Sequence(RequestId(str(len(self.all))), length, length + 1)
        sequence.arrival = len(self.all)
        self.all[sequence.request] = sequence
        self.admission.waiting.append(sequence)

    def iterate(self) -> list[tuple[str, int]]:
        """Who got how many tokens."""
        pieces = self.chunks.cut([], 0)
        for piece in pieces:
            self._compute(piece)
        self.admission.check()
        self.batch.check(self.batch.prompts)
        return [(piece.request, piece.count) for piece in pieces]

    def _compute(self, piece: Piece) -> None:
        sequence = self.all[piece.request]
        assert (piece.start, piece.samples) == (
            sequence.computed,
            piece.start + piece.count == sequence.length,
        )
        sequence.computed += piece.count
        if piece.samples:
            self.batch.remove(sequence)
            self.memory.release(sequence)


LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=12)


@settings(max_examples=150)
@given(LENGTHS, st.integers(1, 100), st.integers(1, 4), st.integers(1, 6), st.sampled_from([1, 30, 1 << 30]))
def test_no_token_of_the_budget_is_left_while_somebody_could_use_it(
    lengths: list[int], budget: int, partial: int, places: int, batch: int
) -> None:
    prompts = Prompts(
        *lengths, token_budget=budget, partial_prefills=partial, max_sequences=places, prompt_batch=batch
    )
    computed = 0
    while computed < sum(lengths):
        counts = [count for _, count in prompts.iterate()]
        assert 1 <= sum(counts) <= budget
        is_full = sum(counts) == budget or sum(counts) >= batch
        assert is_full or not prompts.admission.waiting or len(counts) == places
        assert is_full or not prompts.batch.prompts, "a prompt was cut, and there was room for more of it"
        assert len(prompts.batch.prompts) <= partial, "more prompts are computed in parts than may be"
        computed += sum(counts)
    assert prompts.memory.pool.available == 10_000


@given(LENGTHS, st.integers(1, 100))
def test_one_after_the_other_they_end_in_the_order_they_came(lengths: list[int], budget: int) -> None:
    prompts, served = Prompts(*lengths, token_budget=budget), []
    while prompts.admission.waiting or prompts.batch.prompts:
        served += [int(request) for request, _ in prompts.iterate()]
    assert served == sorted(served)


@settings(max_examples=150)
@given(LENGTHS, st.integers(2, 100), st.integers(2, 4))
def test_overtaken_a_prompt_waits_at_most_for_twice_as_many_tokens(
    lengths: list[int], budget: int, partial: int
) -> None:
    prompts = Prompts(*lengths, token_budget=budget, partial_prefills=partial)
    before, computed = 0, 0
    for number, length in enumerate(lengths):
        before += length
        while prompts.all[RequestId(str(number))].computed < length:
            computed += sum(count for _, count in prompts.iterate())
        assert computed <= 2 * before + budget


def test_a_short_prompt_gets_half_of_what_a_long_one_would() -> None:
    prompts = Prompts(1000, 30, token_budget=100, partial_prefills=2)
    assert prompts.iterate() == [("1", 30), ("0", 70)]


def test_a_prompt_alone_repeats_its_chunk_but_the_last() -> None:
    prompts = Prompts(1000, token_budget=100, max_chunks=4)
    pieces = prompts.chunks.cut([], 0)
    assert prompts.chunks.steps(pieces) == 4
    prompts.all[RequestId("0")].computed = 700
    assert prompts.chunks.steps(prompts.chunks.cut([], 0)) == 2, "the last chunk is a run of its own"


def test_a_chunk_that_follows_a_cached_prefix_does_not_repeat() -> None:
    prompts = Prompts(1000, token_budget=100, max_chunks=4)
    (piece,) = prompts.chunks.cut([], 0)
    sequence = prompts.all[piece.request]
    sequence.computed = sequence.cached = 200
    assert prompts.chunks.steps(prompts.chunks.cut([], 0)) == 1
