"""What `isthmus bench store` measures the store against: memcpy, a plain file, the Mooncake store, Redis.

Each holds the blocks of `source`, one after another, and gives them back into `target`; a measurement is the
seconds that all of them took, one call for each block and one call at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from isthmus.benchmarks.serve import BenchError
from isthmus.benchmarks.transfer_peers import Foreign
from isthmus.errors import StartError

START_S = 10.0


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


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


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


def drop_cached(files: Sequence[Path]) -> None:
    """The kernel forgets what it has of the files; they must be synced."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _open(file: Path, flags: int) -> int:
    try:
        return os.open(file, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(file, flags, 0o600)


class Redis:
    """A server of our own without persistence; the protocol over one blocking socket, straight into the target."""

    def __init__(self, binary: str, blocks: Blocks) -> None:
        self._blocks = blocks
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        try:
            self._server = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
        except OSError as error:
            raise StartError(f"{binary}: cannot be run: {error.strerror}") from None
        self._link = self._connect(port)
        self._line = memoryview(bytearray(64))

    def _connect(self, port: int) -> socket.socket:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                link = socket.create_connection(("127.0.0.1", port))
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return link
            time.sleep(0.05)
        self._server.kill()
        raise StartError(f"the Redis server did not open port {port}")

    def put(self) -> float:
        return timed(self._put_all)

    def get(self) -> float:
        return timed(self._get_all)

    def verify(self) -> None:
        self._blocks.verify("redis")

    def clear(self) -> None:
        self._link.sendall(b"*1\r\n$8\r\nFLUSHALL\r\n")
        self._read_line()

    def close(self) -> None:
        self._link.close()
        self._server.terminate()
        self._server.wait()

    def _put_all(self) -> None:
        for index, source in enumerate(self._blocks.sources):
            key = b"%08d" % index
            self._link.sendall(b"*3\r\n$3\r\nSET\r\n$8\r\n%s\r\n$%d\r\n" % (key, len(source)))
            self._link.sendall(source)
            self._link.sendall(b"\r\n")
            if self._read_line() != b"+OK":
                raise BenchError("redis: a put failed")

    def _get_all(self) -> None:
        for index, target in enumerate(self._blocks.targets):
            self._link.sendall(b"*2\r\n$3\r\nGET\r\n$8\r\n%08d\r\n" % index)
            if self._read_line() != b"$%d" % len(target):
                raise BenchError("redis: a get failed")
            self._fill(target)
            self._fill(self._line[:2])

    def _read_line(self) -> bytes:
        """One byte at a time: what follows belongs in its place."""
        for end in range(len(self._line)):
            self._fill(self._line[end : end + 1])
            if self._line[end] == 10:
                return bytes(self._line[: end - 1])
        raise BenchError("redis: an answer without an end")

    def _fill(self, part: memoryview) -> None:
        while len(part):
            count = self._link.recv_into(part)
            if not count:
                raise BenchError("redis: the server went away")
            part = part[count:]


class MooncakeStore:
    """The Mooncake store: its master, a client with its zero-copy calls, and the pool's memory.

    The memory lies in the client's own process, or (`remote`) in another one.
    """

    def __init__(self, python: str, size: int, count: int, *, remote: bool) -> None:
        self._size, self._count = size, count
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-mooncake-"))
            master = stack.enter_context(_foreign(python, "master", folder)).hello
            total, segment = size * count, str(2 * size * count + (64 << 20))
            if remote:
                stack.enter_context(_foreign(python, "store", master, segment, "4096"))
            lent = "0" if remote else segment
            self._client = stack.enter_context(_foreign(python, "store", master, lent, str(total)))
            self._stack = stack.pop_all()
        self._client.ask("stamp", total)
        self._digest = self._client.ask("digest", total)

    def put(self) -> float:
        return float(self._client.ask("put", self._size, self._count))

    def get(self) -> float:
        return float(self._client.ask("get", self._size, self._count))

    def verify(self) -> None:
        """Gets what was put into memory that held something else meanwhile."""
        total = self._size * self._count
        self._client.ask("stamp", total)
        other = self._client.ask("digest", total)
        self.get()
        if self._client.ask("digest", total) != self._digest or other == self._digest:
            raise BenchError(f"mooncake store: blocks of {self._size} bytes came back damaged")

    def clear(self) -> None:
        self._client.ask("clear")

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def _foreign(python: str, kind: str, *arguments: str) -> Iterator[Foreign]:
    with contextlib.closing(Foreign(python, "mooncake_peer.py", kind, *arguments)) as process:
        yield process


def find_redis(binary: str | None) -> str | None:
    """The server's binary: the one given, or Redis or Valkey on the path, or None."""
    return binary or shutil.which("redis-server") or shutil.which("valkey-server")
