"""Who has a place on the node: each request that computes its prompt, decodes, or leaves with what it has computed.

Requests that decode advance together, so an iteration touches none of them: a clock counts iterations. Each request
keeps its distance to it, and two heaps know when the first has its last token and when the first has filled its blocks.
Entries of those who stopped, or got blocks since, stay until they come first.
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
"""When, by the clock; the age it had; who."""


class DecodeClock:
    """All that decode on one node, and the iteration they are at."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.now = 0  # iterations so far
        self.sequences: dict[Sequence, None] = {}  # in the order in which they began
        self._limits = limits
        self._offsets = 0  # sum over `sequences`, less what was dropped of those that were packed
        self._ends: list[Entry] = []  # at its last token
        self.fills: list[Entry] = []  # with its blocks full; only of who needs more blocks to reach its end

    @property
    def context(self) -> int:
        """Tokens that the next iteration attends to, all requests together: of packed ones those that were kept."""
        return self._offsets + len(self.sequences) * (self.now + 1)

    def start(self, sequence: Sequence) -> None:
        """Its prompt is computed and its next token is known."""
        sequence.offset = offset = sequence.computed - self.now
        self._offsets += offset if sequence.packing is None else offset - self._dropped(sequence)
        self.sequences[sequence] = None
        heappush(self._ends, (sequence.stop_length - 1 - offset, sequence.age, sequence))
        self._note_full(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Whether it is at its end or not. What it has come to is settled."""
        sequence.computed = self.now + sequence.offset
        sequence.length = sequence.computed + 1
        self._offsets -= (
            sequence.offset if sequence.packing is None else sequence.offset - self._dropped(sequence)
        )
        del self.sequences[sequence]

    def _dropped(self, sequence: Sequence) -> int:
        return sequence.packing.num_dropped * self._limits.block_size if sequence.packing is not None else 0

    def run(self, chunks: list[Piece]) -> Run:
        """Of all that decode, beside these chunks. Needs somebody who decodes."""
        steps = 1 if chunks else self._steps()
        return Run(tuple(chunks), len(self.sequences), self.context, steps, self._pieces)

    def _steps(self) -> int:
        """Iterations for which nobody needs a block or passes its end."""
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
        """One token of each, oldest admission first."""
        oldest_first = sorted(self.sequences, key=lambda sequence: sequence.age)
        return [sequence.piece(self.now + sequence.offset, 1, True) for sequence in oldest_first]

    def make_room(self, pool: Pool) -> bool:
        """A block for each that needs one now; while half the pool is left, also those of the next `max_steps`
        iterations, but for who gives full ones away. False: the pool is empty, and somebody has to give blocks back
        first."""
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
        """Blocks for `steps` more tokens after the computed ones; False when the pool is empty."""
        wanted = -(-(self.now + sequence.offset + steps) // self._limits.block_size)
        needed = wanted - sequence.num_absent - len(sequence.blocks)
        if needed > pool.available:
            return False
        for _ in range(needed):
            sequence.blocks += pool.allocate(1, after=sequence.blocks[-1])
        self._note_full(sequence)
        return True

    def _note_full(self, sequence: Sequence) -> None:
        """Only who has too few blocks for all its tokens will ever need one."""
        kept = (sequence.num_absent + len(sequence.blocks)) * self._limits.block_size
        offset = sequence.offset
        sequence.full_at = kept - offset
        if kept < sequence.stop_length - 1:
            heappush(self.fills, (kept - offset, sequence.age, sequence))

    def _first_full(self) -> Sequence | None:
        """Whose blocks are full first, of those that will need more."""
        fills, sequences = self.fills, self.sequences
        while fills:
            full_at, age, sequence = fills[0]
            if sequence in sequences and age == sequence.age and full_at == sequence.full_at:
                return sequence
            heappop(fills)
        return None

    def check(self) -> None:
        """Each that decodes is in the sum and in the heaps, with blocks for what it has computed."""
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
    """`prompts` that are computed, oldest first; `decoding`; and `num_placed`, with those that leave, of at most
    `max_sequences`. `turns`: who comes next of those that have none."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.prompts: list[Sequence] = []
        self.decoding = DecodeClock(limits)
        self.turns = Turns(limits)
        self.num_placed = 0
        self._admissions = 0
        self._max_placed, self._max_headroom = limits.max_sequences, limits.num_blocks // 8

    @property
    def headroom(self) -> int:
        """One spare block for each running request, so that admitting does not pre-empt at once."""
        running, most = len(self.decoding.sequences) + len(self.prompts), self._max_headroom
        return running if running < most else most

    def place(self, sequence: Sequence) -> None:
        """Gives it a place, of which there is one."""
        self.num_placed += 1
        self._admissions += 1
        sequence.age = self._admissions

    def remove(self, sequence: Sequence) -> None:
        """Its place is free, whatever it had come to."""
        self.num_placed -= 1
        self.turns.gone(sequence)
        if sequence.state is DECODING:
            known = sequence.length
            self.decoding.stop(sequence)
            self.turns.serve(sequence, sequence.length - known)
        elif sequence.state is COMPUTING:
            self.prompts.remove(sequence)

    def youngest(self) -> Sequence:
        """Admitted last of all that compute, prompts included; who cannot be computed anew only if there is nobody
        else."""
        everybody = [*self.decoding.sequences, *self.prompts]
        return max(everybody, key=lambda sequence: (not sequence.is_bound, sequence.age))

    def check(self, sequences: abc.Iterable[Sequence]) -> None:
        """Of all `sequences`, those placed are where they belong, and no more than there are places."""
        self.decoding.check()
        assert self.num_placed <= self._max_placed, "more requests than places"
        states = [each.state for each in sequences]
        assert self.num_placed == sum([state in PLACED for state in states])
        assert len(self.decoding.sequences) == states.count(DECODING)
        assert len(self.prompts) == states.count(COMPUTING)
        assert all(each.state is COMPUTING and 0 <= each.computed <= each.length for each in self.prompts)
        ages = [each.age for each in self.prompts]
        assert ages == sorted(ages), "prompts are computed in the order of admission"
