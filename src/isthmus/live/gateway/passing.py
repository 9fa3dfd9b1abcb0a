"""The HTTP front of servers that run already: requests are passed on and answers passed back byte for byte.

Of a body only the fields are read that placement needs; all others are the server's business. Knows neither servers
nor who decides: that is the `PassingBackend`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from isthmus.core.errors import UnavailableError, UnknownModelError
from isthmus.core.types import PassedRequest, RequestId
from isthmus.live.gateway.app import framed, refusing
from isthmus.live.gateway.headers import hex_id, salt_of, terms_of
from isthmus.live.gateway.http import ClientGoneError, HttpError, read_body, while_connected
from isthmus.live.gateway.metrics import CONTENT_TYPE, FIRST_TOKEN_S, Tally
from isthmus.live.gateway.node_metrics import PREFIX, Family, Reading
from isthmus.live.gateway.operator import OperatorDoor
from isthmus.live.gateway.prompt_tokens import PromptTokens
from isthmus.live.gateway.settings import GatewaySettings
from isthmus.live.gateway.tenants import TenantMeter, Traffic, account_of

PATHS = ("/v1/", "/v2/")
SINGLE_PATHS = (
    "/tokenize", "/detokenize", "/rerank", "/reranking", "/score", "/classify", "/pooling", "/embeddings", "/embedding",
    "/generate", "/inference/v1/generate", "/completion", "/completions", "/chat/completions", "/responses", "/infill",
    "/apply-template", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/tags", "/api/show",
    "/api/version", "/version", "/get_model_info", "/model_info",
)  # fmt: skip
"""Paths that are passed on: of inference. Others of a server's, such as those that load adapters, put it to sleep or
empty its cache, are for its operator."""
STREAMED = ("/api/chat", "/api/generate")
"""Ollama's: an answer is streamed unless the body says no."""
OPERATORS_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_ODD = re.compile(r"(^|/)\.{1,2}(/|$)|//|[\x00-\x20\x7f\\]")
"""Of decoded paths: segments that a server might resolve, and characters that belong in no request line."""
_UNSENDABLE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""Of headers' values: HTTP has no such characters."""
MAX_DEPTH_MESSAGE = "the body is nested too deeply"


class PassedAnswer(Protocol):
    """An answer of which the first bytes are here."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]: ...

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens of prompt and answer so far; 0 of an error."""
        ...

    def chunks(self) -> AsyncGenerator[bytes]:
        """Yields the body as it comes. Raises UnavailableError where it breaks off."""
        ...

    def close(self) -> None:
        """Gives the request up, if its answer is not whole."""
        ...


class PassingBackend(Protocol):
    """Servers that run already, with whoever decides which one takes a request."""

    @property
    def healthy(self) -> bool:
        """Whether a server is there."""
        ...

    def models(self) -> list[dict[str, Any]]:
        """Returns what the servers say of their models in `/v1/models`, each name once."""
        ...

    async def forward(self, passed: PassedRequest) -> PassedAnswer:
        """Passes a request on. Raises OverloadedError, UnavailableError or RequestError."""
        ...

    def status(self) -> list[Any]:
        """Returns an object for each server: what is known of it, and what it does."""
        ...

    async def change_servers(self, add: Sequence[str], remove: Sequence[str]) -> list[str]:
        """Adds servers and removes others; returns what becomes of each, in lines. Raises RequestError."""
        ...

    def gauges(self) -> dict[str, dict[str, float]]:
        """Returns the latest value of each metric: metric name -> server -> value."""
        ...


class _Read(msgspec.Struct):
    """The fields that are read of a body of JSON, in whatever form they come: the server judges that."""

    model: Any = ""
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    cache_salt: Any = ""
    n_predict: Any = None
    options: Any = None
    sampling_params: Any = None
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()

    @property
    def name(self) -> str:
        """The model's; "" if the body has none."""
        return self.model if isinstance(self.model, str) else ""

    @property
    def salt(self) -> str:
        """The client's, by which the server keeps caches apart."""
        return self.cache_salt if isinstance(self.cache_salt, str) else ""

    @property
    def prefix(self) -> bytes:
        """The prompt's bytes, without the sign that ends a list or a text: a longer conversation begins alike."""
        prompts = (self.messages, self.prompt, self.input, self.input_ids)
        # `text` is SGLang's prompt, and of `/v1/responses` the form of the answer.
        prompt = next((each for each in map(bytes, prompts) if each), bytes(self.text))
        return bytes(self.system) + bytes(self.instructions) + bytes(self.tools) + prompt[:-1]

    @property
    def limit(self) -> int:
        """The most tokens of the answer; 0 if the body has no limit."""
        given: list[Any] = [self.max_completion_tokens, self.max_output_tokens, self.max_tokens, self.n_predict]
        for within, name in ((self.options, "num_predict"), (self.sampling_params, "max_new_tokens")):
            given.append(within.get(name) if isinstance(within, dict) else None)
        return next((limit for limit in given if type(limit) is int and 0 < limit < 1 << 40), 0)


