"""Binds frames to asyncio transports, TCP above all. One `Connection` is one session with one peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import msgspec

from isthmus.errors import ProtocolError
from isthmus.messenger.frames import FrameReader, frame

log = logging.getLogger(__name__)


class Handler(Protocol):
    """What a session's owner does. All calls come from the event loop, in the order of the wire."""

    def on_message(self, connection: Connection, message: Any) -> None:
        """A whole message is here, its payload (if any) in the memory that `place` gave."""

    def place(self, connection: Connection, message: Any, size: int) -> Sequence[memoryview]:
        """Memory of exactly `size` bytes for the payload of `message`, as one or more pieces."""

    def on_close(self, connection: Connection, reason: str) -> None:
        """The session ended; nothing more comes."""


class Connection(asyncio.BufferedProtocol):
    """Sends and receives typed messages with payloads. Not thread-safe: use it from its event loop."""

    def __init__(self, types: Any, handler: Handler) -> None:
        self._handler = handler
        decoder = msgspec.msgpack.Decoder(types)
        self._reader: FrameReader[Any] = FrameReader(decoder.decode, self._place)
        self._transport: asyncio.Transport | None = None
        self._close_reason = ""
        self.peer = "unconnected"
        self.bytes_in = 0
        self.bytes_out = 0

    def send(self, message: Any, *payload: memoryview) -> None:
        """Queues a message. The payload's memory must stay as it is until the peer confirms it.

        Sending on a closed session does nothing: its owner learns of the end by `on_close`.
        """
        if self._transport is None or self._transport.is_closing():
            return
        size = sum(part.nbytes for part in payload)
        head = frame(message, size)
        self.bytes_out += len(head) + size
        self._transport.writelines([head, *payload])

    def close(self, reason: str = "closed here") -> None:
        """Ends the session after what is queued is sent. Idempotent."""
        self._close_reason = self._close_reason or reason
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Ends the session at once; what is queued is dropped."""
        self._close_reason = self._close_reason or reason
        if self._transport is not None:
            self._transport.abort()

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    # The asyncio side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        host, port = transport.get_extra_info("peername")[:2]
        self.peer = f"{host}:{port}"

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_in += nbytes
        try:
            for message in self._reader.advance(nbytes):
                self._handler.on_message(self, message)
        except ProtocolError as error:
            log.warning("session with %s ends: %s", self.peer, error)
            self.close(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        reason = self._close_reason or (str(exc) if exc else "closed by the peer")
        self._handler.on_close(self, reason)

    def _place(self, message: Any, size: int) -> Sequence[memoryview]:
        return self._handler.place(self, message, size) if size else ()


class Server(Protocol):
    def close(self) -> None:
        """Takes no new sessions; those that are open go on."""


class Network(Protocol):
    """Where sessions come from: TCP, or memory."""

    async def listen(
        self, host: str, port: int, types: Any, handler_of: Callable[[], Handler]
    ) -> tuple[Server, int]:
        """Serves sessions; returns the server and the port it got. Raises OSError when the port is taken."""
        ...

    async def connect(self, address: str, types: Any, handler: Handler, *, timeout_s: float) -> Connection:
        """A session with `host:port`. Raises OSError or TimeoutError."""
        ...


class TcpNetwork:
    """Real sockets."""

    async def listen(
        self, host: str, port: int, types: Any, handler_of: Callable[[], Handler]
    ) -> tuple[asyncio.Server, int]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(types, handler_of()), host, port)
        return server, server.sockets[0].getsockname()[1]

    async def connect(self, address: str, types: Any, handler: Handler, *, timeout_s: float) -> Connection:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(lambda: Connection(types, handler), host, int(port))
        return connection
