"""Binds sessions to TCP sockets that the event loop watches, several per session.

asyncio's transports are not used: they take all bytes at once, so nothing urgent could overtake them, and copy them.
Threads with blocking sockets moved no more bytes per second of CPU (0.19 s/GiB on either side, event loop 0.15 to
0.19) and would need locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from isthmus.core.errors import ProtocolError
from isthmus.live.messenger.frames import scratch
from isthmus.live.messenger.lane import Lane
from isthmus.live.messenger.ports import Timer
from isthmus.live.messenger.running import TICK_S, RunningTimer
from isthmus.live.messenger.session import Session
from isthmus.live.messenger.streams import Stream, ready

log = logging.getLogger(__name__)

READ_BUDGET = 2 << 20
WRITE_BUDGET = 2 << 20
"""Bytes moved before the event loop gets a turn."""
BULK_BYTES = 64 << 10
"""Bytes after which the next connection has its turn."""
ACK_DELAY_S = 0.005
DRAIN_S = 2.0
"""Longest time for the peer to read the last bytes before a socket is closed."""


class TcpPort:
    """Port of a session over sockets: its connections, timers, and turns to write."""

    ack_delay_s = ACK_DELAY_S

    def __init__(self, on_ended: Callable[[], object]) -> None:
        self.loop = asyncio.get_running_loop()
        self.session: Session | None = None
        self.lane_lost = asyncio.Event()
        self.dial_line: Callable[[], Awaitable[Stream]] | None = None
        """Opens a line; on the side that opened the session."""
        self._on_ended = on_ended
        self._wires: dict[Lane, _Wire] = {}
        self._drains: set[asyncio.Task[None]] = set()
        self._turn = 0
        self._scheduled = False

    def add(self, stream: Stream, number: int) -> None:
        """Adds a connection to the session."""
        assert self.session is not None
        lane = self.session.lane_up(number)
        self._wires[lane] = _Wire(self, self.session, stream, lane)

    def removed(self, lane: Lane) -> None:
        self._wires.pop(lane, None)
        self.lane_lost.set()

    # For the session.

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def soon(self, function: Callable[[], object]) -> object:
        return self.loop.call_soon(function)

    def later(self, delay_s: float, function: Callable[[], object]) -> Timer:
        if delay_s < TICK_S:  # it judges nobody
            return self.loop.call_later(delay_s, function)
        return RunningTimer(self.loop, delay_s, function)

    def wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._pump)

    def retransmits(self) -> int:
        return sum([wire.stream.retransmits() for wire in self._wires.values()])

    def finish(self, lane: Lane) -> None:
        wire = self._wires.get(lane)
        if wire is not None:
            wire.finish()

    def drain(self, stream: Stream) -> None:
        task = drain(stream)
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    def abort(self, lane: Lane) -> None:
        wire = self._wires.get(lane)
        if wire is not None:
            wire.close()
            self.removed(lane)

    def ended(self) -> None:
        self.lane_lost.set()
        self._on_ended()

    async def line(self) -> Stream:
        if self.dial_line is None:
            raise ConnectionError("a line is opened by who opened the session")
        return await self.dial_line()

    def _pump(self) -> None:
        """Lets lanes write in turns, a batch each. Small messages stay on one lane."""
        self._scheduled = False
        wires = list(self._wires.values())
        budget, idle, at = WRITE_BUDGET, 0, self._turn
        while idle < len(wires):
            if budget <= 0:
                self.wake()
                return
            count = wires[at % len(wires)].push()
            budget -= count
            if count < BULK_BYTES:
                idle, at = (0, at) if count else (idle + 1, at + 1)
            else:
                idle, at = 0, at + 1
                self._turn = at


class _Wire:
    """A socket and the lane that it carries."""

    def __init__(self, port: TcpPort, session: Session, stream: Stream, lane: Lane) -> None:
        self._port, self._session, self._lane, self.stream = port, session, lane, stream
        self._fileno = stream.fileno()
        self._full = self._finishing = self._closed = False
        port.loop.add_reader(self._fileno, self._readable)
        if stream.pending:
            port.loop.call_soon(self._readable)

    def push(self) -> int:
        """Writes a batch. Returns its bytes: 0 when there is nothing to write or no room for it."""
        if self._full or self._closed or not self._lane.fill():
            return 0
        return self._write()

    def finish(self) -> None:
        self._finishing = True
        if not self._lane.unwritten_bytes:
            self._finish_now()

    def close(self) -> None:
        """Closes the socket without telling the session."""
        if not self._closed:
            self._closed = True
            self._port.loop.remove_reader(self._fileno)
            self._port.loop.remove_writer(self._fileno)
            self.stream.close()

    def _write(self) -> int:
        try:
            count = self.stream.send(self._lane.views())
        except OSError as error:
            self._lost(str(error))
            return 0
        if count is None:
            if not self._full:
                self._full = True
                self._port.loop.add_writer(self._fileno, self._writable)
            return 0
        self._lane.wrote(count)
        if self._finishing and not self._lane.unwritten_bytes:
            self._port.loop.call_soon(self._finish_now)
        return count

    def _writable(self) -> None:
        """Goes on writing to a socket that was full, until nothing is left."""
        budget = WRITE_BUDGET
        while budget > 0 and not self._closed:
            if not self._lane.fill():
                self._full = False
                self._port.loop.remove_writer(self._fileno)
                return
            count = self._write()
            if not count:
                return
            budget -= count

    def _readable(self) -> None:
        budget = READ_BUDGET
        try:
            while budget > 0 and not self._closed:
                buffers = self._lane.reader.buffers()
                count = self.stream.receive(buffers)
                if count is None:
                    return
                if count == 0:
                    self._lost("")
                    return
                budget -= count
                if not self._lane.reader.advance(count):
                    return
                if not self.stream.pending and count < sum(map(len, buffers)):
                    return
            if not self._closed and self.stream.pending:
                self._port.loop.call_soon(self._readable)
        except ProtocolError as error:
            log.warning("the session with %s ends: %s", self._session.peer, error)
            self._stop_reading()
            self._session.fail(str(error))
        except OSError as error:
            self._lost(str(error))
        except BaseException as error:
            self._session.abort(f"a fault on this side: {type(error).__name__}: {error}")
            raise

    def _stop_reading(self) -> None:
        """Reads no more after a frame that made no sense; what is queued is still sent."""
        if not self._closed:
            self._port.loop.remove_reader(self._fileno)

    def _lost(self, reason: str) -> None:
        self.close()
        self._port.removed(self._lane)
        self._session.lane_down(self._lane, reason)

    def _finish_now(self) -> None:
        """Ends a lane that has written everything. The socket stays until the peer has read it."""
        if self._closed:
            return
        self._closed = True
        loop = self._port.loop
        loop.remove_reader(self._fileno)
        loop.remove_writer(self._fileno)
        self._port.drain(self.stream)
        self._port.removed(self._lane)
        self._session.lane_down(self._lane, "")


def drain(stream: Stream) -> asyncio.Task[None]:
    """Sends the end of the stream, reads past what still comes, for a while, and closes: closing a socket with unread
    bytes would take back bytes that the peer has not read. A task, so that a loop that ends closes the socket,
    too."""
    stream.finish()
    task = asyncio.get_running_loop().create_task(_read_past(stream))
    task.add_done_callback(lambda _: stream.close())  # also where it is cancelled before it begins
    return task


async def _read_past(stream: Stream) -> None:
    (buffer,) = scratch(1 << 16)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while (count := stream.receive([buffer])) != 0:
                if count is None:
                    await ready(stream.fileno(), to_write=False)
                else:
                    await asyncio.sleep(0)
