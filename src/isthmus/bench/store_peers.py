"""What `isthmus bench store` measures the store against: memcpy and a plain file.

Each holds the blocks of `source`, one after another, and gives them back into `target`; a measurement is the
seconds that all of them took, one call for each block and one call at a time.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from isthmus.bench import BenchError


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
        """So that a block which is not given back is found."""
        for target in self.targets:
            target[:64] = bytes(64)

    def verify(self, who: str) -> None:
        for index, (source, target) in enumerate(zip(self.sources, self.targets, strict=True)):
            if source != target:
                raise BenchError(f"{who}: block {index} of {self.size} bytes came back damaged")


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
    """The kernel writes what it has of the files, and forgets it."""
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
