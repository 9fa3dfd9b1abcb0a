"""Blocks that other nodes want from this one: lent where they lie, or sent from memory and disk.

See `fetches.py` for what the two sides say to each other.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.types import BlockName, NodeId, RequestId
from isthmus.live.engine.codecs import CODECS
from isthmus.live.kv.cache import NodeCache
from isthmus.live.kv.fetches import host_id
from isthmus.live.messenger import Priority, Sending, Session
from isthmus.live.peers.messages import FetchedSlices, FetchServed, LentBlocks, Pull
from isthmus.live.peers.sessions import Spawn
from isthmus.live.peers.wire import pack
from isthmus.live.store import ArenaHandle, Pinned

GIVE_BLOCKS = 64
"""Blocks that are looked up, read from the SSD if need be, and sent together."""
MAX_PULLS = 4096
"""Pulls that wait for the node's decision, for one turn of the event loop."""


class Lease:
    """Blocks that another node reads: their slots stay until all users have released it."""

    def __init__(self, cache: NodeCache) -> None:
        self._cache = cache
        self._pinned: list[Pinned] = []
        self._own: list[int] = []  # slots that hold what was read from disk for this
        self._users = 1
        self.slots: list[int] = []
        self.seals: list[tuple[bytes, ...]] = []
        self.over = asyncio.Event()

    def add(self, names: Sequence[BlockName]) -> bool:
        """Adds blocks as far as they are here. False when one is not. May read the SSD."""
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
        """Adds a user, until `release`."""
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            self._cache.store.unpin(self._pinned)
            self._cache.store.give_back(self._own)
            self.over.set()


@dataclass
class _Loan:
    """Blocks that another node may have: the first `stop` of a prefix. `answered`: the last pull was answered, though
    not all may be acknowledged."""

    names: tuple[BlockName, ...]
    stop: int
    answered: bool = True
    task: asyncio.Task[None] | None = None


class Loans:
    """Answers pulls of other nodes. For the node's event loop. Without a cache nothing is given."""

    def __init__(self, cache: NodeCache | None, spawn: Spawn) -> None:
        self._of, self._spawn = cache, spawn
        self._loans: dict[tuple[RequestId, NodeId], _Loan] = {}
        self._pulls: OrderedDict[tuple[RequestId, NodeId], tuple[Session, Pull]] = OrderedDict()
        """Pulls that the node has not decided yet."""
        self._host = host_id()
        self.bytes_out = 0

    @property
    def _cache(self) -> NodeCache:
        assert self._of is not None, "a node without a cache gives nothing"
        return self._of

    def pull(self, session: Session, peer: NodeId, pull: Pull) -> None:
        """Answers a pull, now or when the node has decided. Raises ProtocolError for one that cannot be answered."""
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
        """Decides which blocks another node may have, in place of an earlier decision."""
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
        """Ends all loans to a node."""
        for at in [at for at in (*self._loans, *self._pulls) if at[1] == peer]:
            self._pulls.pop(at, None)
            self._end(*at)

    def close(self) -> None:
        """Ends all loans, as soon as nothing reads them."""
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
        """Sends blocks batch by batch: the next batch is read from the SSD while one is sent."""
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
        """Sends a batch layer by layer; each layer holds the lease until it is sent."""
        arena, layout = self._cache.store.arena, self._cache.layout
        for layer in range(layout.num_layers if lease.slots else 0):
            parts = [arena.slice(slot, layer) for slot in lease.slots]
            known = partial(list[bytes], [seals[layer] for seals in lease.seals])
            payload, seals = pack(pull.codec, layout, parts, len(parts) * layout.block_size, known)
            head = FetchedSlices(pull.key, layer, first, seals)
            lease.hold()
            yield session.send(head, *payload, done=lambda _: lease.release())
