"""Non-blocking sockets, plain or with TLS, and how they are set up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import sys

from isthmus.live.messenger.credentials import Credentials, Identity

USER_TIMEOUT_MS = 60_000
"""A connection whose sent bytes stay unacknowledged for so long is lost. Linux counts the time in which the peer's
buffer is full as well, so a process may stand still no longer than this while much is sent to it. The head notices a
dead machine much earlier."""
KEEPALIVE_S = 10
UNSENT_BYTES = 512 << 10
"""Bytes that the kernel may hold beyond what the network can carry now. More would only delay urgent messages."""
TLS_CHUNK = 16 << 10
"""Bytes of one TLS record."""
_TCP_INFO = struct.Struct("100xI")
"""`tcpi_total_retrans` of `struct tcp_info` (linux/tcp.h): after 8 bytes and 23 numbers of 32 bits."""


class Stream:
    """A connected socket that never blocks. `identity`: the peer's, where a certificate says it."""

    def __init__(self, sock: socket.socket, identity: Identity | None = None) -> None:
        self._sock, self.identity = sock, identity

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether more was received already than the socket shows."""
        return False

    def receive(self, buffers: list[memoryview]) -> int | None:
        """Fills the buffers in order. Returns the number of bytes: 0 at the end of the stream, None when nothing is
        there yet. Raises OSError when the connection is lost."""
        try:
            return self._sock.recvmsg_into(buffers)[0]
        except (BlockingIOError, InterruptedError):
            return None

    def send(self, views: list[memoryview]) -> int | None:
        """Takes bytes from the front. Returns how many, or None when it can take none now. Raises OSError."""
        try:
            return self._sock.sendmsg(views)
        except (BlockingIOError, InterruptedError):
            return None

    def retransmits(self) -> int:
        """Counts TCP segments sent again so far; 0 where the kernel does not tell."""
        if not sys.platform.startswith("linux"):
            return 0
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return 0
        return int(_TCP_INFO.unpack(info)[0]) if len(info) == _TCP_INFO.size else 0

    def finish(self) -> None:
        """Sends nothing more; the peer sees the end of the stream."""
        with contextlib.suppress(OSError):  # the peer was first
            self._sock.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """Ends both directions: threads that wait for the socket see the end. From any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class TlsStream(Stream):
    """OpenSSL wants a write that did not go through to be repeated with the same bytes: `_chunk`."""

    _sock: ssl.SSLSocket
    _chunk: memoryview | bytes | None = None

    @property
    def pending(self) -> bool:
        return self._sock.pending() > 0

    def receive(self, buffers: list[memoryview]) -> int | None:
        """Reads as many records as there are, each with a call of its own."""
        got = 0
        try:
            for buffer in buffers:
                at = 0
                while at < len(buffer):
                    count = self._sock.recv_into(buffer[at:])
                    if not count:
                        return got
                    at, got = at + count, got + count
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):  # the last one after `finish`
            return got or None
        except ssl.SSLEOFError:
            return got
        return got

    def send(self, views: list[memoryview]) -> int | None:
        if self._chunk is None:
            self._chunk = _chunk_of(views)
        try:
            count = self._sock.send(self._chunk)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        self._chunk = None
        return count


def _chunk_of(views: list[memoryview]) -> memoryview | bytes:
    """Joins small pieces to one record's worth of bytes."""
    if len(views[0]) >= TLS_CHUNK or len(views) == 1:
        return views[0][:TLS_CHUNK]
    parts, size = [], 0
    for view in views:
        parts.append(view[: TLS_CHUNK - size])
        size += len(parts[-1])
        if size == TLS_CHUNK:
            break
    return b"".join(parts)


def tune(sock: socket.socket) -> None:
    """Sets up a socket: small messages go at once, lost peers are noticed, the kernel queues no more than it can use.

    The kernel sizes buffers by rate and delay; setting them would stop that. Within a host BBR, where it is the
    default, costs half as much CPU again as CUBIC (0.25 against 0.16 s/GiB on either side).
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
        ("TCP_NOTSENT_LOWAT", UNSENT_BYTES),
    ):
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    host = sock.getpeername()[0]
    is_local = host in ("127.0.0.1", "::1") or host == sock.getsockname()[0]
    if is_local and hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):  # not in this kernel: then the default
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


async def ready(fileno: int, *, to_write: bool) -> None:
    """Returns when the socket can be read or written."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if to_write else (loop.add_reader, loop.remove_reader)
    add(fileno, lambda: None if future.done() else future.set_result(None))
    try:
        await future
    finally:
        remove(fileno)


async def open_stream(sock: socket.socket, credentials: Credentials | None, *, server: bool) -> Stream:
    """Sets up a connected socket; with credentials the TLS handshake is done and the peer's identity checked. Raises
    OSError."""
    try:
        tune(sock)
        if credentials is None:
            return Stream(sock)
        context = credentials.context(server=server)
        secured = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise
    try:
        await _shake_hands(secured)
        return TlsStream(secured, credentials.identity(secured))
    except BaseException:
        secured.close()
        raise


async def _shake_hands(secured: ssl.SSLSocket) -> None:
    while True:
        try:
            secured.do_handshake()
            return
        except ssl.SSLWantReadError:
            await ready(secured.fileno(), to_write=False)
        except ssl.SSLWantWriteError:
            await ready(secured.fileno(), to_write=True)


async def read_exactly(stream: Stream, count: int) -> memoryview:
    """Reads `count` bytes. Raises ConnectionError when the stream ends before."""
    data = memoryview(bytearray(count))
    at = 0
    while at < count:
        got = stream.receive([data[at:]])
        if got is None:
            await ready(stream.fileno(), to_write=False)
        elif got == 0:
            raise ConnectionError("the connection ended before it began")
        else:
            at += got
    return data


async def write_all(stream: Stream, data: bytes) -> None:
    left = memoryview(data)
    while len(left):
        count = stream.send([left])
        if count is None:
            await ready(stream.fileno(), to_write=True)
        else:
            left = left[count:]
