"""`isthmus bench store`: put and get of blocks in DRAM and on the SSD, beside what bounds them.

All sides take turns within a round; a figure is the median over the rounds. What comes back is compared with what
was put, outside the time. Gets from the SSD are cold: the store and the plain reads go past the page cache
(O_DIRECT) where the file system allows, and what the kernel holds of the files is dropped before each (fadvise).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from typer import Option

from isthmus.bench import BenchError
from isthmus.bench.options import SIZE, SIZES, Rounds
from isthmus.bench.study import Outcome, Report, in_turns, medians, said, silent, table, timed
from isthmus.bench.transfer_peers import shown_bytes, touched
from isthmus.core.errors import ConfigError
from isthmus.core.types import BlockName
from isthmus.live.store import Arena, Log, Shape, Store

KIB, MIB = 1 << 10, 1 << 20
NUM_LAYERS = 16
RECORD_ROOM = 16 * KIB
TIER_ROOM = MIB
"""Upper bounds of the SSD bytes that a record and the tier need beside the blocks."""


@dataclass(frozen=True)
class Plan:
    sizes: Annotated[tuple[int, ...], SIZES, Option(help="Bytes of a block.")] = (256 * KIB, MIB, 16 * MIB)
    total: Annotated[int, SIZE, Option(help="Bytes of all blocks of a case.")] = 256 * MIB
    rounds: Rounds = 5
    folder: Annotated[
        Path | None, Option(help="An existing folder on the SSD; default: the temporary folder.")
    ] = None

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured."""
        if any(size % NUM_LAYERS or size > self.total for size in self.sizes):
            raise ConfigError(f"sizes must be multiples of {NUM_LAYERS} bytes and no larger than the total")
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: is no folder; make it first")


class BlockStore(Protocol):
    """One way of keeping blocks. `put` and `get` return seconds; a `get` gives what was put last."""

    def put(self) -> float: ...

    def get(self) -> float: ...

    def verify(self) -> None:
        """Raises BenchError if the blocks of the last `get` are not those of the last `put`."""

    def clear(self) -> None:
        """Forgets all blocks."""


class Blocks:
    """Source and target memory cut into blocks of one size."""

    def __init__(self, source: memoryview, target: memoryview, size: int) -> None:
        self.size, self.count = size, len(source) // size
        starts = [index * size for index in range(self.count)]
        self.sources = [source[start : start + size] for start in starts]
        self.targets = [target[start : start + size] for start in starts]

    def blank(self) -> None:
        """Clears targets, so that a block which is not given back is found."""
        for target in self.targets:
            target[:64] = bytes(64)

    def verify(self, who: str) -> None:
        for index, (source, target) in enumerate(zip(self.sources, self.targets, strict=True)):
            if source != target:
                raise BenchError(f"{who}: block {index} of {self.size} bytes came back damaged")


Others = Callable[[Blocks], AbstractContextManager[Mapping[str, BlockStore]]]
"""Opens other in-memory stores, by name, while blocks of one size are measured."""


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
        """Files of the SSD tier, in the order in which they are filled."""
        return [] if self._folder is None else sorted(self._folder.glob("blocks-*"))

    @property
    def file_bytes(self) -> int:
        """Bytes of all blocks on the SSD."""
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


def run(plan: Plan, report: Report = silent, others: Others = nobody) -> Outcome:
    """Put and get of blocks in DRAM and on the SSD, beside memcpy and a plain file: GB/s.

    In DRAM also beside `others`. Raises BenchError for a damaged block, ConfigError for what cannot be measured.

    A row has `operation`, `tier`, `size` of a block in bytes, and GB/s (1e9 bytes) of the sides that were measured.
    `isthmus`: one call for each block, one at a time; `batched`: one call for all; `file`: a plain file, one thread.
    """
    plan.check()
    source, target = touched(plan.total), touched(plan.total)
    _fill(source)
    rows: list[dict[str, Any]] = []
    for size in plan.sizes:
        blocks = Blocks(source, target, size)
        with tempfile.TemporaryDirectory(prefix="isthmus-bench-", dir=plan.folder) as folder:
            for tier, measured in (
                ("dram", _in_memory(plan, blocks, others)),
                ("ssd", _on_disk(plan, blocks, Path(folder))),
            ):
                for operation in ("put", "get"):
                    speeds = {side: speed for (each, side), speed in measured.items() if each == operation}
                    rows.append({"operation": operation, "tier": tier, "size": size} | speeds)
                    report(said(_shown(rows[-1]), "GB/s"))
    title = "isthmus bench store: GB/s; gets from the SSD are cold (O_DIRECT, fadvise)"
    columns = {name: name for row in rows for name in row}
    return Outcome([table(title, columns, map(_shown, rows))], rows)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "size": shown_bytes(row["size"])}


