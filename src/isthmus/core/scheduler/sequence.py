"""One request on one node: what its scheduler knows of it, and the literal tables of where it may go from there."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from isthmus.core.attempts import Assembly, FetchOrder
from isthmus.core.reuse import Packing
from isthmus.core.scheduler.events import Actions, Piece
from isthmus.core.scheduler.pool import Blocks
from isthmus.core.scheduler.remote import ALL_HERE, RemoteKV
from isthmus.core.types import NOBODY, BlockName, RequestId, Tenant


class SequenceState(Enum):
    """QUEUED, EXPECTED: waits for blocks of the engine. COMPUTING: its prompt. DEPARTING: computed, on its way to where
    it decodes. RECEIVING: comes from where it was computed. JOINING: all is here, waits for a place in the batch."""

    __hash__ = object.__hash__  # there is one of each, and an enumeration's own takes long

    QUEUED = auto()
    COMPUTING = auto()
    DEPARTING = auto()
    EXPECTED = auto()
    RECEIVING = auto()
    JOINING = auto()
    DECODING = auto()


# Looking a member up in its class takes long.
QUEUED, COMPUTING, DEPARTING, EXPECTED, RECEIVING, JOINING, DECODING = SequenceState

# What moves a sequence on, from where to where; from elsewhere is a bug of ours. None: it is over. It may be forgotten
# from everywhere. docs/node.md has the picture.
ADMITTED = {QUEUED: COMPUTING}
COMPUTED = {COMPUTING: DECODING}
DEPARTS = {COMPUTING: DEPARTING}
RESERVED = {EXPECTED: RECEIVING}
WHOLE = {RECEIVING: JOINING}
JOINED = {JOINING: DECODING}
PREEMPTED = {COMPUTING: QUEUED, DECODING: QUEUED}
ENDED = {DEPARTING: None, DECODING: None}


class CachedPrefix(msgspec.Struct, frozen=True):
    """The cached prefix of a prompt."""

    num_tokens: int = 0  # that need no computing
    num_found: int = 0  # leading blocks that are cached, with a state to go on from or not
    blocks: Blocks = ()  # of the engine, where the prefix lies; none if it `loads`
    state: Blocks = ()  # the same of the recurrent state at its end
    loads: bool = False  # it lies in the tiers, and comes into new blocks
    num_on_disk: int = 0  # of its blocks, those on SSD


@dataclass(slots=True, eq=False)
class PlannedSnapshot:
    """The recurrent state after `position` tokens, to be written to `blocks`."""

    position: int
    depth: int  # full blocks of the prompt that it follows; 0 for one at the prompt's end, which only travels
    blocks: Blocks


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens on one node, which the field calls a sequence. Tokens `[0, length)` are known, of which
    `[0, computed)` have KV: in `blocks`, behind the leading `num_absent` blocks.

    While it decodes, `computed` is the decode clock's `now + offset` and `length` one more; both are settled when it
    stops."""

    request: RequestId  # its name here; a node calls it by the key of the attempt
    length: int
    stop_length: int  # it ends at the latest when it has so many tokens
    names: tuple[BlockName, ...] = ()  # of the prompt's full blocks
    state: SequenceState = QUEUED
    tenant: Tenant = NOBODY  # in whose share it is computed and kept
    hands_over: bool = (
        False  # a decode node takes it over after prefill; its blocks stay held until it is forgotten
    )
    arrival: int = 0  # counts arrivals
    age: int = 0  # counts admissions: the youngest is pre-empted first
    computed: int = 0
    cached: int = 0  # tokens that had KV from the start
    named: int = 0  # leading blocks of the prompt that were given to the cache, or came from there
    blocks: Blocks = ()
    num_absent: int = 0  # leading blocks that are not in `blocks`: they lie elsewhere, or were dropped
    remote: RemoteKV = ALL_HERE
    offset: int = 0  # its distance to the decode clock
    full_at: int = 0  # when, by the decode clock, its blocks are full
    num_cached: int = 0  # leading blocks it was sent here for, those that a fetch brings included
    fetch: FetchOrder | None = None  # a fetch that is not over brings some of them
    work_ns: int = 0  # time its prefill is expected to take
    deadline_ns: int = 0  # when its first token was promised, 0 without a promise
    pinned: tuple[BlockName, ...] = ()  # in the tiers
    num_pinned: int = 0  # leading blocks among these that the scheduler pinned, with the snapshot at their end
    # What is not cached of its prompt may be assembled from donors' KV, in one piece.
    assembly: Assembly | None = None
    scratch: Blocks = ()  # for donors' blocks
    awaits: bool = False  # donors are on their way, while it keeps its place in the queue
    packing: Packing | None = None  # what was kept of its first blocks
    is_exact: bool = True  # else its answer's blocks get no names
    # With recurrent states.
    slot: int = -1  # of the live state
    restore: Blocks = ()  # of a snapshot to go on from
    snapshots: list[PlannedSnapshot] = field(default_factory=list)  # taken, or to be taken, of its prompt

    @property
    def donated(self) -> tuple[BlockName, ...]:
        """Names of its donors' blocks that are needed, in order."""
        donors = self.assembly.donors if self.assembly is not None else ()
        return tuple([name for donor in donors for name in donor.names[donor.first :]])

    @property
    def num_scratch(self) -> int:
        """Blocks that it needs to be assembled, beside its own."""
        if self.assembly is None:
            return 0
        needed = sum([len(donor.names) - donor.first for donor in self.assembly.donors])
        packing = self.assembly.packing
        return needed if packing is None else max(needed, packing.num_packed)

    @property
    def is_bound(self) -> bool:
        """Whether it cannot be computed anew here: some of its KV lies elsewhere, or is to, or was dropped."""
        return self.num_absent > 0 or self.remote.num_planned > 0

    @property
    def table(self) -> Blocks:
        """`blocks` by the number of the block in the request; what stands for those absent means nothing."""
        return (0,) * self.num_absent + self.blocks if self.num_absent else self.blocks

    def piece(self, start: int, count: int, samples: bool) -> Piece:
        """To compute these tokens in one iteration; with what it has of a recurrent state, if it has one."""
        request, blocks, there = self.request, self.blocks, self.remote.there
        if self.slot >= 0:
            reached = [shot for shot in self.snapshots if start < shot.position <= start + count]
            snapshots = tuple([(shot.position, shot.blocks) for shot in reached])
            return Piece(request, start, count, blocks, samples, self.slot, self.restore, snapshots, there)
        if self.assembly is None:
            return Piece(request, start, count, blocks, samples, remote=there, packing=self.packing)
        assembly, scratch = self.assembly, self.scratch
        return Piece(request, start, count, blocks, samples, assembly=assembly, scratch=scratch)

    def moved(self, num_blocks: int) -> Blocks:
        """So many more of its leading blocks lie where they are to lie. Returns those that held them here."""
        self.remote.moved(num_blocks)
        self.num_absent += num_blocks
        gone, self.blocks = self.blocks[:num_blocks], self.blocks[num_blocks:]
        return gone

    def returned(self, blocks: Blocks) -> None:
        """The last that lay elsewhere lie in these now. Nothing was on its way there."""
        self.remote.returned(len(blocks))
        self.num_absent -= len(blocks)
        self.blocks = blocks + self.blocks

    def assembled(self) -> Blocks:
        """Its prompt is put together and, if it is to be, packed. Returns blocks that it needs no more."""
        assert self.assembly is not None
        packing, gone = self.assembly.packing, self.scratch
        if packing is not None:
            packed, gone = self.scratch[: packing.num_packed], self.scratch[packing.num_packed :]
            gone += self.blocks[: packing.num_blocks]
            self.blocks = packed + self.blocks[packing.num_blocks :]
            self.pack(packing)
        self.assembly, self.scratch = None, ()
        return gone

    def pack(self, packing: Packing) -> None:
        """Of its first blocks only so much is kept."""
        self.packing, self.num_absent = packing, packing.num_dropped

    def take_cached_snapshots(self) -> list[PlannedSnapshot]:
        """Its prompt is computed: those that others may go on from. What is left travels with it."""
        cached = [snapshot for snapshot in self.snapshots if snapshot.depth]
        self.snapshots = [snapshot for snapshot in self.snapshots if not snapshot.depth]
        return cached

    def start_over(self) -> None:
        """Its blocks are somebody else's now."""
        self.blocks, self.scratch, self.computed, self.named = (), (), 0, 0

    def admitted(self) -> Actions:
        """What follows when its prompt may be computed in its blocks."""
        return []

    def reserved(self) -> Actions:
        """What follows when it may be received into its blocks."""
        return []

    def check(self) -> None:
        """What is absent lies elsewhere or was dropped."""
        self.remote.check()
        dropped = self.packing.num_dropped if self.packing is not None else 0
        assert self.num_absent == self.remote.num_there + dropped, "blocks are neither here nor elsewhere"
