"""HTTP client of a vLLM server (0.32): attempts as requests to `/v1/completions`, with token ids in both directions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import aiohttp
import msgspec

from isthmus.core.types import FinishReason, Sampling, TokenLogprobs

MODEL = "isthmus"
"""Model name of servers that are started here."""
SEED_STEP = 0x9E3779B97F4A7C15
MAX_ALLOWED, MAX_BIASES, MAX_STOPS = 1024, 1024, 128
"""Limits above which vLLM 0.32's worker dies (`v1/worker/gpu/sample/logit_bias.py`); its API does not check them."""
_READ_BYTES = 1 << 16
_QUICK = aiohttp.ClientTimeout(total=5)
"""For requests that a healthy server answers at once."""


class EngineError(Exception):
    """A server did not answer, or answered with an error. `final`: another server would fail the same way."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class _CompletionChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    """A whole answer, or a chunk of a streamed one."""

    choices: list[_CompletionChoice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return details.cached_tokens if details is not None else None


class Token(msgspec.Struct, frozen=True):
    """A token of an answer. The last one has a `finish` reason and `cached_tokens`."""

    token: int
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    cached_tokens: int | None = None


class Computed(msgspec.Struct, frozen=True):
    """A prompt computed for another server. `params`: where its KV is, if this server keeps it."""

    cached_tokens: int
    params: dict[str, Any] | None


_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(_Answer).decode


def objection(sampling: Sampling) -> str:
    """Returns why vLLM cannot compute an attempt, "" if it can."""
    if sampling.prompt_logprobs is not None:
        return "vLLM nodes do not score prompts: leave prompt_logprobs out"
    if sampling.bad_words:
        return "vLLM nodes take no bad_words"
    # vLLM goes on with any token where its masks leave none: the grammar's and one of these.
    if sampling.grammar and sampling.allowed_tokens:
        return "vLLM nodes take no allowed_token_ids beside a grammar (response_format, forced tools)"
    if sampling.grammar and sampling.min_tokens:
        return "vLLM nodes take no min_tokens beside a grammar (response_format, forced tools)"
    if len(sampling.allowed_tokens) > MAX_ALLOWED:
        return f"vLLM nodes take {MAX_ALLOWED} allowed_token_ids at most"
    if len(sampling.logit_bias) > MAX_BIASES:
        return f"vLLM nodes take a logit_bias of {MAX_BIASES} tokens at most"
    if sampling.min_tokens and len(sampling.stop_tokens) > MAX_STOPS:
        return f"vLLM nodes take {MAX_STOPS} stop tokens at most beside min_tokens"
    return ""


def starts_over(sampling: Sampling) -> bool:
    """Whether an answer that another server began is drawn from its first token again: vLLM follows grammars, and
    counts tokens for penalties, from the end of the prompt that it is given."""
    return bool(sampling.grammar or sampling.presence_penalty or sampling.frequency_penalty)


def body_of(sampling: Sampling, tokens: Sequence[int], num_prompt: int, max_tokens: int) -> dict[str, Any]:
    """Returns the body of a request, with all fields: vLLM would take missing ones from the model's folder. `tokens`:
    of the prompt and of the answer so far."""
    num_generated = len(tokens) - num_prompt
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": list(tokens),
        "max_tokens": max_tokens,
        "min_tokens": max(0, min(max_tokens, sampling.min_tokens - num_generated)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        # The draw for a token depends on (seed, its number) alone; vLLM's on how many it drew before.
        "seed": (sampling.seed + num_generated * SEED_STEP) % (1 << 63),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": [],
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": True,  # the gateway has put end tokens into `stop_token_ids`
        "add_special_tokens": False,
        "return_token_ids": True,
    }
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.allowed_tokens:
        body["allowed_token_ids"] = list(sampling.allowed_tokens)
    if sampling.grammar:
        # The directive says whose Lark it is: XGrammar, which reads some of it otherwise, refuses it, and vLLM's back
        # end "auto" then takes llguidance. A grammar's end is an end token, also for requests that ignore those.
        body |= {
            "structured_outputs": {"grammar": f"%llguidance {{}}\n{sampling.grammar}"},
            "ignore_eos": False,
        }
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    return body


class Client:
    """Client of the server at `url`, in an event loop. `model`: its name there; `key`: API key, if it requires one."""

    def __init__(self, url: str, model: str = MODEL, key: str | None = None) -> None:
        self.url, self.model = url, model
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            read_bufsize=_READ_BYTES,
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )

    async def close(self) -> None:
        await self._session.close()

    async def compute(self, key: str, body: dict[str, Any]) -> Computed:
        """Computes a prompt, unstreamed: only a whole answer tells where its KV is. Raises EngineError."""
        body = body | {"max_tokens": 1, "min_tokens": 0, "structured_outputs": None, "stream": False}
        async with _speaking("the session with vLLM broke: "), self._post(key, body) as response:
            await _check(response)
            answer = _read(await response.read())
        return Computed(answer.cached_tokens or 0, answer.kv_transfer_params)

    async def answer(
        self, key: str, body: dict[str, Any], num_top: int | None
    ) -> AsyncGenerator[list[Token], None]:
        """Yields tokens as they come. Closing the generator ends the request in the server. Raises EngineError."""
        held: Token | None = None
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with _speaking("the session with vLLM broke: "), self._post(key, body) as response:
            await _check(response)
            async for data in _lines(response.content):
                if data == b"[DONE]":
                    break
                chunk = _read(data)
                if chunk.choices and chunk.choices[0].token_ids:
                    found = _tokens(chunk.choices[0], num_top)
                    if found[-1].finish is not None:
                        held = found.pop()
                    if found:
                        yield found
                if held is not None and chunk.cached_tokens is not None:
                    held = msgspec.structs.replace(held, cached_tokens=chunk.cached_tokens)
        if held is None:
            raise EngineError("vLLM ended the answer without a reason")
        yield [held]

    async def release(self, params: dict[str, Any]) -> None:
        """Releases KV that another server keeps, as `params` say: for a request that cannot be served, this server
        tells that one so. Raises EngineError if this server is not reached."""
        body = {"model": "none", "prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
        async with _speaking(), self._session.post(f"{self.url}/v1/completions", json=body) as response:
            await response.read()

    async def get(self, path: str) -> bytes:
        """Returns the body of a quick GET. Raises EngineError."""
        async with _speaking(), self._session.get(self.url + path, timeout=_QUICK) as response:
            await _check(response)
            return await response.read()

    def _post(self, key: str, body: dict[str, Any]) -> Any:
        return self._session.post(
            f"{self.url}/v1/completions",
            data=_encode(body | {"model": self.model}),
            headers={"Content-Type": "application/json", "X-Request-Id": key},
        )


@contextlib.asynccontextmanager
async def _speaking(prefix: str = "") -> AsyncIterator[None]:
    """Turns connection errors into EngineError."""
    try:
        yield
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise EngineError(prefix + (str(error) or type(error).__name__)) from None


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields the data of server-sent events."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _read(data: bytes) -> _Answer:
    try:
        answer = _decode(data)
    except msgspec.DecodeError as error:
        raise EngineError(f"vLLM answered what cannot be read: {error}") from None
    if answer.error is not None:
        raise EngineError(f"vLLM: {answer.error.get('message', '')}")
    return answer


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = (await response.read()).decode("utf8", "replace")
    try:
        found = json.loads(text)
        message = str(found.get("error", found).get("message", text)) if isinstance(found, dict) else text
    except (ValueError, AttributeError):
        message = text
    raise EngineError(f"vLLM: {message[:500]} (HTTP {response.status})", final=response.status in (400, 422))


def _tokens(choice: _CompletionChoice, num_top: int | None) -> list[Token]:
    assert choice.token_ids is not None
    found = [Token(token, _logprobs(choice.logprobs, at, num_top)) for at, token in enumerate(choice.token_ids)]
    if choice.finish_reason is not None:
        if choice.finish_reason not in tuple(FinishReason):
            raise EngineError(f"vLLM ended the answer: {choice.finish_reason}")
        found[-1] = msgspec.structs.replace(found[-1], finish=FinishReason(choice.finish_reason))
    return found


def _logprobs(given: _Logprobs | None, at: int, num_top: int | None) -> TokenLogprobs | None:
    if given is None or num_top is None or at >= len(given.token_logprobs):
        return None
    chosen, top = given.token_logprobs[at], given.top_logprobs[at] if given.top_logprobs else None
    ranked = sorted((top or {}).items(), key=lambda pair: -pair[1])[:num_top]
    named = tuple([(int(name.removeprefix("token_id:")), value) for name, value in ranked])
    return TokenLogprobs(chosen if chosen is not None else float("-inf"), named)
