"""The messenger as a peer of `isthmus bench messenger` and `python -m benchmarks wan`: sealed pieces, in place.

The sender computes a 128-bit seal of every piece just before it is sent; the receiver checks it when the piece
has come, in the memory where it is to stay. Each side is an event loop of its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from isthmus.bench import BenchError
from isthmus.bench.child import Child, Loop, Pipe
from isthmus.bench.transfer_peers import Direction, Through, digest, touched
from isthmus.core.blocks import seal
from isthmus.live.messenger import Session, TcpNetwork

GROUP_BYTES = 2 << 20
"""Pieces smaller than this travel several in one message, as the slices of one layer do in the cluster."""
AHEAD_BYTES = 8 << 20
"""What may be sealed and wait for a connection: enough to seal while a socket is full, not so much that it has left
the processor's cache when it is sent."""
TIMEOUT_S = 120.0
START_S = 10.0


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """Bytes [start, stop) of the region, in pieces of `piece` bytes; a seal for each."""

    start: int
    stop: int
    piece: int
    seals: tuple[bytes, ...]


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Asks for the first `size` bytes."""

    size: int
    piece: int


class Expect(msgspec.Struct, frozen=True, tag=True):
    """`size` bytes are coming; answer `Arrived` when they are here and whole."""

    size: int


class Arrived(msgspec.Struct, frozen=True, tag=True):
    damaged: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Carries a payload; answered by `Pong`."""

    size: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    pass


Message = Pieces | Pull | Expect | Arrived | Ping | Pong


class End:
    """One side of a session: sends its region, receives into it, checks what it received."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._unconfirmed = 0  # messages with pieces
        self._progress = asyncio.Event()
        self.closed = asyncio.Event()
        self._expected = self._damaged = 0
        self._news = asyncio.Event()
        self._arrived: Arrived | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # What the messenger calls.

    def on_message(self, session: Session, message: Any) -> None:
        match message:
            case Pieces():
                self._check(session, message)
            case Expect(size):
                self._expected, self._damaged = size, 0
            case Pull(size, piece):
                task = asyncio.get_running_loop().create_task(self.send(session, size, piece))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Ping():
                session.send(Pong())
            case Arrived() | Pong():
                self._arrived = message if isinstance(message, Arrived) else None
                self._news.set()

    def place(self, session: Session, message: Any, size: int) -> Sequence[memoryview]:
        if isinstance(message, Ping):
            return [self._memory[:size]]
        return [self._memory[message.start : message.stop]]

    def on_void(self, session: Session, message: Any) -> None:
        self._damaged += 1  # nobody cancels anything here

    def on_close(self, session: Session, reason: str) -> None:
        self._damaged += 1
        self.closed.set()
        self._progress.set()
        self._news.set()

    def _check(self, session: Session, message: Pieces) -> None:
        starts = range(message.start, message.stop, message.piece)
        for start, expected in zip(starts, message.seals, strict=True):
            if seal(self._memory[start : min(message.stop, start + message.piece)]) != expected:
                self._damaged += 1
        self._expected -= message.stop - message.start
        if self._expected == 0:
            session.send(Arrived(self._damaged))
            self._news.set()

    # What the benchmark calls.

    async def send(self, session: Session, size: int, piece: int) -> None:
        """Sends `size` bytes: the region, again and again where it is smaller."""
        group = max(piece, GROUP_BYTES // piece * piece)
        for first in range(0, size, len(self._memory)):
            last = min(size - first, len(self._memory))
            for start in range(0, last, group):
                await self._send_group(session, start, min(last, start + group), piece)

    async def _send_group(self, session: Session, start: int, stop: int, piece: int) -> None:
        await self._wait_for_room(session)
        parts = (self._memory[i : min(stop, i + piece)] for i in range(start, stop, piece))
        seals = tuple(seal(part) for part in parts)
        self._unconfirmed += 1
        session.send(Pieces(start, stop, piece, seals), self._memory[start:stop], done=self._confirmed)
        await asyncio.sleep(0)  # lets it be written while it is in the cache

    async def _wait_for_room(self, session: Session) -> None:
        while self._unconfirmed and session.stat().queued_bytes > AHEAD_BYTES:
            self._progress.clear()
            await self._progress.wait()

    def _confirmed(self, arrived: bool) -> None:
        self._unconfirmed -= 1
        self._progress.set()

    async def push(self, session: Session, size: int, piece: int) -> float:
        """Seconds until the far side says that all is there. Raises BenchError if a seal did not match."""
        self._news.clear()
        started = time.perf_counter()
        session.send(Expect(size))
        await self.send(session, size, piece)
        await self._wait()
        if self._arrived is None or self._arrived.damaged:
            raise BenchError(f"the messenger: {size} bytes arrived damaged")
        return time.perf_counter() - started

    async def pull(self, session: Session, size: int, piece: int) -> float:
        self._news.clear()
        self._expected, self._damaged = size, 0
        started = time.perf_counter()
        session.send(Pull(size, piece))
        await self._wait()
        if self._damaged:
            raise BenchError(f"the messenger: {size} bytes arrived damaged")
        return time.perf_counter() - started

    async def echo(self, session: Session, size: int) -> float:
        self._news.clear()
        started = time.perf_counter()
        session.send(Ping(size), self._memory[:size])
        await self._wait()
        return time.perf_counter() - started

    async def _wait(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self._news.wait()


def _serve(pipe: Pipe, capacity: int, connections: int) -> None:
    memory = touched(capacity)
    listen = TcpNetwork(connections).listen("127.0.0.1", 0, Message, lambda: End(memory))
    _server, port = Loop().run(listen)
    pipe.send(port)
    with contextlib.suppress(EOFError):
        while True:
            (size,) = pipe.recv()
            pipe.send(digest(memory[:size]))


class Sessions:
    """A session with another process."""

    def __init__(self, memory: memoryview, connections: int, through: Through = int) -> None:
        self.memory = memory
        self._child = Child(_serve, len(memory), connections)
        self._loop = Loop()
        self._connections = connections
        self._loop.run(self._connect(through(self._child.hello)))

    async def _connect(self, port: int) -> None:
        """With all its connections: the first would do to begin with."""
        self._end = End(self.memory)
        network = TcpNetwork(self._connections)
        self._session = await network.connect(f"127.0.0.1:{port}", Message, self._end, timeout_s=START_S)
        async with asyncio.timeout(START_S):
            while self._session.stat().lanes < self._connections:
                await asyncio.sleep(0.01)

    def transfer(self, direction: Direction, size: int, piece: int) -> float:
        move = self._end.push if direction is Direction.PUSH else self._end.pull
        return self._loop.run(move(self._session, size, piece))

    def echo(self, size: int) -> float:
        return self._loop.run(self._end.echo(self._session, size))

    def far_digest(self, size: int) -> str:
        return str(self._child.ask(size))

    def close(self) -> None:
        self._loop.run(self._end_session())
        self._child.close()
        self._loop.close()

    async def _end_session(self) -> None:
        """At once: nothing is on the way."""
        self._session.abort("the benchmark is over")
        async with asyncio.timeout(START_S):
            await self._end.closed.wait()
