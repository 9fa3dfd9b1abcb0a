"""Cached blocks on their way between nodes, pulled by the one that wants them.

    Want ──> Lent                       the arena is of this host: its bytes are read where they lie
    Want ──> Given, Given, … Ended      layer by layer into this node's arena, seals checked slice by slice

The node that wants asks for as many blocks as it has empty slots, and again when those are its cache's. The other
side is in `lending.py`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from isthmus.blocks import seal
from isthmus.cluster.cache import NodeCache
from isthmus.cluster.messages import Ended, Enough, Given, Lent, Want
from isthmus.cluster.wire import fits, seals_kv, unpack
from isthmus.engine.codecs import NONE
from isthmus.errors import ProtocolError
from isthmus.messenger import Session
from isthmus.store import PeerArena, Pinned, copy_bytes
from isthmus.types import BlockName, RequestId

log = logging.getLogger(__name__)


def host_id() -> str:
    """Equal for processes that may share memory; "" where that cannot be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Fetch:
    """Blocks `[start, stop)` of a prefix, wanted from another node. Its own lock: an event loop fills it, threads
    that load prefixes read it.

    `landed[layer]`: how many of the blocks are here, layer by layer. `final`: how many there will be, once known.
    """

    def __init__(
        self, key: RequestId, names: Sequence[BlockName], start: int, cache: NodeCache, codec: str = NONE
    ) -> None:
        self.key, self.names, self.start, self.codec = key, names, start, codec
        self._placed: dict[int, tuple[Given, memoryview | None]] = {}
        """Payloads being received, by identity: into this node's arena, or to be decoded into it."""
        self.condition = threading.Condition()
        self._cache = cache
        self._layout = cache.memory.layout
        self._slots: list[int] = []  # of this node's arena, for `names[start:]`
        self._kept: list[Pinned] = []  # those that are the cache's
        self._seals: list[list[bytes]] = []
        self._num_committed = 0
        self._landed = [0] * self._layout.num_layers
        self._peer: PeerArena | None = None
        self._released: Callable[[], object] = bool
        self._damaged: Callable[[], object] = bool
        self._lent: Sequence[tuple[int, tuple[bytes, ...]]] = ()
        self._final: int | None = None
        self._users = 1  # who fetches, and who reads from it

    # Thread side.

    def await_layer(self, layer: int, stop: int, given_up: Callable[[], bool]) -> list[tuple[memoryview, int]]:
        """See `cache.Arriving`."""
        wanted = stop - self.start
        with self.condition:
            self.condition.wait_for(
                lambda: self._final is not None or self._landed[layer] >= wanted or given_up()
            )
            count = min(wanted, self._landed[layer] if self._final is None else self._final)
            if self._peer is not None:
                return [(self._peer.memory, self._offset(slot, layer)) for slot, _ in self._lent[:count]]
            memory = self._cache.store.arena.memory
            return [(memory, self._offset(slot, layer)) for slot in self._slots[:count]]

    def num_intact(self, layer: int, count: int) -> int:
        """See `cache.Arriving`. What came into this node's arena was checked as it came."""
        if self._peer is None:
            return count
        memory, width = self._peer.memory, self._layout.slice_bytes
        for at, (slot, seals) in enumerate(self._lent[:count]):
            offset = self._offset(slot, layer)
            if seal(memory[offset : offset + width]) != seals[layer]:
                self._blame()
                return at
        return count

    def _blame(self) -> None:
        log.warning("a block lent by another node is damaged (seal mismatch)")
        self._damaged()

    def _offset(self, slot: int, layer: int) -> int:
        return slot * self._layout.block_bytes + layer * self._layout.slice_bytes

    def hold(self) -> None:
        """One more reads from it, until `release`."""
        with self.condition:
            self._users += 1

    def release(self) -> None:
        """The last one gives everything back: slots that did not become the cache's, and what was lent."""
        with self.condition:
            self._users -= 1
            if self._users:
                return
            kept, peer = self._kept, self._peer
            spare = set(self._slots) - {pinned.slot for pinned in kept}
            self._kept, self._slots, self._peer = [], [], None
        self._cache.store.unpin(kept)
        self._cache.store.give_back(sorted(spare))
        if peer is not None:
            peer.close()
            self._released()

    # Event loop side.

    @property
    def num_whole(self) -> int:
        """How many of the blocks are here in all layers."""
        return self._final if self._final is not None and self.is_lent else self._num_committed

    @property
    def is_over(self) -> bool:
        """Nothing more comes."""
        return self._final is not None

    @property
    def is_lent(self) -> bool:
        return self._peer is not None

    def make_room(self) -> int:
        """Empty slots for what is still wanted; for how many blocks there are any."""
        with self.condition:
            wanted = len(self.names) - self.start - len(self._slots)
            slots = self._cache.store.reserve(wanted)
            self._slots += slots
            self._seals += [[] for _ in slots]
            return len(self._slots) - self._num_committed

    def borrow(
        self, peer: PeerArena, lent: Lent, released: Callable[[], object], damaged: Callable[[], object]
    ) -> None:
        """The blocks are read where they lie, until the last user releases them; `damaged`: one is not what it was.
        Both are called from any thread."""
        with self.condition:
            self._released, self._damaged = released, damaged
            self._peer, self._lent = peer, list(zip(lent.slots, lent.seals, strict=True))
            self._final = min(len(lent.slots), len(self.names) - self.start)
            self.condition.notify_all()

    def place(self, given: Given, size: int) -> list[memoryview] | None:
        """Where a payload goes; None when it cannot be part of what is to come. `given.first` counts from the last
        Want."""
        first, count = self._num_committed + given.first, len(given.seals)
        expected = (
            self._final is None
            and 0 <= given.layer < self._layout.num_layers
            and first >= self._landed[given.layer]
            and 0 < count <= len(self._slots) - first
            and fits(self.codec, self._layout, count * self._layout.block_size, size)
            and not any(overlap(given, other) for other, _ in self._placed.values())
        )
        if not expected:
            return None
        encoded = None if self.codec == NONE else memoryview(bytearray(size))
        self._placed[id(given)] = given, encoded
        if encoded is not None:
            return [encoded]
        arena = self._cache.store.arena
        return [arena.slice(slot, given.layer) for slot in self._slots[first : first + count]]

    def receive(self, given: Given) -> bool:
        """Books a whole payload; False when a seal does not match: nothing from there on counts."""
        arena, layer = self._cache.store.arena, given.layer
        _, encoded = self._placed.pop(id(given), (None, None))
        if not given.seals:
            return False
        with self.condition:
            if self._final is not None:
                return True
            first = self._landed[layer]
            if self._num_committed + given.first != first:
                return False
            targets = [arena.slice(slot, layer) for slot in self._slots[first : first + len(given.seals)]]
            num_tokens = len(targets) * self._layout.block_size
            if encoded is not None and not unpack(
                self.codec, self._layout, encoded, targets, num_tokens, given.seals
            ):
                return False
            for at, (target, expected) in enumerate(zip(targets, given.seals, strict=True), first):
                found = seal(target)
                if seals_kv(self.codec) and found != expected:
                    return False
                self._seals[at].append(found)
                self._landed[layer] = at + 1
            self.condition.notify_all()
            return True

    def void(self, given: Given) -> None:
        """A payload that was being received will not come."""
        self._placed.pop(id(given), None)

    def take_placed(self) -> list[Given]:
        """Payloads that are still being received. They must come to an end before their slots are given back."""
        placed, self._placed = self._placed, {}
        return [given for given, _ in placed.values()]

    def commit(self) -> None:
        """What is whole becomes the cache's. A block that it got elsewhere meanwhile stays private until the end."""
        store = self._cache.store
        with self.condition:
            for at in range(self._num_committed, min(self._landed)):
                index = self.start + at
                head = self.names[index - 1] if index else None
                pinned = store.adopt(self.names[index], head, self._slots[at], tuple(self._seals[at]))
                if pinned is not None:
                    self._kept.append(pinned)
            self._num_committed = min(self._landed)

    def keep_lent(self) -> bool:
        """Copies all lent blocks to this node's arena; they are the cache's then. False when they find no room, or
        one is damaged: then none is, for nobody would know of a part. From a thread."""
        assert self._peer is not None
        arena, memory, count = self._cache.store.arena, self._peer.memory, self.num_whole
        slots, width = self._slots[:count], self._layout.slice_bytes
        if len(slots) < count:
            return False
        for layer in range(self._layout.num_layers):
            for slot, (there, seals) in zip(slots, self._lent, strict=True):
                target, offset = arena.slice(slot, layer), self._offset(there, layer)
                copy_bytes(target, memory[offset : offset + width])
                if seal(target) != seals[layer]:  # of the copy: its owner may have lost it meanwhile
                    self._blame()
                    return False
        self._seals = [list(seals) for _, seals in self._lent]
        self._landed = [count] * self._layout.num_layers
        self.commit()
        return True

    def end(self) -> None:
        """Nothing more comes. Idempotent."""
        with self.condition:
            if self._final is None:
                self.commit()
                self._final = self._num_committed
                self.condition.notify_all()


