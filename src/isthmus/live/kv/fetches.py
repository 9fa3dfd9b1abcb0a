"""Cached blocks on their way between nodes, pulled by the node that fetches them.

    Pull ──> LentBlocks                       the arena is on this host: its bytes are copied from it
    Pull ──> FetchedSlices, …, FetchServed    layer by layer into this node's arena, each slice checked by its seal

A fetch pulls as many blocks as there are empty slots, and again after its node has adopted those. The giving side is in
`loans.py`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from isthmus.core.blocks import seal
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.types import BlockName, RequestId, Span
from isthmus.live.engine.codecs import EXACT
from isthmus.live.kv.cache import NodeCache
from isthmus.live.messenger import Session
from isthmus.live.peers.messages import FetchedSlices, FetchServed, LentBlocks, Pull
from isthmus.live.peers.sessions import Reach, Tell
from isthmus.live.peers.wire import KVFrames
from isthmus.live.store import PeerArena, Pinned, copy_bytes

log = logging.getLogger(__name__)


def host_id() -> str:
    """Identifies this machine: equal for processes that may share memory; "" where it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Fetching:
    """Blocks of a prefix, from `start` on, fetched from another node. Has a lock of its own: an event loop or a
    copying thread fills it, threads that load prefixes read it.

    `_landed[layer]`: number of blocks that are here. `final`: how many there will be, once known. `session`: the one
    that is asked; `answer`: of the last `pull`; `peer`: the arena that was lent.
    """

    def __init__(self, order: events.Fetch, cache: NodeCache) -> None:
        self.order = order
        self.key, self.names, self.start, self.codec = order.key, order.names, order.start, order.codec
        self.session: Session | None = None
        self.pull: Pull | None = None
        self.answer: asyncio.Future[LentBlocks | FetchServed | None] | None = None
        self.peer: PeerArena | None = None
        self._lent: list[
            tuple[int, Sequence[bytes]]
        ] = []  # slots and seals there, for the same blocks as `_slots`
        self.condition = threading.Condition()
        self._cache = cache
        self._layout = cache.layout
        self.frames = KVFrames(self._layout)
        self._slots: list[int] = []  # of this node's arena, for `names[start:]`
        self._adopted: dict[int, Pinned] = {}  # by slot, those that became the cache's
        self._seals: list[list[bytes]] = []
        self.num_whole = 0
        """Number of blocks that were here in all layers at the last `count`."""
        self._landed = [0] * self._layout.num_layers
        self.final: int | None = None
        self._users = 1  # who fetches, and who reads from it

    # Thread side.

    def await_layer(self, layer: int, stop: int, given_up: Callable[[], bool]) -> tuple[memoryview, list[int]]:
        """Waits until this layer of the blocks `[start, stop)` is here or will not come. Returns memory, and the offset
        in it of each block that is here, in order."""
        wanted = stop - self.start
        with self.condition:
            self.condition.wait_for(
                lambda: self.final is not None or self._landed[layer] >= wanted or given_up()
            )
            slots = self._slots[: min(wanted, self._landed[layer] if self.final is None else self.final)]
            return self._cache.store.arena.memory, [self._cache.offset(slot, layer) for slot in slots]

    def hold(self) -> bool:
        """Adds a user, until `release`. False: the last user has released it."""
        with self.condition:
            self._users += self._users > 0
            return self._users > 0

    def release(self) -> None:
        """Removes a user. The last one gives back slots of blocks that were not adopted."""
        with self.condition:
            self._users -= 1
            if self._users:
                return
        self._cache.store.unpin(self._adopted.values())
        self._cache.store.give_back([slot for slot in self._slots if slot not in self._adopted])

    def adopt(self, names: Sequence[BlockName]) -> int:
        """Commits these blocks to the store, in order; returns how many. A block that the store has from elsewhere
        stays private until the end."""
        store, first = self._cache.store, self.names.index(names[0])
        with self.condition:
            for at, name in enumerate(names, first):
                assert at >= self.start, "what was not fetched is adopted"
                here, head = at - self.start, self.names[at - 1] if at else None
                if here >= self.num_whole or not (head is None or store.contains(head)):
                    return at - first
                slot = self._slots[here]
                if slot not in self._adopted:
                    pinned = store.adopt(name, head, slot, tuple(self._seals[here]))
                    if pinned is not None:
                        self._adopted[slot] = pinned
                elif not store.contains(name):
                    return at - first  # it was the cache's, and has left it
        return len(names)

    def copy(self, peer: PeerArena) -> bool:
        """Copies blocks from another node's arena into the reserved slots. False when a copy does not match its
        seals: its owner may have reused the slot."""
        arena, first = self._cache.store.arena, self.num_whole
        lent = self._lent[first : len(self._slots)]
        for layer in range(self._layout.num_layers if lent else 0):
            if self.final is not None:
                break
            for slot, (there, _) in zip(self._slots[first:], lent, strict=False):
                copy_bytes(arena.slice(slot, layer), peer.slice(there, layer))
            if not self._land(layer, first, [seals[layer] for _, seals in lent]):
                return False
        return True

    def _land(self, layer: int, first: int, expected: Sequence[bytes], *, sealed: bool = True) -> bool:
        """Counts one layer of some blocks that lie in their slots. False when one does not match its seal: nothing
        from there on counts. `sealed`: the seals are of these bytes, not of encoded ones."""
        arena = self._cache.store.arena
        found = [seal(arena.slice(slot, layer)) for slot in self._slots[first : first + len(expected)]]
        good = len(found)
        if sealed:
            pairs = enumerate(zip(found, expected, strict=True))
            good = next((at for at, (one, other) in pairs if one != other), good)
        with self.condition:
            if self.final is None:
                for seals, one in zip(self._seals[first : first + good], found, strict=False):
                    seals.append(one)
                self._landed[layer] = first + good
                self.condition.notify_all()
        return good == len(found)

    # Event loop side.

    def make_room(self) -> int:
        """Reserves slots for blocks still wanted. Returns for how many blocks there are slots."""
        with self.condition:
            wanted = len(self.names) - self.start - len(self._slots)
            slots = self._cache.store.reserve(wanted)
            self._slots += slots
            self._seals += [[] for _ in slots]
            return len(self._slots) - self.num_whole

    def ask(self, session: Session, pull: Pull) -> asyncio.Future[LentBlocks | FetchServed | None]:
        self.pull, self.answer = pull, asyncio.get_running_loop().create_future()
        session.send(pull)
        return self.answer

    def answered(self, answer: LentBlocks | FetchServed | None) -> bool:
        """Sets the answer to the last pull. False when none is awaited."""
        if self.answer is None or self.answer.done():
            return False
        self.answer.set_result(answer)
        return True

    def asked_for(self, lent: LentBlocks) -> bool:
        """Whether a loan answers the last pull and can be of this shape."""
        pull, layout = self.pull, self._layout
        return (
            pull is not None
            and bool(pull.host)
            and len(lent.slots) == len(lent.seals) <= len(self.names) - pull.start
            and all(len(seals) == layout.num_layers for seals in lent.seals)
            and all(0 <= slot < lent.arena.num_slots for slot in lent.slots)
            and lent.arena.shape == self._cache.store.shape
        )

    def borrow(self, lent: LentBlocks) -> bool:
        """Maps a lent arena for `copy`. False when it cannot be read from here."""
        self.peer = PeerArena.attach(lent.arena)
        came_before = [(0, ())] * self.num_whole  # another way: not asked for, and not lent
        self._lent = [*came_before, *zip(lent.slots, lent.seals, strict=True)]
        return self.peer is not None

    def place(self, session: Session, given: FetchedSlices, size: int) -> list[memoryview] | None:
        """Returns memory for a payload; None when it is not expected. `given.first` counts from the last pull."""
        first, count, width = self.num_whole + given.first, len(given.seals), self._layout.block_size
        expected = (
            self.final is None
            and 0 <= given.layer < self._layout.num_layers
            and first >= self._landed[given.layer]
            and 0 < count <= len(self._slots) - first
        )
        if not expected:
            return None
        arena, tokens = self._cache.store.arena, Span(first * width, (first + count) * width)
        targets = [arena.slice(slot, given.layer) for slot in self._slots[first : first + count]]
        return self.frames.place(given, session, self.codec, tokens, targets, size)

    def receive(self, given: FetchedSlices) -> bool:
        """Takes a whole payload. False when a seal does not match: nothing from there on counts."""
        targets, first = self.frames.take(given), self.num_whole + given.first
        if self.final is not None:
            return True
        if targets is None or first != self._landed[given.layer]:
            return False
        return self._land(given.layer, first, given.seals, sealed=self.codec in EXACT)

    def count(self) -> int:
        """Returns how many more blocks are whole than at the last call."""
        with self.condition:
            before, self.num_whole = self.num_whole, min(self._landed)
            return self.num_whole - before

    def end(self) -> None:
        """Ends the fetch: nothing more comes. Idempotent."""
        with self.condition:
            if self.final is None:
                self.count()
                self.final = self.num_whole
                self.condition.notify_all()


