"""HTTP answers and errors: OpenAI's error object `{"error": {"message", "type", "param", "code"}}`, bodies,
server-sent events, and clients that disconnect."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from isthmus.core.errors import IsthmusError, OverloadedError, RequestError, UnavailableError


class HttpError(RequestError):
    """A request error with the HTTP status `status`."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.http_status = status


def unknown_model(name: str, served: Sequence[str]) -> HttpError:
    known = " and ".join(map(repr, served))
    message = f"The model {name!r} does not exist; this server serves {known}"
    return HttpError(404, message, param="model", code="model_not_found")


def compressed(coding: str) -> HttpError:
    message = f"the body is compressed ({coding}), which this server does not undo: send it as it is"
    return HttpError(415, message)


class RateLimitError(OverloadedError):
    """A tenant exceeds `allowed`, by its `limit`: the name of an option of `auth.tenants`."""

    code = "rate_limit_exceeded"

    def __init__(self, limit: str, allowed: str, wait_s: float) -> None:
        retry_after_s = max(1, math.ceil(wait_s))
        super().__init__(
            f"this API key's tenant may have {allowed} ({limit}); try again in {retry_after_s} s",
            retry_after_s=retry_after_s,
        )
        self.limit = limit


class Problem(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ProblemBody(msgspec.Struct, frozen=True):
    error: Problem


STOPPING = UnavailableError("the server is stopping; send the request again")
"""Ends the answers under way when the drain time is over."""


def status_of(error: BaseException) -> int:
    """The HTTP status that answers `error`; 500 for a bug."""
    return error.http_status if isinstance(error, IsthmusError) else 500


def message_of(error: BaseException) -> str:
    """The message for the client; a bug's own message stays in the log."""
    return str(error) if isinstance(error, IsthmusError) else "internal error; the server's log says more"


def problem_json(error: BaseException) -> bytes:
    """The error object, for a body or an SSE event."""
    status = status_of(error)
    param = error.param if isinstance(error, RequestError) else None
    code = {429: "overloaded", 503: "unavailable"}.get(status)
    if isinstance(error, RequestError | RateLimitError):
        code = error.code
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    return msgspec.json.encode(ProblemBody(Problem(message_of(error), kind, param, code)))


def problem_headers(error: BaseException) -> list[tuple[bytes, bytes]]:
    """The headers that belong to `error`, besides those of its body."""
    if isinstance(error, OverloadedError | UnavailableError):
        return [(b"retry-after", str(error.retry_after_s).encode())]
    return _HEADERS.get(status_of(error), [])


_HEADERS = {
    401: [(b"www-authenticate", b"Bearer")],
    403: [(b"vary", b"Origin")],
    415: [(b"accept-encoding", b"identity")],
}


# ASGI messages.

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed the connection. No answer is needed, so this is no IsthmusError."""


async def disconnected(receive: Receive) -> None:
    """Returns when the client disconnects. Must be awaited after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(work: asyncio.Future[Result], receive: Receive) -> Result:
    """The result of `work`; cancels it and raises ClientGoneError if the client disconnects first."""
    leaving = asyncio.create_task(disconnected(receive))
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
    (b"x-accel-buffering", b"no"),  # nginx would collect events into blocks
]
NOTE = b"x-isthmus-note"
"""Header of an answer that lists the parts of the request that were left out."""
_COMPRESSION = re.compile(rb"\b(gzip|deflate|compress|br|zstd)\b", re.IGNORECASE)
"""Compressing content codings. Others are let through: some clients name a charset there."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole request body. Raises HttpError as early as a fault is known, or ClientGoneError."""
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
    """Sends a whole answer with status 200."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


class EventWriter:
    """Server-sent events of one response, which starts with the first write."""

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
        except OSError:  # ASGI's sign of a closed connection
            raise ClientGoneError from None


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is larger than {max_bytes} bytes, the most this server reads")
