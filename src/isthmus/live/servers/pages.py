"""KV pages of a vLLM worker: copied into the node's store and out of it, with their seals checked.

The connector in the worker (`connectors/vllm`) announces saved blocks and requests others; the node decides which
blocks are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.core.blocks import KVLayout, seal
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.types import BlockName, RequestId
from isthmus.live.kv.cache import NodeCache, not_left
from isthmus.live.kv.loans import Lease
from isthmus.live.peers.sessions import Tell
from isthmus.live.servers import wire
from isthmus.live.store import PeerArena, Shape, copy_bytes

log = logging.getLogger(__name__)

MAX_CHAINS = 1 << 13
ACCEPT_S = 1.0
"""Pause while there are no descriptors for connections."""
LOAD_BLOCKS = 32
"""Blocks of a load that are looked up, and read from disk if need be, at once."""


@dataclass
class _Fill:
    """New blocks of a prefix that a worker saved, in reserved slots of the store; `kept`: slots of adopted ones."""

    names: tuple[BlockName, ...]
    slots: dict[BlockName, int]
    seals: dict[BlockName, tuple[bytes, ...]]
    adopted: asyncio.Future[None] | None = None
    kept: set[int] = field(default_factory=set)


class _Worker:
    """The connection of one worker."""

    def __init__(self, writer: asyncio.StreamWriter, staged: PeerArena) -> None:
        self.writer, self.staged = writer, staged
        self.loads: dict[int, tuple[wire.Load, Lease, asyncio.Task[None]]] = {}
        self.tasks: asyncio.Queue[wire.Save | wire.Over] = asyncio.Queue()
        """Processed in order: an attempt's saves before its end."""

    def send(self, message: wire.ToWorker) -> None:
        if not self.writer.is_closing():
            self.writer.write(wire.frame(message))


def misfit(opened: wire.Open, layout: KVLayout) -> str:
    """Returns why a worker does not fit a node with this layout, "" if it does."""
    shape = opened.memory.shape
    if opened.protocol != wire.PROTOCOL:
        return f"it speaks protocol {opened.protocol}, this node {wire.PROTOCOL}"
    fits = shape == Shape(layout.num_layers, layout.slice_bytes)
    if opened.form != layout.form or opened.block_size != layout.block_size or not fits:
        return (
            f"its KV is {opened.form}, {shape.num_layers} layers of {shape.slice_bytes} bytes a block; this node "
            f"keeps {layout.form}, {layout.num_layers} of {layout.slice_bytes}"
        )
    return ""


