"""Errors as OpenAI writes them, `{"error": {"message", "type", "param", "code"}}`, and their HTTP status."""

from __future__ import annotations

import asyncio
import math
import re
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from isthmus.core.errors import IsthmusError, OverloadedError, RequestError, UnavailableError


class HttpError(RequestError):
    """A request that is answered with `status`."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.http_status = status


def unknown_model(name: str, served: str) -> HttpError:
    message = f"The model {name!r} does not exist; this server serves {served!r}"
    return HttpError(404, message, param="model", code="model_not_found")


def compressed(coding: str) -> HttpError:
    """The refusal of a body that is compressed."""
    return HttpError(
        415, f"the body is compressed ({coding}), which this server does not undo: send it as it is"
    )


class RateLimitError(OverloadedError):
    """A tenant asks for more than `allowed`: by its `limit`, an option of `auth.tenants`."""

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
"""Ends the answers that are under way when the time for them is over."""


def status_of(error: BaseException) -> int:
    """The HTTP status that answers `error`; 500 for a bug of ours."""
    return error.http_status if isinstance(error, IsthmusError) else 500


def message_of(error: BaseException) -> str:
    """What a client is told. A bug's own message stays in the log."""
    return str(error) if isinstance(error, IsthmusError) else "internal error; the server's log says more"


def problem_json(error: BaseException) -> bytes:
    """The error object for a body or an SSE event."""
    param = error.param if isinstance(error, RequestError) else None
    code = error.code if isinstance(error, RequestError | RateLimitError) else _code(status_of(error))
    return msgspec.json.encode(ProblemBody(Problem(message_of(error), _type(status_of(error)), param, code)))


def problem_headers(error: BaseException) -> list[tuple[bytes, bytes]]:
    """Headers that belong to `error`, besides its body's."""
    if isinstance(error, OverloadedError | UnavailableError):
        return [(b"retry-after", str(error.retry_after_s).encode())]
    return _HEADERS.get(status_of(error), [])


_HEADERS = {
    401: [(b"www-authenticate", b"Bearer")],
    403: [(b"vary", b"Origin")],
    415: [(b"accept-encoding", b"identity")],
}


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _code(status: int) -> str | None:
    return {429: "overloaded", 503: "unavailable"}.get(status)


# The thin layer between ASGI messages and the rest: bodies in, events and bodies out, and clients that leave.


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