class Fetcher:
    """All fetches of a node. For its event loop."""

    def __init__(self, cache: NodeCache, reach: Reach, tell: Tell, *, shares_memory: bool = True) -> None:
        self.cache, self._reach, self._tell = cache, reach, tell
        self._open: dict[RequestId, Fetching] = {}
        self._shares = shares_memory
        self._strangers: set[str] = set()
        self.bytes_in = self.bytes_lent = self.seal_mismatches = 0

    def begin(self, fetch: Fetching) -> Coroutine[Any, Any, None]:
        """Returns the coroutine that fetches as much as there is, then releases the fetch. It raises nothing for
        another node's faults."""
        self._open[fetch.key] = fetch
        return self._run(fetch)

    async def _run(self, fetch: Fetching) -> None:
        try:
            fetch.session = await self._reach(fetch.order.source)
            await self._rounds(fetch, fetch.session)
        except (OSError, TimeoutError, ProtocolError) as error:
            log.warning("blocks cannot be fetched from %s: %s", fetch.order.source, error)
        finally:
            self._open.pop(fetch.key, None)
            if fetch.session is not None:
                fetch.frames.refuse()  # what still comes must not be written into slots that are given back
            if fetch.peer is not None:
                fetch.peer.close()
            fetch.end()
            self._tell(events.BlocksFetched(fetch.key, fetch.start + fetch.num_whole))
            fetch.release()

    async def _rounds(self, fetch: Fetching, session: Session) -> None:
        """Pulls, or copies from a loan, as many blocks as there are slots; then again, when the node has evicted
        others."""
        while fetch.final is None and not session.closed and (room := fetch.make_room()):
            wanted = len(fetch.names) - fetch.start - fetch.num_whole
            self._tell(events.Progress(fetch.key, fetched=True))
            if fetch.peer is None:
                answer = await fetch.ask(session, self._pull(fetch, session, room))
                if answer is None:
                    return
                if isinstance(answer, LentBlocks) and not fetch.borrow(answer):
                    self._strangers.add(session.peer)  # another container, or just gone
                    continue
            if fetch.peer is not None and not await self.cache.serve(fetch.copy, fetch.peer):
                self._damaged(session)
                return
            came = fetch.count()
            if fetch.peer is not None:
                self.bytes_lent += came * self.cache.layout.block_bytes
            if not 0 < came == room < wanted:
                return
            self._tell(events.BlocksFetched(fetch.key, fetch.start + fetch.num_whole, ended=False))
            await asyncio.sleep(0)
            await asyncio.wrap_future(self.cache.kept())

    def _pull(self, fetch: Fetching, session: Session, room: int) -> Pull:
        shares = self._shares and session.peer not in self._strangers
        host, start = host_id() if shares else "", fetch.start + fetch.num_whole
        return Pull(fetch.key, start, room, host, fetch.codec)

    def _damaged(self, session: Session) -> None:
        self.seal_mismatches += 1
        log.warning("a block from %s came damaged (seal mismatch)", session.peer)

    def _found(self, key: RequestId, session: Session) -> Fetching | None:
        """Returns the fetch that was asked for over this session."""
        fetch = self._open.get(key)
        return fetch if fetch is not None and fetch.session is session else None

    def place(self, session: Session, given: FetchedSlices, size: int) -> list[memoryview]:
        """Returns memory for a payload. Raises ProtocolError for one that was not asked for."""
        fetch = self._open.get(given.key)
        if fetch is None:
            return [memoryview(bytearray(size))]  # given up: read past it
        if fetch.session is not session:
            raise ProtocolError("blocks came over a session that nobody asked for them")
        targets = fetch.place(session, given, size)
        if targets is None:
            raise ProtocolError(f"blocks for {given.key}, layer {given.layer}, are not what must come next")
        return targets

    def receive(self, session: Session, given: FetchedSlices) -> None:
        fetch = self._found(given.key, session)
        if fetch is None:
            return
        self._tell(events.Progress(given.key, fetched=True))
        self.bytes_in += len(given.seals) * self.cache.layout.slice_bytes
        if not fetch.receive(given):
            self._damaged(session)
            fetch.answered(None)

    def void(self, session: Session, given: FetchedSlices) -> None:
        """Ends the pull: the sender gave up in the midst of a payload."""
        fetch = self._found(given.key, session)
        if fetch is not None:
            fetch.frames.void(session, given)
            fetch.answered(None)

    def answer(self, session: Session, answer: LentBlocks | FetchServed) -> None:
        """Takes the answer to a pull. Raises ProtocolError for a loan that was not asked for or is invalid."""
        fetch = self._found(answer.key, session)
        if fetch is None:
            return
        if isinstance(answer, LentBlocks) and not fetch.asked_for(answer):
            raise ProtocolError(f"what was lent for {answer.key} is not what was asked for")
        fetch.answered(answer)

    def cancel(self, key: RequestId) -> None:
        """Ends a fetch early: blocks that are here may be adopted. Unknown keys are ignored."""
        fetch = self._open.get(key)
        if fetch is not None and not fetch.answered(None):
            fetch.end()  # nothing is asked for just now

    def close(self) -> None:
        """Ends all fetches."""
        for key in list(self._open):
            self.cancel(key)