class Pages:
    """The adapter's side of the connector's protocol, in an event loop. `path`: of the socket; `opened`: the first
    worker's Open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: asyncio.Future[wire.Open] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        self._workers: set[_Worker] = set()
        self._sessions: set[asyncio.Task[None]] = set()
        self._chains: dict[RequestId, list[BlockName]] = {}
        """Block names of the engine's attempts, from the first block on."""
        self._fills: dict[RequestId, _Fill] = {}
        self._numbers = itertools.count()
        self._copier = ThreadPoolExecutor(1, "pages")
        self.blocks_saved = self.blocks_loaded = self.seal_mismatches = 0

    async def listen(self) -> None:
        """Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self.path))
        os.chmod(self.path, 0o600)
        self._listener.listen()
        self._spawn(self._accept())

    def serve(self, cache: NodeCache, tell: Tell, lost: Callable[[Sequence[BlockName]], None]) -> None:
        """Starts answering workers."""
        self._cache, self._layout, self._tell, self._lost = cache, cache.layout, tell, lost
        self._ready.set()

    async def close(self) -> None:
        for session in self._sessions:
            session.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)
        self._listener.close()
        self._copier.shutdown(wait=True)
        with contextlib.suppress(OSError):
            self.path.unlink()

    @property
    def connected(self) -> bool:
        return bool(self._workers)

    # Attempts.

    def begin(self, key: RequestId, names: Sequence[BlockName]) -> None:
        """Notes an attempt before the engine gets it. One that never gets there is dropped at `MAX_CHAINS`."""
        self._chains[key] = list(names)
        if len(self._chains) > MAX_CHAINS:
            del self._chains[next(iter(self._chains))]

    def adopt(self, adopt: events.AdoptBlocks) -> bool:
        """Adopts a worker's saved blocks into the store; returns False for blocks that no worker saved."""
        fill = self._fills.get(adopt.request)
        if fill is None:
            return False
        loop = asyncio.get_running_loop()
        adopted = fill.adopted = loop.create_future()

        def done(lost: Sequence[BlockName]) -> None:
            """Called in any thread."""
            if lost:
                self._lost(lost)
            loop.call_soon_threadsafe(adopted.set_result, None)

        self._cache.adopt(adopt.names, lambda names: self._take(fill, names), done)
        return True

    def _take(self, fill: _Fill, names: Sequence[BlockName]) -> int:
        """As in `NodeCache.adopt`."""
        store, heads = self._cache.store, dict(itertools.pairwise(fill.names))
        parents = {name: head for head, name in heads.items()}
        for count, name in enumerate(names):
            head = parents.get(name)
            if name not in fill.slots or not (head is None or store.contains(head)):
                return count
            store.commit(name, head, fill.slots[name], fill.seals[name])
            fill.kept.add(fill.slots[name])
        return len(names)

    # Workers.

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        session = asyncio.get_running_loop().create_task(work)
        self._sessions.add(session)
        session.add_done_callback(self._sessions.discard)

    async def _accept(self) -> None:
        while True:
            try:
                stream, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError as error:
                log.error("no worker of vLLM can connect: %s", error.strerror)
                await asyncio.sleep(ACCEPT_S)
                continue
            stream.setblocking(False)
            self._spawn(self._meet(stream))

    async def _meet(self, stream: socket.socket) -> None:
        memories: list[int] = []
        try:
            begin, memories = await wire.read_begin(stream)
            reader, writer = await asyncio.open_unix_connection(sock=stream)
            try:
                await self._talk(stream, reader, writer, begin, memories)
            finally:
                writer.close()
        except (EOFError, OSError):
            pass
        except ProtocolError as error:
            log.error("%s; its connection is closed", error)
        finally:
            stream.close()
            for memory in memories:
                os.close(memory)

    async def _talk(
        self,
        stream: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        begin: bytes,
        memories: list[int],
    ) -> None:
        """Serves one worker to its end. `begin`, `memories`: the first bytes that it sent, and what came with them.
        Raises EOFError, OSError, ProtocolError."""
        opened = await wire.read_message(reader, begin)
        if not isinstance(opened, wire.Open):
            raise ProtocolError("vLLM's connector did not open its session")
        if not self.opened.done():
            self.opened.set_result(opened)
        await self._ready.wait()
        arena, reason = self._cache.store.arena, misfit(opened, self._layout)
        staged = PeerArena.of(memories[0], opened.memory) if memories else None
        if arena.handle is None or (staged is None and not reason):
            reason = "memory cannot be shared with it"
        if reason or staged is None or arena.handle is None:
            log.error("vLLM's connector is refused: %s", reason)
            writer.write(wire.frame(wire.Refused(reason)))
            return
        wire.send_with_memory(stream, wire.Arena(arena.handle), arena.fileno())  # nothing was written before
        worker = _Worker(writer, staged)
        self._workers.add(worker)
        saving = asyncio.create_task(self._saves(worker))
        try:
            while True:
                self._heard(worker, await wire.read_message(reader))
        finally:
            saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)
            await self._leave(worker)

    def _heard(self, worker: _Worker, message: wire.FromWorker) -> None:
        match message:
            case wire.Load():
                if message.load in worker.loads:
                    raise ProtocolError(f"vLLM's connector began load {message.load} twice")
                lease = Lease(self._cache)
                task = asyncio.get_running_loop().create_task(self._load(worker, lease, message))
                worker.loads[message.load] = message, lease, task
            case wire.Done():
                if message.damaged is not None and message.load in worker.loads:
                    self._damaged(*worker.loads[message.load][:2], message.damaged)
                self._end(worker, message.load)
            case wire.Save() | wire.Over():
                worker.tasks.put_nowait(message)
            case wire.Open():
                raise ProtocolError("vLLM's connector opened its session twice")

    async def _leave(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        for load in list(worker.loads):
            self._end(worker, load)
        worker.staged.close()
        if not self._workers:  # nobody will announce saves of the engine's attempts
            for key in list(self._chains):
                self._settle(key)

    # Loads.

    async def _load(self, worker: _Worker, lease: Lease, load: wire.Load) -> None:
        count = 0
        try:
            for start in range(0, len(load.names), LOAD_BLOCKS):
                whole = await self._cache.serve(lease.add, load.names[start : start + LOAD_BLOCKS])
                slots, seals = tuple(lease.slots[count:]), tuple(lease.seals[count:])
                count += len(slots)
                if slots:
                    worker.send(wire.Ready(load.load, slots, seals))
                if not whole:
                    worker.send(wire.Short(load.load))
                    break
        except Exception:
            log.exception("blocks could not be given to vLLM; it computes them")
            worker.send(wire.Short(load.load))
        self.blocks_loaded += count

    def _damaged(self, load: wire.Load, lease: Lease, at: int) -> None:
        """Condemns block number `at` of a load if its bytes are wrong here: the worker will save it again."""
        if not 0 <= at < len(lease.slots):
            raise ProtocolError(f"vLLM's connector found a block {at} damaged that it was not given")
        slot, arena = lease.slots[at], self._cache.store.arena
        found = tuple([seal(arena.slice(slot, layer)) for layer in range(self._layout.num_layers)])
        if found != lease.seals[at]:
            self.seal_mismatches += 1
            log.warning("a block in memory is damaged (seal mismatch); it is computed again")
            self._cache.store.condemn(load.names[at], slot)

    def _end(self, worker: _Worker, load: int) -> None:
        """Ends a load and releases its blocks, after its task."""
        _, lease, task = worker.loads.pop(load, (None, None, None))
        if lease is not None and task is not None:
            task.cancel()
            task.add_done_callback(lambda _: lease.release())

    # Saves.

    async def _saves(self, worker: _Worker) -> None:
        while True:
            message = await worker.tasks.get()
            if isinstance(message, wire.Over):
                self._settle(RequestId(message.key))
                continue
            try:  # finished even when cancelled: its slots are being added to the store
                await not_left(asyncio.get_running_loop().create_task(self._save(worker, message)))
            except Exception:
                log.exception("blocks of vLLM could not be saved")
            finally:
                worker.send(wire.Free(message.slots))

    def _settle(self, key: RequestId) -> None:
        self._chains.pop(key, None)
        self._tell(events.SavesDone(key))

    async def _save(self, worker: _Worker, save: wire.Save) -> None:
        """Saves blocks in parts as large as the store has slots for: adopting one part makes room for the next."""
        chain = self._chains.get(RequestId(save.key))
        before = tuple(chain[: save.first]) if chain is not None else ()
        fits = len(before) == save.first and (before[-1] if before else None) == save.parent
        if chain is None or not fits or not len(save.names) == len(save.slots) == len(save.seals):
            return
        names = (*before, *save.names)
        if len(names) > len(chain):
            self._chains[RequestId(save.key)] = list(names)
        done, loop = 0, asyncio.get_running_loop()
        await asyncio.wrap_future(self._cache.kept())  # so that evicted blocks are not taken for present
        while done < len(save.names):
            fill = await loop.run_in_executor(self._copier, self._copy, worker.staged, names, save, done)
            if len(fill.names) == save.first + done:
                return
            await self._fill(fill)
            done = len(fill.names) - save.first

    def _copy(self, staged: PeerArena, names: tuple[BlockName, ...], save: wire.Save, done: int) -> _Fill:
        """Copies as many of the remaining blocks as fit into slots of the store."""
        store, fill = self._cache.store, _Fill((), {}, {})
        left = range(done, len(save.names))
        new = {at for at in left if not store.contains(save.names[at])}
        slots, count = store.reserve(len(new)), done
        for at in left:
            if at in new:
                if not slots:
                    break
                if not self._take_in(staged, save.slots[at], slots[-1], save.seals[at]):
                    self.seal_mismatches += 1
                    log.warning("a block that vLLM saved is damaged (seal mismatch)")
                    break
                name = save.names[at]
                fill.slots[name], fill.seals[name] = slots.pop(), save.seals[at]
            count = at + 1
        store.give_back(slots)
        fill.names = names[: save.first + count]
        return fill

    def _take_in(self, staged: PeerArena, there: int, slot: int, seals: Sequence[bytes]) -> bool:
        arena, layers = self._cache.store.arena, range(self._layout.num_layers)
        if len(seals) != len(layers) or not 0 <= there < staged.num_slots:
            return False
        for layer in layers:
            copy_bytes(arena.slice(slot, layer), staged.slice(there, layer))
            if seal(arena.slice(slot, layer)) != seals[layer]:
                return False
        return True

    async def _fill(self, fill: _Fill) -> None:
        """Tells the node of filled slots, and gives back those that it does not adopt."""
        key = RequestId(f"fill {next(self._numbers)}")
        self._fills[key] = fill
        try:
            self._tell(events.SlotsFilled(key, fill.names))
            if fill.adopted is not None:
                await fill.adopted
                await asyncio.wrap_future(self._cache.kept())  # evicted blocks are gone
        finally:
            del self._fills[key]
            self._cache.store.give_back([slot for slot in fill.slots.values() if slot not in fill.kept])
            self.blocks_saved += len(fill.kept)
