"""`python -m benchmarks.paced_server --port P`: a fake server of OpenAI's API that keeps a set pace.

It computes nothing. A token is four characters of the rendered messages; each word of an answer, with its space, is
four characters. Sixteen tokens are a block, and blocks are kept until they are the least recently used, as a server
with prefix caching keeps its own. A prompt takes `prefill_us` for each token that is not cached, one prompt after
another. Then all running answers get a token each every `token_ms`. Of itself it tells what a vLLM server tells.

`/v1/chat/completions/render`, `/v1/completions/render` and `/tokenize` tell the tokens of a prompt, for routers that
ask for them; a vLLM server does so if it is told to.

`POST /fault` replaces the faults that are set; `{}` ends them all. Counts are of the next answers:
`{"fail": 2, "status": 500, "hang": 1, "cut": 1, "after": 3, "slow_s": 4}` refuses two with status 500, leaves one
without an answer, breaks one off after 3 tokens, and makes each wait 4 seconds first. Failures come before hangs, and
those before cuts. `POST /reset_prefix_cache` forgets all blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import zlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec
import uvloop

TOKEN_CHARS = 4
BLOCK_TOKENS = 16
DEFAULT_TOKENS = 16
"""Of an answer that says no limit, as in OpenAI's completions."""
WORDS = [f" {word}" for word in "ark bay cob den elm fir gem hut ivy jar key log map net oak pit".split()]


@dataclass(frozen=True)
class Pace:
    """How quick the server is, and how much it keeps."""

    blocks: int = 384
    token_ms: float = 5.0
    prefill_us: float = 100.0
    delay_s: float = 0.0
    model: str = "paced"
    max_model_len: int = 131_072


class Blocks:
    """Names of cached blocks in the order of their last use."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def matched(self, names: Sequence[int]) -> int:
        """So many blocks at the beginning of a prompt are cached. Changes nothing."""
        return next((at for at, name in enumerate(names) if name not in self._kept), len(names))

    def use(self, names: Sequence[int]) -> None:
        """Keeps these blocks as the most recently used; the end of a prompt goes before its beginning."""
        for name in reversed(names):
            self._kept[name] = None
            self._kept.move_to_end(name)
        while len(self._kept) > self.limit:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()


def named(text: str | Sequence[int]) -> list[int]:
    """Names of the full blocks of a prompt. Each depends on all blocks before it."""
    size = BLOCK_TOKENS * (TOKEN_CHARS if isinstance(text, str) else 1)
    names, parent = [], 0
    for start in range(0, len(text) - size + 1, size):
        part = text[start : start + size]
        parent = hash((parent, part if isinstance(part, str) else tuple(part)))
        names.append(parent)
    return names


def length_of(text: str | Sequence[int]) -> int:
    """Tokens of a prompt."""
    return -(-len(text) // TOKEN_CHARS) if isinstance(text, str) else len(text)


def tokens_of(text: str | Sequence[int]) -> list[int]:
    """Tokens of a prompt, by number."""
    if not isinstance(text, str):
        return list(text)
    data = text.encode("utf-32-le")
    return [
        zlib.crc32(data[at : at + 4 * TOKEN_CHARS]) & 0x1FFFF for at in range(0, len(data), 4 * TOKEN_CHARS)
    ]


def rendered(messages: Sequence[dict[str, Any]]) -> str:
    """The prompt of a chat, which begins with the prompts and answers of its earlier turns."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        parts.append(f"<|{message['role']}|>\n{content}\n")
    return "".join(parts) + "<|assistant|>\n"


@dataclass
class Faults:
    """What goes wrong next; `POST /fault` sets it."""

    fail: int = 0
    status: int = 500
    hang: int = 0
    cut: int = 0
    after: int = 0
    slow_s: float = 0.0

    def took(self, name: str) -> bool:
        """Whether one of these is left; then it is one less."""
        left = getattr(self, name)
        setattr(self, name, max(0, left - 1))
        return left > 0


@dataclass(eq=False)
class Answer:
    """One answer that is asked for. `cut`: the tokens after which it breaks off."""

    connection: Connection
    is_chat: bool
    is_stream: bool
    has_usage: bool
    text: str | Sequence[int]
    limit: int
    cut: int | None = None
    cached: int = 0
    said: list[str] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    head: bytes = b""
    seed: int = 0
    timer: asyncio.TimerHandle | None = None


