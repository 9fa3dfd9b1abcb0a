"""Keeps blocks: a DRAM arena over an SSD log. Thread-safe; copies and I/O happen outside the one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from isthmus.core.blocks import seal
from isthmus.core.types import BlockName, Tier
from isthmus.live.store.arena import Arena, Buffer, copy_bytes
from isthmus.live.store.directory import BlockDirectory, Pinned, whole_chains
from isthmus.live.store.log import Log
from isthmus.live.store.reader import Fault, Reader, Source
from isthmus.live.store.record import check_name
from isthmus.live.store.writer import Counters, StoreStat, TierStat, Writer

_CLOSE_S = 10.0
_UNIT_BYTES = 4 << 20
"""What one thread of `put_many` puts at a time."""
_CACHED_BYTES = 256 * 1024
"""Of what was copied, so much at least is still in the processor's cache."""


def _ignore(names: Sequence[BlockName]) -> None:
    pass


class Want(NamedTuple):
    """Layers of a block that somebody asks for."""

    name: BlockName
    layers: range
    into: memoryview


class Store:
    """Blocks of one shape in `arena` and, with a `log`, on the SSD.

    `on_lost` hears of blocks that the store can no longer give though nobody dropped them: demoted and not
    writable, or found damaged. It is called without the lock, from the thread that finds out; it must be quick, must
    not raise, and must not `flush` or `close`. `threads` share the work of one call of `get_many`, `put_many` or a
    large `get`. Unless it `writes_behind`, in a thread, what is to be written waits for `flush`. A store that
    `lacks_log` should have one and could not: it is degraded for good. The store closes `arena` and `log`.
    """

    def __init__(
        self,
        arena: Arena,
        log: Log | None = None,
        on_lost: Callable[[Sequence[BlockName]], None] = _ignore,
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
        """Up to `count` empty slots to fill; fewer when the arena has no more."""
        with self._changed:
            return self._directory.reserve(count)

    def give_back(self, slots: Iterable[int]) -> None:
        """Reserved slots that are not used after all."""
        with self._changed:
            self._directory.give_back(slots)

    def commit(self, name: BlockName, parent: BlockName | None, slot: int, seals: Sequence[bytes]) -> None:
        """The reserved slot holds this block from now on, in DRAM by decision; it is written behind.

        `parent` names the block before it, None for a prompt's first. When the block is in DRAM already, the slot
        is empty again. Raises ValueError for a name longer than 32 bytes.
        """
        assert len(seals) == self.shape.num_layers, "one seal per layer"
        check_name(name)
        check_name(parent)
        with self._changed:
            if self._directory.commit(name, parent, slot, tuple(seals)):
                self._counters.memory_bytes_in += self.shape.block_bytes
            self._changed.notify_all()

    def adopt(
        self, name: BlockName, parent: BlockName | None, slot: int, seals: Sequence[bytes]
    ) -> Pinned | None:
        """`commit` and `pin` in one; None: the block is in DRAM already, and the slot stays reserved."""
        check_name(name)
        check_name(parent)
        with self._changed:
            block = self._directory.blocks.get(name)
            if block is not None and block.slot is not None:
                return None
            self._directory.commit(name, parent, slot, tuple(seals))
            self._counters.memory_bytes_in += self.shape.block_bytes
            self._changed.notify_all()
            return self._directory.pin(name)

    # Using DRAM.

    def pin(self, names: Sequence[BlockName]) -> list[Pinned | None]:
        """Where in the arena these blocks are, None for each that is not in DRAM.

        A pinned slot keeps its bytes until `unpin`, whatever becomes of the block. Counted.
        """
        with self._changed:
            found = [self._directory.pin(name) for name in names]
            hits = sum(pinned is not None for pinned in found)
            self._counters.memory_hits += hits
            self._counters.memory_bytes_out += hits * self.shape.block_bytes
            return found

    def unpin(self, pinned: Iterable[Pinned]) -> None:
        """Undoes one `pin` of each."""
        with self._changed:
            for one in pinned:
                self._directory.slots.unpin(one.slot)

    def tier(self, name: BlockName) -> Tier | None:
        """Where the block is by decision; None: nowhere."""
        with self._changed:
            block = self._directory.blocks.get(name)
            return None if block is None else block.tier

    def contains(self, name: BlockName) -> bool:
        with self._changed:
            return name in self._directory.blocks

    def seals(self, name: BlockName) -> tuple[bytes, ...] | None:
        """One per layer; None when the block is not here."""
        with self._changed:
            block = self._directory.blocks.get(name)
            return None if block is None else block.seals

    # Decisions.

    def demote(self, names: Iterable[BlockName]) -> None:
        """On the SSD only from now on. Free for what was written behind, else it is written first.

        What cannot be kept is lost: without an SSD tier, while it is degraded, or when it is full of demoted blocks.
        """
        lost = []
        with self._changed:
            can_write = self._writer is not None and self._writer.can_write
            for name in names:
                if self._directory.demote(name, can_write=can_write):
                    self._counters.memory_evictions += 1
                else:
                    lost.append(name)
            self._counters.lost_blocks += len(lost)
            self._changed.notify_all()
        self._lose(lost)

    def drop(self, names: Iterable[BlockName]) -> None:
        """In no tier any more. Unknown names are ignored."""
        with self._changed:
            for name in names:
                block = self._directory.blocks.get(name)
                if block is None:
                    continue
                self._counters.memory_evictions += block.slot is not None
                self._counters.disk_evictions += block.place is not None
                self._directory.drop(name)
            self._changed.notify_all()

    def condemn(self, name: BlockName, slot: int) -> None:
        """Somebody who read this pinned slot found it damaged: if it is still the block's, the block is in no tier any
        more, and `on_lost` hears of it."""
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
        """Copies layers `[first_layer, stop_layer)` to `into`, from the SSD or from DRAM where they still are.

        Blocks the thread. Bytes from the SSD are checked against their seals. False: gone, unreadable or damaged;
        `on_lost` has heard of it then, and `into` may hold anything.
        """
        assert 0 <= first_layer < stop_layer <= self.shape.num_layers
        if not self.contains(name):
            self._lose([name])
            return False
        return self._fetch([Want(name, range(first_layer, stop_layer), into)])[0]

    def get(self, name: BlockName, into: memoryview) -> bool:
        """Copies the whole block to `into`, from DRAM or from the SSD; False: not here, or damaged."""
        return self._fetch([Want(name, self._all_layers, into)])[0]

    def get_many(self, items: Sequence[tuple[BlockName, memoryview]]) -> list[bool]:
        """`get` of each, several at a time; neighbours on the SSD in one read."""
        return self._fetch([Want(name, self._all_layers, into) for name, into in items])

    def put(self, name: BlockName, parent: BlockName | None, data: Buffer) -> bool:
        """Stores a copy of a whole block in DRAM; False: no slot is empty (`demote` or `drop` some)."""
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
        """`put` of each, several at a time."""
        step = max(1, _UNIT_BYTES // self.shape.block_bytes)
        units = [items[at : at + step] for at in range(0, len(items), step)]
        done = self._pool.map(lambda unit: [self.put(*item) for item in unit], units)
        return [stored for unit in done for stored in unit]

    # Life.

    def recover(self) -> list[tuple[BlockName, BlockName | None]]:
        """Offers the blocks of an earlier run: (name, parent), parents first. To be called before anything else.

        Only headers are read; what is damaged behind one shows when it is read. Blocks whose head is missing are
        left out, since nobody could use them.
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
        """Waits until nothing is left to write: all is written and synced, or there is no room, or the SSD is degraded.

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
        """Conservation of slots and places; walks over everything."""
        with self._changed:
            self._directory.check(0 if self.log is None else self.log.num_used)

    def close(self) -> None:
        """Flushes for at most ten seconds, then gives everything back. Idempotent.

        Files and memory that a disk which does not answer still works on are left to the end of the process.
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
        """Copies a block; its seals, taken while the bytes are still in the processor's cache."""
        size = self.shape.slice_bytes
        step = max(1, _CACHED_BYTES // size) * size
        seals = []
        for start in range(0, len(into), step):
            copy_bytes(into[start : start + step], source[start : start + step])
            seals += [seal(into[at : at + size]) for at in range(start, min(start + step, len(into)), size)]
        return seals

    def _fetch(self, wants: Sequence[Want]) -> list[bool]:
        """Brings what is here. A block whose place went to another one meanwhile is looked up again."""
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
        """Reading a block layer by layer is one hit."""
        with self._changed:
            if source.slot is not None:
                self._counters.memory_hits += source.layers.start == 0
                self._counters.memory_bytes_out += len(source.into)
            else:
                self._counters.disk_hits += source.layers.start == 0
                self._counters.disk_bytes_out += len(source.into)

    def _blame(self, name: BlockName, source: Source, fault: Fault) -> bool:
        """Removes a block found damaged, and says so; False: it lies elsewhere by now."""
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
                hits=counters.memory_hits,
                bytes_in=counters.memory_bytes_in,
                bytes_out=counters.memory_bytes_out,
                evictions=counters.memory_evictions,
            ),
            disk=TierStat(
                capacity_bytes=0 if self.log is None else self.log.capacity_bytes,
                used_bytes=0 if self.log is None else num_records * self.log.format.record_bytes,
                num_blocks=num_records - len(directory.in_writing),
                hits=counters.disk_hits,
                bytes_in=counters.disk_bytes_in,
                bytes_out=counters.disk_bytes_out,
                evictions=counters.disk_evictions,
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
