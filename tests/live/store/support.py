"""Blocks with known bytes, and file systems that fail."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

from isthmus.core.blocks import seal
from isthmus.core.types import BlockName
from isthmus.live.store import Arena, Files, Log, Shape, Store
from isthmus.live.store.arena import Buffer

SMALL = Shape(num_layers=3, slice_bytes=100)
"""Goes through the page cache."""
LARGE = Shape(num_layers=4, slice_bytes=32 * 1024)
"""Goes past it, from the caller's memory."""
ODD = Shape(num_layers=3, slice_bytes=32 * 1024 + 8)
"""Goes past it, through memory of the store's own."""


@cache
def content(name: int, shape: Shape) -> bytes:
    """What block `name` must hold."""
    return np.random.Generator(np.random.Philox(name)).bytes(shape.block_bytes)


def seals_of(data: bytes, shape: Shape) -> tuple[bytes, ...]:
    size = shape.slice_bytes
    return tuple(seal(data[at : at + size]) for at in range(0, len(data), size))


def room(shape: Shape) -> memoryview:
    """Memory for one block."""
    return memoryview(bytearray(shape.block_bytes))


def log_bytes(shape: Shape, num_blocks: int, folder: Path) -> int:
    """Capacity for exactly so many blocks."""
    log = Log(folder / "measure", shape, 1 << 30, b"")
    log.close()
    return log.format.file_bytes(num_blocks)


@contextmanager
def opened(
    shape: Shape,
    num_slots: int,
    folder: Path | str | None = None,
    capacity_bytes: int = 1 << 24,
    *,
    files: Files | None = None,
    on_lost: Callable[[Sequence[BlockName]], None] = lambda names: None,
) -> Iterator[Store]:
    """A store that is checked and closed at the end."""
    log = None if folder is None else Log(folder, shape, capacity_bytes, b"test", files=files)
    if isinstance(files, FaultyFiles):
        files.begun = True
    store = Store(Arena(shape, num_slots), log, on_lost)
    try:
        yield store
        store.check()
    finally:
        store.close()


def descriptors() -> set[str]:
    """Those open in this process, without what only waits to be collected."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def put(store: Store, *names: int) -> None:
    """Puts these as one chain."""
    for parent, name in zip((None, *names), names, strict=False):
        assert store.put(name, parent, content(name, store.shape))


def whole(store: Store, name: int) -> bool:
    """Whether the store gives the block; it must not give a wrong one."""
    into = room(store.shape)
    if not store.get(name, into):
        return False
    assert into == content(name, store.shape), f"a wrong block {name}"
    return True


class FaultyFiles(Files):
    """The real file system, with calls that fail once it has `begun`, and a clock that only sleeping moves.

    `broken` maps a method's name to the error number that it fails with.
    """

    def __init__(self) -> None:
        self.begun = False
        self.broken: dict[str, int] = {}
        self.calls: list[str] = []
        self.fail_at: int | None = None
        """The call with this number fails with EIO."""
        self.short = False
        """Writes say that they took a byte less than they were given."""
        self._clock_s = 0.0
        self.sleeps = threading.Event()
        """Set: sleeping takes no time."""
        self.sleeps.set()

    def _call(self, method: str) -> None:
        if not self.begun:
            return
        self.calls.append(method)
        if len(self.calls) - 1 == self.fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if number := self.broken.get(method):
            raise OSError(number, os.strerror(number))

    def allocate(self, fd: int, size: int) -> None:
        self._call("allocate")
        super().allocate(fd, size)

    def read(self, fd: int, into: Sequence[Buffer], offset: int) -> int:
        self._call("read")
        return super().read(fd, into, offset)

    def write(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        self._call("write")
        return super().write(fd, pieces, offset) - self.short

    def sync(self, fd: int) -> None:
        self._call("sync")
        super().sync(fd)

    def wait(self, changed: threading.Condition, timeout_s: float | None) -> None:
        if timeout_s is None:
            changed.wait()
        elif self.sleeps.is_set():
            self._clock_s += timeout_s
            changed.wait(0.001)
        else:
            changed.wait(0.01)

    def now(self) -> float:
        return self._clock_s


class CrashingFiles(Files):
    """Files in memory that forget, at a crash, any part of what was not synced.

    Sizes and names are kept: what was allocated reads as zeros. Every `sync` keeps only what its file was written.
    """

    SECTOR_BYTES = 512

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._data: dict[int, bytearray] = {}
        self._durable: dict[int, bytearray] = {}
        self._fds: dict[int, int] = {}
        self._locks: set[int] = set()
        self._next = 0
        self._guard = threading.Lock()
        self.writes_left: int | None = None
        """After so many calls of `write` every call fails, as in a process that is dead."""

    def crash(self, random: Random) -> None:
        """Each sector written since its file's last sync is kept or not."""
        with self._guard:
            for inode, data in self._data.items():
                old = self._durable[inode]
                old.extend(bytes(len(data) - len(old)))
                del old[len(data) :]
                for at in range(0, len(data), self.SECTOR_BYTES):
                    part = slice(at, at + self.SECTOR_BYTES)
                    if old[part] != data[part] and random.random() < 0.5:
                        old[part] = data[part]
                data[:] = old
            self._fds.clear()
            self._locks.clear()
            self.writes_left = None

    def open_folder(self, path: str) -> int:
        return 0

    def names(self, folder: int) -> list[str]:
        return sorted(self._names)

    def open(self, folder: int, name: str, *, direct: bool) -> int:
        with self._guard:
            self._next += 1
            if name not in self._names:
                self._names[name] = self._next
                self._data[self._next] = bytearray()
                self._durable[self._next] = bytearray()
            self._fds[self._next] = self._names[name]
            return self._next

    def close(self, fd: int) -> None:
        with self._guard:
            self._locks.discard(fd)
            self._fds.pop(fd, None)

    def lock(self, fd: int) -> bool:
        with self._guard:
            taken = {self._fds.get(other) for other in self._locks}
            if self._fds[fd] in taken:
                return False
            self._locks.add(fd)
            return True

    def size(self, fd: int) -> int:
        return len(self._data[self._fds[fd]])

    def truncate(self, fd: int, size: int) -> None:
        del self._data[self._fds[fd]][size:]

    def allocate(self, fd: int, size: int) -> None:
        data = self._data[self._fds[fd]]
        data.extend(bytes(size - len(data)))

    def remove(self, folder: int, name: str) -> None:
        with self._guard:
            inode = self._names.pop(name)
            del self._data[inode], self._durable[inode]

    def read(self, fd: int, into: Sequence[Buffer], offset: int) -> int:
        with self._guard:
            data, at = self._file(fd), offset
            for piece in into:
                part = data[at : at + len(piece)]
                memoryview(piece)[: len(part)] = part
                at += len(part)
            return at - offset

    def write(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        with self._guard:
            data, at = self._file(fd), offset
            whole = b"".join(pieces)
            if self.writes_left is not None:
                self.writes_left -= 1
                if self.writes_left < 0:
                    raise OSError(errno.EIO, "dead")
            data[at : at + len(whole)] = whole
            return len(whole)

    def sync_folder(self, folder: int) -> None:
        pass

    def sync(self, fd: int) -> None:
        with self._guard:
            if self.writes_left is not None and self.writes_left <= 0:
                raise OSError(errno.EIO, "dead")
            self._durable[self._fds[fd]][:] = self._file(fd)

    def _file(self, fd: int) -> bytearray:
        if fd not in self._fds:
            raise OSError(errno.EBADF, "closed by a crash")
        return self._data[self._fds[fd]]
