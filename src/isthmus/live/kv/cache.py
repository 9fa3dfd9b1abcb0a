"""A node's cached blocks in bytes: between the tiers of its store, and into an engine's KV memory and back.

Carries out the node's decisions in threads of its own, while the engine computes. A prefix is loaded layer by layer,
and the engine waits only for the layer it needs. A missing or damaged block shortens the prefix: the rest is
computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

from isthmus.core.blocks import KVLayout, seal
from isthmus.core.node.events import SaveBlocks
from isthmus.core.scheduler import ReadAhead
from isthmus.core.types import BlockName, Tier
from isthmus.live.engine.interface import KVBytes
from isthmus.live.store import Pinned, Store, aligned_buffer

if TYPE_CHECKING:
    from isthmus.live.kv.fetches import Fetching

log = logging.getLogger(__name__)

Result = TypeVar("Result")

PoolOf = Callable[[int, str], Executor]
"""Makes a pool of so many threads of that name."""
Lost = Callable[[Sequence[BlockName]], None]
"""Hears of blocks that are in no tier."""
Brought = tuple[int, tuple[bytes, ...]]
"""A slot with a whole block, and the seals of its layers."""

LOADERS = 16
"""Prefixes loaded at once. One that waits for another node keeps its thread."""
READERS = 4
"""Blocks read from the SSD at once: it is quickest with several reads in flight."""
READ_BYTES = 1 << 17
"""Smallest read of one block from the SSD, in bytes, rounded up to whole layers."""
SINK_S = 5.0
"""Longest wait for the SSD to take blocks that are kept on it alone."""
AHEAD = 16
"""One in so many slots of the arena may hold blocks that were read from the SSD before their load begins."""


def chains_of(found: Sequence[tuple[BlockName, BlockName | None]]) -> tuple[tuple[BlockName, ...], ...]:
    """Returns whole prefixes, one for each block that none follows, from pairs (block, the block it follows)."""
    heads = dict(found)
    inner = set(heads.values())
    chains: list[tuple[BlockName, ...]] = []
    for name in [name for name in heads if name not in inner]:
        chain = [name]
        while (head := heads[chain[-1]]) is not None:
            chain.append(head)
        chains.append(tuple(chain[::-1]))
    return tuple(chains)


def _log_failure(task: Future[object]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("the store could not do what was decided", exc_info=task.exception())


async def not_left(work: asyncio.Future[Result]) -> Result:
    """Awaits work. When cancelled, however often, it raises only after the work is done."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):  # once more, when the process ends
                await asyncio.wait([work])
        raise


