"""One request on one node: what its scheduler knows of it, and the literal tables of where it may go from there."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from isthmus.attempts import Assembly, Holding
from isthmus.reuse import Packing
from isthmus.scheduler.events import Actions, Piece
from isthmus.scheduler.pool import Blocks
from isthmus.types import NOBODY, BlockName, RequestId


class State(Enum):
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
QUEUED, COMPUTING, DEPARTING, EXPECTED, RECEIVING, JOINING, DECODING = State

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


class Prefix(msgspec.Struct, frozen=True):
    """What is cached of a prompt. `num_tokens` need no computing; `num_found` leading blocks are there, with a state to
    go on from or not. They are in these `blocks` of the engine, the state in `state`; or, if it `loads`, in the tiers,
    `num_on_disk` blocks on SSD, and come into new ones."""

    num_tokens: int = 0
    num_found: int = 0
    blocks: Blocks = ()
    state: Blocks = ()
    loads: bool = False
    num_on_disk: int = 0


class Snapshot:
    """The recurrent state after `position` tokens, to be written to `blocks`. `depth`: it ends that many full blocks of
    the prompt, 0 for one at the prompt's end that only travels."""

    __slots__ = ("blocks", "depth", "position")

    def __init__(self, position: int, depth: int, blocks: Blocks) -> None:
        self.position, self.depth, self.blocks = position, depth, blocks


