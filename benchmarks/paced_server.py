"""`python -m benchmarks.paced_server --port P`: a fake server of OpenAI's API that keeps a set pace.

It computes nothing. A token is four characters of the rendered messages; each word of an answer, with its space, is
four characters, and follows from all the text before it. Sixteen tokens are a block, and blocks are kept until they are
the least recently used, as a server with prefix caching keeps its own. A prompt takes `prefill_us` for each token that
is not cached, one prompt after another. Then all running answers get a token each every `token_ms`. Of itself it tells
what a vLLM server tells, and the ids of tokens with `return_token_ids`.

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
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httptools
import msgspec
import uvloop

from benchmarks.paced import Answer, Faults, Pace, Server, length_of, rendered, text_of, tokens_of

DEFAULT_TOKENS = 16
"""Of an answer that says no limit, as in OpenAI's completions."""


class Connection(asyncio.Protocol):
    """One client's connection: reads requests, answers them one after another."""

    def __init__(self, server: Server, open_ones: dict[Connection, None]) -> None:
        """`open_ones`: the connections of its server, which it joins and leaves."""
        self.server, self._open = server, open_ones
        self.answer: Answer | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", [b""]
        self._requests: deque[tuple[str, str, bytes]] = deque()
        self._is_busy = self._is_last = False

    # The transport's and the parser's calls.

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._open[self] = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._open.pop(self, None)
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
            except (
                msgspec.DecodeError,
                TypeError,
                KeyError,
                AttributeError,
                ValueError,
                OverflowError,
            ) as error:
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
        has_ids = bool(fields.get("return_token_ids"))
        self.answer = Answer(self, is_chat, stream, has_usage, has_ids, text, int(limit))
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
                first += _chunk(b"data: " + answer.head + role + b"]" + _ids(answer, prompt=True) + b"}\n\n")
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
            if answer.has_ids:
                choice["token_ids"] = tokens_of(content)
            out = answer.head + msgspec.json.encode(choice) + b"]" + usage + b"}"
            self.write(200, out, "application/json")

    def _stream_token(self, answer: Answer, is_last: bool, usage: bytes) -> None:
        said = answer.said[-1].encode()
        said = b'"delta":{"content":"%s"}' % said if answer.is_chat else b'"text":"%s"' % said
        reason = b'"length"' if is_last else b"null"
        ids = _ids(answer, prompt=False)
        if not answer.is_chat and len(answer.said) == 1:
            ids += _ids(answer, prompt=True)
        choice = b'{"index":0,%s,"logprobs":null,"finish_reason":%s%s}' % (said, reason, ids)
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


def _prompt(fields: dict[str, Any]) -> str:
    if "messages" in fields:
        return rendered(fields["messages"])
    text = fields["prompt"]
    if isinstance(text, list) and text and not isinstance(text[0], int):
        (text,) = text
    return text if isinstance(text, str) else text_of(text)


def _ids(answer: Answer, *, prompt: bool) -> bytes:
    """The field of the prompt's tokens, or of the last one of the answer, if they are asked for."""
    if not answer.has_ids:
        return b""
    name = b"prompt_token_ids" if prompt else b"token_ids"
    ids = msgspec.json.encode(tokens_of(answer.text if prompt else answer.said[-1]))
    return b',"%s":%s' % (name, ids)


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
    server, open_ones = Server(pace), dict[Connection, None]()
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Connection(server, open_ones), host, port)
    try:
        yield f"http://{host}:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for connection in list(open_ones):
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
