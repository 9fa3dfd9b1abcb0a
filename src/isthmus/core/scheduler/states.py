"""Recurrent states on one node: slots of live states, and where snapshots are taken and can be used.

A sequence that computes has one live state, in a slot. A *snapshot* is a copy of it at one position, in ordinary blocks
that follow the block before it in a chain (`isthmus.core.blocks.state_names`). KV of a prefix can be used up to any
block, a state only at its own position; so a cached prefix can be used up to its deepest snapshot.

Snapshots are taken where a later prompt is likely to part from this one:

* at the last full block before the prompt's end: the next turn of a chat repeats the prompt up to there, as does the
  same prompt sent again (one token is always computed);
* where KV is cached further than a state: another prompt parted there, as a third one may (a branch point in Marconi's
  section on speculative insertion);
* at the prompt's end, if the request is handed over: the decode node goes on from it.

Models without recurrent layers have `NoStates`, with the same methods.
"""

from __future__ import annotations

from collections import abc
from heapq import heappop, heappush

from isthmus.core.blocks import state_name, state_names
from isthmus.core.scheduler.pool import Blocks, Pool
from isthmus.core.scheduler.sequence import COMPUTING, DECODING, CachedPrefix, PlannedSnapshot, Sequence
from isthmus.core.scheduler.tiers import TierCache
from isthmus.core.types import BlockName

Names = tuple[BlockName, ...]
Positions = abc.Sequence[tuple[int, int]]
"""(position, depth) of snapshots, as in `PlannedSnapshot`."""