_read = msgspec.json.Decoder(_Read).decode
_UNREAD = _Read()


def read_fields(body: bytes) -> _Read:
    """Returns the fields of a body; those of none where it has another form, which the server will refuse or know.
    Raises HttpError for one that is nested beyond what can be read."""
    if not body.startswith((b"{", b" ", b"\n", b"\t", b"\r")):
        return _UNREAD
    try:
        return _read(body)
    except RecursionError:
        raise HttpError(400, MAX_DEPTH_MESSAGE) from None
    except msgspec.DecodeError:
        return _UNREAD


SERVER_METRICS = {
    "server_up": "1 while requests are sent to the server, else 0.",
    "server_requests_running": "Requests sent to the server that have not ended.",
    "server_requests_total": "Attempts at requests sent to the server.",
    "server_failures_total": "Attempts that the server did not answer, or broke off.",
    "server_leaves_total": "Times that the server was left since it did not answer.",
    "server_continued_total": "Answers that broke off at the server and went on at another.",
    "server_cache_blocks": "Blocks of prompts that the server's cache has, or is believed to have.",
    "server_cache_capacity_blocks": "Blocks that it is believed to hold at most.",
    "server_expected_tokens_total": "Prompt tokens that were expected to come from the server's cache.",
    "server_prompt_tokens_total": "Prompt tokens, as the server's answers say.",
    "server_cache_told_tokens_total": "Those of answers that say how many came from its cache.",
    "server_cached_tokens_total": "Those that came from its cache, as its answers say.",
}


class _Meter:
    """Metrics of the router, in a registry of its own. `tenants`: None unless metrics may name tenants."""

    def __init__(self, backend: PassingBackend, *, names_tenants: bool) -> None:
        self._registry = registry = CollectorRegistry()
        self.tenants = TenantMeter(registry) if names_tenants else None
        text = "From the arrival of a request to the first bytes of its answer."
        self.first_bytes = Tally(f"{PREFIX}time_to_first_token_seconds", text, FIRST_TOKEN_S)
        registry.register(self.first_bytes)
        registry.register(Reading(partial(of_servers, backend)))
        text = "HTTP requests that failed."
        self._failed = Counter(f"{PREFIX}requests_failed", text, ("status",), registry=registry)
        self._cancelled = Counter(
            f"{PREFIX}requests_cancelled", "HTTP requests given up by clients.", registry=registry
        )

    def failed(self, status: int) -> None:
        self._failed.labels(str(status)).inc()

    def cancelled(self) -> None:
        self._cancelled.inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)


def of_servers(backend: PassingBackend) -> Iterator[Family]:
    """The metrics of all servers."""
    for name, values in backend.gauges().items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(f"{PREFIX}{name}", SERVER_METRICS[name], labels=("server",))
        for server, value in values.items():
            family.add_metric((server,), value)
        yield family


def create_passing_app(
    backend: PassingBackend, settings: GatewaySettings, prompt_tokens: PromptTokens | None = None
) -> Starlette:
    """The ASGI app before servers that run already. `prompt_tokens`: makes tokens of prompts; None: they are not
    known."""
    meter = _Meter(backend, names_tenants=settings.names_tenants)
    pages, passing = _Pages(backend, meter), _Passing(backend, settings, meter, prompt_tokens)
    routes = [
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model, methods=["GET"]),
        Route("/health", pages.health),
        Route("/ping", pages.health),
        Route("/metrics", pages.metrics),
        Route("/status", pages.status),
        *[Route(f"{path}{{rest:path}}", passing) for path in PATHS],  # first, since most requests go there
        *[Route(path, passing) for path in SINGLE_PATHS],
    ]
    app = framed(routes, {"/health", "/ping"}, settings, meter.failed, meter.tenants)
    refuse = refusing(meter.failed)
    app.add_middleware(OperatorDoor, digest=settings.operator, change=backend.change_servers, refuse=refuse)
    app.state.preparing, app.state.traffic = None, Traffic(settings.http)
    return app