def _fill(memory: memoryview) -> None:
    """Bytes that differ from block to block and do not compress."""
    noise = os.urandom(min(MIB, len(memory)))
    for start in range(0, len(memory), len(noise)):
        part = noise[: len(memory) - start]
        memory[start : start + len(part)] = part
        memory[start : start + 8] = (start + 1).to_bytes(8, "big")[: len(part)]


Speeds = dict[tuple[str, str], float]
"""GB/s by operation and side."""


def _speeds(plan: Plan, blocks: Blocks, steps: Mapping[tuple[str, str], Callable[[], float]]) -> Speeds:
    """Steps return the seconds of all blocks; each step of a round needs the one before."""
    found = in_turns(steps, plan.rounds)
    return {step: blocks.size * blocks.count / seconds / 1e9 for step, seconds in medians(found).items()}


def _in_memory(plan: Plan, blocks: Blocks, others: Others) -> Speeds:
    def after(
        before: Callable[[], object], step: Callable[[], float], *then: Callable[[], object]
    ) -> Callable[[], float]:
        def whole() -> float:
            before()
            seconds = step()
            for each in then:
                each()
            return seconds

        return whole

    def copy() -> float:
        return copy_all(blocks.sources, blocks.targets)

    with others(blocks) as stores, contextlib.closing(Ours(blocks)) as ours:
        steps: dict[tuple[str, str], Callable[[], float]] = {
            ("put", "isthmus"): after(ours.clear, ours.put),
            ("put", "batched"): after(ours.clear, ours.put_batched),
            ("put", "memcpy"): copy,
            **{("put", side): other.put for side, other in stores.items()},
            ("get", "isthmus"): after(blocks.blank, ours.get, ours.verify),
            ("get", "batched"): ours.get_batched,
            ("get", "memcpy"): copy,
        }
        for side, other in stores.items():
            steps["get", side] = after(blocks.blank, other.get, other.verify, other.clear)
        return _speeds(plan, blocks, steps)


def _on_disk(plan: Plan, blocks: Blocks, folder: Path) -> Speeds:
    tier = folder / "tier"
    tier.mkdir()
    with contextlib.closing(Ours(blocks, tier)) as ours:

        def put(batched: bool) -> float:
            ours.clear()
            return ours.put_through(batched=batched)

        def get() -> float:
            ours.demote()
            blocks.blank()
            seconds = ours.get()
            ours.verify()
            return seconds

        def read() -> float:
            drop_cached(ours.files)
            return read_plain(ours.files, blocks.targets, ours.file_bytes)

        def get_batched() -> float:
            drop_cached(ours.files)
            return ours.get_batched()

        steps = {
            ("put", "file"): lambda: write_plain(folder / "plain", blocks.sources),
            ("put", "batched"): lambda: put(True),
            ("put", "isthmus"): lambda: put(False),
            ("get", "isthmus"): get,
            ("get", "file"): read,
            ("get", "batched"): get_batched,
        }
        return _speeds(plan, blocks, steps)


# What bounds a store: memcpy and a plain file.


def copy_all(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> float:
    """The bound of every store in memory: each block copied once, by one thread."""
    pairs = [
        (np.frombuffer(t, np.uint8), np.frombuffer(s, np.uint8)) for s, t in zip(sources, targets, strict=True)
    ]
    started = time.perf_counter()
    for target, source in pairs:
        np.copyto(target, source)
    return time.perf_counter() - started


def write_plain(file: Path, sources: Sequence[memoryview]) -> float:
    """One file, block after block, past the page cache where the file system allows, then synced."""
    fd = _open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        started = time.perf_counter()
        for source in sources:
            os.write(fd, source)
        os.fdatasync(fd)
        return time.perf_counter() - started
    finally:
        os.close(fd)


def read_plain(files: Sequence[Path], targets: Sequence[memoryview], total: int) -> float:
    """Seconds for the first `total` bytes of the files, in order, by one thread, a target's size at a time.

    Into the targets, as a store's gets: into the same few pages again and again would be quicker, and no use.
    """
    fds = [_open(file, os.O_RDONLY) for file in files]
    places = itertools.cycle(targets)
    try:
        left = total
        started = time.perf_counter()
        for fd in fds:
            while left > 0 and (count := os.readv(fd, [next(places)])):
                left -= count
        seconds = time.perf_counter() - started
    finally:
        for fd in fds:
            os.close(fd)
    if left > 0:
        raise BenchError(f"the files are {left} bytes shorter than what was put")
    return seconds


def drop_cached(files: Iterable[Path]) -> None:
    """Makes the kernel write back and drop its cached pages of the files."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _open(file: Path, flags: int) -> int:
    try:
        return os.open(file, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(file, flags, 0o600)
