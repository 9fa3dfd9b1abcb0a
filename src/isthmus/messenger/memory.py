"""Binds frames to memory: sessions between endpoints of one event loop, with no socket and no time passing.

A session is an ordinary `Connection` on each side, so frames, their limits, `place` and the order of calls are
those of the TCP binding. What is sent is delivered by the loop in the order of sending, never inside `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from isthmus.messenger.connection import Connection, Handler, Server

Deliver = Callable[..., object]
"""`deliver(function, *arguments)` calls it later; in the order of the calls, as an event loop's `call_soon` does."""


class MemoryNetwork:
    """Addresses `host:port` that exist only here. Ports count from 1.

    `deliver_of`: how what is sent over a session with an address is delivered; None is the loop's `call_soon`.
    """

    def __init__(self, deliver_of: Callable[[str], Deliver] | None = None) -> None:
        self._deliver_of = deliver_of
        self._listeners: dict[str, Callable[[], Connection]] = {}
        self._last_port = 0

    async def listen(
        self, host: str, port: int, types: Any, handler_of: Callable[[], Handler]
    ) -> tuple[Server, int]:
        """Serves sessions; returns the server and the port it got. Raises OSError when the port is taken."""
        if port == 0:
            port = self._last_port = self._last_port + 1
        address = f"{host}:{port}"
        if address in self._listeners:
            raise OSError(f"{address} is taken")
        self._listeners[address] = lambda: Connection(types, handler_of())
        return _Listener(self._listeners, address), port

    async def connect(self, address: str, types: Any, handler: Handler, *, timeout_s: float) -> Connection:
        """A session with `host:port`. Raises OSError when nobody listens there; never waits."""
        accept = self._listeners.get(address)
        if accept is None:
            raise OSError(f"nobody listens at {address}")
        here, there = Connection(types, handler), accept()
        self._last_port += 1
        deliver = self._deliver_of(address) if self._deliver_of else asyncio.get_running_loop().call_soon
        ends = _Transport(here, address, deliver), _Transport(there, f"memory:{self._last_port}", deliver)
        for end, other in zip(ends, reversed(ends), strict=True):
            end.join(other)
        return here


class _Listener:
    def __init__(self, listeners: dict[str, Callable[[], Connection]], address: str) -> None:
        self._listeners, self._address = listeners, address

    def close(self) -> None:
        """Takes no new sessions; those that are open go on."""
        self._listeners.pop(self._address, None)


class _Transport(asyncio.Transport):
    """One end of a session. Bytes sent here are received by the other end's connection."""

    def __init__(self, connection: Connection, peer: str, deliver: Deliver) -> None:
        host, _, port = peer.rpartition(":")
        super().__init__({"peername": (host, int(port))})
        self._connection, self._deliver = connection, deliver
        self._closing = False
        self._lost = False

    def join(self, other: _Transport) -> None:
        self._other = other
        self._connection.connection_made(self)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self._deliver(self._other.receive, list(list_of_data))

    def receive(self, parts: list[Any]) -> None:
        """Hands bytes over in the pieces that the connection asks for, until it closes."""
        for part in parts:
            data = memoryview(part).cast("B")
            while len(data) and not self._closing:
                buffer = self._connection.get_buffer(len(data))
                count = min(len(buffer), len(data))
                buffer[:count] = data[:count]
                data = data[count:]
                self._connection.buffer_updated(count)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Both ends learn of it after what was sent before has arrived."""
        if not self._closing:
            self._closing = True
            self._deliver(self._other.lose)
            self._deliver(self.lose)

    def abort(self) -> None:
        self.close()

    def lose(self) -> None:
        self._closing = True
        if not self._lost:
            self._lost = True
            self._connection.connection_lost(None)
