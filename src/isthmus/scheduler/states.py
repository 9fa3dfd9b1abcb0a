"""Recurrent states on one node: slots for the live ones, and where snapshots of them are taken and can be used.

A request that computes has one live state, in a slot. A *snapshot* is a copy of it at one position, in ordinary blocks
that follow, in a chain, the block at whose end it was taken (`isthmus.blocks.state_names`). KV of a prefix is of use up
to any block; a state only at exactly the position it was taken at. So a prefix can be used as far as both reach.

Snapshots are taken where a later prompt is likely to part from this one:

* at the last full block before the prompt's end: the next turn of a chat repeats the prompt up to there, and so does
  the same prompt sent again (one token is always computed);
* where KV of the prompt was cached further than a state: somebody else's prompt shared these blocks and went on
  differently, as a third one may (Marconi, section on speculative insertion, calls it a branch point);
* at the prompt's end, when the request leaves: the other node goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from isthmus.blocks import MAX_SNAPSHOTS, state_name, state_names
from isthmus.types import BlockName


def capacity_tokens(num_blocks: int, block_size: int, state_blocks: int) -> int:
    """The longest request, prompt and answer, that fits alone, with all snapshots it may need at once."""
    return (num_blocks - MAX_SNAPSHOTS * state_blocks) * block_size


class Snapshot:
    """The state after `position` tokens, to be written to `blocks`. `depth`: it ends that many full blocks of the
    prompt, 0 for one at the prompt's end that only travels."""

    __slots__ = ("blocks", "depth", "position")

    def __init__(self, position: int, depth: int, blocks: list[int]) -> None:
        self.position, self.depth, self.blocks = position, depth, blocks


class States:
    """`num_blocks` of a snapshot, above 0; `num_slots` of live states: as many as were ever in use at once, for how
    many may be changes with a node's role."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, "models without recurrent layers need no states"
        self.num_blocks, self._size = num_blocks, block_size
        self.num_slots = 0
        self._free: list[int] = []  # a heap: the lowest first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_slot(self) -> int:
        if self._free:
            return heappop(self._free)
        self.num_slots += 1
        return self.num_slots - 1

    def give_slot(self, slot: int) -> None:
        heappush(self._free, slot)

    def usable(self, names: Sequence[BlockName], found: int, holds: Callable[[BlockName], bool]) -> int:
        """Of `found` leading blocks that are cached, how many end where a snapshot is held."""
        count = self.num_blocks
        for depth in range(found, 0, -1):
            if holds(state_name(names[depth - 1], count - 1, count)):
                return depth
        return 0

    def chain(self, names: tuple[BlockName, ...], depth: int) -> tuple[BlockName, ...]:
        """The leading `depth` blocks and the snapshot at their end."""
        return names[:depth] + self.parts(names, depth) if depth else ()

    def parts(self, names: Sequence[BlockName], depth: int) -> tuple[BlockName, ...]:
        """The snapshot's blocks alone."""
        return state_names(names[depth - 1], self.num_blocks)

    def positions(
        self, length: int, num_names: int, computed: int, found: int, *, leaves: bool
    ) -> list[tuple[int, int]]:
        """(position, depth) of the snapshots of a prompt of `length` tokens, `computed` of which need no computing
        while `found` leading blocks of KV were cached. Ascending."""
        last = min((length - 1) // self._size, num_names)
        wanted = [depth for depth in sorted({min(found, last), last}) if depth * self._size > computed]
        at = [(depth * self._size, depth) for depth in wanted]
        return [*at, (length, 0)] if leaves else at
