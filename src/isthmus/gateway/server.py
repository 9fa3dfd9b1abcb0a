"""Serves the gateway's app on a bound socket until told to stop, then drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from email.utils import formatdate

import uvicorn
from starlette.applications import Starlette
from uvicorn.server import ServerState

from isthmus.errors import StartError
from isthmus.gateway.certificate import Certificate
from isthmus.gateway.connections import Connection, full
from isthmus.gateway.traffic import Traffic

log = logging.getLogger(__name__)

SWEEP_S = 0.25
END_S = 1.0
"""What the last bytes of answers get to leave, once the time for answers is over."""
ACCEPTED_AT_ONCE = 16
"""New connections between two turns of the event loop."""


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises StartError when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(2048)
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
    """Serves until `stop`; then takes no new connections and gives running answers `drain_s` to end, less if `at_once`
    is set. What is left then is ended by us, each answer in its own form. HTTPS with a `certificate`."""
    server = _Server(app, bound, certificate)
    try:
        async with asyncio.TaskGroup() as group:
            accepting, sweeping = group.create_task(server.accept(group)), group.create_task(server.sweep())
            await stop.wait()
            accepting.cancel()
            await asyncio.wait([accepting])
            bound.close()
            await server.drain(drain_s, at_once or asyncio.Event())
            sweeping.cancel()
    finally:
        bound.close()
        await server.end_answers()


class _Server:
    """uvicorn's protocol with an accept loop of our own: what is accepted is counted before it has a handshake."""

    def __init__(self, app: Starlette, bound: socket.socket, certificate: Certificate | None) -> None:
        self._bound, self._certificate = bound, certificate
        self._traffic: Traffic = app.state.traffic
        self._state = ServerState()
        self._config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
        self._config.load()

    async def accept(self, group: asyncio.TaskGroup) -> None:
        loop, count = asyncio.get_running_loop(), 0
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._bound)
            except OSError as error:  # the client is gone, or there is no descriptor left
                log.warning("a connection could not be accepted: %s", error.strerror)
                await asyncio.sleep(SWEEP_S)
                continue
            if self._traffic.make_room():
                connection = Connection(self._traffic, self._config, self._state)
                connection.opening = group.create_task(self._open(connection, accepted))
            else:
                self._turn_away(accepted)
            count += 1
            if count % ACCEPTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _open(self, connection: Connection, accepted: socket.socket) -> None:
        """Makes the connection its handshake. `sweep` ends one that takes too long."""
        context = self._certificate.context if self._certificate else None
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: connection, accepted, ssl=context)
        except (OSError, asyncio.CancelledError):
            self._traffic.leave(connection)
            accepted.close()

    def _turn_away(self, accepted: socket.socket) -> None:
        """All that are here are being answered. An answer in plain text would be no answer in a handshake."""
        with accepted, contextlib.suppress(OSError):
            if self._certificate is None:
                accepted.send(full())
                accepted.shutdown(socket.SHUT_WR)
                accepted.recv(65536)  # unread bytes would reset the connection, and the answer with it

    async def sweep(self) -> None:
        while True:
            self._state.default_headers = [
                (b"date", formatdate(time.time(), usegmt=True).encode()),
                *self._config.encoded_headers,
            ]
            self._traffic.sweep()
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
