"""Keeps blocks: a DRAM arena over an SSD log. Thread-safe; copies and I/O happen outside the one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from isthmus.core.blocks import seal
from isthmus.core.types import BlockName, Tier
from isthmus.live.store.arena import Arena, Buffer, copy_bytes
from isthmus.live.store.directory import BlockDirectory, Pinned, whole_chains
from isthmus.live.store.log import Log
from isthmus.live.store.reader import UNIT_BYTES, Fault, Reader, Source
from isthmus.live.store.record import check_name
from isthmus.live.store.writer import Counters, StoreStat, TierStat, Writer

_CLOSE_S = 10.0
_CACHED_BYTES = 256 * 1024
"""Bytes that are still in the processor's cache after they were copied."""


class Want(NamedTuple):
    """Layers of a block to be read."""

    name: BlockName
    layers: range
    into: memoryview


class Store:
    """Blocks of one shape in `arena` and, with a `log`, on the SSD.

    `on_lost` hears of blocks that are lost though nobody dropped them: demoted and not writable, or damaged. It is
    called without the lock, from the thread that finds out; it must be quick, must not raise, and must not `flush` or
    `close`. `threads` share the work of `get_many`, `put_many` or a large `get`. Unless the store `writes_behind`, in
    a thread, only `flush` writes. A store that `lacks_log`, since its SSD tier could not be opened, is degraded for
    good. The store closes `arena` and `log`.
    """

    def __init__(
        self,
        arena: Arena,
        log: Log | None = None,
        on_lost: Callable[[Sequence[BlockName]], None] = lambda names: None,
        threads: int = 4,
        *,
        writes_behind: bool = True,
        lacks_log: bool = False,
    ) -> None:
        assert log is None or log.shape == arena.shape, "arena and log hold blocks of different shapes"
        self.arena = arena
        self.log = log
        self.shape = arena.shape
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._directory = BlockDirectory(arena.num_slots, log)
        self._counters = Counters()
        self._reading = 0
        self._closed = False
        self._all_layers = range(self.shape.num_layers)
        self._pool = ThreadPoolExecutor(threads, "isthmus-store")
        self._reader = Reader(arena, log, self._pool, threads)
        self._writer = (
            None
            if log is None
            else Writer(self._directory, arena, log, self._counters, self._changed, self._lose)
        )
        self._writes_behind, self._lacks_log = writes_behind, lacks_log
        if self._writer is not None and writes_behind:
            self._writer.start()

    # Filling DRAM.

    def reserve(self, count: int) -> list[int]:
        """Reserves up to `count` empty slots; fewer when the arena has no more."""
        with self._changed:
            return self._directory.reserve(count)

    def give_back(self, slots: Iterable[int]) -> None:
        """Gives reserved slots back that were not used."""
        with self._changed:
            self._directory.give_back(slots)

    def commit(self, name: BlockName, parent: BlockName | None, slot: int, seals: Sequence[bytes]) -> None:
        """Puts a block into the reserved slot, in DRAM by decision; it is written behind.

        `parent`: name of the block before it, None for a prompt's first. When the block is in DRAM already, the slot
        is empty again. Raises ValueError for a name longer than 32 bytes.
        """
        assert len(seals) == self.shape.num_layers, "one seal per layer"
        check_name(name)
        check_name(parent)
        with self._changed:
            if self._directory.commit(name, parent, slot, tuple(seals)):
                self._counters.memory.bytes_in += self.shape.block_bytes
            self._changed.notify_all()

    def adopt(
        self, name: BlockName, parent: BlockName | None, slot: int, seals: Sequence[bytes]
    ) -> Pinned | None:
        """Commits and pins in one. None: the block is in DRAM already, and the slot stays reserved."""
        check_name(name)
        check_name(parent)
        with self._changed:
            block = self._directory.blocks.get(name)
            if block is not None and block.slot is not None:
                return None
            self._directory.commit(name, parent, slot, tuple(seals))
            self._counters.memory.bytes_in += self.shape.block_bytes
            self._changed.notify_all()
            return self._directory.pin(name)

    # Using DRAM.

    def pin(self, names: Sequence[BlockName]) -> list[Pinned | None]:
        """Pins blocks that are in DRAM; None for the others. Counted.

        A pinned slot keeps its bytes until `unpin`, whatever becomes of the block.
        """
        with self._changed:
            found = [self._directory.pin(name) for name in names]
            hits = sum(pinned is not None for pinned in found)
            self._counters.memory.hits += hits
            self._counters.memory.bytes_out += hits * self.shape.block_bytes
            return found

    def unpin(self, pinned: Iterable[Pinned]) -> None:
        """Undoes one `pin` of each."""
        with self._changed:
            for one in pinned:
                self._directory.slots.unpin(one.slot)

    def tier(self, name: BlockName) -> Tier | None:
        """Returns the tier by decision; None: the block is in none."""
        with self._changed:
            block = self._directory.blocks.get(name)
            return None if block is None else block.tier

    def contains(self, name: BlockName) -> bool:
        with self._changed:
            return name in self._directory.blocks

    def seals(self, name: BlockName) -> tuple[bytes, ...] | None:
        """Returns the seal of each layer; None when the block is not here."""
        with self._changed:
            block = self._directory.blocks.get(name)
            return None if block is None else block.seals

    # Decisions.

    def demote(self, names: Iterable[BlockName]) -> None:
        """Moves blocks to the SSD by decision. Free for blocks that were written behind, others are written first.

        Blocks are lost without an SSD tier, while it is degraded, or when it is full of demoted blocks.
        """
        lost = []
        with self._changed:
            can_write = self._writer is not None and self._writer.can_write
            for name in names:
                if self._directory.demote(name, can_write=can_write):
                    self._counters.memory.evictions += 1
                else:
                    lost.append(name)
            self._counters.lost_blocks += len(lost)
            self._changed.notify_all()
        self._lose(lost)

    def drop(self, names: Iterable[BlockName]) -> None:
        """Removes blocks from all tiers. Unknown names are ignored."""
        with self._changed:
            for name in names:
                block = self._directory.blocks.get(name)
                if block is None:
                    continue
                self._counters.memory.evictions += block.slot is not None
                self._counters.disk.evictions += block.place is not None
                self._directory.drop(name)
            self._changed.notify_all()

    def condemn(self, name: BlockName, slot: int) -> None:
        """Drops a block that a reader of this pinned slot found damaged, if the slot is still the block's; `on_lost`
        hears of it."""
        with self._changed:
            block = self._directory.blocks.get(name)
            if block is None or block.slot != slot:
                return
            self._directory.drop(name)
            self._counters.lost_blocks += 1
            self._changed.notify_all()
        self._lose([name])

    # Reading.

    def read(self, name: BlockName, first_layer: int, stop_layer: int, into: memoryview) -> bool:
        """Copies layers `[first_layer, stop_layer)` to `into`, from DRAM or the SSD. Blocks the thread.

        Bytes from the SSD are checked against their seals. False: gone, unreadable or damaged; then `on_lost` has
        heard of it, and `into` may hold anything.
        """
        assert 0 <= first_layer < stop_layer <= self.shape.num_layers
        if not self.contains(name):
            self._lose([name])
            return False
        return self._fetch([Want(name, range(first_layer, stop_layer), into)])[0]

    def get(self, name: BlockName, into: memoryview) -> bool:
        """Copies the whole block to `into`. False: not here, or damaged."""
        return self._fetch([Want(name, self._all_layers, into)])[0]

    def get_many(self, items: Sequence[tuple[BlockName, memoryview]]) -> list[bool]:
        """Does `get` for each, several at a time."""
        return self._fetch([Want(name, self._all_layers, into) for name, into in items])

    def put(self, name: BlockName, parent: BlockName | None, data: Buffer) -> bool:
        """Stores a copy of a whole block in DRAM. False: no slot is empty (`demote` or `drop` some)."""
        source = memoryview(data)
        assert len(source) == self.shape.block_bytes, "data of the wrong size"
        check_name(name)
        check_name(parent)
        slots = self.reserve(1)
        if not slots:
            return False
        seals = self._fill(self.arena.slot(slots[0]), source)
        self.commit(name, parent, slots[0], seals)
        return True

    def put_many(self, items: Sequence[tuple[BlockName, BlockName | None, Buffer]]) -> list[bool]:
        """Does `put` for each, several at a time."""
        step = max(1, UNIT_BYTES // self.shape.block_bytes)
        units = [items[at : at + step] for at in range(0, len(items), step)]
        done = self._pool.map(lambda unit: [self.put(*item) for item in unit], units)
        return [stored for unit in done for stored in unit]

    # Life.

    def recover(self) -> list[tuple[BlockName, BlockName | None]]:
        """Offers the blocks of an earlier run as (name, parent), parents first. Call it before anything else.

        Only headers are read; a damaged payload is noticed when it is read. Blocks with a missing head are left out.
        """
        if self.log is None or self._writer is None:
            return []
        found = self.log.scan()
        chains = whole_chains(found)
        with self._changed:
            assert not self._directory.blocks, "recover comes before anything else"
            self.log.occupy(place for place, _ in chains)
            for place, header in chains:
                self._directory.restore(header.name, header.parent, header.seals, place)
            self._writer.sequence = max((header.sequence for _, header in found), default=0)
        return [(header.name, header.parent) for _, header in chains]

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing is left to write: all is written and synced, or there is no room, or the SSD is
        degraded.

        False: the time was up first. None: no limit.
        """
        if self._writer is None:
            return True
        if not self._writes_behind:
            self._writer.catch_up()
        with self._changed:
            return self._changed.wait_for(self._writer.idle, timeout_s)

    def stat(self) -> StoreStat:
        with self._changed:
            return self._stat()

    def check(self) -> None:
        """Checks that no slot and no place is lost; walks over everything."""
        with self._changed:
            self._directory.check(0 if self.log is None else self.log.num_used)

    def close(self) -> None:
        """Flushes for at most ten seconds, then frees everything. Idempotent.

        Files and memory that are still used by a disk which does not answer are left to the end of the process.
        """
        if self._closed:
            return
        self.flush(_CLOSE_S)
        with self._changed:
            self._closed = True
            is_quiet = self._changed.wait_for(lambda: not self._reading, _CLOSE_S)
        has_written = self._writer is None or self._writer.stop(_CLOSE_S)
        if not (is_quiet and has_written):
            return
        self._pool.shutdown()
        if self.log is not None:
            self.log.close()
        self.arena.close()

    def _fill(self, into: memoryview, source: memoryview) -> list[bytes]:
        """Copies a block. Returns its seals, computed while the bytes are in the processor's cache."""
        size = self.shape.slice_bytes
        step = max(1, _CACHED_BYTES // size) * size
        seals = []
        for start in range(0, len(into), step):
            copy_bytes(into[start : start + step], source[start : start + step])
            seals += [seal(into[at : at + size]) for at in range(start, min(start + step, len(into)), size)]
        return seals

    def _fetch(self, wants: Sequence[Want]) -> list[bool]:
        """Reads blocks. A block whose place was given to another one meanwhile is looked up again."""
        found = [False] * len(wants)
        left = list(range(len(wants)))
        while left:
            sources = self._begin_reading([wants[at] for at in left])
            here = [(at, source) for at, source in zip(left, sources, strict=True) if source is not None]
            faults: Sequence[Fault | None] = ()
            try:
                faults = self._reader.read([source for _, source in here]) if here else ()
            finally:
                self._end_reading([source for _, source in here])
            left = []
            for (at, source), fault in zip(here, faults, strict=True):
                if fault is None:
                    self._count_hit(source)
                    found[at] = True
                elif not self._blame(wants[at].name, source, fault):
                    left.append(at)
        return found

    def _begin_reading(self, wants: Sequence[Want]) -> list[Source | None]:
        sources: list[Source | None] = []
        with self._changed:
            for want in wants:
                assert len(want.into) == len(want.layers) * self.shape.slice_bytes, "memory of the wrong size"
                block = None if self._closed else self._directory.blocks.get(want.name)
                if block is None:
                    self._counters.misses += 1
                    sources.append(None)
                    continue
                if block.slot is not None:
                    self._directory.slots.pin(block.slot)
                sources.append(Source(block.slot, block.place, block.seals, want.layers, want.into))
            self._reading += 1
        return sources

    def _end_reading(self, sources: Iterable[Source]) -> None:
        with self._changed:
            self._reading -= 1
            for source in sources:
                if source.slot is not None:
                    self._directory.slots.unpin(source.slot)
            if self._closed:
                self._changed.notify_all()

    def _count_hit(self, source: Source) -> None:
        """Counts a read; a block that is read layer by layer is one hit."""
        with self._changed:
            traffic = self._counters.disk if source.slot is None else self._counters.memory
            traffic.hits += source.layers.start == 0
            traffic.bytes_out += len(source.into)

    def _blame(self, name: BlockName, source: Source, fault: Fault) -> bool:
        """Drops a block found damaged. False: it lies elsewhere by now."""
        with self._changed:
            block = self._directory.blocks.get(name)
            if block is None or block.place != source.place or block.slot is not None:
                return block is None
            self._directory.drop(name)
            self._counters.lost_blocks += 1
            self._counters.io_errors += fault is Fault.UNREADABLE
            self._counters.seal_mismatches += fault is Fault.DAMAGED
            self._changed.notify_all()
        self._lose([name])
        return True

    def _lose(self, names: Sequence[BlockName]) -> None:
        if names:
            self._on_lost(names)

    def _stat(self) -> StoreStat:
        directory, counters, size = self._directory, self._counters, self.shape.block_bytes
        num_slots_used = self.arena.num_slots - directory.slots.num_empty
        num_records = 0 if self.log is None else self.log.num_used
        return StoreStat(
            memory=TierStat(
                capacity_bytes=self.arena.capacity_bytes,
                used_bytes=num_slots_used * size,
                num_blocks=directory.slots.num_owned - len(directory.reserved),
                **msgspec.structs.asdict(counters.memory),
            ),
            disk=TierStat(
                capacity_bytes=0 if self.log is None else self.log.capacity_bytes,
                used_bytes=0 if self.log is None else num_records * self.log.format.record_bytes,
                num_blocks=num_records - len(directory.in_writing),
                **msgspec.structs.asdict(counters.disk),
            ),
            misses=counters.misses,
            num_pinned=directory.slots.num_pinned,
            num_reserved=len(directory.reserved),
            file_bytes=0 if self.log is None else self.log.used_bytes,
            queued_blocks=0 if self.log is None else len(directory.unwritten) + len(directory.demoting),
            lost_blocks=counters.lost_blocks,
            seal_mismatches=counters.seal_mismatches,
            io_errors=counters.io_errors,
            degraded=self._lacks_log or (self._writer is not None and self._writer.degraded),
        )
