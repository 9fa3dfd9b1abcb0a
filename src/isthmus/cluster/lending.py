"""Blocks that other nodes want from this one: lent where they lie, or sent from memory and disk.

See `fetches.py` for what the two sides say to each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from isthmus.cluster.cache import NodeCache
from isthmus.cluster.fetches import host_id
from isthmus.cluster.messages import Ended, Given, Lent, Want
from isthmus.cluster.wire import pack
from isthmus.engine.codecs import CODECS
from isthmus.errors import ProtocolError
from isthmus.messenger import Priority, Sending, Session
from isthmus.store import ArenaHandle, Pinned
from isthmus.types import BlockName, RequestId

GIVE_BLOCKS = 64
"""Blocks that are looked up, read from disk if need be, and sent together."""


class Lease:
    """Blocks that another node reads: nothing else gets their slots before `release`."""

    def __init__(self, cache: NodeCache) -> None:
        self._cache = cache
        self._pinned: list[Pinned] = []
        self._own: list[int] = []  # slots that hold what was read from disk for this
        self.slots: list[int] = []
        self.seals: list[tuple[bytes, ...]] = []

    def add(self, names: Sequence[BlockName]) -> bool:
        """Takes these blocks in as far as they are here; False when one is not. May read the disk."""
        found = self._cache.pin(names)
        self._pinned += [pinned for pinned in found if pinned is not None]
        for name, pinned in zip(names, found, strict=True):
            if pinned is not None:
                self.slots.append(pinned.slot)
                self.seals.append(pinned.seals)
            elif not self._read(name):
                return False
        return True

    def _read(self, name: BlockName) -> bool:
        store = self._cache.store
        slots, seals = store.reserve(1), store.seals(name)
        self._own += slots
        if not slots or seals is None:
            return False
        size, layers = self._cache.memory.layout.block_bytes, self._cache.memory.layout.num_layers
        into = store.arena.memory[slots[0] * size : (slots[0] + 1) * size]
        if not store.read(name, 0, layers, into):
            return False
        self.slots.append(slots[0])
        self.seals.append(seals)
        return True

    def release(self) -> None:
        self._cache.store.unpin(self._pinned)
        self._cache.store.give_back(self._own)
        self._pinned, self._own = [], []


class Lender:
    """Answers other nodes. For the node's event loop."""

    def __init__(self, cache: NodeCache) -> None:
        self._cache = cache
        self._open: dict[tuple[int, RequestId], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Those that are open, and those that are ending."""
        self._answered: set[tuple[int, RequestId]] = set()
        """Of the open ones: all was sent, though not all may have been acknowledged. More may be wanted then."""
        self._host = host_id()
        self.bytes_out = 0

    def wanted(self, connection: Session, want: Want) -> None:
        """Raises ProtocolError for what cannot be answered."""
        at = id(connection), want.key
        if at in self._open and at not in self._answered:
            raise ProtocolError(f"a second Want for {want.key} before the first was answered")
        if want.codec not in CODECS or want.room < 0:
            raise ProtocolError(f"blocks for {want.key} cannot be given as {want.codec}, {want.room} at once")
        self._answered.discard(at)
        task = self._open[at] = asyncio.get_running_loop().create_task(self._answer(connection, want))
        self._tasks.add(task)
        task.add_done_callback(partial(self._over, at))

    def _over(self, at: tuple[int, RequestId], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._open.get(at) is task:
            self._close(at)

    def _close(self, at: tuple[int, RequestId]) -> asyncio.Task[None] | None:
        self._answered.discard(at)
        return self._open.pop(at, None)

    def enough(self, connection: Session, key: RequestId) -> None:
        """The same key may be asked for again at once."""
        task = self._close((id(connection), key))
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Gives everything back."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def lost(self, connection: Session) -> None:
        for session, key in list(self._open):
            if session == id(connection):
                self.enough(connection, key)

    async def _answer(self, connection: Session, want: Want) -> None:
        handle = self._cache.store.arena.handle
        if want.host and want.host == self._host and handle is not None:
            await self._lend(connection, want, handle)
        else:
            await self._give(connection, want)

    async def _lend(self, connection: Session, want: Want, handle: ArenaHandle) -> None:
        lease = Lease(self._cache)
        try:
            await self._in_thread(lease.add, want.names)
            connection.send(Lent(want.key, handle, tuple(lease.slots), tuple(lease.seals)))
            await asyncio.get_running_loop().create_future()  # until `enough` or `lost`
        finally:
            lease.release()

    async def _give(self, connection: Session, want: Want) -> None:
        """Batch by batch: the next one is read from disk while this one is sent."""
        names, count = want.names[: want.room], 0
        sendings: list[_Batch] = []
        try:
            for start in range(0, len(names), GIVE_BLOCKS):
                lease = Lease(self._cache)
                batch = _Batch(lease)
                sendings.append(batch)
                whole = await self._in_thread(lease.add, names[start : start + GIVE_BLOCKS])
                batch.send(connection, want, start, self._cache)
                count += len(lease.slots)
                self.bytes_out += len(lease.slots) * self._cache.memory.layout.block_bytes
                if len(sendings) > 1:
                    await sendings[-2].sent.wait()
                if not whole:
                    break
            connection.send(Ended(want.key, count), priority=_priority(want))
            self._answered.add((id(connection), want.key))
            if sendings:
                await sendings[-1].sent.wait()
        finally:
            for batch in sendings:
                batch.cancel()

    async def _in_thread(self, work: Callable[..., bool], *arguments: object) -> bool:
        """Does not leave the work behind when it is cancelled: a lease must be whole before it is released."""
        future = asyncio.wrap_future(self._cache.submit(work, *arguments))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise


def _priority(want: Want) -> Priority:
    return Priority.BACKGROUND if want.background else Priority.NORMAL


class _Batch:
    """A lease on its way, released when its last byte was sent."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._sendings: list[Sending] = []
        self._left = 1  # who fills it, and every message that is not sent
        self._is_filled = False
        self.sent = asyncio.Event()

    def send(self, connection: Session, want: Want, first: int, cache: NodeCache) -> None:
        arena, layout = cache.store.arena, cache.memory.layout
        slots = self._lease.slots
        for layer in range(layout.num_layers if slots else 0):
            parts = [arena.slice(slot, layer) for slot in slots]
            known = partial(self._seals, layer)
            payload, seals = pack(want.codec, layout, parts, len(parts) * layout.block_size, known)
            head = Given(want.key, layer, first, seals)
            self._left += 1
            self._sendings.append(connection.send(head, *payload, priority=_priority(want), done=self._done))
        self._is_filled = True
        self._done(True)

    def _seals(self, layer: int) -> list[bytes]:
        return [seals[layer] for seals in self._lease.seals]

    def cancel(self) -> None:
        for sending in self._sendings:
            sending.cancel()
        if not self._is_filled:
            self._is_filled = True
            self._done(False)

    def _done(self, whole: bool) -> None:
        self._left -= 1
        if not self._left:
            self._lease.release()
            self.sent.set()