class Server:
    """Prompts that wait, the one that is computed, and the answers that run."""

    def __init__(self, pace: Pace) -> None:
        self.pace, self.blocks, self.faults = pace, Blocks(pace.blocks), Faults(slow_s=pace.delay_s)
        self.loop = asyncio.get_running_loop()
        self.connections: dict[Connection, None] = {}
        self.waiting: deque[Answer] = deque()
        self.prefilling: Answer | None = None
        self.running: dict[Answer, None] = {}
        self.delayed: dict[Answer, None] = {}
        self.counts = dict.fromkeys(("prompt_tokens", "hits", "answered", "aborted", "generation_tokens"), 0)
        self._ids = itertools.count()
        self._free_at = self._next_at = 0.0
        self._is_ticking = False

    # Facts.

    def metrics(self) -> str:
        pace, label = self.pace, f'{{engine="0",model_name="{self.pace.model}"}}'
        active = [*self.running, *([self.prefilling] if self.prefilling else [])]
        used = sum([-(-(length_of(each.text) + len(each.said)) // BLOCK_TOKENS) for each in active])
        lines = [
            f"vllm:num_requests_running{label} {len(active)}",
            f"vllm:num_requests_waiting{label} {len(self.waiting)}",
            f"vllm:kv_cache_usage_perc{label} {min(1.0, used / pace.blocks):.6f}",
            f"vllm:prefix_cache_queries_total{label} {self.counts['prompt_tokens']}",
            f"vllm:prefix_cache_hits_total{label} {self.counts['hits']}",
            f"vllm:prompt_tokens_total{label} {self.counts['prompt_tokens']}",
            f"vllm:generation_tokens_total{label} {self.counts['generation_tokens']}",
            f"vllm:request_success_total{label} {self.counts['answered']}",
            f"vllm:request_aborted_total{label} {self.counts['aborted']}",
            f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",enable_prefix_caching="True",engine="0",'
            f'num_gpu_blocks="{pace.blocks}"}} 1',
        ]
        kinds = [f"# TYPE {line.partition('{')[0]} gauge" for line in lines]
        return "".join(f"{kind}\n{line}\n" for kind, line in zip(kinds, lines, strict=True))

    # Answers.

    def ask(self, answer: Answer) -> None:
        """Takes an answer in; it comes in its time, or is a fault."""
        faults = self.faults
        if faults.took("fail"):
            answer.connection.error(faults.status, "a fault that was asked for")
            return
        if faults.took("hang"):
            return
        answer.cut = faults.after if faults.took("cut") else None
        if faults.slow_s:
            self.delayed[answer] = None
            answer.timer = self.loop.call_later(faults.slow_s, self._queue, answer)
        else:
            self._queue(answer)

    def drop(self, answer: Answer) -> None:
        """Its client has gone."""
        if answer.timer is not None and answer is not self.prefilling:
            answer.timer.cancel()
        known = answer in self.waiting or answer in self.running or answer in self.delayed
        if known or answer is self.prefilling:
            self.counts["aborted"] += 1
        if answer in self.waiting:
            self.waiting.remove(answer)
        self.running.pop(answer, None)
        self.delayed.pop(answer, None)

    def _queue(self, answer: Answer) -> None:
        self.delayed.pop(answer, None)
        self.waiting.append(answer)
        if self.prefilling is None:
            self._prefill()

    def _prefill(self) -> None:
        """Begins with the next prompt; the last token of a prompt is always computed."""
        while self.waiting and self.prefilling is None:
            answer = self.prefilling = self.waiting.popleft()
            answer.names = named(answer.text)
            tokens = length_of(answer.text)
            reusable = answer.names[: (tokens - 1) // BLOCK_TOKENS]
            matched = self.blocks.matched(reusable)
            answer.cached = matched * BLOCK_TOKENS
            self.blocks.use(reusable[:matched])
            self.counts["prompt_tokens"] += tokens
            self.counts["hits"] += answer.cached
            now = self.loop.time()
            self._free_at = max(now, self._free_at) + (tokens - answer.cached) * self.pace.prefill_us / 1e6
            if self._free_at - now < 0.0005:  # the loop's timers know milliseconds
                self._prefilled(answer)
            else:
                answer.timer = self.loop.call_at(self._free_at, self._computed, answer)

    def _computed(self, answer: Answer) -> None:
        self._prefilled(answer)
        self._prefill()

    def _prefilled(self, answer: Answer) -> None:
        self.prefilling = None
        self.blocks.use(answer.names)
        if answer.connection.answer is not answer:
            return  # its client has gone meanwhile
        text = answer.text if isinstance(answer.text, str) else repr(answer.text)
        answer.seed = zlib.crc32(text.encode())
        answer.connection.begin(answer, next(self._ids))
        self.running[answer] = None
        self._token(answer)
        if self.running and not self._is_ticking:
            self._is_ticking = True
            self._next_at = self.loop.time()
            self._later()

    def _later(self) -> None:
        """Sets the next step of all running answers, by the clock and not by when the last one was done."""
        self._next_at = max(self._next_at + self.pace.token_ms / 1e3, self.loop.time())
        self.loop.call_at(self._next_at, self._step)

    def _step(self) -> None:
        for answer in list(self.running):
            self._token(answer)
        if self.running:
            self._later()
        else:
            self._is_ticking = False

    def _token(self, answer: Answer) -> None:
        answer.seed = (answer.seed * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        answer.said.append(WORDS[answer.seed >> 16 & 15])
        self.counts["generation_tokens"] += 1
        is_last = len(answer.said) >= answer.limit
        is_cut = answer.cut is not None and len(answer.said) > answer.cut
        if is_cut or is_last:
            self.running.pop(answer, None)
        if is_cut:
            answer.connection.cut()
            return
        if is_last:
            self.counts["answered"] += 1
            if isinstance(answer.text, str):
                self.blocks.use(named(answer.text + "".join(answer.said)))
        answer.connection.token(answer, is_last)


class Connection(asyncio.Protocol):
    """One client's connection: reads requests, answers them one after another."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.answer: Answer | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", [b""]
        self._requests: deque[tuple[str, str, bytes]] = deque()
        self._is_busy = self._is_last = False

    # The transport's and the parser's calls.

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server.connections[self] = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.server.connections.pop(self, None)
        answer, self.answer = self.answer, None
        if answer is not None:
            self.server.drop(answer)

    def on_message_begin(self) -> None:
        self._url, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._is_last = not self._parser.should_keep_alive()
        path = self._url.decode("latin1").partition("?")[0]
        self._requests.append((self._parser.get_method().decode(), path, b"".join(self._body)))
        self._next()

    # Answers.

    def _next(self) -> None:
        if self._requests and not self._is_busy:
            self._is_busy = True
            self._handle(*self._requests.popleft())

    def _handle(self, method: str, path: str, body: bytes) -> None:
        server, pace = self.server, self.server.pace
        if method == "GET" and path == "/v1/models":
            card = {"id": pace.model, "object": "model", "created": 0, "owned_by": "vllm", "root": pace.model}
            self.json({"object": "list", "data": [card | {"max_model_len": pace.max_model_len}]})
        elif method == "GET" and path in ("/health", "/ping"):
            self.json({})
        elif method == "GET" and path == "/version":
            self.json({"version": "0.0.0-paced"})
        elif method == "GET" and path == "/metrics":
            self.write(200, server.metrics().encode(), "text/plain; version=0.0.4")
        elif method == "POST" and path == "/reset_prefix_cache":
            server.blocks.clear()
            self.json({})
        elif method == "POST" and path in POSTS:
            try:
                POSTS[path](self, msgspec.json.decode(body or b"{}"))
            except (msgspec.DecodeError, TypeError, KeyError, AttributeError, ValueError) as error:
                self.error(400, f"bad request: {error!r}")
        else:
            self.error(404, f"{method} {path} is not here")

    def _fault(self, fields: dict[str, Any]) -> None:
        self.server.faults = Faults(**fields)
        self.json(fields)

    def _render(self, fields: dict[str, Any]) -> None:
        self.json({"request_id": "render-0", "token_ids": tokens_of(_prompt(fields)), "sampling_params": {}})

    def _tokenize(self, fields: dict[str, Any]) -> None:
        tokens = tokens_of(_prompt(fields))
        self.json({"count": len(tokens), "max_model_len": self.server.pace.max_model_len, "tokens": tokens})

    def _chat(self, fields: dict[str, Any]) -> None:
        self._ask(fields, is_chat=True)

    def _complete(self, fields: dict[str, Any]) -> None:
        self._ask(fields, is_chat=False)

    def _ask(self, fields: dict[str, Any], *, is_chat: bool) -> None:
        pace = self.server.pace
        if fields.get("model", pace.model) != pace.model:
            self.error(404, f"the model {fields['model']} does not exist")
            return
        text = _prompt(fields)
        limit = fields.get("max_completion_tokens") or fields.get("max_tokens") or DEFAULT_TOKENS
        tokens = length_of(text)
        if tokens + limit > pace.max_model_len:
            self.error(
                400, f"maximum context length is {pace.max_model_len} tokens, {tokens + limit} are asked for"
            )
            return
        stream = bool(fields.get("stream"))
        has_usage = not stream or bool((fields.get("stream_options") or {}).get("include_usage"))
        self.answer = Answer(self, is_chat, stream, has_usage, text, int(limit))
        self.server.ask(self.answer)

    def begin(self, answer: Answer, number: int) -> None:
        """The beginning of each part of an answer, which is the same in all."""
        kind = "chat.completion" if answer.is_chat else "text_completion"
        kind += ".chunk" if answer.is_chat and answer.is_stream else ""
        name = f"{'chatcmpl' if answer.is_chat else 'cmpl'}-{number}"
        model = self.server.pace.model
        fields = f'{{"id":"{name}","object":"{kind}","created":0,"model":"{model}","choices":['
        answer.head = fields.encode()
        if answer.is_stream:
            first = (
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            if answer.is_chat:
                role = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                first += _chunk(b"data: " + answer.head + role + b"]}\n\n")
            self.transport.write(first)

    def token(self, answer: Answer, is_last: bool) -> None:
        """Tells of the token that was just said; an answer that is no stream comes with its last one."""
        usage = b""
        if is_last and answer.has_usage:
            usage = b',"usage":' + msgspec.json.encode(_usage(answer))
        if answer.is_stream:
            self._stream_token(answer, is_last, usage)
        elif is_last:
            content = "".join(answer.said)
            choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
            choice |= (
                {"message": {"role": "assistant", "content": content}} if answer.is_chat else {"text": content}
            )
            self.write(200, answer.head + msgspec.json.encode(choice) + b"]" + usage + b"}", "application/json")

    def _stream_token(self, answer: Answer, is_last: bool, usage: bytes) -> None:
        said = answer.said[-1].encode()
        said = b'"delta":{"content":"%s"}' % said if answer.is_chat else b'"text":"%s"' % said
        reason = b'"length"' if is_last else b"null"
        choice = b'{"index":0,%s,"logprobs":null,"finish_reason":%s}' % (said, reason)
        out = b"data: " + answer.head + choice + b"]}\n\n"
        if not is_last:
            self.transport.write(_chunk(out))
            return
        if usage:
            out += b"data: " + answer.head + b"]" + usage + b"}\n\n"
        self.transport.write(_chunk(out + b"data: [DONE]\n\n") + b"0\r\n\r\n")
        self._done()

    def cut(self) -> None:
        self.answer = None
        self.transport.close()

    def error(self, status: int, message: str) -> None:
        self.json({"error": {"message": message, "type": "paced", "code": status}}, status)

    def json(self, value: Any, status: int = 200) -> None:
        self.write(status, msgspec.json.encode(value), "application/json")

    def write(self, status: int, body: bytes, kind: str) -> None:
        head = f"HTTP/1.1 {status} paced\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._done()

    def _done(self) -> None:
        self.answer, self._is_busy = None, False
        if self._is_last and not self._requests:
            self.transport.close()
        self._next()


POSTS: dict[str, Callable[[Connection, dict[str, Any]], None]] = {
    "/fault": Connection._fault,
    "/tokenize": Connection._tokenize,
    "/v1/chat/completions": Connection._chat,
    "/v1/chat/completions/render": Connection._render,
    "/v1/completions": Connection._complete,
    "/v1/completions/render": Connection._render,
}


def _prompt(fields: dict[str, Any]) -> str | list[int]:
    if "messages" in fields:
        return rendered(fields["messages"])
    text = fields["prompt"]
    if isinstance(text, list) and text and not isinstance(text[0], int):
        (text,) = text
    return text


def _usage(answer: Answer) -> dict[str, Any]:
    prompt, said = length_of(answer.text), len(answer.said)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": answer.cached},
    }


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


@asynccontextmanager
async def listening(pace: Pace, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Yields the server's URL; in the end it closes the connections that are left."""
    server = Server(pace)
    listener = await asyncio.get_running_loop().create_server(lambda: Connection(server), host, port)
    try:
        yield f"http://{host}:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for connection in list(server.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # they end in the loop's next round


async def _serve(pace: Pace, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with listening(pace, port, host) as url:
        print(f"paced at {url}", flush=True)
        await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=Pace.blocks, help="of 16 tokens, that are kept")
    parser.add_argument("--token-ms", type=float, default=Pace.token_ms)
    parser.add_argument("--prefill-us", type=float, default=Pace.prefill_us, help="for each uncached token")
    parser.add_argument("--delay-s", type=float, default=Pace.delay_s, help="before each prompt")
    parser.add_argument("--model", default=Pace.model)
    parser.add_argument("--max-model-len", type=int, default=Pace.max_model_len)
    given = vars(parser.parse_args())
    host, port = given.pop("host"), given.pop("port")
    uvloop.run(_serve(Pace(**given), host, port))


if __name__ == "__main__":
    main()