class States:
    """`num_blocks` of a snapshot, above 0; `num_slots`: most live states so far, since their limit changes with a
    node's role. `restoring`: sequences that decode from a snapshot in the next run."""

    def __init__(self, num_blocks: int, block_size: int, pool: Pool) -> None:
        assert num_blocks > 0, "models without recurrent layers need no states"
        self.num_blocks, self._size, self._pool = num_blocks, block_size, pool
        self.num_slots = 0
        self._free: list[int] = []  # a heap: the lowest first
        self.restoring: list[Sequence] = []

    # Which prefixes can be used.

    def chain(self, names: Names, depth: int) -> Names:
        """The leading `depth` blocks and the snapshot at their end."""
        return names[:depth] + self.parts(names, depth) if depth else ()

    def parts(self, names: abc.Sequence[BlockName], depth: int) -> Names:
        """Names of the blocks of the snapshot after `depth` blocks."""
        return state_names(names[depth - 1], self.num_blocks)

    def usable(self, names: abc.Sequence[BlockName], found: int, holds: abc.Callable[[BlockName], bool]) -> int:
        """The deepest of `found` cached leading blocks that a held snapshot follows; 0 for none."""
        count = self.num_blocks
        for depth in range(found, 0, -1):
            if holds(state_name(names[depth - 1], count - 1, count)):
                return depth
        return 0

    def in_pool(self, names: Names, held: Blocks) -> tuple[Blocks, Blocks]:
        """The cached blocks of a prompt up to the deepest snapshot, and the snapshot's."""
        depth = self.usable(names, len(held), self._pool.holds)
        state = self._pool.match(self.parts(names, depth)) if depth else ()
        if len(state) < self.num_blocks:  # some of it was evicted
            return (), ()
        return held[:depth], state

    def in_tiers(self, tiers: TierCache, sequence: Sequence, present: int, on_disk: int) -> tuple[int, int]:
        """How many of its `present` cached leading blocks can be used, and how many blocks of those, snapshot included,
        are on the SSD."""
        usable = min(present, (sequence.length - 1) // self._size)
        usable = self.usable(sequence.names, usable, tiers.holds)
        return usable, tiers.match(self.chain(sequence.names, usable))[1]

    def leaves_some(self, depth: int, length: int) -> bool:
        """Whether a prompt has a token to compute after so many cached blocks."""
        return depth * self._size < length

    def missing(self, sequence: Sequence, num_blocks: int) -> None:
        """Computes a sequence from its first token, since the state to be loaded is at the end of the lost prefix."""
        if sequence.restore:
            sequence.computed = 0
            self.restored(sequence)

    # What a request holds.

    def positions(self, sequence: Sequence, prefix: CachedPrefix) -> Positions:
        """Positions of the snapshots to be taken of its prompt, ascending."""
        last = min((sequence.length - 1) // self._size, len(sequence.names))
        depths = sorted({min(prefix.num_found, last), last})
        at = [(depth * self._size, depth) for depth in depths if depth * self._size > prefix.num_tokens]
        return [*at, (sequence.length, 0)] if sequence.hands_over else at

    def admit(self, sequence: Sequence, prefix: CachedPrefix, positions: Positions) -> None:
        """Allocates blocks for the snapshot at the end of `prefix` and for those to be taken, and a slot."""
        allocate = self._pool.allocate
        sequence.restore = allocate(self.num_blocks) if prefix.loads else prefix.state
        sequence.snapshots = [PlannedSnapshot(*position, allocate(self.num_blocks)) for position in positions]
        self._take_slot(sequence)

    def reserve(self, sequence: Sequence) -> None:
        """Allocates blocks for the snapshot that is handed over."""
        sequence.restore = self._pool.allocate(self.num_blocks)

    def join(self, sequence: Sequence) -> None:
        """Gives a received sequence a slot: it decodes from its snapshot in the next run."""
        self._take_slot(sequence)
        self.restoring.append(sequence)

    def ran(self) -> None:
        """Frees the snapshots from which sequences decoded in the last run."""
        for sequence in self.restoring:
            if sequence.state is DECODING:  # not pre-empted since
                self.restored(sequence)
        self.restoring.clear()

    def restored(self, sequence: Sequence) -> None:
        """Frees the snapshot that its live state was read from."""
        self._pool.release(sequence.restore)
        sequence.restore = ()

    def leave(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence that computes no more."""
        if sequence.slot >= 0:
            heappush(self._free, sequence.slot)
            sequence.slot = -1

    def release(self, sequence: Sequence) -> list[PlannedSnapshot]:
        """Frees its slot and the snapshot it goes on from. Returns its own snapshots, which may be in saving."""
        self.restored(sequence)
        self.leave(sequence)
        snapshots, sequence.snapshots = sequence.snapshots, []
        return snapshots

    def _take_slot(self, sequence: Sequence) -> None:
        if not self._free:
            heappush(self._free, self.num_slots)
            self.num_slots += 1
        sequence.slot = heappop(self._free)

    def check(self, sequences: abc.Iterable[Sequence]) -> None:
        """Checks that computing sequences have a slot each, others none, and that none was lost."""
        slots = []
        for sequence in sequences:
            computes = sequence.state is COMPUTING or sequence.state is DECODING
            assert computes == (sequence.slot >= 0), "who computes has a slot, and nobody else"
            slots += [sequence.slot] if computes else []
        assert sorted(slots + self._free) == list(range(self.num_slots)), "a slot was lost or given twice"


class NoStates:
    """Of models without recurrent layers, which go on from any prefix."""

    num_blocks = 0
    restoring = ()

    def __init__(self, block_size: int) -> None:
        self._size = block_size

    def chain(self, names: Names, depth: int) -> Names:
        return names[:depth]

    def parts(self, names: abc.Sequence[BlockName], depth: int) -> Names:
        return ()

    def in_pool(self, names: Names, held: Blocks) -> tuple[Blocks, Blocks]:
        return held, ()

    def in_tiers(self, tiers: TierCache, sequence: Sequence, present: int, on_disk: int) -> tuple[int, int]:
        return present, on_disk

    def leaves_some(self, depth: int, length: int) -> bool:
        """Always: the last token may be computed anew."""
        return True

    def missing(self, sequence: Sequence, num_blocks: int) -> None:
        sequence.computed = min(sequence.computed, num_blocks * self._size)

    def positions(self, sequence: Sequence, prefix: CachedPrefix) -> Positions:
        return ()

    def admit(self, sequence: Sequence, prefix: CachedPrefix, positions: Positions) -> None: ...
    def reserve(self, sequence: Sequence) -> None: ...
    def ran(self) -> None: ...

    join = restored = leave = reserve

    def release(self, sequence: Sequence) -> abc.Sequence[PlannedSnapshot]:
        return ()

    def check(self, sequences: abc.Iterable[Sequence]) -> None:
        assert all(sequence.slot < 0 and not sequence.restore for sequence in sequences)


AnyStates = States | NoStates
