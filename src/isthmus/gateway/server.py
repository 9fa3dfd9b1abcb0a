"""Serves the gateway's app on a bound socket until told to stop, then drains."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from isthmus.errors import StartError


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
    return bound


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the command owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(app: ASGIApp, bound: socket.socket, stop: asyncio.Event, *, drain_s: float) -> None:
    """Serves until `stop`; then takes no new connections and gives running answers `drain_s` to end."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(drain_s)),
        timeout_keep_alive=60,
    )
    server = _Server(config)

    async def end() -> None:
        await stop.wait()
        server.should_exit = True

    async with asyncio.TaskGroup() as group:
        ender = group.create_task(end())
        await server.serve(sockets=[bound])
        ender.cancel()
