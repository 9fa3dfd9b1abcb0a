"""Binds sessions to memory: both ends in one event loop, with no socket and no time passing.

What is sent is delivered by the loop in the order of sending, never inside `send`. A session is an ordinary
`Session` on each side, so frames, their limits, `place` and the order of calls are those of the TCP binding.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from isthmus.core.errors import ProtocolError
from isthmus.core.types import NS_PER_S
from isthmus.live.messenger.lane import Lane
from isthmus.live.messenger.network import Server
from isthmus.live.messenger.ports import STANDARD, Handler, Terms, Timer
from isthmus.live.messenger.session import Session
from isthmus.live.messenger.streams import Stream


class MemoryNetwork:
    """Addresses `host:port` that exist only here. Ports count from 1."""

    def __init__(self, connections: int = 1, terms: Terms = STANDARD) -> None:
        self._connections, self._terms = connections, terms
        self._listeners: dict[str, Callable[[MemoryPort], Session]] = {}
        self._last_port = 0
        self.links: list[Link] = []
        """Every connection ever made, for tests that want to break them."""

    async def listen(
        self, host: str, port: int, types: Any, handler_of: Callable[[], Handler]
    ) -> tuple[Server, int]:
        """Serves sessions; returns the server and the port it got. Raises OSError when the port is taken."""
        if port == 0:
            port = self._last_port = self._last_port + 1
        address = f"{host}:{port}"
        if address in self._listeners:
            raise OSError(f"{address} is taken")
        self._listeners[address] = lambda port: Session(types, handler_of(), port, self._terms)
        return _Listener(self._listeners, address), port

    async def connect(
        self, address: str, types: Any, handler: Handler, *, timeout_s: float, connections: int | None = None
    ) -> Session:
        """A session with `host:port`. Raises OSError when nobody listens there; never waits."""
        accept = self._listeners.get(address)
        if accept is None:
            raise OSError(f"nobody listens at {address}")
        ports = MemoryPort(), MemoryPort()
        here, there = Session(types, handler, ports[0], self._terms), accept(ports[1])
        self._last_port += 1
        here.peer, there.peer = address, f"memory:{self._last_port}"
        here.agree(self._terms)
        there.agree(self._terms)
        ports[0].session, ports[1].session = here, there
        ports[0].other = ports[1]
        connections = connections or self._connections
        for number in range(connections):
            self._link(ports[0], ports[1], number)
        if connections > 1 or self._terms.resume_s:
            ports[0].redial = lambda number: self._link(ports[0], ports[1], number)
            ports[0].next_number = connections
        return here

    def _link(self, here: MemoryPort, there: MemoryPort, number: int) -> None:
        self.links.append(Link(here, there, number))


class _Listener:
    refused = 0

    def __init__(self, listeners: dict[str, Callable[[MemoryPort], Session]], address: str) -> None:
        self._listeners, self._address = listeners, address

    def close(self) -> None:
        """Takes no new sessions; those that are open go on."""
        self._listeners.pop(self._address, None)


class Link:
    """One connection of a session."""

    def __init__(self, here: MemoryPort, there: MemoryPort, number: int) -> None:
        self.is_lost = False
        self.ends = _End(self, here, number), _End(self, there, number)
        self.ends[0].other, self.ends[1].other = self.ends[1], self.ends[0]

    def lose(self, reason: str = "lost") -> None:
        """Ends the connection, with what is on its way; both sides learn of it."""
        self.is_lost = True
        for end in self.ends:
            end.port.deliver(end.lost, reason)

    def carry(self, end: _End, data: bytes) -> None:
        """Brings bytes to an end, later."""
        self.do(end.port, lambda: end.receive(data))

    def do(self, port: MemoryPort, function: Callable[[], object]) -> None:
        """Calls `function` in its turn after what is on its way."""
        port.deliver(function)


class MemoryPort:
    """What a session needs. Writing never waits, so whatever is sent is on its way at once."""

    ack_delay_s = 0.0

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.deliver: Callable[..., object] = self.loop.call_soon
        self.session: Session | None = None
        self.redial: Callable[[int], None] | None = None
        self.other: MemoryPort | None = None
        """On the side that opened the session."""
        self.next_number = 0
        self._ends: dict[Lane, _End] = {}

    def now_ns(self) -> int:
        return round(self.loop.time() * NS_PER_S)

    def soon(self, function: Callable[[], object]) -> object:
        return self.deliver(function)

    def later(self, delay_s: float, function: Callable[[], object]) -> Timer:
        return self.loop.call_later(delay_s, function) if delay_s else self.loop.call_soon(function)

    def wake(self) -> None:
        written = True
        while written:
            written = False
            for end in list(self._ends.values()):
                written = end.write() or written

    def finish(self, lane: Lane) -> None:
        end = self._ends.get(lane)
        if end is not None:
            end.finish()

    def retransmits(self) -> int:
        return 0

    def abort(self, lane: Lane) -> None:
        end = self._ends.get(lane)
        if end is not None:
            end.leave()

    def ended(self) -> None:
        self.redial = self.other = None

    async def line(self) -> Stream:
        """A socket all the same: threads wait for it."""
        session = None if self.other is None else self.other.session
        if session is None or session.closed or not session.takes_lines:
            raise ConnectionError("there is nobody who answers on a line")
        here, there = socket.socketpair()
        for end in (here, there):
            end.setblocking(False)
        session.take_line(Stream(there))
        return Stream(here)

    def add(self, end: _End, number: int) -> Lane:
        assert self.session is not None
        lane = self.session.lane_up(number)
        self._ends[lane] = end
        return lane

    def removed(self, end: _End) -> None:
        self._ends.pop(end.lane, None)
        if self.redial is not None and self.session is not None and not self.session.closed:
            number, self.next_number = self.next_number, self.next_number + 1
            self.deliver(self._dial, number)

    def _dial(self, number: int) -> None:
        if self.redial is not None:
            self.redial(number)


class _End:
    """One end of a connection."""

    other: _End

    def __init__(self, link: Link, port: MemoryPort, number: int) -> None:
        self._link, self.port = link, port
        self._open, self._is_deaf = True, False
        self.lane = port.add(self, number)

    def write(self) -> bool:
        if not self._open or self._link.is_lost or not self.lane.fill():
            return False
        views = self.lane.views()
        data = b"".join(views)
        self.lane.wrote(len(data))
        self._link.carry(self.other, data)
        return True

    def receive(self, data: bytes) -> None:
        session, left = self.port.session, memoryview(data)
        assert session is not None
        try:
            while len(left) and self._open and not self._is_deaf and not self._link.is_lost:
                buffer = self.lane.reader.buffers()[0]
                count = min(len(buffer), len(left))
                buffer[:count] = left[:count]
                left = left[count:]
                if not self.lane.reader.advance(count):
                    return
        except ProtocolError as error:
            self._is_deaf = True  # its frames make no sense any more; what is sent still arrives
            session.fail(str(error))
        except BaseException as error:
            session.abort(f"a fault on this side: {type(error).__name__}: {error}")
            raise

    def finish(self) -> None:
        while self.write():
            pass
        self.leave()

    def leave(self) -> None:
        """The other end sees the end of the stream after what was sent before."""
        if self._open:
            self._open = False
            self._link.do(self.other.port, lambda: self.other.lost(""))
            self.port.deliver(self.lost, "")

    def lost(self, reason: str) -> None:
        session = self.port.session
        assert session is not None
        self._open = False
        self.port.removed(self)
        session.lane_down(self.lane, reason)
