"""HTTP client of a server of which nothing is known but its URL: what it says of itself, and requests passed on."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from isthmus.core.types import PassedRequest
from isthmus.live.servers.told import LIFE, MODELS, PAGES, Description, read_models, read_pages

ASK_S = 5.0
CONNECT_S = 3.0
MAX_TOLD_BYTES = 16 << 20
KEPT_S = 3.0
"""How long a connection is kept for the next request: servers close theirs after 5 s and more."""
STALE_S = 0.5
"""A kept connection that breaks within this time of a request, before a byte of its answer, had been closed by the
server before the request came."""
NOT_PASSED_BACK = frozenset(
    (
        "connection",
        "keep-alive",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "date",
        "server",
        "x-request-id",
    )
)
"""Headers of one connection, and those that the gateway adds itself."""
HEALTH, UNREADY = "/health", 503


class _Tokens(msgspec.Struct):
    tokens: tuple[int, ...] = ()


_tokens = msgspec.json.Decoder(_Tokens).decode


class UnreadyError(aiohttp.ClientError):
    """A server says that it cannot serve: it is loading its model, or its engine is dead."""


def life_of(told: Description | None) -> str:
    """The path that a server is asked at for a sign of life."""
    return LIFE.get(told.kind, HEALTH) if told is not None else HEALTH


def said(error: BaseException) -> str:
    """Returns the reason of a failure in one line."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    return str(error) or type(error).__name__


def is_ours(error: BaseException) -> bool:
    """Whether a connection failed for want of something here, not of the server."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in _OURS


def refuses(error: BaseException) -> bool:
    """Whether the server takes no connections."""
    return isinstance(error, aiohttp.ClientConnectorError) and not is_ours(error)


def unheard(error: BaseException) -> bool:
    """Whether a request failed before there was a connection, so that no server has heard of it."""
    return isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EADDRNOTAVAIL)


class Response:
    """An answer with its `first` bytes, over a connection of its own until it is whole."""

    def __init__(self, response: aiohttp.ClientResponse, first: bytes) -> None:
        self.status = response.status
        dropped = NOT_PASSED_BACK | {
            name.strip().lower() for name in response.headers.get("Connection", "").split(",")
        }
        self.headers = [
            (name, value)
            for name, value in response.raw_headers
            if name.decode("latin-1").lower() not in dropped
        ]
        kind = response.headers.get("Content-Type", "").startswith("text/event-stream")
        self.takes_events = kind and not response.headers.keys() & {"Content-Encoding", "Content-Length"}
        self.first = first
        self._response = response

    async def body(self) -> AsyncIterator[bytes]:
        """Yields the body as it comes. Raises aiohttp.ClientError when it breaks off."""
        if self.first:
            yield self.first
        async for chunk in self._response.content.iter_any():
            yield chunk

    def abort(self) -> None:
        """Closes the connection if the body has not come whole; else that can still be read."""
        if not self._response.content.is_eof():
            self._response.close()


def new_session(timeout_s: float | None = None, *, keeps: bool = True) -> aiohttp.ClientSession:
    """Returns a session for the clients of all servers, in an event loop. `timeout_s`: the longest time between two
    bytes of an answer, None without one; `keeps`: connections are used for several requests."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S) if keeps else None
    return aiohttp.ClientSession(
        connector=kept or aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),  # cookies are the clients'
        max_field_size=1 << 16,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=timeout_s),
        auto_decompress=False,
        read_bufsize=1 << 16,
        skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept", "Content-Type"),
        trace_configs=[trace],
    )


async def _note_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, _: Any) -> None:
    """aiohttp's sign that a request goes over a connection that was kept."""
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.is_reused = True