def overlap(given: Given, other: Given) -> bool:
    """Whether both are for the same bytes: whichever comes last would be under the seals of the other."""
    return (
        given.layer == other.layer
        and given.first < other.first + len(other.seals)
        and other.first < given.first + len(given.seals)
    )


class Fetcher:
    """All fetches of a node. For its event loop.

    `connect`: the session with the node at an address; `offer`: told of each prefix that is whole here.
    """

    def __init__(
        self,
        cache: NodeCache,
        connect: Callable[[str], Awaitable[Session]],
        offer: Callable[[Sequence[BlockName]], None],
        *,
        shares_memory: bool = True,
    ) -> None:
        self.cache, self._connect, self._offer = cache, connect, offer
        self._open: dict[RequestId, tuple[Fetch, Session | None]] = {}
        self._asked: dict[RequestId, tuple[Want, asyncio.Future[Lent | Ended | None]]] = {}
        self._progress: dict[RequestId, float] = {}
        self._shares = shares_memory
        self._strangers: set[str] = set()
        self.bytes_in = self.bytes_lent = self.seal_mismatches = 0

    async def run(self, fetch: Fetch, source: str, *, background: bool = False) -> None:
        """Fetches as much as there is, and ends the fetch. Never raises for what another node does."""
        self._open[fetch.key] = fetch, None
        connection = None
        try:
            connection = await self._connect(source)
            self._open[fetch.key] = fetch, connection
            while await self._ask(fetch, connection, background):
                self._offer(fetch.names[: fetch.start + fetch.num_whole])
        except (OSError, TimeoutError, ProtocolError) as error:
            log.warning("blocks cannot be fetched from %s: %s", source, error)
        finally:
            for state in (self._open, self._asked, self._progress):
                state.pop(fetch.key, None)
            if connection is not None:
                for given in fetch.take_placed():
                    connection.refuse(given)
                if not fetch.is_lent:
                    connection.send(Enough(fetch.key))
            fetch.end()
            if fetch.num_whole and not fetch.is_lent:
                self._offer(fetch.names[: fetch.start + fetch.num_whole])

    async def _ask(self, fetch: Fetch, connection: Session, background: bool) -> bool:
        """One Want and its answer. False when there is nothing left to ask for."""
        if fetch.is_over or connection.closed:
            return False
        room, before = fetch.make_room(), fetch.num_whole
        names = tuple(fetch.names[fetch.start + fetch.num_whole :])
        shares = self._shares and connection.peer not in self._strangers
        host = host_id() if shares and not background and not fetch.num_whole else ""
        if not names or not (room or host):
            return False
        loop = asyncio.get_running_loop()
        want = Want(fetch.key, names, room, host, background, fetch.codec)
        self._asked[fetch.key] = want, loop.create_future()
        self._progress[fetch.key] = loop.time()
        connection.send(want)
        answer = await self._asked[fetch.key][1]
        if isinstance(answer, Lent):
            peer = PeerArena.attach(answer.arena)
            if peer is None:
                self._strangers.add(connection.peer)  # another container, or just gone: do not ask again
                connection.send(Enough(fetch.key))
                return True
            fetch.borrow(
                peer,
                answer,
                partial(loop.call_soon_threadsafe, connection.send, Enough(fetch.key)),
                partial(loop.call_soon_threadsafe, self._count_damaged),
            )
            self.bytes_lent += fetch.num_whole * self.cache.memory.layout.block_bytes
            return False
        fetch.commit()
        return answer is not None and 0 < fetch.num_whole - before == room < len(names)

    def _count_damaged(self) -> None:
        self.seal_mismatches += 1

    def place(self, connection: Session, given: Given, size: int) -> list[memoryview]:
        """Raises ProtocolError for what nobody asked for."""
        found = self._open.get(given.key)
        if found is None:
            return [memoryview(bytearray(size))]  # given up: read past it
        if found[1] is not connection:
            raise ProtocolError("blocks came over a session that nobody asked for them")
        targets = found[0].place(given, size)
        if targets is None:
            raise ProtocolError(f"blocks for {given.key}, layer {given.layer}, are not what must come next")
        return targets

    def receive(self, connection: Session, given: Given) -> None:
        found = self._open.get(given.key)
        if found is None or found[1] is not connection:
            return
        fetch = found[0]
        self._progress[given.key] = asyncio.get_running_loop().time()
        self.bytes_in += len(given.seals) * self.cache.memory.layout.slice_bytes
        if not fetch.receive(given):
            self._count_damaged()
            log.warning("a block from %s came damaged (seal mismatch)", connection.peer)
            self._answer(given.key, None)

    def void(self, connection: Session, given: Given) -> None:
        """The sender gave up in the midst of it."""
        found = self._open.get(given.key)
        if found is not None and found[1] is connection:
            found[0].void(given)
            self._answer(given.key, None)

    def answer(self, connection: Session, answer: Lent | Ended) -> None:
        """Raises ProtocolError for a loan that was not asked for, or cannot be one."""
        found = self._open.get(answer.key)
        if found is None or found[1] is not connection:
            return
        if isinstance(answer, Lent) and not self._is_loan(answer):
            raise ProtocolError(f"what was lent for {answer.key} is not what was asked for")
        self._answer(answer.key, answer)

    def _is_loan(self, lent: Lent) -> bool:
        want, _ = self._asked[lent.key]
        layout = self.cache.memory.layout
        return (
            bool(want.host)
            and len(lent.slots) == len(lent.seals) <= len(want.names)
            and all(len(seals) == layout.num_layers for seals in lent.seals)
            and all(0 <= slot < lent.arena.num_slots for slot in lent.slots)
            and lent.arena.shape == self.cache.store.shape
        )

    def cancel(self, key: RequestId) -> None:
        """What is here stays the cache's. Unknown ones are no error."""
        found = self._open.get(key)
        if found is not None and found[1] is None:
            found[0].end()  # nothing was asked for yet
        self._answer(key, None)

    def lost(self, connection: Session) -> None:
        for key, (_, other) in list(self._open.items()):
            if other is connection:
                self._answer(key, None)

    def end_stalled(self, limit_s: float) -> None:
        """Ends fetches that brought nothing since then (loop time)."""
        for key, progressed_s in list(self._progress.items()):
            if progressed_s < limit_s:
                log.warning("the fetch for %s brought nothing for too long", key)
                self._answer(key, None)

    def _answer(self, key: RequestId, answer: Lent | Ended | None) -> None:
        asked = self._asked.get(key)
        if asked is not None and not asked[1].done():
            asked[1].set_result(answer)
