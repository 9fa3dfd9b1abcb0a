"""A light client of OpenAI's chat completions, for a load that shares few cores with what it measures.

It owns its connections, one for each answer under way, and stamps when the first text comes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

Message = dict[str, str]
LIMIT_S = 60.0


@dataclass
class Reply:
    """One answer. `ttft_s`: until the first text of a stream, or the whole of an answer that is no stream; `error`:
    empty if it came in full."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class _Connection(asyncio.Protocol):
    """One connection; answers come one after another."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.ended: asyncio.Future[None] | None = None
        self.is_open, self.is_kept = True, True
        self._begin()

    def _begin(self) -> None:
        self.body, self.first_at, self.is_stream = bytearray(), 0.0, False

    def ask(self, request: bytes) -> asyncio.Future[None]:
        self._begin()
        self.ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.ended

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end(ConnectionError("the connection was closed"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.is_stream = value.startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        self.body += data
        if not self.first_at and (not self.is_stream or _has_text(self.body)):
            self.first_at = time.perf_counter()

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.is_kept = self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self.ended is None or self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def _has_text(body: bytearray) -> bool:
    """Whether a chunk has content that is not empty; servers and routers write JSON with and without spaces."""
    at = 0
    while (at := body.find(b'"content":', at)) >= 0:
        at += 10
        start = body[at : at + 3].lstrip()
        if start[:1] == b'"' and start[1:2] not in (b'"', b""):
            return True
    return False


@dataclass
class Client:
    """Asks one server; as many connections as answers under way, kept for later ones."""

    url: str
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields that each request has as well."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        more = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            f"content-type: application/json\r\n{more}content-length: "
        ).encode()
        self._free: list[_Connection] = []

    async def close(self) -> None:
        """Ends the connections that are kept."""
        for each in self._free:
            each.transport.close()
        self._free.clear()
        await asyncio.sleep(0)  # they end in the loop's next round

    async def ask(self, messages: Sequence[Message], max_tokens: int, *, stream: bool = True) -> Reply:
        """One chat. An error, of the connection too, is in the reply."""
        fields: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": max_tokens}
        fields |= self.extra
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        body = msgspec.json.encode(fields)
        begin = time.perf_counter()
        connection = None
        try:
            async with asyncio.timeout(LIMIT_S):
                connection = await self._connection()
                await connection.ask(self._head + b"%d\r\n\r\n" % len(body) + body)
        except (OSError, TimeoutError) as error:
            if connection is not None:
                connection.transport.close()
            return Reply(total_s=time.perf_counter() - begin, error=f"{type(error).__name__} {error}".strip())
        if connection.is_kept and connection.is_open:
            self._free.append(connection)
        else:
            connection.transport.close()
        if connection.status != 200:
            said = bytes(connection.body[:200]).decode(errors="replace")
            return Reply(error=f"status {connection.status}: {said}")
        reply = _streamed(connection.body) if connection.is_stream else _whole(connection.body)
        reply.ttft_s, reply.total_s = connection.first_at - begin, time.perf_counter() - begin
        return reply

    async def _connection(self) -> _Connection:
        while self._free:
            found = self._free.pop()
            if found.is_open:
                return found
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(_Connection, self._host, self._port))[1]


def _streamed(body: bytearray) -> Reply:
    reply, said = Reply(error="the stream has no end"), []
    for line in body.split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            reply.error = ""
            continue
        event = msgspec.json.decode(data)
        if "error" in event:
            reply.error = f"in the stream: {event['error']}"
            break
        said += [each["delta"].get("content") or "" for each in event.get("choices") or ()]
        _count(reply, event.get("usage"))
    reply.text = "".join(said)
    return reply


def _whole(body: bytearray) -> Reply:
    answer = msgspec.json.decode(body)
    reply = Reply(text=answer["choices"][0]["message"]["content"])
    _count(reply, answer.get("usage"))
    return reply


def _count(reply: Reply, usage: dict[str, Any] | None) -> None:
    if usage:
        reply.prompt_tokens = usage["prompt_tokens"]
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
