"""An OpenAI-compatible server in the event loop of a test: answers as the test says, and keeps what was asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import count
from typing import Any

WORDS = ["one ", "two ", "three ", "four"]
METRICS = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="64"} 1.0\n'


class FakeServer:
    """Speaks HTTP/1.1 by hand, so that it can die as a process does.

    `fault`: "" or `error` (HTTP 500), `hang` (no answer to anything), `mute` (none to requests for answers), `cut` (the
    connection breaks off after the second word); `gate`: unset, answers wait for it after their first word, and errors
    before it; `pages`: what other paths, or these, are answered with: status line, headers, and chunks of the body;
    `num_stale`: so many of the next requests over connections that were used before find them closed.
    """

    def __init__(self, *models: str, metrics: str = METRICS) -> None:
        self.models, self.metrics, self.fault = models or ("m",), metrics, ""
        self.entries: dict[str, dict[str, Any]] = {}
        """More that `/v1/models` says of each."""
        self.sources: dict[str, Any] = {}
        """Answer of `/kv_event_sources`."""
        self.tokens: dict[str, tuple[int, ...]] = {}
        """Of `/tokenize`: tokens of any `prompt`, and of any `messages`."""
        self.pages: dict[str, tuple[str, str, list[bytes]]] = {}
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_stale = 0
        self.num_left = 0
        """Requests whose client left before their answer was whole."""
        self.port = 0
        self._server: asyncio.Server | None = None
        self._talking: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[bytes]:
        """Bodies of the requests for answers."""
        return [body for method, _, _, body in self.asked if method == "POST"]

    async def start(self) -> None:
        """Listens on a free port, or again on its own."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Dies: every connection breaks off, and new ones are refused."""
        assert self._server is not None
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(
            5
        ):  # what asyncio has accepted it would leave open for ever, if nobody listened any more
            await asyncio.sleep(0)
        self._server.close()
        talking, self._talking = self._talking, {}
        for task, writer in talking.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._talk(reader, writer))
        self._talking[task] = writer
        task.add_done_callback(lambda task: self._talking.pop(task, None))

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for number in count():
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = dict(line.split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("Content-Length", 0)))
                if number and method == "POST" and self.num_stale:
                    self.num_stale -= 1
                    break
                answering = asyncio.create_task(self._answer(writer, method, target, headers, body))
                leaving = asyncio.create_task(reader.read(1))  # nothing comes before the answer but an end
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                has_left = not answering.done()
                answering.cancel()
                leaving.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)
                if has_left:
                    self.num_left += 1
                    break
                answering.result()
        writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> None:
        if self.fault == "hang":
            await asyncio.Event().wait()
        if target in self.pages:
            if method == "POST":
                self.asked.append((method, target, headers, body))
            status, more, chunks = self.pages[target]
            writer.write(f"HTTP/1.1 {status}\r\n{more}Transfer-Encoding: chunked\r\n\r\n".encode())
            for chunk in chunks:
                _chunk(writer, chunk)
            return writer.write(b"0\r\n\r\n")
        match target:
            case "/v1/models":
                listed = [{"id": name, "own": 1, **self.entries.get(name, {})} for name in self.models]
                return answer_whole(writer, json.dumps({"object": "list", "data": listed}).encode())
            case "/kv_event_sources":
                return answer_whole(writer, json.dumps(self.sources).encode())
            case "/metrics":
                return answer_whole(writer, self.metrics.encode())
            case "/tokenize":
                kind = "messages" if "messages" in json.loads(body) else "prompt"
                return answer_whole(writer, json.dumps({"tokens": self.tokens.get(kind, ())}).encode())
            case "/health":
                return answer_whole(writer, b"")
        self.asked.append((method, target, headers, body))
        if self.fault == "mute":
            await asyncio.Event().wait()
        if self.fault == "error":
            await self.gate.wait()
            return answer_whole(writer, b'{"error": {"message": "%s is ill"}}' % self.url.encode(), "500 Error")
        if b"wrong" in body:
            return answer_whole(writer, b'{"error": {"message": "no such field"}}', "422 Unprocessable")
        asked = json.loads(body) if body else {}
        if not asked.get("stream"):
            await self.gate.wait()
            return answer_whole(writer, json.dumps({"vendor": 1, **asked}).encode(), more="X-Vendor: kept\r\n")
        return await self._say(writer, target, asked)

    async def _say(self, writer: asyncio.StreamWriter, target: str, asked: dict[str, Any]) -> None:
        """Streams an answer."""
        kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n\r\n")
        for at, word in enumerate(WORDS):
            _chunk(writer, event({"choices": [{"index": 0, "delta": {"content": word}}]}))
            await writer.drain()
            if at == 1 and self.fault == "cut":
                return writer.close()
            await self.gate.wait()
        usage = {"prompt_tokens": 40, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 32}}
        _chunk(writer, event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return None


def answer_whole(writer: asyncio.StreamWriter, body: bytes, status: str = "200 OK", *, more: str = "") -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


WHOLE = b"".join(event({"choices": [{"index": 0, "delta": {"content": word}}]}) for word in WORDS)
"""The events of a whole answer, without its usage."""