class PlainClient:
    """Client of the server at `url`. `key`: an API key, in place of the clients' own; `fresh`: a session that keeps no
    connections."""

    def __init__(
        self, url: str, key: str | None, session: aiohttp.ClientSession, fresh: aiohttp.ClientSession
    ) -> None:
        self.url, self._key, self._session, self._fresh = url.rstrip("/"), key, session, fresh

    def beside(self, url: str) -> PlainClient:
        """Returns a client of another server, without a key."""
        return PlainClient(url, None, self._session, self._fresh)

    async def describe(self) -> Description:
        """Asks the server what it is. Raises UnreadyError while it says that it is not ready, ValueError if it does not
        speak OpenAI's protocol, aiohttp.ClientError, OSError or TimeoutError."""
        await self.alive(HEALTH, ASK_S)
        told = read_models(await self.get(MODELS))
        names = PAGES[told.kind]
        pages = await asyncio.gather(*map(self._page, names))
        return read_pages(told, dict(zip(names, pages, strict=True)), URL(self.url).host or "")

    async def tokenize(self, model: str, question: bytes) -> tuple[int, ...]:
        """Returns the tokens of a prompt, an object as `/tokenize` takes it but for its model; none from a server that
        does not tell them."""
        body = msgspec.json.encode({**msgspec.json.decode(question), "model": model})
        headers = {"Content-Type": "application/json", **self._own()}
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        try:
            async with self._session.post(
                f"{self.url}/tokenize", data=body, headers=headers, timeout=timeout
            ) as response:
                return _tokens(await _limited(response)).tokens if response.ok else ()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError):
            return ()

    async def alive(self, path: str, limit_s: float) -> None:
        """Returns when the server gives a sign of life, whatever it says but that it is not ready. Raises UnreadyError,
        aiohttp.ClientError, OSError or TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=limit_s)
        async with self._session.get(self.url + path, headers=self._own(), timeout=timeout) as response:
            await response.content.read(MAX_TOLD_BYTES)
            if response.status == UNREADY:
                raise UnreadyError(f"it says that it is not ready (HTTP {UNREADY} of {path})")

    async def send(self, passed: PassedRequest, *, once: bool = False) -> Response:
        """Sends a request on, and returns its answer when the first bytes of the body are here; once more over a fresh
        connection where a kept one was stale. `once`: it may not come twice, and goes over a fresh one. Raises
        aiohttp.ClientError, OSError or TimeoutError."""
        reuse, begin_s = SimpleNamespace(is_reused=False), time.monotonic()
        try:
            response = await self._request(self._fresh if once else self._session, passed, reuse)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            is_stale = reuse.is_reused and time.monotonic() - begin_s < STALE_S
            if not is_stale or isinstance(error, aiohttp.ClientConnectorError):
                raise
            response = await self._request(self._fresh, passed, reuse)
        try:
            first = await response.content.readany()
        except BaseException:
            response.close()
            raise
        return Response(response, first)

    async def _request(
        self, session: aiohttp.ClientSession, passed: PassedRequest, reuse: SimpleNamespace
    ) -> aiohttp.ClientResponse:
        return await session.request(
            passed.method,
            URL(self.url + passed.target, encoded=True),
            data=passed.body or None,
            headers=[*self._of_client(passed), *self._own().items()],
            allow_redirects=False,
            trace_request_ctx=reuse,
        )

    async def probe(self, model: str, prompt: str, limit_s: float) -> int:
        """Returns the status of the answer to a prompt, when its first token is here. Raises as `send`."""
        fields = {"model": model, "prompt": prompt, "max_tokens": 1, "stream": True}
        async with self._session.post(
            f"{self.url}/v1/completions",
            data=msgspec.json.encode(fields),
            headers={"Content-Type": "application/json", **self._own()},
            timeout=aiohttp.ClientTimeout(total=limit_s),
        ) as response:
            await response.content.readany()
            return response.status

    async def _page(self, path: str) -> bytes:
        """Returns a page that a server may not have, b"" where it has none."""
        try:
            return await self.get(path)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return b""

    async def get(self, path: str) -> bytes:
        """Returns a short answer. Raises aiohttp.ClientError, OSError, TimeoutError, or ValueError for a long one."""
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        async with self._session.get(self.url + path, headers=self._own(), timeout=timeout) as response:
            response.raise_for_status()
            return await _limited(response)

    def _of_client(self, passed: PassedRequest) -> list[tuple[str, str]]:
        """A client's headers, without its key where the server is shown another: it reads the first."""
        return [(name, text) for name, text in passed.headers if not (self._key and name == "authorization")]

    def _own(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}


async def _limited(response: aiohttp.ClientResponse) -> bytes:
    """Returns a body. Raises ValueError for one that is too long."""
    found = bytearray()
    async for chunk in response.content.iter_any():
        found += chunk
        if len(found) > MAX_TOLD_BYTES:
            raise ValueError(f"{response.url.path} has more than {MAX_TOLD_BYTES} bytes")
    return bytes(found)
