"""Prepares each body: in this process if it is small and asks for no grammar, else in a sandboxed worker, so that
other requests' tokens flow meanwhile, and a library's native code meets strangers' grammars only in a process that
may die."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Receive

from isthmus.core.errors import OverloadedError, RequestError, StartError, UnavailableError
from isthmus.core.types import Job, ModelCard
from isthmus.live.gateway.fields import parse_body
from isthmus.live.gateway.headers import RequestTerms
from isthmus.live.gateway.http import while_connected
from isthmus.live.gateway.prepare import PreparedRequest, RequestPreparer
from isthmus.live.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeChat,
    TokenizeRequest,
    TokenizeText,
    check_vocabulary,
)
from isthmus.live.gateway.responses.body import ResponsesPreparer, ResponsesRequest, renamed
from isthmus.live.gateway.settings import GatewaySettings
from isthmus.live.gateway.structured import is_constrained
from isthmus.live.gateway.tokenizer import GatewayTokenizer
from isthmus.live.gateway.tool_use import format_of
from isthmus.live.gateway.wire import encode, token_text
from isthmus.sandbox import Answer, ForkServer, Limits, Sandbox, SandboxError, serve


class TokenizeReply(msgspec.Struct):
    """`token_strs`: of each token, if asked for."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeReply(msgspec.Struct):
    prompt: str


def tokenized(preparer: RequestPreparer, request: TokenizeText | TokenizeChat) -> TokenizeReply:
    """Raises RequestError."""
    tokenizer, special = preparer.tokenizer, request.add_special_tokens
    preparer.check_model(request.model)
    if isinstance(request, TokenizeChat):
        tokens = preparer.chat_tokens(request, special)
    else:
        tokens = tuple(tokenizer.encode_text(request.prompt, add_special_tokens=special is not False))
    reply = TokenizeReply(len(tokens), preparer.card.max_length, tokens)
    if request.return_token_strs:
        reply.token_strs = [token_text(tokenizer.token_bytes(token)) for token in tokens]
    return reply


def detokenized(preparer: RequestPreparer, request: DetokenizeRequest) -> DetokenizeReply:
    """Raises RequestError."""
    preparer.check_model(request.model)
    check_vocabulary(request.tokens, preparer.card, "tokens")
    return DetokenizeReply(preparer.tokenizer.decode(request.tokens, special=True))


KEPT_BYTES = 64 << 20
"""Growth after which a worker is replaced."""
NICE = 10
"""Of workers: other requests' tokens come first."""


Result = TypeVar("Result")


@dataclass(frozen=True)
class Preparation:
    """`read`: the request model of the body; `make`: prepares it to a PreparedRequest, or to the whole answer."""

    read: Any
    make: Callable[[Any, str, RequestTerms], PreparedRequest | bytes]


class PreparerSetup(msgspec.Struct, frozen=True):
    """The state of a worker. `model`: path of the tokenizer."""

    model: str
    card: ModelCard
    settings: GatewaySettings