class Sequence:
    """One request's tokens on one node, which the field calls a sequence: `[0, length)` are known, and it ends at the
    latest when it has `stop_length`; `[0, computed)` have KV in `blocks`, `[0, cached)` of them from the start.
    `request`: what it is called here; a node calls it by the key of the attempt. `names`: of the prompt's full blocks.

    `tenant`: in whose share it is computed and kept.

    `departs`: after its prompt is computed it leaves for another node; its blocks stay held until it is forgotten.
    `num_cached`: leading blocks it was sent here for; of these `[fetch_start, fetch_stop)` are being fetched, until
    about `fetch_until_ns`; `fetches`: that is not over. `work_ns`: time its prefill is expected to take;
    `deadline_ns`: when its first token was promised, 0 without a promise.

    While it decodes, `computed` is the decode clock's `now + offset` and `length` one more; both are settled when it
    stops, and its `blocks` are full at the clock's `full_at`. `arrival` counts arrivals, `age` admissions: the youngest
    is pre-empted first. `pinned`: in the tiers; by the scheduler, `num_pinned` leading blocks and the snapshot at their
    end.

    Its leading `num_away` blocks are to lie with `holdings`; the first `num_held` of them do, with `held`, the next
    `num_shipping` are on their way there, and `blocks` are those that follow what is held. `waits`: for their answers.
    While it waits for memory it may hold what an attempt before it computed. If it `grows`, what fills while it decodes
    goes elsewhere, too.

    `assembly`: what is not cached of its prompt is put together from donors' KV, in one piece; `scratch`: blocks for
    that; `awaits`: donors on their way, while it keeps its place in the queue. `packing`: what is kept of its first
    blocks since; those that were dropped are held by nobody. `is_exact`: else its answer's blocks get no names.

    With recurrent states: `slot` of the live one, -1 without; `restore`: blocks of a snapshot to go on from;
    `snapshots`: taken, or to be taken, of its prompt.
    """

    __slots__ = (
        "age", "arrival", "assembly", "awaits", "blocks", "cached", "computed", "deadline_ns", "departs", "fetch_start",
        "fetch_stop", "fetch_until_ns", "fetches", "full_at", "grows", "held", "holdings", "is_exact", "length",
        "named", "names", "num_away", "num_cached", "num_held", "num_pinned", "num_shipping", "offset", "packing",
        "pinned", "request", "restore", "scratch", "slot", "snapshots", "state", "stop_length", "tenant", "waits",
        "work_ns",
    )  # fmt: skip

    def __init__(
        self,
        request: RequestId,
        num_tokens: int,
        stop_length: int,
        names: tuple[BlockName, ...] = (),
    ) -> None:
        self.request, self.length, self.stop_length, self.names = request, num_tokens, stop_length, names
        self.state = QUEUED
        self.tenant = NOBODY
        self.departs = self.fetches = self.waits = self.grows = self.awaits = False
        self.is_exact = True
        self.num_cached = self.fetch_start = self.fetch_stop = self.fetch_until_ns = 0
        self.cached = self.computed = self.named = self.offset = self.full_at = self.age = self.arrival = 0
        self.work_ns = self.deadline_ns = self.num_pinned = 0
        self.num_away = self.num_held = self.num_shipping = 0
        self.holdings: tuple[Holding, ...] = ()
        self.held: tuple[Holding, ...] = ()
        self.slot = -1
        self.pinned: tuple[BlockName, ...] = ()
        self.blocks: Blocks = ()
        self.restore: Blocks = ()
        self.snapshots: list[Snapshot] = []
        self.assembly: Assembly | None = None
        self.scratch: Blocks = ()
        self.packing: Packing | None = None

    @property
    def donated(self) -> tuple[BlockName, ...]:
        """Names of its donors' blocks that are needed, in order."""
        donors = self.assembly.donors if self.assembly is not None else ()
        return tuple([name for donor in donors for name in donor.names[donor.first :]])

    @property
    def num_scratch(self) -> int:
        if self.assembly is None:
            return 0
        needed = sum([len(donor.names) - donor.first for donor in self.assembly.donors])
        packing = self.assembly.packing
        return needed if packing is None else max(needed, packing.num_packed)

    def piece(self, start: int, count: int, samples: bool) -> Piece:
        """To compute these tokens in one iteration; with what it has of a recurrent state, if it has one."""
        if self.slot < 0:
            if self.assembly is not None:
                return Piece(
                    self.request,
                    start,
                    count,
                    self.blocks,
                    samples,
                    assembly=self.assembly,
                    scratch=self.scratch,
                )
            return Piece(
                self.request, start, count, self.blocks, samples, holdings=self.held, packing=self.packing
            )
        reached = [shot for shot in self.snapshots if start < shot.position <= start + count]
        snapshots = tuple([(shot.position, shot.blocks) for shot in reached])
        slot, restore = self.slot, self.restore
        return Piece(self.request, start, count, self.blocks, samples, slot, restore, snapshots, self.held)

    def keep_away(self, holdings: tuple[Holding, ...]) -> None:
        """Its leading blocks are to lie there; those that do already, where they are."""
        self.holdings = holdings
        self.num_away = sum([holding.num_blocks for holding in holdings])

    def moved(self, num_blocks: int) -> Blocks:
        """So many more of its leading blocks lie where they are to lie. Returns those that held them here."""
        self.num_held += num_blocks
        held, left = [], self.num_held
        for holding in self.holdings:
            there = min(left, holding.num_blocks)
            if there:
                held.append(Holding(holding.holders, there))
            left -= there
        gone, self.blocks = self.blocks[:num_blocks], self.blocks[num_blocks:]
        self.held = tuple(held)
        return gone

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
        self.packing = packing
        self.num_away = self.num_held = packing.num_dropped
        self.holdings = self.held = (Holding((), packing.num_dropped),)

    def returned(self, blocks: Blocks) -> None:
        """The last that lay elsewhere lie in these now. Nothing was on its way there."""
        assert self.num_held == self.num_away and not self.num_shipping
        left = self.num_held = self.num_away = self.num_held - len(blocks)
        held: list[Holding] = []
        for holding in self.holdings:
            there = min(left, holding.num_blocks)
            if there:
                held.append(Holding(holding.holders, there))
            left -= there
        self.holdings = self.held = tuple(held)
        self.blocks = blocks + self.blocks

    @property
    def table(self) -> Blocks:
        """`blocks` by the number of the block in the request; what stands for those elsewhere means nothing."""
        return (0,) * self.num_held + self.blocks if self.num_held else self.blocks

    def take_cached_snapshots(self) -> list[Snapshot]:
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
