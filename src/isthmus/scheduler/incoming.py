"""Requests whose prompt another node computes: from the time they are expected until they decode here.

They get memory as soon as there is some, since the other node waits for it, and a place when their KV is here.
"""

from __future__ import annotations

from collections import abc, deque

from isthmus.scheduler.batch import Batch
from isthmus.scheduler.events import Actions, Joined
from isthmus.scheduler.limits import Limits
from isthmus.scheduler.memory import Memory
from isthmus.scheduler.sequence import EXPECTED, JOINED, JOINING, RECEIVING, RESERVED, WHOLE, Sequence


class Incoming:
    """Who comes from another node, in the order of the routes."""

    def __init__(self, limits: Limits, memory: Memory, batch: Batch) -> None:
        self.expected: deque[Sequence] = deque()  # wait for blocks
        self.joining: deque[Sequence] = deque()  # are here, and wait for a place
        self._num_reserved = 0  # RECEIVING and JOINING: they hold blocks and no place yet
        self._max_sequences, self._memory, self._batch = limits.max_sequences, memory, batch

    def expect(self, sequence: Sequence) -> None:
        sequence.state = EXPECTED
        self.expected.append(sequence)

    def reserve(self, actions: Actions, *, in_order: bool = False) -> None:
        """Blocks for all for whom there are some; `in_order`: of their routes, whoever's turn it is."""
        while self.expected and self._num_reserved < self._max_sequences:
            index = 0 if in_order else self._next()
            sequence = self.expected[index]
            if not self._memory.reserve(sequence, self._batch.headroom):
                return
            del self.expected[index]
            self._batch.turns.take(sequence, sequence.length)
            if index:
                self._batch.turns.passed(sequence, self._blocks(sequence))
            sequence.state = RESERVED[sequence.state]
            self._num_reserved += 1
            actions += sequence.reserved()

    def _next(self) -> int:
        """The first, or the first of the tenant whose turn it is."""
        turns = self._batch.turns
        index = turns.indexes(self.expected)[0] if turns.is_shared else 0
        return index if not index or turns.may_pass(self.expected, index, self._blocks, holds=True) else 0

    def _blocks(self, sequence: Sequence) -> int:
        return self._memory.to_receive(sequence) + self._memory.states.num_blocks

    def imported(self, sequence: Sequence) -> None:
        """All its KV is here and checked; its first new token is known."""
        sequence.state = WHOLE[sequence.state]
        sequence.computed = sequence.length
        self.joining.append(sequence)

    def join(self, actions: Actions) -> None:
        """Those that are here decode, as far as there are places."""
        batch = self._batch
        while self.joining and batch.num_placed < self._max_sequences:
            sequence = self.joining.popleft()
            self._num_reserved -= 1
            batch.turns.gone(sequence)
            batch.place(sequence)
            self._memory.states.join(sequence)
            sequence.state = JOINED[sequence.state]
            batch.decoding.start(sequence)
            actions.append(Joined(sequence.request))

    def remove(self, sequence: Sequence) -> None:
        """It does not come, or not on."""
        if sequence.state is EXPECTED:
            self.expected.remove(sequence)
            return
        self._batch.turns.gone(sequence)
        self._num_reserved -= 1
        if sequence.state is JOINING:
            self.joining.remove(sequence)

    def check(self, sequences: abc.Iterable[Sequence]) -> None:
        states = [each.state for each in sequences]
        assert self._num_reserved == states.count(RECEIVING) + states.count(JOINING)
        assert self._num_reserved <= self._max_sequences, "more was reserved than may come"
        assert len(self.expected) == states.count(EXPECTED) and len(self.joining) == states.count(JOINING)
        for each in self.expected:
            assert not (each.blocks or each.restore), "a waiting request holds blocks"
