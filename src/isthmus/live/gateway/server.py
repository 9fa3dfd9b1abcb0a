"""The HTTP server: serves the gateway's app on a bound socket until stopped, then drains. Also its TLS certificate
and its number of connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from uvicorn.server import ServerState

from isthmus.core.errors import ConfigError, StartError
from isthmus.live.gateway.connections import Connection, Opening
from isthmus.live.gateway.preparing import Preparing
from isthmus.live.gateway.tenants import Traffic

log = logging.getLogger(__name__)

LOOK_S = 5.0


class Certificate:
    """A certificate and its key in PEM files; `context` is replaced when new files appear. Raises ConfigError."""

    def __init__(self, certificate: str, key: str) -> None:
        self._files = (certificate, key)
        self._seen = self._times()
        self.context = self._read()
        self._looked_s = 0.0

    def renew(self, now_s: float) -> None:
        """Reads changed files, at most every `LOOK_S`; keeps the earlier certificate while they cannot be read."""
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            times = self._times()
            if times == self._seen:
                return
            self._seen = times
            self.context = self._read()
        except ConfigError as error:
            log.warning("the certificate of HTTPS stays the earlier one: %s", error)

    def _times(self) -> list[tuple[int, int]]:
        found = []
        for path in self._files:
            try:
                status = Path(path).stat()
            except OSError as error:
                raise ConfigError(f"https: {path} cannot be read: {error.strerror}") from None
            found.append((status.st_mtime_ns, status.st_ino))
        return found

    def _read(self) -> ssl.SSLContext:
        certificate, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(f"https: certificate {certificate} with key {key}: {_reason(error)}") from None
        return context


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is another certificate's"
        return "one of them has no certificate, or no key, in PEM form"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")


MOST_DESCRIPTORS = 65_536
RESERVED = 256
"""Descriptors for everything but clients: files, pipes of starting nodes, sessions."""
RESERVED_BY_NODE = 8
MOST_CONNECTIONS = 16_384


def raise_descriptors() -> int:
    """Raises this process's descriptor limit as far as allowed, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def connections_within(descriptors: int, num_nodes: int, asked: int | None) -> int:
    """The number of client connections beside `num_nodes` nodes. Raises StartError where `asked` for do not fit."""
    reserved = RESERVED + RESERVED_BY_NODE * num_nodes
    fit = descriptors - reserved
    if fit < (asked or 16):
        raise StartError(
            f"{asked or 16} connections (limits.connections) do not fit in {descriptors} descriptors, of which "
            f"{reserved} are kept for {num_nodes} nodes and files; raise the limit (ulimit -n)"
        )
    return asked or min(fit, MOST_CONNECTIONS)


WARM_S = 3.0
"""Seconds from the server's start to the workers' start, unless a request needs one earlier."""
SWEEP_S = 0.25
BACKLOG = 2048
END_S = 1.0
"""Seconds for the last bytes of answers, once the drain time is over."""
ACCEPTED_AT_ONCE = 16
"""Handshakes begun between two turns of the event loop."""


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises StartError when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise StartError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port or --host"
        ) from None
    bound.setblocking(False)
    return bound


async def serve_http(
    app: Starlette,
    bound: socket.socket,
    stop: asyncio.Event,
    *,
    drain_s: float,
    at_once: asyncio.Event | None = None,
    certificate: Certificate | None = None,
) -> None:
    """Serves until `stop`; then takes no new connections and gives running answers `drain_s` seconds, less if
    `at_once` is set. Answers that still run are ended, each in its own form. HTTPS with a `certificate`."""
    server = _Server(app, bound, certificate)
    preparing: Preparing | None = app.state.preparing
    try:
        async with asyncio.TaskGroup() as group:
            sweeping = group.create_task(server.sweep())
            warming = group.create_task(_warm(preparing))
            async with server.listening(group):
                await stop.wait()
            bound.close()
            await server.drain(drain_s, at_once or asyncio.Event())
            sweeping.cancel()
            warming.cancel()
    finally:
        bound.close()
        await server.end_answers()
        if preparing is not None:
            preparing.close()


async def _warm(preparing: Preparing | None) -> None:
    """Starts the workers for large bodies after the nodes' start has had the processor."""
    await asyncio.sleep(WARM_S)
    if preparing is not None:
        preparing.open()


class _Server:
    """Accepts connections. Each counts from its acceptance, before its TLS handshake."""

    def __init__(self, app: Starlette, bound: socket.socket, certificate: Certificate | None) -> None:
        self._bound, self._certificate = bound, certificate
        self._traffic: Traffic = app.state.traffic
        self._state = ServerState()
        self._resume: Callable[[], None] | None = None
        """Listens again, after accepting failed for want of descriptors."""
        self._config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
        self._config.load()

    @contextlib.asynccontextmanager
    async def listening(self, group: asyncio.TaskGroup) -> AsyncIterator[None]:
        """Accepts connections inside the context; `group` owns their handshakes."""
        loop = asyncio.get_running_loop()
        if self._certificate is None:
            server = await loop.create_server(self._connection, sock=self._bound, backlog=BACKLOG)
            try:
                yield
            finally:
                server.close()
            return
        self._listen(group)
        try:
            yield
        finally:
            self._resume = None
            loop.remove_reader(self._bound)

    def _connection(self) -> Connection:
        return Connection(self._traffic, self._config, self._state)

    def _listen(self, group: asyncio.TaskGroup) -> None:
        """Accepts by hand, for TLS: asyncio's servers hide a connection until its handshake is over, so a slow one
        could not be ended."""
        self._resume = None
        asyncio.get_running_loop().add_reader(self._bound, self._accept, group)

    def _accept(self, group: asyncio.TaskGroup) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._bound.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the client is gone already
            except OSError as error:  # no descriptor is left; the next sweep listens again
                log.warning("a connection could not be accepted: %s", error.strerror)
                asyncio.get_running_loop().remove_reader(self._bound)
                self._resume = partial(self._listen, group)
                return
            accepted.setblocking(False)
            connection = self._connection()
            connection.opening = Opening(group.create_task(self._open(connection, accepted)), accepted)

    async def _open(self, connection: Connection, accepted: socket.socket) -> None:
        """Does the TLS handshake; `sweep` ends one that takes too long."""
        assert self._certificate is not None
        loop, context = asyncio.get_running_loop(), self._certificate.context
        try:
            await loop.connect_accepted_socket(lambda: connection, accepted, ssl=context)
        except (OSError, asyncio.CancelledError):
            self._traffic.leave(connection)
            accepted.close()

    async def sweep(self) -> None:
        while True:
            self._state.default_headers = [
                (b"date", formatdate(time.time(), usegmt=True).encode()),
                *self._config.encoded_headers,
            ]
            self._traffic.sweep()
            if self._resume is not None:
                self._resume()
            if self._certificate is not None:
                self._certificate.renew(time.monotonic())
            await asyncio.sleep(SWEEP_S)

    async def drain(self, drain_s: float, at_once: asyncio.Event) -> None:
        """Returns when no connection is left, or the time is over."""
        self._traffic.stopping = True
        for connection in self._traffic.connections():
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self._traffic.num_connections and not at_once.is_set():
                    await asyncio.sleep(0.05)

    async def end_answers(self) -> None:
        """Ends every answer under way in its own form, then every connection."""
        for connection in self._traffic.connections():
            connection.end()
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)
        until = time.monotonic() + END_S
        while self._traffic.num_connections and time.monotonic() < until:
            await asyncio.sleep(0.01)
        for connection in self._traffic.connections():
            connection.abort()
