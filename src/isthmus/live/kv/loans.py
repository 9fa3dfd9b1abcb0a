"""Whole blocks of an attempt's KV on their way between a home and a holder, in frames of one layer of some blocks.

home ══Shipment…══> holder       into room of a guest (`hosting.py`)
holder ══Shipment…══> home       into blocks of the engine that are nobody's meanwhile
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from isthmus.core.attempts import Share
from isthmus.core.blocks import seal
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.types import BlockName, NodeId, RequestId, Span
from isthmus.live.engine.codecs import CODECS, NONE
from isthmus.live.engine.interface import KVBytes, runs_of
from isthmus.live.kv.cache import NodeCache
from isthmus.live.kv.fetches import host_id
from isthmus.live.messenger import Priority, Sending, Session
from isthmus.live.peers.messages import FetchedSlices, FetchServed, LentBlocks, Pull, ShipmentSlices
from isthmus.live.peers.sessions import Peers, Spawn, Tell
from isthmus.live.peers.wire import KVFrames, pack, sealed
from isthmus.live.store import ArenaHandle, Pinned

FRAME_BLOCKS = 64


def framed(blocks: Sequence[int], num_layers: int) -> Iterator[tuple[int, int, Sequence[int]]]:
    """What is sent, frame by frame: the layer, which of `blocks` is the first, and these blocks."""
    for start in range(0, len(blocks), FRAME_BLOCKS):
        for layer in range(num_layers):
            yield layer, start, blocks[start : start + FRAME_BLOCKS]


class Landing:
    """Where it arrives: `blocks` of the engine's memory. `placed`: how many of them each layer has, or has on its way
    into its place; `whole`: how many it has, without a gap."""

    def __init__(self, memory: KVBytes, blocks: Sequence[int]) -> None:
        self.memory, self.blocks = memory, blocks
        self.go_on(0)
        self._frames = KVFrames(memory.layout)

    def go_on(self, num_whole: int) -> None:
        """So many are whole, and nothing is on its way."""
        self.placed, self.whole = ([num_whole] * self.memory.layout.num_layers for _ in range(2))

    @property
    def num_whole(self) -> int:
        """In all layers."""
        return min(self.whole)

    def place(self, session: Session, head: ShipmentSlices, size: int) -> Sequence[memoryview]:
        """Where a frame goes. Raises ProtocolError for what is not expected."""
        layout, first, stop = self.memory.layout, head.first, head.first + len(head.seals)
        fits = 0 <= head.layer < layout.num_layers and 0 <= first <= self.placed[head.layer]
        if not (fits and first < stop <= len(self.blocks)):
            raise ProtocolError(f"KV of {head.key}, layer {head.layer}, is not what must come next")
        tokens = Span(first * layout.block_size, stop * layout.block_size)
        targets = [self.memory.landing(head.layer, *run) for run in self._runs(tokens)]
        placed = self._frames.place(head, session, NONE, tokens, targets, size)
        if placed is None:
            raise ProtocolError(f"KV of {head.key}, layer {head.layer}, is not of its size")
        self.placed[head.layer] = stop
        if head.layer == 0:  # it comes first: what other layers have from there on is of what was there before
            self.whole = [min(whole, first) for whole in self.whole]
        self.whole[head.layer] = min(self.whole[head.layer], first)
        return placed

    def take(self, head: ShipmentSlices) -> bool | None:
        """A whole frame: whether all seals match; None for one that nobody waits for."""
        targets, memory, size = self._frames.take(head), self.memory, self.memory.layout.block_size
        if targets is None:
            return None
        first, stop = head.first, head.first + len(head.seals)
        for run, buffer in zip(self._runs(Span(first * size, stop * size)), targets, strict=True):
            memory.land(head.layer, *run, buffer)
        matches = all(
            seal(memory.export(head.layer, block * size, (block + 1) * size)) == expected
            for block, expected in zip(self.blocks[first:stop], head.seals, strict=True)
        )
        if matches and self.whole[head.layer] == first:
            self.whole[head.layer] = stop
        return matches

    def _runs(self, tokens: Span) -> Iterator[tuple[int, int]]:
        return runs_of(self.blocks, self.memory.layout.block_size, tokens.start, tokens.stop)

    def void(self, session: Session, head: ShipmentSlices) -> None:
        """It will not come."""
        self._frames.void(session, head)

    def refuse(self) -> None:
        """Nothing more is written when this returns."""
        self._frames.refuse()


class Shipments:
    """For an event loop. What leaves, and what comes home; each return is told to be over once."""

    def __init__(self, memory: KVBytes, peers: Peers, tell: Tell) -> None:
        self._memory, self._peers, self._tell = memory, peers, tell
        self._sendings: dict[RequestId, dict[NodeId, list[Sending]]] = {}
        self._returns: dict[RequestId, tuple[NodeId, Landing]] = {}  # and where they come from
        self.bytes_out = self.bytes_in = self.seal_mismatches = 0

    def ship(self, ship: events.Ship) -> None:
        session, layout, share = self._peers.open_to(ship.peer), self._memory.layout, ship.share
        if session is None:
            return  # the node hears that it is gone
        sendings = self._sendings.setdefault(ship.key, {}).setdefault(ship.peer, [])
        sendings[:] = [sending for sending in sendings if not sending.over]
        for layer, start, blocks in framed(ship.blocks, layout.num_layers):
            payload, seals = self._slices(layer, blocks, share)
            sendings.append(session.send(ShipmentSlices(ship.key, layer, ship.first + start, seals), *payload))
            self.bytes_out += len(blocks) * layout.slice_bytes // share.parts

    def _slices(
        self, layer: int, blocks: Sequence[int], share: Share
    ) -> tuple[Sequence[memoryview], tuple[bytes, ...]]:
        """What goes of these blocks in a layer, and seals of that: all bytes from where they lie, or a share's
        heads."""
        memory, size = self._memory, self._memory.layout.block_size
        if share.parts == 1:
            return sealed(memory, layer, blocks)
        heads = [
            memory.export_heads(layer, at * size, (at + 1) * size, share.part, share.parts) for at in blocks
        ]
        return heads, tuple([seal(each) for each in heads])

    def stop(self, key: RequestId, peer: NodeId | None = None) -> None:
        """Nothing is read from its blocks any more for `peer`, or for anybody, when this returns."""
        everyone = self._sendings.get(key, {})
        for node in [peer] if peer is not None else list(everyone):
            for sending in everyone.pop(node, ()):
                sending.cancel()
        if not everyone:
            self._sendings.pop(key, None)

    # What comes home.

    def reclaim(self, reclaim: events.Reclaim) -> None:
        self._returns[reclaim.key] = reclaim.holder, Landing(self._memory, reclaim.blocks)

    def release(self, key: RequestId) -> None:
        """Nothing more is read from its blocks, or written to those of what comes back, when this returns."""
        self.stop(key)
        self._end(key, whole=False)

    def _end(self, key: RequestId, *, whole: bool) -> None:
        found = self._returns.pop(key, None)
        if found is not None:
            found[1].refuse()
            self._tell(events.Reclaimed(key, whole))

    def awaits(self, peer: NodeId | None, head: ShipmentSlices) -> bool:
        """Whether this is a part of what comes home."""
        holder, _ = self._returns.get(head.key, (None, None))
        return holder is not None and holder == peer

    def place(self, session: Session, head: ShipmentSlices, size: int) -> Sequence[memoryview]:
        """Where the payload goes. Raises ProtocolError for what is not expected."""
        return self._returns[head.key][1].place(session, head, size)

    def receive(self, head: ShipmentSlices) -> None:
        """What came damaged lies with its holder still; what follows is awaited, so that it is not taken for another
        return."""
        _, landing = self._returns[head.key]
        matches, count = landing.take(head), len(landing.blocks)
        if matches is None:
            return
        self.bytes_in += len(head.seals) * self._memory.layout.slice_bytes
        self.seal_mismatches += not matches
        if head.layer == len(landing.whole) - 1 and head.first + len(head.seals) == count:
            self._end(head.key, whole=landing.num_whole == count)

    def void(self, head: ShipmentSlices) -> None:
        """The holder gave up in the midst of it."""
        self._end(head.key, whole=False)


# Blocks that other nodes want from this one: lent where they lie, or sent from memory and disk.
#
# See `fetches.py` for what the two sides say to each other.


GIVE_BLOCKS = 64
"""Blocks that are looked up, read from disk if need be, and sent together."""
MAX_PULLS = 4096
"""Of which nothing is decided yet: they wait for one turn of the event loop."""


class Lease:
    """Blocks that another node reads: nothing else gets their slots before all who hold it have released it."""

    def __init__(self, cache: NodeCache) -> None:
        self._cache = cache
        self._pinned: list[Pinned] = []
        self._own: list[int] = []  # slots that hold what was read from disk for this
        self._users = 1
        self.slots: list[int] = []
        self.seals: list[tuple[bytes, ...]] = []
        self.over = asyncio.Event()

    def add(self, names: Sequence[BlockName]) -> bool:
        """Takes these blocks in as far as they are here; False when one is not. May read the disk."""
        found = self._cache.pin(names)
        self._pinned += [pinned for pinned in found if pinned is not None]
        for name, pinned in zip(names, found, strict=True):
            if pinned is not None:
                self.slots.append(pinned.slot)
                self.seals.append(pinned.seals)
            elif (brought := self._cache.bring(name)) is not None:
                self._own.append(brought[0])
                self.slots.append(brought[0])
                self.seals.append(brought[1])
            else:
                return False
        return True

    def hold(self) -> None:
        """One more reads from it, until `release`."""
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            self._cache.store.unpin(self._pinned)
            self._cache.store.give_back(self._own)
            self.over.set()


@dataclass
class _Loan:
    """What another node may have: the first `stop` blocks of a prefix. `answered`: all of the last pull was sent,
    though not all may have been acknowledged, or is lent."""

    names: tuple[BlockName, ...]
    stop: int
    answered: bool = True
    task: asyncio.Task[None] | None = None


class Loans:
    """Answers other nodes. For the node's event loop. Without a cache nothing is ever given."""

    def __init__(self, cache: NodeCache | None, spawn: Spawn) -> None:
        self._of, self._spawn = cache, spawn
        self._loans: dict[tuple[RequestId, NodeId], _Loan] = {}
        self._pulls: OrderedDict[tuple[RequestId, NodeId], tuple[Session, Pull]] = OrderedDict()
        """Of what the node has not decided yet."""
        self._host = host_id()
        self.bytes_out = 0

    @property
    def _cache(self) -> NodeCache:
        assert self._of is not None, "a node without a cache gives nothing"
        return self._of

    def pull(self, session: Session, peer: NodeId, pull: Pull) -> None:
        """Raises ProtocolError for what cannot be answered."""
        at = pull.key, peer
        if pull.codec not in CODECS or pull.room < 0 or pull.start < 0:
            raise ProtocolError(f"blocks for {pull.key} cannot be given as {pull.codec}, {pull.room} at once")
        loan = self._loans.get(at)
        if loan is not None:
            self._begin(loan, session, pull)
            return
        self._pulls[at] = session, pull
        if len(self._pulls) > MAX_PULLS:
            self._pulls.popitem(last=False)

    def give(self, give: events.Give) -> None:
        """In place of what it might have before."""
        at = give.key, give.peer
        pulled = self._pulls.pop(at, None)
        self._end(*at)
        loan = self._loans[at] = _Loan(give.names, give.stop)
        if pulled is not None:
            self._begin(loan, *pulled)

    def _begin(self, loan: _Loan, session: Session, pull: Pull) -> None:
        if not loan.answered:
            raise ProtocolError(f"a second Pull for {pull.key} before the first was answered")
        if loan.task is not None:
            loan.task.cancel()
        loan.answered = False
        loan.task = self._spawn(self._answer(loan, session, pull))

    def end(self, end: events.EndGive) -> None:
        self._pulls.pop((end.key, end.peer), None)
        self._end(end.key, end.peer)

    def _end(self, key: RequestId, peer: NodeId) -> None:
        loan = self._loans.pop((key, peer), None)
        if loan is not None and loan.task is not None:
            loan.task.cancel()

    def lost(self, peer: NodeId) -> None:
        """It gets nothing more."""
        for at in [at for at in (*self._loans, *self._pulls) if at[1] == peer]:
            self._pulls.pop(at, None)
            self._end(*at)

    def close(self) -> None:
        """Gives everything back, as soon as nothing is done with it."""
        for loan in self._loans.values():
            if loan.task is not None:
                loan.task.cancel()

    async def _answer(self, loan: _Loan, session: Session, pull: Pull) -> None:
        names = loan.names[pull.start : loan.stop] if self._of is not None else ()
        handle = self._cache.store.arena.handle if names and pull.host == self._host else None
        if handle is not None:
            await self._lend(loan, session, pull.key, names, handle)
        else:
            await self._give(loan, session, pull, names[: pull.room])

    async def _lend(
        self, loan: _Loan, session: Session, key: RequestId, names: Sequence[BlockName], handle: ArenaHandle
    ) -> None:
        lease = Lease(self._cache)
        try:
            await self._cache.serve(lease.add, names)
            session.send(LentBlocks(key, handle, tuple(lease.slots), tuple(lease.seals)))
            loan.answered = True
            await asyncio.get_running_loop().create_future()  # until `end` or `lost`
        finally:
            lease.release()

    async def _give(self, loan: _Loan, session: Session, pull: Pull, names: Sequence[BlockName]) -> None:
        """Batch by batch: the next one is read from disk while this one is sent."""
        count = 0
        leases: list[Lease] = []
        sendings: list[Sending] = []
        try:
            for start in range(0, len(names), GIVE_BLOCKS):
                lease = Lease(self._cache)
                leases.append(lease)
                try:
                    whole = await self._cache.serve(lease.add, names[start : start + GIVE_BLOCKS])
                    sendings += self._send(session, pull, start, lease)
                finally:
                    lease.release()
                count += len(lease.slots)
                self.bytes_out += len(lease.slots) * self._cache.layout.block_bytes
                if len(leases) > 1:
                    await leases[-2].over.wait()
                if not whole:
                    break
            session.send(FetchServed(pull.key, count), priority=Priority.NORMAL)
            loan.answered = True
            if leases:
                await leases[-1].over.wait()
        finally:
            for sending in sendings:
                sending.cancel()

    def _send(self, session: Session, pull: Pull, first: int, lease: Lease) -> Iterator[Sending]:
        """Each layer holds the lease until it is sent."""
        arena, layout = self._cache.store.arena, self._cache.layout
        for layer in range(layout.num_layers if lease.slots else 0):
            parts = [arena.slice(slot, layer) for slot in lease.slots]
            known = partial(list[bytes], [seals[layer] for seals in lease.seals])
            payload, seals = pack(pull.codec, layout, parts, len(parts) * layout.block_size, known)
            head = FetchedSlices(pull.key, layer, first, seals)
            lease.hold()
            yield session.send(head, *payload, done=lambda _: lease.release())
