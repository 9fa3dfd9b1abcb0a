"""Whether the client is still there that asked for something."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed the connection. Nobody is left to answer, so this is no IsthmusError."""


async def gone(receive: Receive) -> None:
    """Returns when the client goes away. The body was read, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(work: asyncio.Future[Result], receive: Receive) -> Result:
    """What comes of `work`, or ClientGoneError if the client goes away first. Cancels what nobody waits for."""
    leaving = asyncio.create_task(gone(receive))
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGoneError
        return work.result()
    finally:
        work.cancel()
        leaving.cancel()