class _Pages:
    """Endpoints that the router answers itself."""

    def __init__(self, backend: PassingBackend, meter: _Meter) -> None:
        self._backend, self._meter = backend, meter

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": self._backend.models()})

    async def model(self, request: Request) -> Response:
        """One entry of the list: not all servers answer this."""
        name = request.path_params["name"]
        found = {str(each.get("id")): each for each in self._backend.models()}
        if name not in found:
            raise UnknownModelError(name, ", ".join(sorted(found)) or "none now")
        return _json(found[name])

    async def health(self, request: Request) -> Response:
        return Response() if self._backend.healthy else Response(status_code=503, headers={"retry-after": "1"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._meter.render(), headers={"content-type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        return _json({"servers": self._backend.status()})


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


class _Passing:
    """An ASGI app that passes requests on, and their answers back."""

    def __init__(
        self,
        backend: PassingBackend,
        settings: GatewaySettings,
        meter: _Meter,
        prompt_tokens: PromptTokens | None,
    ) -> None:
        self._backend, self._settings, self._meter = backend, settings, meter
        self._prompt_tokens = prompt_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises IsthmusError before the answer has begun."""
        with contextlib.suppress(ClientGoneError):
            await self._pass(scope, receive, send)
            return
        self._meter.cancelled()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = time.perf_counter()
        path = scope["path"]
        if _ODD.search(path):
            raise HttpError(404, f"no such route: {path!r}")
        if path.rstrip("/") in OPERATORS_PATHS:
            raise HttpError(403, f"{path} changes a server; ask the server itself")
        account = account_of(scope)
        if account is not None:
            account.check_prompt(1)  # what a request costs is known at its end
        body = await read_body(scope, receive, self._settings.max_body_bytes)
        passed = self._passed(scope, body)
        if self._prompt_tokens is not None:
            tokens = await self._prompt_tokens.of(scope, body, receive)
            passed = msgspec.structs.replace(passed, tokens=tokens)
        forwarding = asyncio.ensure_future(self._backend.forward(passed))
        try:
            answer = await while_connected(forwarding, receive)
        except BaseException:
            if forwarding.done() and not forwarding.cancelled() and forwarding.exception() is None:
                forwarding.result().close()  # it came as the client left
            raise
        self._meter.first_bytes.observe(time.perf_counter() - began_s)
        sending = asyncio.ensure_future(_send_back(answer, send))
        try:
            await while_connected(sending, receive)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            answer.close()
            if account is not None:
                for num_tokens, kind in zip(answer.num_tokens, ("prompt", "generation"), strict=True):
                    account.spend(num_tokens, kind)

    def _passed(self, scope: Scope, body: bytes) -> PassedRequest:
        read, terms, settings = read_fields(body), terms_of(scope), self._settings
        path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
        named = {
            name.strip().lower().encode()
            for header, value in scope["headers"]
            if header == b"connection"
            for name in value.decode("latin-1").split(",")
        }
        dropped = NOT_PASSED | named | ({b"authorization"} if settings.keys else set())
        return PassedRequest(
            request=RequestId(hex_id(scope)),
            method=scope["method"],
            target=path + (f"?{query}" if query else ""),
            headers=tuple(
                [
                    (name.decode("latin-1"), _text(value))
                    for name, value in scope["headers"]
                    if name not in dropped
                ]
            ),
            body=body,
            model=read.name,
            prefix=read.prefix,
            max_tokens=read.limit,
            is_streamed=read.stream is True or (path in STREAMED and read.stream is not False),
            tenant=terms.tenant or "",
            cache_salt=read.salt,
            salt=salt_of(terms.tenant, read.salt),
            priority=terms.priority,
            ttft_ms=settings.ttft_ms if terms.ttft_ms is None else terms.ttft_ms,
            tbt_ms=settings.tbt_ms if terms.tbt_ms is None else terms.tbt_ms,
            weight=settings.shares.weight_of(terms.tenant),
        )


def _text(value: bytes) -> str:
    """A header's value as it is encoded again by the client, in UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


async def _send_back(answer: PassedAnswer, send: Send) -> None:
    """Sends an answer. Raises ClientGoneError where its client left, or its server broke off."""
    headers = [
        (name, value)
        for name, value in answer.headers
        if not _UNSENDABLE.search(value) and not _is_of_origins(name.lower(), value)
    ]
    if answer.status in (204, 304):
        headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    async with contextlib.aclosing(answer.chunks()) as chunks:
        try:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (OSError, UnavailableError):  # OSError: ASGI's sign of a closed connection
            raise ClientGoneError from None


def _is_of_origins(name: bytes, value: bytes) -> bool:
    """Whether a header says which pages may read an answer: the front does, and browsers take no second word."""
    return name.startswith(b"access-control-") or (name == b"vary" and value.lower() == b"origin")


NOT_PASSED = frozenset(
    (b"host", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"content-length",
     b"expect", b"proxy-authorization", b"proxy-connection")
)  # fmt: skip
"""Headers of one connection, or of the body as it came over it."""
