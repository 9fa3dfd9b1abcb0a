"""HTTP connections: what a client may send and how long it may take, before any of it reaches the app.

uvicorn's protocol parses and writes; here its input is bounded, and every answer ends once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import urllib.parse
from typing import Any, NamedTuple, NoReturn

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from isthmus.core.errors import IsthmusError, RequestError, UnavailableError
from isthmus.live.gateway.http import (
    JSON_HEADERS,
    STOPPING,
    HttpError,
    problem_headers,
    problem_json,
    status_of,
)
from isthmus.live.gateway.tenants import Phase, Traffic

log = logging.getLogger(__name__)

MAX_PIPELINED = 16
"""Requests that may wait on one connection for the answers before theirs."""


class _EndOfInputError(Exception):
    """Raised in a callback of the parser, so that it reads no further."""


class HttpExchange(RequestResponseCycle):
    """One request and its answer. `error`: why its body will never be whole, None for as long as it may be."""

    error: IsthmusError | None = None
    _sized = True  # the answer says how long it is, or is cut into chunks that do

    def fail(self, error: IsthmusError) -> None:
        """The app gets `error` in place of the rest of the body."""
        self.error = error
        self.body = bytearray()
        self.message_event.set()

    async def receive(self) -> Any:
        """Raises what `fail` was given."""
        message = await super().receive() if self.error is None else None
        if self.error is not None:
            raise self.error
        return message

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            await self._send_start(message)
            return
        if not self._sized:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)

    async def _send_start(self, message: Any) -> None:
        """HTTP/1.0 has no chunks: there the end of the connection ends an answer of unknown length (RFC 9112, 6.1)."""
        headers = message["headers"]
        if self.scope["http_version"] == "1.0" and all(name != b"content-length" for name, _ in headers):
            self._sized = self.chunked_encoding = False
        is_last = self.more_body
        if is_last:
            message = {**message, "headers": [*headers, (b"connection", b"close")]}
        await super().send(message)
        if is_last:
            self.keep_alive = True  # the connection closes itself, after the rest of the body

    async def run_asgi(self, app: Any) -> None:
        """Every way out of the app ends the answer, once."""
        error: BaseException | None = None
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            error = STOPPING
        except Exception as bug:
            error = bug
            log.error("an answer failed: a bug of this server", exc_info=bug)
        if not self.disconnected and not self.response_complete:
            if self.response_started:
                self.transport.close()
            else:
                await self._send_problem(error or RuntimeError("the app gave no answer"))
        self.on_response = _nothing  # it may be called from here on only by mistake

    async def _send_problem(self, error: BaseException) -> None:
        body = problem_json(error)
        start = {"status": status_of(error), "headers": _problem_headers(error, body)}
        await self.send({"type": "http.response.start", **start})
        await self.send({"type": "http.response.body", "body": body})


def _problem_headers(error: BaseException, body: bytes) -> list[tuple[bytes, bytes]]:
    return [*JSON_HEADERS, (b"content-length", str(len(body)).encode()), *problem_headers(error)]


def _whole(error: IsthmusError, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    """The answer to what never became a request."""
    body = problem_json(error)
    headers = [*default_headers, *_problem_headers(error, body), (b"connection", b"close")]
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    return b"".join([STATUS_LINE[status_of(error)], *lines, b"\r\n", body])


def _new_parser(connection: Connection) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # what follows the last request is dropped
    return parser


def _nothing() -> None: ...


class Opening(NamedTuple):
    """A handshake under way."""

    task: asyncio.Task[None]
    accepted: socket.socket


class Connection(HttpToolsProtocol):
    """One client's connection, from its acceptance on."""

    cycle: HttpExchange

    def __init__(self, traffic: Traffic, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self.phase, self.body_bytes = Phase.HEADERS, 0
        self.opening: Opening | None = None
        self._has_room = traffic.make_room()
        self._traffic = traffic
        self._max_unseen, self._max_headers = traffic.limits.header_bytes, traffic.limits.headers
        self._unseen = 0  # bytes given to the parser since it last gave something whole
        self._partial = True  # a request has begun and is not whole, or the first is awaited
        self._in_headers = True
        self._collected = bytearray()  # of a body, until the app gets it
        self._deaf = False  # nothing more is read
        self._given_up = False  # before it was made
        self._declining = False  # the parser reads a head of our own
        self._answering: HttpExchange | None = None  # of those that came, the first without an answer
        traffic.enter(self, Phase.HEADERS)

    # From the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.opening = None
        super().connection_made(transport)
        if self._given_up:
            transport.abort()
        elif not self._has_room:
            error = UnavailableError("every connection is being answered (limits.connections)")
            transport.write(_whole(error, self.server_state.default_headers))
            self._linger()

    def connection_lost(self, exc: Exception | None) -> None:
        self._traffic.leave(self)
        self._release_body()
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._traffic.stall(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._traffic.flow(self)
        self._settle()

    @property
    def unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            self._feed(data)
            self._settle()
        except httptools.HttpParserError as error:
            if not self._deaf:
                self.refuse("malformed", RequestError(f"this is not HTTP: {' '.join(str(error).split())}"))
        except _EndOfInputError:
            pass  # it was refused

    def _settle(self) -> None:
        """Comes to the phase that the parser, the app and the client have brought about. An answer is under way until
        the client has taken it."""
        exchange = self._answering
        if self.flow is not None and self.flow.write_paused and self.phase is Phase.ANSWER:
            return
        if exchange is None or exchange.response_complete:
            phase = Phase.HEADERS if self._partial else Phase.IDLE
        else:
            phase = Phase.BODY if exchange.more_body else Phase.ANSWER
        if phase is not self.phase is not Phase.LINGER:
            self._traffic.enter(self, phase)

    def _feed(self, data: bytes) -> None:
        """Stops where too much is no part of anything whole: the parser joins the pieces of a header anew with each,
        which takes the square of its length. That goes for headers behind a body, too."""
        while data:
            room = self._max_unseen - self._unseen
            if room <= 0:
                self._stop("header_bytes", HttpError(431, f"the headers are over {self._max_unseen} bytes"))
            part, data = data[:room], data[room:]
            self._unseen += len(part)
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade as offered:
                self._decline()
                data = part[offered.args[0] :] + data
            self._pass_on()

    def _decline(self) -> None:
        """Nothing is switched to: the request is served as if it had not asked (RFC 9110, 7.8). Its parser takes what
        follows for the other protocol, so that another one reads on, behind a head that only says how long the body is.
        """
        framing = (b"content-length", b"transfer-encoding")
        lines = [b"%s: %s\r\n" % header for header in self.headers if header[0] in framing]
        self.parser = _new_parser(self)
        self._declining = True
        self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *lines, b"\r\n"]))
        self._declining = False

    def _stop(self, reason: str, error: IsthmusError) -> NoReturn:
        """Refuses, and ends what the parser is at."""
        self.refuse(reason, error)
        raise _EndOfInputError

    # From the parser.

    def on_message_begin(self) -> None:
        if not self._declining:
            self._partial = self._in_headers = True
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._declining:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers:
            return  # behind the body, where nobody asks for any, or known already
        if len(self.headers) >= self._max_headers:
            self._stop("headers", HttpError(431, f"there are more than {self._max_headers} headers"))
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = self.parser.get_http_version() != "1.0"  # which knows no such answer
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._stop(
                "malformed",
                HttpError(501, "of transfer codings only 'chunked' is known: send the body as it is"),
            )
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._declining:
            return
        self._unseen, self._in_headers = 0, False
        http_version = self.parser.get_http_version()
        scope = self.scope
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = http_version
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope["raw_path"], scope["query_string"] = url.path, url.query or b""
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        before, self.cycle = (
            self.cycle,
            HttpExchange(
                scope=scope,
                transport=self.transport,
                flow=self.flow,
                logger=self.logger,
                access_logger=self.access_logger,
                access_log=False,
                default_headers=self.server_state.default_headers,
                message_event=asyncio.Event(),
                expect_100_continue=self.expect_100_continue,
                keep_alive=http_version != "1.0" and self.parser.should_keep_alive(),
                on_response=self.on_response_complete,
            ),
        )
        if before is None or before.response_complete:
            self._begin(self.cycle, self.app)
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop("pipelined", RequestError(f"more than {MAX_PIPELINED} requests wait for an answer"))
        self.flow.pause_reading()
        self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        """Only collects: in chunks of one byte it is called ten thousand times for what came at once."""
        self._unseen = 0
        self._collected += body

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its body comes
        self._pass_on()
        self._unseen, self._partial = 0, False
        self._release_body()
        super().on_message_complete()

    def _pass_on(self) -> None:
        """Gives the app what was collected of a body."""
        body, self._collected = self._collected, bytearray()
        if not body or self.cycle.response_complete:
            return
        super().on_body(body)  # type: ignore[arg-type]
        self.body_bytes += len(body)
        self._traffic.take_body(len(body))
        if self._deaf:  # it was this one that was too much
            raise _EndOfInputError

    # Answers.

    def _begin(self, exchange: HttpExchange, app: Any) -> None:
        self._answering = exchange
        self._start_asgi_task(exchange, app)

    def on_response_complete(self) -> None:
        if self.transport.is_closing():
            return
        assert self._answering is not None
        if self._answering.more_body or (self._deaf and not self.pipeline):
            self._linger()
            return
        if self._traffic.stopping and not self.pipeline:
            self.transport.close()
            return
        self.flow.resume_reading()
        if self.pipeline:
            exchange, app = self.pipeline.pop()
            assert isinstance(exchange, HttpExchange)
            self._begin(exchange, app)
        self._settle()

    def refuse(self, reason: str, error: IsthmusError) -> None:
        self._traffic.refused[reason] += 1
        self._deaf = True
        self._release_body()
        self._settle()
        if self.phase is Phase.BODY:
            self.cycle.fail(error)
        elif self.phase is not Phase.ANSWER and not self.transport.is_closing():
            self.transport.write(_whole(error, self.server_state.default_headers))
            self._linger()

    def too_late(self) -> None:
        limits = self._traffic.limits
        if self.transport is None or self.phase is Phase.LINGER or self.transport.is_closing():
            self.abort()
        elif self.phase is Phase.IDLE:
            self.transport.close()
        elif self.phase is Phase.HEADERS:
            self.refuse("header_s", HttpError(408, f"the headers took longer than {limits.header_s:g} s"))
        elif not self._deaf:
            self.refuse("body_s", HttpError(408, f"the body took longer than {limits.body_s:g} s"))

    def drop(self) -> None:
        if self.phase is Phase.BODY and not self._deaf:
            self.cycle.fail(UnavailableError("too many clients are connected (limits.connections)"))
            self._deaf = True
            self._release_body()
        else:
            self.abort()

    def shutdown(self) -> None:
        if self.transport is None:
            self.abort()
        elif self.phase in (Phase.IDLE, Phase.HEADERS):
            self.transport.close()
        elif self.phase is not Phase.LINGER and not self.pipeline:
            self.cycle.keep_alive = False

    def end(self) -> None:
        self.pipeline.clear()
        self.shutdown()

    def _linger(self) -> None:
        self._deaf = True
        self._release_body()
        self._traffic.enter(self, Phase.LINGER)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def abort(self) -> None:
        self._traffic.leave(self)
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.task.cancel()
            self.opening.accepted.close()  # the task may not have begun
        else:
            self._given_up = True

    def _release_body(self) -> None:
        self._traffic.body_bytes -= self.body_bytes
        self.body_bytes = 0
