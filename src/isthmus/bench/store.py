"""`isthmus bench store`: put and get of blocks in DRAM and on the SSD, beside what bounds them.

All sides take turns within a round; a figure is the median over the rounds. What comes back is compared with what
was put, outside the time. Gets from the SSD are cold: the store and the plain reads go past the page cache
(O_DIRECT) where the file system allows, and what the kernel holds of the files is dropped before each (fadvise).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from isthmus.bench import BenchError
from isthmus.bench.store_peers import (
    Blocks,
    BlockStore,
    copy_all,
    drop_cached,
    read_plain,
    timed,
    write_plain,
)
from isthmus.bench.transfer_peers import shown_bytes, touched
from isthmus.core.errors import ConfigError
from isthmus.core.types import BlockName
from isthmus.live.store import Arena, Log, Shape, Store

KIB, MIB = 1 << 10, 1 << 20
NUM_LAYERS = 16
RECORD_ROOM = 16 * KIB
TIER_ROOM = MIB
"""What a record and the tier itself need on the SSD beside the blocks, at most."""


@dataclass(frozen=True)
class Plan:
    """`total`: bytes of all blocks of a case. `folder`: where the SSD is; default: the temporary folder."""

    sizes: tuple[int, ...] = (256 * KIB, MIB, 16 * MIB)
    total: int = 256 * MIB
    rounds: int = 5
    folder: Path | None = None

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured."""
        if any(size % NUM_LAYERS or size > self.total for size in self.sizes):
            raise ConfigError(f"sizes must be multiples of {NUM_LAYERS} bytes and no larger than the total")
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: is no folder; make it first")


@dataclass(frozen=True)
class Row:
    """`size`: bytes of a block. `speeds`: GB/s (1e9 bytes), medians, by side; what was not measured is not there.

    `isthmus`: one call for each block, one at a time; `batched`: one call for all of them. `file`: a plain file, one
    thread.
    """

    operation: str
    tier: str
    size: int
    speeds: dict[str, float]


Others = Callable[[Blocks], AbstractContextManager[Mapping[str, BlockStore]]]
"""Other stores in memory, by their names, for as long as blocks of one size are measured."""


def nobody(blocks: Blocks) -> AbstractContextManager[Mapping[str, BlockStore]]:
    return contextlib.nullcontext({})


