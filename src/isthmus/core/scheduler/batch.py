"""The running batch of a node: sequences that compute their prompt, decode, or are being handed over.

Decoding sequences advance together, so an iteration touches none of them: `DecodeClock` counts iterations, each
sequence keeps its offset to that count, and two heaps know who reaches its last token first, and who fills its blocks
first. Stale heap entries stay until they come first.
"""

from __future__ import annotations

from collections import abc
from heapq import heappop, heappush

from isthmus.core.scheduler.events import Piece, Run, SchedulerLimits
from isthmus.core.scheduler.pool import Pool
from isthmus.core.scheduler.sequence import COMPUTING, DECODING, DEPARTING, Sequence
from isthmus.core.scheduler.turns import Turns

PLACED = (COMPUTING, DECODING, DEPARTING)
Entry = tuple[int, int, Sequence]
"""Iteration at which it is due, the age that its sequence had, the sequence."""


class DecodeClock:
    """All sequences that decode on one node, and their iteration."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.now = 0  # iterations so far
        self.sequences: dict[Sequence, None] = {}  # in the order in which they began to decode
        self._limits = limits
        self._offsets = 0  # sum over `sequences`, less tokens that packing dropped
        self._ends: list[Entry] = []  # due when a sequence has its last token
        self.fills: list[Entry] = []  # due when its blocks are full; only of sequences that will need more

    @property
    def context(self) -> int:
        """Tokens that the next iteration attends to, over all sequences; of packed prompts the kept ones."""
        return self._offsets + len(self.sequences) * (self.now + 1)

    def start(self, sequence: Sequence) -> None:
        """Begins decoding a sequence whose prompt is computed and whose next token is known."""
        sequence.offset = offset = sequence.computed - self.now
        self._offsets += offset if sequence.packing is None else offset - self._dropped(sequence)
        self.sequences[sequence] = None
        heappush(self._ends, (sequence.stop_length - 1 - offset, sequence.age, sequence))
        self._note_full(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Stops decoding a sequence, at its end or before, and settles `computed` and `length`."""
        sequence.computed = self.now + sequence.offset
        sequence.length = sequence.computed + 1
        self._offsets -= (
            sequence.offset if sequence.packing is None else sequence.offset - self._dropped(sequence)
        )
        del self.sequences[sequence]

    def _dropped(self, sequence: Sequence) -> int:
        return sequence.packing.num_dropped * self._limits.block_size if sequence.packing is not None else 0

    def run(self, chunks: list[Piece]) -> Run:
        """The run of all decoding sequences, at least one, beside these chunks."""
        steps = 1 if chunks else self._steps()
        return Run(tuple(chunks), len(self.sequences), self.context, steps, self._pieces)

    def _steps(self) -> int:
        """Iterations until a sequence needs a block or reaches its end."""
        ends, sequences = self._ends, self.sequences
        until, age, sequence = ends[0]
        while age != sequence.age or sequence not in sequences:
            heappop(ends)
            until, age, sequence = ends[0]
        first = self._first_full() if self.fills else None
        if first is not None and first.full_at < until:
            until = first.full_at
        steps, most = until - self.now, self._limits.max_steps
        return 1 if steps < 1 else steps if steps < most else most

    def _pieces(self) -> list[Piece]:
        """One token of each sequence, oldest admission first."""
        oldest_first = sorted(self.sequences, key=lambda sequence: sequence.age)
        return [sequence.piece(self.now + sequence.offset, 1, True) for sequence in oldest_first]

    def make_room(self, pool: Pool) -> bool:
        """Allocates a block for each sequence that needs one now; while half the pool is free, also those of the next
        `max_steps` iterations, unless its full blocks go to holders. Returns False if the pool is empty: then a
        sequence has to be pre-empted."""
        limits, first = self._limits, self._first_full()
        while first is not None and first.full_at <= self.now:
            if not self._grow(first, 1, pool):
                return False
            first = self._first_full()
        ahead = self.now + limits.max_steps
        while first is not None and first.full_at < ahead and pool.available > limits.num_blocks // 2:
            if first.remote.growing:
                break
            end = first.stop_length - 1 - first.offset
            if not self._grow(first, min(ahead, end) - self.now, pool):
                break
            first = self._first_full()
        return True

    def _grow(self, sequence: Sequence, steps: int, pool: Pool) -> bool:
        """Allocates blocks for `steps` more tokens. Returns False if the pool is empty."""
        wanted = -(-(self.now + sequence.offset + steps) // self._limits.block_size)
        needed = wanted - sequence.num_absent - len(sequence.blocks)
        if needed > pool.available:
            return False
        for _ in range(needed):
            sequence.blocks += pool.allocate(1, after=sequence.blocks[-1])
        self._note_full(sequence)
        return True

    def _note_full(self, sequence: Sequence) -> None:
        """Notes when its blocks are full, if it has too few for all its tokens."""
        kept = (sequence.num_absent + len(sequence.blocks)) * self._limits.block_size
        offset = sequence.offset
        sequence.full_at = kept - offset
        if kept < sequence.stop_length - 1:
            heappush(self.fills, (kept - offset, sequence.age, sequence))

    def _first_full(self) -> Sequence | None:
        """The sequence whose blocks are full first, of those that will need more."""
        fills, sequences = self.fills, self.sequences
        while fills:
            full_at, age, sequence = fills[0]
            if sequence in sequences and age == sequence.age and full_at == sequence.full_at:
                return sequence
            heappop(fills)
        return None

    def check(self) -> None:
        """Checks that each decoding sequence is in the sum and in the heaps, with blocks for its computed tokens."""
        assert self._offsets == sum([each.offset - self._dropped(each) for each in self.sequences])
        ends = {(at, sequence) for at, age, sequence in self._ends if age == sequence.age}
        fills = {(at, sequence) for at, age, sequence in self.fills if age == sequence.age}
        for sequence in self.sequences:
            assert sequence.state is DECODING
            end, full_at = sequence.stop_length - 1 - sequence.offset, sequence.full_at
            assert self.now <= full_at, "computed tokens without a block"
            num_blocks = sequence.num_absent + len(sequence.blocks)
            assert full_at == num_blocks * self._limits.block_size - sequence.offset
            assert (end, sequence) in ends, "nobody will notice its end"
            assert full_at >= end or (full_at, sequence) in fills, "nobody will give it a block"


class RunningBatch:
    """`prompts` being computed, oldest admission first; `decoding`; `num_placed`, those that are handed over included,
    of at most `max_sequences`. `turns`: the tenants' counters of service."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.prompts: list[Sequence] = []
        self.decoding = DecodeClock(limits)
        self.turns = Turns(limits)
        self.num_placed = 0
        self._admissions = 0
        self._max_placed, self._max_headroom = limits.max_sequences, limits.num_blocks // 8

    @property
    def headroom(self) -> int:
        """Blocks kept free: one for each running sequence, so that admitting does not pre-empt at once."""
        running, most = len(self.decoding.sequences) + len(self.prompts), self._max_headroom
        return running if running < most else most

    def place(self, sequence: Sequence) -> None:
        """Gives a sequence a free place."""
        self.num_placed += 1
        self._admissions += 1
        sequence.age = self._admissions

    def remove(self, sequence: Sequence) -> None:
        """Frees a sequence's place, in any state."""
        self.num_placed -= 1
        self.turns.gone(sequence)
        if sequence.state is DECODING:
            known = sequence.length
            self.decoding.stop(sequence)
            self.turns.serve(sequence, sequence.length - known)
        elif sequence.state is COMPUTING:
            self.prompts.remove(sequence)

    def youngest(self) -> Sequence:
        """The sequence to pre-empt: the one admitted last, of those that can be computed anew if there is any."""
        everybody = [*self.decoding.sequences, *self.prompts]
        return max(everybody, key=lambda sequence: (not sequence.is_bound, sequence.age))

    def check(self, sequences: abc.Iterable[Sequence]) -> None:
        """Checks that those of `sequences` that have a place are where they belong."""
        self.decoding.check()
        assert self.num_placed <= self._max_placed, "more requests than places"
        states = [each.state for each in sequences]
        assert self.num_placed == sum([state in PLACED for state in states])
        assert len(self.decoding.sequences) == states.count(DECODING)
        assert len(self.prompts) == states.count(COMPUTING)
        assert all(each.state is COMPUTING and 0 <= each.computed <= each.length for each in self.prompts)
        ages = [each.age for each in self.prompts]
        assert ages == sorted(ages), "prompts are computed in the order of admission"