class NodeCache:
    """Carries out the node's decisions about the blocks of a store. Any thread may call it."""

    def __init__(self, layout: KVLayout, store: Store, pool_of: PoolOf = ThreadPoolExecutor) -> None:
        self.layout, self.store = layout, store
        self._readers = pool_of(READERS, "read")
        self._givers = pool_of(READERS, "give")
        """Apart from the loaders: nodes whose loads all wait for each other must still answer each other."""
        self._keeping = pool_of(1, "keep")
        """One thread, so that decisions are carried out in order: a block that is saved and then evicted must not
        come back."""
        self._coming: dict[BlockName, Future[None]] = {}
        """Blocks that are being saved or read from the SSD: in DRAM when the future is done, if there is room."""
        self._lock = threading.Lock()
        self._reading: dict[BlockName, tuple[Future[Brought | None], Future[None]]] = {}
        self._ahead = ReadAhead()
        """Blocks read ahead. It and `_reading` belong to the thread of `_keeping`."""

    def close(self) -> None:
        """Waits for work under way; the store stays open."""
        for pool in (self._givers, self._readers, self._keeping):
            pool.shutdown(wait=True, cancel_futures=True)

    def pin(self, names: Sequence[BlockName]) -> list[Pinned | None]:
        """Pins blocks as the store does, after those being saved or read have come. From a thread of the cache."""
        wait(self._coming_of(names))
        return self.store.pin(names)

    def _coming_of(self, names: Sequence[BlockName]) -> list[Future[None]]:
        return list(dict.fromkeys([coming for name in names if (coming := self._coming.get(name)) is not None]))

    def offset(self, slot: int, layer: int) -> int:
        """Returns where a slice begins in the arena's memory."""
        return slot * self.layout.block_bytes + layer * self.layout.slice_bytes

    # What is decided, one thing after the other.

    def adopt(self, names: Sequence[BlockName], take: Callable[[Sequence[BlockName]], int], done: Lost) -> None:
        """Adopts fetched blocks. `take` commits them and returns how many; `done` is called, from another thread,
        with those that were not."""

        def adopt() -> None:
            kept = 0
            try:
                kept = take(names)
            finally:
                done(names[kept:])

        self._keep_coming(names, adopt)

    def _keep_coming(self, names: Sequence[BlockName], work: Callable[..., object], *arguments: object) -> None:
        """Queues work as `_keep` does; loads of these blocks wait until it is done."""
        coming: Future[None] = Future()
        with self._lock:
            self._coming.update(dict.fromkeys(names, coming))
        self._keep(work, *arguments).add_done_callback(lambda _: self._came(names, coming))

    def _keep(self, work: Callable[..., object], *arguments: object) -> Future[object]:
        """Queues work on the store after all earlier decisions."""
        task: Future[object] = self._keeping.submit(work, *arguments)
        task.add_done_callback(_log_failure)
        return task

    def _came(self, names: Sequence[BlockName], coming: Future[None]) -> None:
        with self._lock:
            for name in names:
                if self._coming.get(name) is coming:  # and is not on its way once more
                    del self._coming[name]
        coming.set_result(None)

    # From one tier to another.

    def read(self, names: Sequence[BlockName]) -> None:
        """Begins to read blocks ahead of a load, from the SSD into spare slots. `unread` takes them back, except
        blocks that are promoted meanwhile."""
        coming: dict[BlockName, Future[None]] = {name: Future() for name in names}
        with self._lock:  # what is on its way already is waited for as such
            self._coming = coming | self._coming
        self._keep(self._read, coming)

    def _read(self, coming: dict[BlockName, Future[None]]) -> None:
        new = [name for name in coming if name not in self._ahead]
        room = max(0, self.store.arena.num_slots // AHEAD - len(self._ahead))
        skipped = set(new[room:])
        self._ahead.update(name for name in coming if name not in skipped)
        for name in new[:room]:
            read = self._readers.submit(self.bring, name)
            self._reading[name] = read, coming.pop(name)
            read.add_done_callback(lambda _, name=name: self._keep(self._place, name))  # type: ignore[misc]
        for name, nothing in coming.items():
            self._came([name], nothing)

    def _place(self, name: BlockName) -> None:
        """Commits a block that was read ahead to DRAM, unless no load wants it any more."""
        if name not in self._reading:
            return
        read, coming = self._reading.pop(name)
        wait([read])
        brought = None if read.cancelled() else read.result()
        if brought is not None and name in self._ahead and self.store.contains(name):
            self.store.commit(name, None, *brought)  # it is here already, with what it follows
        else:
            self._ahead.settle([name])
            self.store.give_back(brought[:1] if brought is not None else ())
        self._came([name], coming)

    def unread(self, names: Sequence[BlockName]) -> None:
        """Ends one `read` of these blocks."""

        def unread() -> None:
            self.store.demote([name for name in self._ahead.unread(names) if name not in self._reading])

        self._keep(unread)

    def promote(self, names: Sequence[BlockName]) -> None:
        """Moves blocks to DRAM as far as there is room; the rest is found on the SSD."""
        self._keep(self._promote, names)

    def _promote(self, names: Sequence[BlockName]) -> None:
        for name in names:
            self._place(name)
            self._ahead.settle([name])
            if self.store.tier(name) is Tier.DISK and (brought := self.bring(name)) is not None:
                self.store.commit(name, None, *brought)  # as in `_place`

    def bring(self, name: BlockName) -> Brought | None:
        """Reads a block from the SSD into a slot that the caller commits or gives back. None where there is no room,
        or the block is missing or damaged. From a thread of the cache."""
        store, layers = self.store, self.layout.num_layers
        slots, seals = store.reserve(1), store.seals(name)
        if slots and seals and store.read(name, 0, layers, store.arena.slot(slots[0])):
            return slots[0], seals
        store.give_back(slots)
        return None

    def demote(self, names: Sequence[BlockName]) -> None:
        self._keep(self._decide, self.store.demote, names)

    def drop(self, names: Sequence[BlockName]) -> None:
        self._keep(self._decide, self.store.drop, names)

    def _decide(self, does: Callable[[Sequence[BlockName]], None], names: Sequence[BlockName]) -> None:
        self._ahead.settle(names)
        does(names)

    def kept(self) -> Future[object]:
        """Returns a future that is done when all decisions so far are carried out."""
        return self._keep(bool)

    async def serve(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Does work for other nodes that may read the SSD and must not wait for a node. It is done when this returns,
        even if cancelled: a lease must be whole before it is released."""
        return await not_left(asyncio.wrap_future(self._givers.submit(work, *arguments)))


class PrefixMissing(Exception):
    """Raised when only the first `num_blocks` of a cached prefix can be loaded."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.num_blocks = num_blocks


class Loading:
    """One cached prefix on its way into the engine's blocks. `num_blocks`: length of the prefix that is or will be
    loaded. `over`: the load has ended, and so has its `task`."""

    def __init__(self, names: Sequence[BlockName], blocks: Sequence[int], arriving: Fetching | None) -> None:
        self.names, self.blocks, self.arriving = names, blocks, arriving
        self.num_blocks = len(names)
        self.cancelled = False
        self.task: Future[None]
        self._layers = 0
        self._condition = arriving.condition if arriving is not None else threading.Condition()
        self.over = threading.Event()

    def wait(self, layer: int, num_blocks: int) -> None:
        """Waits until this layer of the first `num_blocks` is loaded. Raises PrefixMissing when it will not be."""
        with self._condition:
            # Nothing to wait for: a loader that failed advances no more.
            self._condition.wait_for(
                lambda: not num_blocks or self._layers > layer or self.num_blocks < num_blocks
            )
            if self.num_blocks < num_blocks:
                raise PrefixMissing(self.num_blocks)

    def await_all(self, coming: Sequence[Future[None]]) -> bool:
        """Waits for these futures. Returns False when the load was cancelled first."""
        for each in coming:
            each.add_done_callback(self._notify)
        with self._condition:
            self._condition.wait_for(lambda: self.cancelled or all(each.done() for each in coming))
        return not self.cancelled

    def _notify(self, _: object) -> None:
        with self._condition:
            self._condition.notify_all()

    def cancel(self) -> None:
        """Ends the load: nothing more is written into the blocks when this returns."""
        with self._condition:
            self.cancelled = True
            self._condition.notify_all()
        self.task.cancel()  # if no thread has begun it
        self.over.wait()

    def end(self, _: object) -> None:
        """Marks the load as ended. Called once."""
        if self.arriving is not None:
            self.arriving.release()
        self.over.set()

    def shorten(self, num_blocks: int) -> None:
        with self._condition:
            self.num_blocks = min(self.num_blocks, num_blocks)
            self._condition.notify_all()

    def advance(self) -> None:
        """Marks one more layer as loaded."""
        with self._condition:
            self._layers += 1
            self._condition.notify_all()


class BlockStaging:
    """Blocks of the engine that are copied to slots layer by layer while a chunk computes them. Nobody sees them
    until they are committed."""

    def __init__(self, names: Sequence[BlockName], blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.names, self.blocks, self.slots = names, blocks, slots
        self.layers: set[int] = set()
        """Layers copied so far; for the thread that saves."""


class EngineCache(NodeCache):
    """Also moves blocks between the store and an engine's KV memory. Any thread may call it.

    `on_lost`: hears of blocks to be loaded that are in no tier. `max_staged`: most slots for blocks that are being
    computed; the other slots are for decided saves.
    """

    def __init__(
        self,
        memory: KVBytes,
        store: Store,
        on_lost: Lost = lambda names: None,
        pool_of: PoolOf = ThreadPoolExecutor,
        max_staged: int | None = None,
    ) -> None:
        super().__init__(memory.layout, store, pool_of)
        self._memory, self._on_lost = memory, on_lost
        self._layers, self._slice_bytes = self.layout.num_layers, self.layout.slice_bytes
        self._read_layers = min(self._layers, -(-READ_BYTES // self._slice_bytes))
        self._loaders = pool_of(LOADERS, "load")
        self._may_stage = store.arena.num_slots if max_staged is None else max_staged

    def close(self) -> None:
        self._loaders.shutdown(wait=True, cancel_futures=True)
        super().close()

    # From the store to the engine.

    def load(
        self, names: Sequence[BlockName], blocks: Sequence[int], arriving: Fetching | None = None
    ) -> Loading:
        """Begins to load the first blocks of a prompt into the engine's `blocks`. Releases `arriving` in the end."""
        load = Loading(names, blocks, arriving)
        stop = min(len(names), arriving.start) if arriving is not None else len(names)
        load.task = self._loaders.submit(self._load, load, stop)
        load.task.add_done_callback(load.end)
        return load

    def _load(self, load: Loading, stop: int) -> None:
        pinned: list[Pinned | None] = []
        try:
            if not load.await_all(self._coming_of(load.names[:stop])):
                return
            pinned = self.store.pin(load.names[:stop])
            on_disk = [at for at, pin in enumerate(pinned) if pin is None]
            for at in on_disk:
                if self.store.tier(load.names[at]) is None:
                    load.shorten(at)
                    self._on_lost(load.names[at : at + 1])
                    break
            buffer = aligned_buffer(len(on_disk) * self._read_layers * self._slice_bytes)
            for layer in range(self._layers):
                if load.cancelled:
                    return
                self._load_pinned(load, pinned, layer)
                if on_disk:
                    self._load_disk(load, on_disk, buffer, layer)
                if load.arriving is not None:
                    self._load_arriving(load, load.arriving, layer)
                load.advance()
        except Exception:
            log.exception("a prefix could not be loaded; it is computed")
            load.shorten(0)
        finally:
            self.store.unpin([pin for pin in pinned if pin is not None])

    def _load_pinned(self, load: Loading, pinned: list[Pinned | None], layer: int) -> None:
        at = [at for at, pin in enumerate(pinned[: load.num_blocks]) if pin is not None]
        offsets = [self.offset(pinned[index].slot, layer) for index in at]  # type: ignore[union-attr]
        self._memory.fill(layer, [load.blocks[index] for index in at], self.store.arena.memory, offsets)

    def _load_disk(self, load: Loading, on_disk: list[int], buffer: memoryview, layer: int) -> None:
        """Reads several layers at once, so that each read of the SSD is large enough."""
        first = layer - layer % self._read_layers
        width = self._read_layers * self._slice_bytes
        if layer == first:
            stop = min(self._layers, first + self._read_layers)
            size = (stop - first) * self._slice_bytes
            wanted = [at for at in on_disk if at < load.num_blocks]
            reads = [
                self._readers.submit(
                    self.store.read, load.names[at], first, stop, buffer[index * width : index * width + size]
                )
                for index, at in enumerate(wanted)
            ]
            for at, read in zip(wanted, reads, strict=True):
                if not read.result():
                    load.shorten(at)
        read_in = [(index, at) for index, at in enumerate(on_disk) if at < load.num_blocks]
        offsets = [index * width + (layer - first) * self._slice_bytes for index, _ in read_in]
        self._memory.fill(layer, [load.blocks[at] for _, at in read_in], buffer, offsets)

    def _load_arriving(self, load: Loading, arriving: Fetching, layer: int) -> None:
        stop = min(len(load.names), load.num_blocks)
        if stop <= arriving.start:
            return
        memory, offsets = arriving.await_layer(layer, stop, lambda: load.cancelled)
        if load.cancelled:
            return
        here = arriving.start + len(offsets)
        self._memory.fill(layer, load.blocks[arriving.start : here], memory, offsets)
        if here < stop:
            load.shorten(here)

    # From the engine to the store.

    def stage(self, names: Sequence[BlockName], blocks: Sequence[int]) -> BlockStaging:
        """Reserves slots for blocks that are about to be computed, as far as there are any."""
        with self._lock:
            count = min(len(names), self._may_stage)
            staging = self._reserve(names[:count], blocks[:count])
            self._may_stage -= len(staging.slots)
        return staging

    def _reserve(self, names: Sequence[BlockName], blocks: Sequence[int]) -> BlockStaging:
        slots = self.store.reserve(len(names))
        return BlockStaging(names[: len(slots)], blocks[: len(slots)], slots)

    def save_layer(self, staging: BlockStaging, layer: int) -> None:
        """Begins to copy a computed layer of the staged blocks."""
        self._keep(self._save_layer, staging, layer)

    def unstage(self, staging: BlockStaging) -> None:
        """Gives the slots of staged blocks back."""
        self._keep(self._unstage, [staging], {})

    def _unstage(self, staged: Sequence[BlockStaging], kept: Mapping[BlockName, int]) -> None:
        self._give_back(staged, kept)
        with self._lock:
            self._may_stage += sum([len(each.slots) for each in staged])

    def _give_back(self, reserved: Sequence[BlockStaging], kept: Mapping[BlockName, int]) -> None:
        """Gives slots back that became no block's. A slot may be listed twice, with two blocks: it was empty in
        between."""
        pairs = [pair for each in reserved for pair in zip(each.names, each.slots, strict=True)]
        self.store.give_back([slot for name, slot in pairs if kept.get(name) != slot])

    def save(self, save: SaveBlocks, staged: Sequence[BlockStaging], done: Lost) -> None:
        """Saves blocks of the engine, and copies now those that are not among `staged`. `done` is called, from another
        thread, with the blocks that found no room; then the engine's blocks may change."""
        self._keep_coming(save.names, self._save, save, staged, done)

    def _save_layer(self, staging: BlockStaging, layer: int) -> None:
        try:
            offsets = [self.offset(slot, layer) for slot in staging.slots]
            self._memory.save(layer, staging.blocks, self.store.arena.memory, offsets)
            staging.layers.add(layer)
        except Exception:
            log.exception("a layer could not be saved")

    def _save(self, save: SaveBlocks, staged: Sequence[BlockStaging], done: Lost) -> None:
        names, head, blocks = save.names, save.head, save.blocks
        arena, slots, fresh = self.store.arena, self._filled(staged), list[BlockStaging]()
        kept: dict[BlockName, int] = {}
        first, stays = 0, len(names) - save.num_sunk
        try:
            self._ahead.settle(names)
            while first < len(names):
                new = [at for at in range(first, len(names)) if names[at] not in slots]
                fresh.append(self._reserve([names[at] for at in new], [blocks[at] for at in new]))
                for layer in range(self._layers if fresh[-1].slots else 0):
                    self._save_layer(fresh[-1], layer)
                slots |= self._filled(fresh[-1:])
                stop = next((at for at in range(first, len(names)) if names[at] not in slots), len(names))
                for name in names[first:stop]:
                    if head is None or head in kept or self.store.contains(head):
                        seals = tuple([seal(arena.slice(slots[name], at)) for at in range(self._layers)])
                        self.store.commit(name, head, slots[name], seals)
                        kept[name] = slots[name]
                    head = name
                self.store.demote([name for name in names[max(first, stays) : stop] if name in kept])
                if stop == first:
                    break
                first = stop
                if first < len(names):  # what is on its way to the disk makes room
                    self.store.flush(SINK_S)
        except Exception:
            log.exception("blocks could not be saved")
        finally:
            self._give_back(fresh, kept)
            self._unstage(staged, kept)
            done([name for name in names if name not in kept])

    def _filled(self, staged: Sequence[BlockStaging]) -> dict[BlockName, int]:
        """Returns the slots of blocks staged in all layers; one slot of a block that was staged twice."""
        whole = [staging for staging in staged if len(staging.layers) == self._layers]
        return {name: slot for each in whole for name, slot in zip(each.names, each.slots, strict=True)}
