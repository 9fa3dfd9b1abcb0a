"""One request on one node as its scheduler knows it, and the tables of its states."""

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
    """QUEUED, EXPECTED: waits for blocks of the engine. COMPUTING: its prompt. DEPARTING: computed, being handed over.
    RECEIVING: being received. JOINING: received, waits for a place in the batch."""

    __hash__ = object.__hash__  # quicker than an enumeration's own

    QUEUED = auto()
    COMPUTING = auto()
    DEPARTING = auto()
    EXPECTED = auto()
    RECEIVING = auto()
    JOINING = auto()
    DECODING = auto()


# Names of the module are quicker than attributes of the class.
QUEUED, COMPUTING, DEPARTING, EXPECTED, RECEIVING, JOINING, DECODING = SequenceState

# Each step of a sequence, from where to where; from elsewhere is a bug of ours. None: it is over. It may be forgotten
# in any state. docs/node.md has the picture.
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

    num_tokens: int = 0  # tokens that need no computing
    num_found: int = 0  # cached leading blocks, with a recurrent state to go on from or not
    blocks: Blocks = ()  # of the engine, where the prefix lies; () if it `loads`
    state: Blocks = ()  # of the engine, where the recurrent state at its end lies
    loads: bool = False  # it lies in the tiers, and is loaded into new blocks
    num_on_disk: int = 0  # its blocks on the SSD


@dataclass(slots=True, eq=False)
class PlannedSnapshot:
    """The recurrent state after `position` tokens, to be written to `blocks`."""

    position: int
    depth: int  # full blocks of the prompt before it; 0 for one at the prompt's end, which is only handed over
    blocks: Blocks


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens on one node. Tokens `[0, length)` are known, of which `[0, computed)` have KV: in
    `blocks`, behind the leading `num_absent` blocks. While it decodes, `computed` is the decode clock's `now +
    offset` and `length` one more; both are settled when it stops."""

    request: RequestId  # the key of the attempt
    length: int
    stop_length: int  # its most tokens, prompt and answer
    names: tuple[BlockName, ...] = ()  # of the prompt's full blocks
    state: SequenceState = QUEUED
    tenant: Tenant = NOBODY  # in whose share it is computed and kept
    hands_over: bool = (
        False  # a decode node takes it over after prefill; it keeps its blocks until it is forgotten
    )
    arrival: int = 0  # number of its arrival
    age: int = 0  # number of its admission, 0 before: the youngest is pre-empted first
    computed: int = 0
    cached: int = 0  # tokens that had KV from the start
    named: int = 0  # leading blocks of the prompt that the cache has by name
    blocks: Blocks = ()
    num_absent: int = 0  # leading blocks that are not in `blocks`: with holders, or dropped by packing
    remote: RemoteKV = ALL_HERE
    offset: int = 0  # `computed` less the decode clock's `now`
    full_at: int = 0  # iteration of the decode clock at which its blocks are full
    num_cached: int = 0  # leading blocks for which it was routed here, those of a fetch included
    fetch: FetchOrder | None = None  # a fetch in progress that brings some of them
    work_ns: int = 0  # predicted time of its prefill
    deadline_ns: int = 0  # promised time of its first token, 0 without a promise
    pinned: tuple[BlockName, ...] = ()  # blocks pinned in the tiers
    num_pinned: int = 0  # leading blocks that the scheduler pinned, with the snapshot at their end
    assembly: Assembly | None = (
        None  # the uncached rest of its prompt is assembled from donors' KV, in one piece
    )
    scratch: Blocks = ()  # for donors' blocks
    awaits: bool = False  # its donors are being fetched, while it keeps its place in the queue
    packing: Packing | None = None  # how its first blocks were packed
    is_exact: bool = True  # else its answer's blocks get no names
    slot: int = -1  # of the live recurrent state, -1 for none
    restore: Blocks = ()  # of a snapshot to go on from
    snapshots: list[PlannedSnapshot] = field(default_factory=list)  # taken, or to be taken, of its prompt

    @property
    def donated(self) -> tuple[BlockName, ...]:
        """Names of the needed blocks of its donors, in order."""
        donors = self.assembly.donors if self.assembly is not None else ()
        return tuple([name for donor in donors for name in donor.names[donor.first :]])

    @property
    def num_scratch(self) -> int:
        """Blocks that assembling it needs beside its own."""
        if self.assembly is None:
            return 0
        needed = sum([len(donor.names) - donor.first for donor in self.assembly.donors])
        packing = self.assembly.packing
        return needed if packing is None else max(needed, packing.num_packed)

    @property
    def is_bound(self) -> bool:
        """Whether it cannot be computed anew here: some of its KV lies with holders, is planned to, or was dropped."""
        return self.num_absent > 0 or self.remote.num_planned > 0

    @property
    def table(self) -> Blocks:
        """`blocks` by the number of the block in the request, 0 for absent ones."""
        return (0,) * self.num_absent + self.blocks if self.num_absent else self.blocks

    def piece(self, start: int, count: int, samples: bool) -> Piece:
        """The piece that computes these tokens in one iteration."""
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
        """Counts leading blocks as arrived at their holders. Returns the blocks that held them here."""
        self.remote.moved(num_blocks)
        self.num_absent += num_blocks
        gone, self.blocks = self.blocks[:num_blocks], self.blocks[num_blocks:]
        return gone

    def returned(self, blocks: Blocks) -> None:
        """Takes its last remote blocks back, into these."""
        self.remote.returned(len(blocks))
        self.num_absent -= len(blocks)
        self.blocks = blocks + self.blocks

    def assembled(self) -> Blocks:
        """Notes that its prompt is assembled and, if it is to be, packed. Returns blocks that it needs no more."""
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
        """Notes that packing dropped some of its first blocks."""
        self.packing, self.num_absent = packing, packing.num_dropped

    def take_cached_snapshots(self) -> list[PlannedSnapshot]:
        """Removes and returns snapshots for the cache; the one that is handed over stays."""
        cached = [snapshot for snapshot in self.snapshots if snapshot.depth]
        self.snapshots = [snapshot for snapshot in self.snapshots if not snapshot.depth]
        return cached

    def start_over(self) -> None:
        """Forgets its blocks, which others have now."""
        self.blocks, self.scratch, self.computed, self.named = (), (), 0, 0

    def admitted(self) -> Actions:
        """Actions that follow when it got blocks to compute its prompt."""
        return []

    def reserved(self) -> Actions:
        """Actions that follow when it got blocks to be received into."""
        return []

    def check(self) -> None:
        """Checks that absent blocks lie with holders or were dropped."""
        self.remote.check()
        dropped = self.packing.num_dropped if self.packing is not None else 0
        assert self.num_absent == self.remote.num_there + dropped, "blocks are neither here nor elsewhere"
