"""Who has a place on the node: each request that computes its prompt, decodes, or leaves with what it has computed."""

from __future__ import annotations

from collections import abc

from isthmus.scheduler.decode import DecodeClock
from isthmus.scheduler.limits import Limits
from isthmus.scheduler.sequence import COMPUTING, DECODING, DEPARTING, Sequence
from isthmus.scheduler.turns import Turns

PLACED = (COMPUTING, DECODING, DEPARTING)


class Batch:
    """`prompts` that are computed, oldest first; `decoding`; and `num_placed`, with those that leave, of at most
    `max_sequences`. `turns`: who comes next of those that have none."""

    def __init__(self, limits: Limits) -> None:
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
        """Admitted last of all that compute, prompts included; who has KV elsewhere only if there is nobody else."""
        everybody = [*self.decoding.sequences, *self.prompts]
        return max(everybody, key=lambda sequence: (not sequence.num_away, sequence.age))

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
