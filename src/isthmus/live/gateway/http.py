"""The thin layer between ASGI messages and the rest: bodies in, events and bodies out, and clients that leave."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from isthmus.live.gateway.problems import HttpError, compressed

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


JSON_HEADERS = [(b"content-type", b"application/json")]
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect events into blocks otherwise.
    (b"x-accel-buffering", b"no"),
]
NOTE = b"x-isthmus-note"
"""Header of an answer: what of the request has no part in it."""
_COMPRESSION = re.compile(rb"\b(gzip|deflate|compress|br|zstd)\b", re.IGNORECASE)
"""Of other content codings some clients speak who mean a charset."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole request body. Raises HttpError, as early as they are known, or
    ClientGoneError."""
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > max_bytes:
            raise _too_large(max_bytes)
        if name == b"content-encoding" and (coding := _COMPRESSION.search(value)):
            raise compressed(coding[0].decode().lower())
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        more = message.get("more_body", False)
    return bytes(body)


async def send_body(send: Send, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """A whole answer with status 200."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


class EventWriter:
    """Server-sent events over one response, which starts with the first write."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = False
        self._send, self._headers = send, [*EVENT_HEADERS, *headers]
        self._turn = asyncio.Lock()  # choices write from their own tasks

    async def write(self, events: bytes) -> None:
        """Raises ClientGoneError."""
        async with self._turn:
            await self._start()
            if events:
                await self._body(events, more=True)

    async def close(self, events: bytes) -> None:
        """Writes `events` and ends the response. Raises ClientGoneError."""
        async with self._turn:
            await self._body(events, more=False)

    async def _start(self) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def _body(self, body: bytes, *, more: bool) -> None:
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except OSError:  # what ASGI says of a closed connection
            raise ClientGoneError from None


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is larger than {max_bytes} bytes, the most this server reads")
