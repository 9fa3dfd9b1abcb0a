"""Listens and connects over TCP, and makes lost connections again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from isthmus.core.errors import ProtocolError
from isthmus.live.messenger import greeting
from isthmus.live.messenger.credentials import Credentials, Identity
from isthmus.live.messenger.frames import (
    MAGIC_BYTES,
    PREFIX_BYTES,
    Prefix,
    check_header,
    check_magic,
    parse_prefix,
)
from isthmus.live.messenger.ports import STANDARD, Handler, Terms
from isthmus.live.messenger.running import running_timeout
from isthmus.live.messenger.session import Session
from isthmus.live.messenger.streams import Stream, open_stream, read_exactly, write_all
from isthmus.live.messenger.tcp import TcpPort, drain

log = logging.getLogger(__name__)

MAX_GREETING = 4096
"""Bytes of one frame of a greeting. Each side sends two."""
MAX_PORT = 65535
MAX_CONNECTIONS = 64
"""Connections of one session."""
ACCEPT_PAUSE_S = 1.0
REDIAL_S = (0.02, 1.0)
"""First and longest wait before a lost connection is made again."""
QUIET_S = 5.0
"""Shortest time between two log lines about connections that were turned away."""


class Greetings(msgspec.Struct, frozen=True):
    """Limits of a listener. `within_s`: how long a connection may take to begin, TLS included. `most`: greetings
    under way; one more takes the place of the oldest."""

    within_s: float = 5.0
    most: int = 128


USUAL = Greetings()


class Server(Protocol):
    @property
    def refused(self) -> int:
        """Number of connections so far that came to nothing."""

    def close(self) -> None:
        """Takes no new sessions; those that are open go on."""


class Network(Protocol):
    """Opens and serves sessions: over TCP, or in memory."""

    async def listen(
        self, host: str, port: int, types: Any, handler_of: Callable[[], Handler]
    ) -> tuple[Server, int]:
        """Serves sessions; returns the server and the port it got. Raises OSError when the port is taken."""
        ...

    async def connect(
        self, address: str, types: Any, handler: Handler, *, timeout_s: float, connections: int | None = None
    ) -> Session:
        """Opens a session with `host:port`, of `connections` connections (None: the network's own number). Raises
        OSError, with the peer's reason if it gave one, or TimeoutError."""
        ...


class TcpNetwork:
    """Sessions over sockets.

    `connections`: of each session, opened by the side that connects; the session can be used when the first is there.
    `credentials`: for TLS; None: connections are plain. `secret`: both sides must know it (`greeting.py`).
    """

    def __init__(
        self,
        connections: int = 1,
        credentials: Credentials | None = None,
        terms: Terms = STANDARD,
        *,
        secret: bytes = b"",
        greetings: Greetings = USUAL,
    ) -> None:
        if not 1 <= connections <= MAX_CONNECTIONS:
            raise ValueError(f"a session has 1 to {MAX_CONNECTIONS} connections")
        self.connections, self.terms = connections, terms
        self.secret, self.greetings = secret, greetings
        self.credentials = credentials

    async def listen(
        self, host: str, port: int, types: Any, handler_of: Callable[[], Handler]
    ) -> tuple[Listener, int]:
        def session_of(tcp: TcpPort) -> Session:
            return Session(types, handler_of(), tcp, self.terms, first_s=self.greetings.within_s)

        sockets = await _listening(host, port)
        return Listener(sockets, session_of, self), sockets[0].getsockname()[1]

    async def connect(
        self, address: str, types: Any, handler: Handler, *, timeout_s: float, connections: int | None = None
    ) -> Session:
        host, port = split_address(address)
        dialler = _Dialler(self, host, port)
        async with running_timeout(timeout_s):
            stream, terms = await dialler.dial(0, first=True)
        tcp = TcpPort(dialler.stop)
        session = tcp.session = Session(types, handler, tcp, self.terms)
        session.peer, session.identity = address, stream.identity
        session.agree(terms)
        tcp.dial_line = dialler.dial_line
        tcp.add(stream, 0)
        dialler.keep(tcp, session, connections or self.connections)
        return session


class _Dialler:
    """Opens the connections of one session, and again when they are lost."""

    def __init__(self, network: TcpNetwork, host: str, port: int) -> None:
        self._network, self._host, self._port = network, host, port
        self._name = os.urandom(greeting.SESSION_BYTES)
        self._task: asyncio.Task[None] | None = None
        self._identity: Identity | None = None

    async def dial(self, lane: int, *, first: bool = False) -> tuple[Stream, Terms]:
        """Opens one connection and greets. Raises OSError."""
        nonce = os.urandom(greeting.NONCE_BYTES)
        hello = greeting.hello(self._name, lane, self._network.terms, nonce, first=first)
        stream, terms = await self._greeted(hello)
        self._identity = stream.identity
        return stream, terms

    async def dial_line(self) -> Stream:
        """Opens a line. Raises OSError, TimeoutError."""
        nonce = os.urandom(greeting.NONCE_BYTES)
        async with running_timeout(self._network.greetings.within_s):
            stream, _ = await self._greeted(greeting.line(self._name, self._network.terms, nonce))
        return stream

    async def _greeted(self, hello: greeting.Hello) -> tuple[Stream, Terms]:
        dialling = greeting.Dialling(hello, self._network.secret)
        stream = await open_stream(
            await _connected(self._host, self._port), self._network.credentials, server=False
        )
        try:
            if not hello.first and stream.identity != self._identity:
                raise ConnectionError(f"{stream.identity} answers where {self._identity} did")
            await write_all(stream, dialling.begin())
            await write_all(stream, dialling.answer(*await _read_greeting(stream)))
            return stream, dialling.end(*await _read_greeting(stream))
        except greeting.TurnedAway as error:
            stream.close()
            raise ConnectionRefusedError(f"it says: {error}") from None
        except ProtocolError as error:
            stream.close()
            raise ConnectionError(str(error)) from None
        except BaseException:
            stream.close()
            raise

    def keep(self, tcp: TcpPort, session: Session, connections: int) -> None:
        if connections > 1 or self._network.terms.resume_s:
            self._task = tcp.loop.create_task(self._keep(tcp, session, connections))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _keep(self, tcp: TcpPort, session: Session, connections: int) -> None:
        number, wait_s = 1, REDIAL_S[0]
        while not session.closed:
            if len(session.lanes) >= connections:
                tcp.lane_lost.clear()
                await tcp.lane_lost.wait()
                continue
            try:
                async with running_timeout(self._network.greetings.within_s):
                    stream, _ = await self.dial(number)
            except (OSError, TimeoutError) as error:
                if isinstance(error, ConnectionRefusedError) and session.suspended:
                    session.give_up(f"closed by the peer, which takes it up no more: {error}")
                    return
                log.debug("connection %d with %s failed: %s", number, session.peer, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, REDIAL_S[1])
                continue
            if session.closed:
                stream.close()
                return
            tcp.add(stream, number)
            number, wait_s = number + 1, REDIAL_S[0]


class Listener:
    """Accepts connections, greets them and hands each to its session. Until its greeting is over, a connection has no
    session and takes no memory but its own few bytes."""

    def __init__(
        self, sockets: list[socket.socket], session_of: Callable[[TcpPort], Session], network: TcpNetwork
    ) -> None:
        self._sockets, self._session_of, self._network = sockets, session_of, network
        self._ports: dict[bytes, TcpPort] = {}
        self._tasks: dict[asyncio.Task[None], str] = {}
        """Greetings under way, oldest first, and the address of each peer."""
        self._trouble = _Trouble()
        self._loop = asyncio.get_running_loop()
        for sock in sockets:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def close(self) -> None:
        """Takes no new sessions; those that are open go on."""
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._sockets = []
        for task in self._tasks:
            task.cancel()
        self._trouble.flush()

    @property
    def refused(self) -> int:
        return self._trouble.count

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, address = listening.accept()
        except (BlockingIOError, ConnectionError):  # it went away before
            return
        except OSError as error:  # too many files open, or no memory: it waits in the kernel meanwhile
            log.error("no connection can be accepted for now: %s", error)
            self._loop.remove_reader(listening.fileno())
            self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again, listening)
            return
        peer = address_of(address[0], address[1])
        if len(self._tasks) >= self._network.greetings.most:
            oldest = next(iter(self._tasks))
            self._trouble.say(f"a connection from {self._tasks.pop(oldest)} made room for later ones")
            oldest.cancel()
        task = self._loop.create_task(self._greet(sock, peer))
        self._tasks[task] = peer
        task.add_done_callback(partial(self._greeted, sock))

    def _greeted(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled():
            sock.close()  # nobody else does where it was cancelled before it began

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    async def _greet(self, sock: socket.socket, peer: str) -> None:
        stream: Stream | None = None
        session: Session | None = None
        try:
            async with running_timeout(self._network.greetings.within_s):
                stream = await open_stream(sock, self._network.credentials, server=True)
                hello = await self._prove(stream)
                tcp = self._port_of(hello.hello, peer, stream.identity)
                session = tcp.session
                await write_all(stream, hello.welcome(self._network.terms))
            if session is None or session.closed:
                raise ConnectionError("its session ended meanwhile")
            if hello.hello.is_line:
                session.take_line(stream)
            else:
                tcp.add(stream, hello.hello.lane)
        except ProtocolError as error:
            assert stream is not None
            self._trouble.say(f"a connection from {peer} was turned away: {error}")
            with contextlib.suppress(OSError):
                stream.send([memoryview(greeting.refusal(str(error)))])
            await drain(stream)
        except (OSError, TimeoutError) as error:
            begun = "could not begin" if stream is None else "ended"
            self._trouble.say(f"a connection from {peer} {begun}: {error or 'it was silent'}")
            (stream or sock).close()
            if session is not None and not session.lanes and not session.suspended:
                session.abort(f"it could not begin: {error}")
        except BaseException:
            (stream or sock).close()
            raise

    async def _prove(self, stream: Stream) -> greeting.Listening:
        """Greets a dialler. Raises ProtocolError when it does not belong to this cluster, OSError when it hangs
        up."""
        nonce = os.urandom(greeting.NONCE_BYTES)
        hello = greeting.Listening(*await _read_greeting(stream), nonce, self._network.secret)
        await write_all(stream, hello.challenge())
        hello.check(*await _read_greeting(stream))
        return hello

    def _port_of(self, hello: greeting.Hello, peer: str, identity: Identity | None) -> TcpPort:
        tcp = self._ports.get(hello.session)
        if tcp is not None and tcp.session is not None and not hello.first:
            if tcp.session.identity != identity:
                raise ProtocolError("this session is somebody else's")
            if hello.is_line:
                if not tcp.session.takes_lines:
                    raise ProtocolError("nobody here answers on a line")
                return tcp
            numbers = [lane.number for lane in tcp.session.lanes]
            if hello.lane in numbers or len(numbers) >= MAX_CONNECTIONS:
                raise ProtocolError("this session has that connection already, or too many")
            return tcp
        if tcp is not None or not hello.first:
            raise ProtocolError("this session is not known here")
        tcp = TcpPort(lambda: self._ports.pop(hello.session, None))
        session = tcp.session = self._session_of(tcp)
        session.peer, session.identity = peer, identity
        session.agree(hello.terms)
        self._ports[hello.session] = tcp
        return tcp


class _Trouble:
    """Log of connections that came to nothing, in few lines: thousands of them must not fill a disk."""

    def __init__(self) -> None:
        self._logged_s = -QUIET_S
        self.count = self._unsaid = 0

    def say(self, what: str) -> None:
        self.count += 1
        now_s = time.monotonic()
        if now_s - self._logged_s < QUIET_S:
            self._unsaid += 1
            return
        self.flush()
        self._logged_s = now_s
        log.warning("%s", what)

    def flush(self) -> None:
        if self._unsaid:
            log.warning("%d more connections came to nothing", self._unsaid)
            self._unsaid = 0


def address_of(host: str, port: int) -> str:
    """Joins `host:port`, with IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Splits an address of `address_of`. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > MAX_PORT:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _listening(host: str, port: int) -> list[socket.socket]:
    """Listens on every address of the host, with the same port."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address[0], port, *address[2:]))
            port = sock.getsockname()[1]
            sock.listen(100)
            sock.setblocking(False)
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


async def _connected(host: str, port: int) -> socket.socket:
    """Connects to the first address that answers. Raises OSError."""
    loop = asyncio.get_running_loop()
    failed: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            failed = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failed


async def _read_greeting(stream: Stream) -> tuple[Prefix, bytes]:
    data = bytearray(await read_exactly(stream, MAGIC_BYTES))
    check_magic(memoryview(data))  # before waiting for what something else never sends
    data += await read_exactly(stream, PREFIX_BYTES - MAGIC_BYTES)
    prefix = parse_prefix(memoryview(data))
    if prefix.header > MAX_GREETING:
        raise ProtocolError("a greeting is not that long")
    header = bytes(await read_exactly(stream, prefix.header))
    check_header(prefix, header)
    return prefix, header
