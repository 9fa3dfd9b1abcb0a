"""Blocks that other nodes want from this one: lent where they lie, or sent from memory and disk.

See `fetches.py` for what the two sides say to each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from isthmus.cluster.cache import NodeCache
from isthmus.cluster.fetches import host_id
from isthmus.cluster.messages import Ended, Given, Lent, Want
from isthmus.cluster.sessions import Spawn, Tell
from isthmus.cluster.wire import pack
from isthmus.engine.codecs import CODECS
from isthmus.errors import ProtocolError
from isthmus.messenger import Priority, Sending, Session
from isthmus.node import events
from isthmus.store import ArenaHandle, Pinned
from isthmus.types import BlockName, NodeId, RequestId

GIVE_BLOCKS = 64
"""Blocks that are looked up, read from disk if need be, and sent together."""


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
    """What another node wants. `stop`: of the prefix it may have so much, once that is decided; `answered`: all of the
    last `want` was sent, though not all may have been acknowledged."""

    session: Session
    want: Want
    stop: int | None = None
    answered: bool = False
    task: asyncio.Task[None] | None = None


class Loans:
    """Answers other nodes. For the node's event loop."""

    def __init__(self, cache: NodeCache, tell: Tell, spawn: Spawn) -> None:
        self._cache, self._tell, self._spawn = cache, tell, spawn
        self._loans: dict[tuple[RequestId, NodeId], _Loan] = {}
        self._host = host_id()
        self.bytes_out = 0

    def wanted(self, session: Session, peer: NodeId, want: Want) -> None:
        """Raises ProtocolError for what cannot be answered."""
        at = want.key, peer
        loan = self._loans.get(at)
        if loan is not None and loan.session is not session:
            self.enough(loan.session, *at)
            loan = None
        if loan is not None and not loan.answered:
            raise ProtocolError(f"a second Want for {want.key} before the first was answered")
        is_same = loan is None or want.names == loan.want.names
        if want.codec not in CODECS or want.room < 0 or not 0 <= want.start <= len(want.names) or not is_same:
            raise ProtocolError(f"blocks for {want.key} cannot be given as {want.codec}, {want.room} at once")
        if loan is None:
            self._loans[at] = _Loan(session, want)
            self._tell(events.Wanted(want.key, peer, want.names, want.start, want.whole))
        else:
            loan.want, loan.answered = want, False
            loan.task = self._spawn(self._answer(loan))

    def give(self, give: events.Give) -> None:
        loan = self._loans.get((give.key, give.peer))
        if loan is not None and loan.stop is None and loan.want.names == give.names:
            loan.stop = give.stop
            loan.task = self._spawn(self._answer(loan))

    def enough(self, session: Session, key: RequestId, peer: NodeId) -> None:
        """The same key may be asked for again at once."""
        loan = self._loans.get((key, peer))
        if loan is None or loan.session is not session:
            return
        self._end(key, peer)
        self._tell(events.Enough(key, peer))

    def _end(self, key: RequestId, peer: NodeId) -> None:
        task = self._loans.pop((key, peer)).task
        if task is not None:
            task.cancel()

    def lost(self, peer: NodeId) -> None:
        """It gets nothing more, and the node knows."""
        for at in [at for at in self._loans if at[1] == peer]:
            self._end(*at)

    def close(self) -> None:
        """Gives everything back, as soon as nothing is done with it."""
        for loan in self._loans.values():
            if loan.task is not None:
                loan.task.cancel()

    async def _answer(self, loan: _Loan) -> None:
        handle = self._cache.store.arena.handle
        names = loan.want.names[loan.want.start : loan.stop]
        if names and loan.want.host and loan.want.host == self._host and handle is not None:
            await self._lend(loan, names, handle)
        else:
            await self._give(loan, names[: loan.want.room])

    async def _lend(self, loan: _Loan, names: Sequence[BlockName], handle: ArenaHandle) -> None:
        lease = Lease(self._cache)
        try:
            await self._cache.serve(lease.add, names)
            loan.session.send(Lent(loan.want.key, handle, tuple(lease.slots), tuple(lease.seals)))
            await asyncio.get_running_loop().create_future()  # until `enough` or `lost`
        finally:
            lease.release()

    async def _give(self, loan: _Loan, names: Sequence[BlockName]) -> None:
        """Batch by batch: the next one is read from disk while this one is sent."""
        want, count = loan.want, 0
        leases: list[Lease] = []
        sendings: list[Sending] = []
        try:
            for start in range(0, len(names), GIVE_BLOCKS):
                lease = Lease(self._cache)
                leases.append(lease)
                try:
                    whole = await self._cache.serve(lease.add, names[start : start + GIVE_BLOCKS])
                    sendings += self._send(loan, start, lease)
                finally:
                    lease.release()
                count += len(lease.slots)
                self.bytes_out += len(lease.slots) * self._cache.layout.block_bytes
                if len(leases) > 1:
                    await leases[-2].over.wait()
                if not whole:
                    break
            loan.session.send(Ended(want.key, count), priority=Priority.NORMAL)
            loan.answered = True
            if leases:
                await leases[-1].over.wait()
        finally:
            for sending in sendings:
                sending.cancel()

    def _send(self, loan: _Loan, first: int, lease: Lease) -> Iterator[Sending]:
        """Each layer holds the lease until it is sent."""
        want, arena, layout = loan.want, self._cache.store.arena, self._cache.layout
        for layer in range(layout.num_layers if lease.slots else 0):
            parts = [arena.slice(slot, layer) for slot in lease.slots]
            known = partial(list[bytes], [seals[layer] for seals in lease.seals])
            payload, seals = pack(want.codec, layout, parts, len(parts) * layout.block_size, known)
            head = Given(want.key, layer, first, seals)
            lease.hold()
            yield loan.session.send(head, *payload, done=lambda _: lease.release())