class Ours:
    """Our store, with room for all blocks of the case in DRAM and, with a `folder`, as many on the SSD."""

    def __init__(self, blocks: Blocks, folder: Path | None = None) -> None:
        self._blocks, self._folder, self._log = blocks, folder, None
        shape = Shape(NUM_LAYERS, blocks.size // NUM_LAYERS)
        self._names: list[BlockName] = [index.to_bytes(32, "big") for index in range(blocks.count)]
        if folder is not None:
            room = TIER_ROOM + blocks.count * (blocks.size + RECORD_ROOM)
            self._log = Log(folder, shape, room, b"isthmus bench store")
        self._store = Store(Arena(shape, blocks.count), self._log)

    @property
    def files(self) -> list[Path]:
        """The SSD tier's, in the order in which they are filled."""
        return [] if self._folder is None else sorted(self._folder.glob("blocks-*"))

    @property
    def file_bytes(self) -> int:
        """What all blocks take there."""
        return 0 if self._log is None else self._log.format.record_bytes * self._blocks.count

    def put(self) -> float:
        return timed(self._put_all)

    def put_batched(self) -> float:
        items = [(n, None, source) for n, source in zip(self._names, self._blocks.sources, strict=True)]
        return timed(lambda: self._expect(self._store.put_many(items), "put"))

    def get(self) -> float:
        return timed(self._get_all)

    def get_batched(self) -> float:
        items = list(zip(self._names, self._blocks.targets, strict=True))
        return timed(lambda: self._expect(self._store.get_many(items), "get"))

    def put_through(self, *, batched: bool) -> float:
        """Seconds until all blocks are on the SSD and synced."""
        seconds = self.put_batched() if batched else self.put()
        return seconds + timed(self.flush)

    def flush(self) -> None:
        if not self._store.flush(60):
            raise BenchError("the store's SSD tier does not keep up")

    def demote(self) -> None:
        """All blocks on the SSD only; their slots are empty."""
        self.flush()
        self._store.demote(self._names)
        drop_cached(self.files)

    def verify(self) -> None:
        self._blocks.verify("isthmus")

    def clear(self) -> None:
        self._store.drop(self._names)
        self.flush()

    def close(self) -> None:
        self._store.close()

    def _put_all(self) -> None:
        for name, source in zip(self._names, self._blocks.sources, strict=True):
            if not self._store.put(name, None, source):
                raise BenchError("isthmus: a put found no empty slot")

    def _get_all(self) -> None:
        for name, target in zip(self._names, self._blocks.targets, strict=True):
            if not self._store.get(name, target):
                raise BenchError("isthmus: a get found nothing")

    def _expect(self, found: Sequence[bool], what: str) -> None:
        if not all(found):
            raise BenchError(f"isthmus: {found.count(False)} of {len(found)} blocks: {what} failed")


def run(plan: Plan, report: Callable[[str], None] = lambda line: None, others: Others = nobody) -> list[Row]:
    """Every size, in DRAM and on the SSD; in DRAM beside `others`. Raises BenchError for a damaged block."""
    plan.check()
    source, target = touched(plan.total), touched(plan.total)
    _fill(source)
    rows: list[Row] = []
    for size in plan.sizes:
        blocks = Blocks(source, target, size)
        with tempfile.TemporaryDirectory(prefix="isthmus-bench-", dir=plan.folder) as folder:
            for row in (*_memory_rows(plan, blocks, others), *_disk_rows(plan, blocks, Path(folder))):
                rows.append(row)
                report(_line(row))
    return rows


def _fill(memory: memoryview) -> None:
    """Bytes that differ from block to block and do not compress."""
    noise = os.urandom(min(MIB, len(memory)))
    for start in range(0, len(memory), len(noise)):
        part = noise[: len(memory) - start]
        memory[start : start + len(part)] = part
        memory[start : start + 8] = (start + 1).to_bytes(8, "big")[: len(part)]


class _Speeds:
    """Samples in GB/s by side, for put and for get."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._samples: dict[tuple[str, str], list[float]] = {}

    def add(self, operation: str, side: str, seconds: float) -> None:
        self._samples.setdefault((operation, side), []).append(self._total / seconds / 1e9)

    def rows(self, tier: str, size: int) -> list[Row]:
        """The first round is the warm-up."""
        found = []
        for operation in ("put", "get"):
            speeds = {
                side: statistics.median(samples[1:])
                for (each, side), samples in self._samples.items()
                if each == operation
            }
            found.append(Row(operation, tier, size, speeds))
        return found


def _memory_rows(plan: Plan, blocks: Blocks, others: Others) -> list[Row]:
    speeds = _Speeds(blocks.size * blocks.count)
    with others(blocks) as stores, contextlib.closing(Ours(blocks)) as ours:
        for _ in range(plan.rounds + 1):
            speeds.add("put", "isthmus", ours.put())
            ours.clear()
            speeds.add("put", "batched", ours.put_batched())
            speeds.add("put", "memcpy", copy_all(blocks.sources, blocks.targets))
            for side, other in stores.items():
                speeds.add("put", side, other.put())
            blocks.blank()
            speeds.add("get", "isthmus", ours.get())
            ours.verify()
            speeds.add("get", "batched", ours.get_batched())
            speeds.add("get", "memcpy", copy_all(blocks.sources, blocks.targets))
            for side, other in stores.items():
                blocks.blank()
                speeds.add("get", side, other.get())
                other.verify()
                other.clear()
            ours.clear()
    return speeds.rows("dram", blocks.size)


def _disk_rows(plan: Plan, blocks: Blocks, folder: Path) -> list[Row]:
    speeds = _Speeds(blocks.size * blocks.count)
    plain = folder / "plain"
    tier = folder / "tier"
    tier.mkdir()
    with contextlib.closing(Ours(blocks, tier)) as ours:
        for _ in range(plan.rounds + 1):
            speeds.add("put", "file", write_plain(plain, blocks.sources))
            speeds.add("put", "batched", ours.put_through(batched=True))
            ours.clear()
            speeds.add("put", "isthmus", ours.put_through(batched=False))
            ours.demote()
            blocks.blank()
            speeds.add("get", "isthmus", ours.get())
            ours.verify()
            drop_cached(ours.files)
            speeds.add("get", "file", read_plain(ours.files, blocks.targets, ours.file_bytes))
            drop_cached(ours.files)
            speeds.add("get", "batched", ours.get_batched())
            ours.clear()
    return speeds.rows("ssd", blocks.size)


def _line(row: Row) -> str:
    shown = ", ".join(f"{side} {value:.2f}" for side, value in row.speeds.items())
    return f"{row.operation} {shown_bytes(row.size)}, {row.tier}: {shown} GB/s"


def table(rows: list[Row]) -> Table:
    sides = list(dict.fromkeys(side for row in rows for side in row.speeds))
    names = ("", "tier", "block", *sides)
    found = Table(*names, title="isthmus bench store: GB/s; gets from the SSD are cold (O_DIRECT, fadvise)")
    for row in rows:
        shown = (f"{row.speeds[side]:.2f}" if side in row.speeds else "" for side in sides)
        found.add_row(row.operation, row.tier, shown_bytes(row.size), *shown)
    return found


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows; their keys are the fields of `Row`, and the sides that were measured instead of `speeds`."""
    return [{"operation": row.operation, "tier": row.tier, "size": row.size, **row.speeds} for row in rows]
