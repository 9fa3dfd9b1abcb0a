"""What `isthmus bench messenger` measures the messenger against: bare sockets and memcpy.

Each peer moves `size` bytes in pieces, from this process to another one (push) or back (pull), and says how
long a transfer took: from the first byte asked for until the side that began it knows that all have arrived.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Protocol

import xxhash

from isthmus.bench import BenchError
from isthmus.bench.child import Child, Pipe

Through = Callable[[int], int]
"""From the port where the far side listens to the one to connect to: itself, or a proxy's."""


class Direction(StrEnum):
    PUSH = "push"
    PULL = "pull"


class Peer(Protocol):
    """One way of moving bytes between `memory`, which is this process's, and memory of the other side."""

    memory: memoryview

    def transfer(self, direction: Direction, size: int, piece: int) -> float:
        """Moves the first `size` bytes, in pieces of `piece` bytes; returns seconds."""

    def far_digest(self, size: int) -> str:
        """Digest of the first `size` bytes of the other side's memory."""

    def close(self) -> None: ...


def touched(size: int) -> memoryview:
    """Private memory of which every page is there: no transfer is charged for the kernel's zeroing."""
    memory = memoryview(mmap.mmap(-1, max(size, 1)))
    for start in range(0, size, mmap.PAGESIZE):
        memory[start] = 0
    return memory


def shown_bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} B"


def digest(memory: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(memory)


def verify(peer: Peer, direction: Direction, size: int, piece: int) -> None:
    """One transfer that is not timed, with every piece marked anew. Raises BenchError if other bytes arrive."""
    near, mark = peer.memory[:size], os.urandom(64)
    for start in range(0, size, piece):
        part = mark[: size - start]
        near[start : start + len(part)] = part
        near[start] = start // piece % 251  # a piece in another's place is found
    peer.transfer(direction, size, piece)
    if digest(near) != peer.far_digest(size):
        raise BenchError(f"{type(peer).__name__}: a {direction} of {size} bytes arrived damaged")


class Memcpy:
    """The upper bound: the same pieces copied once, in one process by one thread."""

    def __init__(self, memory: memoryview) -> None:
        self.memory, self._target = memory, touched(len(memory))

    def transfer(self, direction: Direction, size: int, piece: int) -> float:
        source, target = self.memory, self._target
        if direction is Direction.PULL:
            source, target = target, source
        started = time.perf_counter()
        for start in range(0, size, piece):
            stop = min(size, start + piece)
            target[start:stop] = source[start:stop]
        return time.perf_counter() - started

    def far_digest(self, size: int) -> str:
        return digest(self._target[:size])

    def close(self) -> None:
        """Nothing to stop."""


_HEAD = struct.Struct("<cQQ")  # what to do, size, piece


def _stripe(memory: memoryview, size: int, piece: int, index: int, count: int) -> Iterator[memoryview]:
    """The pieces that connection `index` of `count` carries."""
    for start in range(index * piece, size, count * piece):
        yield memory[start : min(size, start + piece)]


def linked(port: int) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def receive_into(link: socket.socket, part: memoryview) -> None:
    while len(part):
        count = link.recv_into(part)
        if count == 0:
            raise BenchError("the other side of a bare socket went away")
        part = part[count:]


def _serve_link(link: socket.socket, memory: memoryview, index: int, count: int) -> None:
    head = memoryview(bytearray(_HEAD.size))
    with contextlib.suppress(BenchError, OSError):  # the parent is done
        while True:
            receive_into(link, head)
            what, size, piece = _HEAD.unpack(head)
            if what == b"<":
                for part in _stripe(memory, size, piece, index, count):
                    link.sendall(part)
                continue
            for part in _stripe(memory, size, piece, index, count):
                receive_into(link, part)
            link.sendall(b"!")


def _serve_sockets(pipe: Pipe, capacity: int, connections: int) -> None:
    memory = touched(capacity)
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        links = [server.accept()[0] for _ in range(connections)]
    for index, link in enumerate(links):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_serve_link, args=(link, memory, index, connections), daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            (size,) = pipe.recv()
            pipe.send(digest(memory[:size]))


class Sockets:
    """Blocking sockets, `sendall` and `recv_into`, one thread for each connection; no framing, no seals."""

    def __init__(self, memory: memoryview, connections: int, through: Through = int) -> None:
        self.memory = memory
        self._child = Child(_serve_sockets, len(memory), connections)
        port = through(self._child.hello)
        self._links = [linked(port) for _ in range(connections)]  # both sides number them alike
        self._threads = ThreadPoolExecutor(max(1, connections - 1))

    def transfer(self, direction: Direction, size: int, piece: int) -> float:
        move = self._push if direction is Direction.PUSH else self._pull
        started = time.perf_counter()
        others = [self._threads.submit(move, i, size, piece) for i in range(1, len(self._links))]
        move(0, size, piece)
        for other in others:
            other.result()
        return time.perf_counter() - started

    def _push(self, index: int, size: int, piece: int) -> None:
        link = self._links[index]
        link.sendall(_HEAD.pack(b">", size, piece))
        for part in _stripe(self.memory, size, piece, index, len(self._links)):
            link.sendall(part)
        link.recv(1)

    def _pull(self, index: int, size: int, piece: int) -> None:
        link = self._links[index]
        link.sendall(_HEAD.pack(b"<", size, piece))
        for part in _stripe(self.memory, size, piece, index, len(self._links)):
            receive_into(link, part)

    def echo(self, size: int) -> float:
        """Seconds from sending one message of `size` bytes until its answer of one byte is here."""
        link = self._links[0]
        started = time.perf_counter()
        link.sendmsg([_HEAD.pack(b">", size, size), self.memory[:size]])
        link.recv(1)
        return time.perf_counter() - started

    def far_digest(self, size: int) -> str:
        return str(self._child.ask(size))

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._threads.shutdown()
        self._child.close()