class Preparing:
    """The preparations of all endpoints, by name. `close` ends the workers."""

    def __init__(
        self, card: ModelCard, tokenizer: GatewayTokenizer, settings: GatewaySettings, model: Path | None = None
    ) -> None:
        """`model`: from where workers load the tokenizer; None: no workers, large bodies are prepared in a thread.
        Raises ConfigError."""
        self._preparations, self._settings = preparations(card, tokenizer, settings), settings
        self.num_waiting = self._waiting_bytes = 0
        self._sandboxes = list[Sandbox]()
        num_workers = settings.num_preparers
        self._threads = ThreadPoolExecutor(num_workers, "preparing")
        self.setup = PreparerSetup(str(model), card, replace(settings, keys=()))
        if model is not None:
            self._server = ForkServer("isthmus.live.gateway.preparing", msgspec.msgpack.encode(self.setup))
            limits = Limits(settings.prepare_bytes, settings.prepare_s, KEPT_BYTES, nice=NICE)
            self._sandboxes = [Sandbox(self._server, limits) for _ in range(num_workers)]
            self._idle = deque(self._sandboxes)

    def open(self) -> None:
        """Starts the workers ahead of the first request."""
        for _ in self._sandboxes:
            self._threads.submit(self._with_sandbox, Sandbox.open)

    async def __call__(self, name: str, body: bytes, hex_id: str, terms: RequestTerms, receive: Receive) -> Any:
        """Prepares one body. A client that disconnects, as `receive` tells, takes no worker's time. Raises
        RequestError, OverloadedError, ClientGoneError."""
        preparation = self._preparations[name]
        if len(body) <= self._settings.long_body_bytes:
            request = parse_body(preparation.read, body, self._settings.max_depth)
            if not self._sandboxes or not _asks_for_grammar(request):
                return preparation.make(request, hex_id, terms)
        self._check_room(len(body))
        self.num_waiting += 1
        self._waiting_bytes += len(body)
        try:
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._threads, self._prepare, name, body, hex_id, terms)
            return await while_connected(work, receive)
        finally:
            self.num_waiting -= 1
            self._waiting_bytes -= len(body)

    def _check_room(self, num_bytes: int) -> None:
        """Raises OverloadedError."""
        most = self._settings.http.bodies
        if self.num_waiting >= self._settings.max_preparing:
            message = (
                f"{self.num_waiting} large requests are being read, the limit (limits.preparing); try again"
            )
        elif self.num_waiting and self._waiting_bytes + num_bytes > most:
            message = f"requests of {self._waiting_bytes} bytes are being read; with this one they were more "
            message += f"than {most}, the limit (limits.bodies); try again"
        else:
            return
        raise OverloadedError(message, retry_after_s=1)

    def _prepare(self, name: str, body: bytes, hex_id: str, terms: RequestTerms) -> Any:
        """Runs in a thread. Raises RequestError."""
        if not self._sandboxes:
            preparation = self._preparations[name]
            return preparation.make(parse_body(preparation.read, body, self._settings.max_depth), hex_id, terms)
        question = _encode(_BodyToPrepare(name, body, hex_id, terms))
        try:
            return _unpacked(self._with_sandbox(lambda sandbox: sandbox.ask(question)))
        except SandboxError as error:
            refusal = self._over_limits(error.note)
            raise (renamed(refusal) if name == "response" else refusal) from None
        except StartError as error:
            raise UnavailableError(f"large bodies cannot be read now: {error}") from None

    def _with_sandbox(self, work: Callable[[Sandbox], Result]) -> Result:
        """Runs in a thread, of which there are as many as sandboxes."""
        sandbox = self._idle.popleft()
        try:
            return work(sandbox)
        finally:
            self._idle.append(sandbox)

    def _over_limits(self, param: str) -> RequestError:
        settings, grammar = self._settings, self._settings.grammar
        if param:
            return RequestError(
                f"{param!r} cannot be followed: it takes more than {grammar.cpu_s:g} s (limits.grammar_s) or "
                f"{settings.prepare_bytes >> 20} MiB to compile, or the library of grammars fails on it",
                param=param,
            )
        return RequestError(
            f"the body takes more than {settings.prepare_s:g} s (limits.prepare_s) or {settings.prepare_bytes >> 20} "
            "MiB (limits.prepare_memory) to read; send a smaller one"
        )

    @property
    def num_deaths(self) -> int:
        """Workers that died over a request."""
        return sum(sandbox.deaths for sandbox in self._sandboxes)

    def close(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.close()
        if self._sandboxes:
            self._server.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def preparations(
    card: ModelCard, tokenizer: GatewayTokenizer, settings: GatewaySettings
) -> dict[str, Preparation]:
    """Raises ConfigError."""
    preparer = RequestPreparer(card, tokenizer, settings, format_of(tokenizer.template, settings.tool_format))
    responses = ResponsesPreparer(preparer)
    return {
        "chat": Preparation(ChatRequest, preparer.chat),
        "completion": Preparation(CompletionRequest, preparer.completion),
        "response": Preparation(ResponsesRequest, responses.prepare),
        "tokenize": Preparation(TokenizeRequest, lambda request, *_: encode(tokenized(preparer, request))),
        "tokens": Preparation(
            TokenizeRequest, lambda request, *_: array("I", tokenized(preparer, request).tokens).tobytes()
        ),
        "detokenize": Preparation(
            DetokenizeRequest, lambda request, *_: encode(detokenized(preparer, request))
        ),
    }


def _asks_for_grammar(request: Any) -> bool:
    if not isinstance(request, GenerationRequest):
        return False
    tools = getattr(request, "tools", None)
    text = request.text if isinstance(request, ResponsesRequest) else None
    forms = text is not None and text.format is not None and text.format.type != "text"
    return bool(tools) or forms or is_constrained(request)


# Messages to and from workers.


class _BodyToPrepare(msgspec.Struct, frozen=True, array_like=True):
    name: str
    body: bytes
    hex_id: str
    terms: RequestTerms


class _PackedRequest(msgspec.Struct, frozen=True, tag=True):
    """A prepared request whose jobs differ only in `draws`: seed and most tokens. Shared parts are sent once, since
    prompts and grammars are large."""

    request: PreparedRequest
    job: Job
    draws: tuple[tuple[int, int], ...]


class _Refusal(msgspec.Struct, frozen=True, tag=True):
    message: str
    param: str | None
    code: str | None
    status: int


_encode = msgspec.msgpack.Encoder().encode
_question = msgspec.msgpack.Decoder(_BodyToPrepare).decode
_encode_answer = msgspec.json.Encoder().encode  # schemas hold integers beyond msgpack's 64 bits
_answer = msgspec.json.Decoder(_PackedRequest | _Refusal).decode
_WHOLE, _PACKED = b"w", b"p"
"""First byte of a worker's reply: an answer for the client as it is, or a packed request or refusal."""


def _packed(prepared: PreparedRequest) -> _PackedRequest:
    draws = tuple([(job.sampling.seed, job.max_tokens) for job in prepared.jobs])
    job = msgspec.structs.replace(prepared.jobs[0], tokens=())
    return _PackedRequest(replace(prepared, jobs=()), job, draws)


def _unpacked(found: bytearray) -> PreparedRequest | bytes:
    """Raises RequestError."""
    kind, content = bytes(found[:1]), memoryview(found)[1:]
    if kind == _WHOLE:
        return bytes(content)
    said = _answer(content)
    if isinstance(said, _Refusal):
        error = RequestError(said.message, param=said.param, code=said.code)
        error.http_status = said.status
        raise error
    prepared = said.request
    jobs = [
        msgspec.structs.replace(
            said.job,
            request=f"{prepared.id}-{at}",
            tokens=prepared.prompts[at // prepared.n],
            max_tokens=max_tokens,
            sampling=msgspec.structs.replace(said.job.sampling, seed=seed),
        )
        for at, (seed, max_tokens) in enumerate(said.draws)
    ]
    return replace(prepared, jobs=tuple(jobs))


def _load_worker(setup: bytes) -> Answer:
    said = msgspec.msgpack.decode(setup, type=PreparerSetup)
    tokenizer = GatewayTokenizer.load(Path(said.model))
    if said.settings.remembered_bytes:
        tokenizer.remember(said.settings.remembered_bytes)
    found = preparations(said.card, tokenizer, said.settings)
    tokenizer.read_for_grammars()

    def answer(data: bytes) -> Sequence[bytes]:
        asked = _question(data)
        preparation = found[asked.name]
        try:
            request = parse_body(preparation.read, asked.body, said.settings.max_depth)
            made = preparation.make(request, asked.hex_id, asked.terms)
            return [_WHOLE, made] if isinstance(made, bytes) else [_PACKED, _encode_answer(_packed(made))]
        except RequestError as error:
            refused = _Refusal(str(error), error.param, error.code, error.http_status)
            return [_PACKED, _encode_answer(refused)]

    return answer


def main() -> None:
    """The entry of the fork server."""
    serve(_load_worker)
