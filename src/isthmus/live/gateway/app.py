"""The HTTP front of a cluster: routes, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import isthmus
from isthmus.core.errors import IsthmusError
from isthmus.core.types import ModelCard
from isthmus.live.gateway.backend import Backend
from isthmus.live.gateway.generate import GenerationEndpoint, JsonEndpoint, Service
from isthmus.live.gateway.headers import ANY, ApiKeys, Origins, RequestIds
from isthmus.live.gateway.http import HttpError, problem_headers, problem_json, status_of, unknown_model
from isthmus.live.gateway.metrics import CONTENT_TYPE, Meter
from isthmus.live.gateway.openapi import Operation, document
from isthmus.live.gateway.preparing import DetokenizeReply, Preparing, TokenizeReply
from isthmus.live.gateway.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from isthmus.live.gateway.responses.body import ResponsesRequest
from isthmus.live.gateway.responses.wire import ResponsesDialect, ResponsesReply
from isthmus.live.gateway.settings import GatewaySettings
from isthmus.live.gateway.status import Status, cluster_status
from isthmus.live.gateway.tenants import TenantGate, TenantMeter, Traffic
from isthmus.live.gateway.tokenizer import GatewayTokenizer
from isthmus.live.gateway.wire import ChatDialect, ChatReply, CompletionDialect, CompletionReply


def create_app(
    backend: Backend,
    tokenizer: GatewayTokenizer,
    settings: GatewaySettings | None = None,
    preparing: Preparing | None = None,
) -> Starlette:
    """The ASGI app that serves `backend`. `settings` None: the defaults; `preparing` None: every body is prepared in
    this process. Raises ConfigError where the settings do not fit the model."""
    settings = settings or GatewaySettings()
    traffic = Traffic(settings.http)
    preparing = preparing or Preparing(backend.card, tokenizer, settings)
    meter = Meter(backend, preparing, traffic, names_tenants=settings.names_tenants)
    operations = _operations(backend, tokenizer, settings, meter, preparing)

    @cache
    def description() -> bytes:
        """The OpenAPI document; made on first request, since it takes longer than the rest of the start."""
        return document(operations, backend.card, keys=bool(settings.keys))

    async def described(request: Request) -> Response:
        return Response(await asyncio.to_thread(description), media_type="application/json")

    routes = [Route(each.path, each.endpoint, methods=[each.method]) for each in operations]
    opened = {each.path for each in operations if each.open}
    app = framed([*routes, Route("/openapi.json", described)], opened, settings, meter.failed, meter.tenants)
    app.state.preparing = preparing
    app.state.traffic = traffic  # for `serve_http`
    return app


def framed(
    routes: list[Route],
    opened: set[str],
    settings: GatewaySettings,
    failed: Callable[[int], None],
    tenants: TenantMeter | None,
) -> Starlette:
    """An app of `routes` with all that stands around them: ids, pages of other origins, API keys (not for GET of the
    paths in `opened`), tenants' limits, errors in OpenAI's shape. `failed` hears the status of each error."""

    refuse = refusing(failed)

    def outermost(app: ASGIApp) -> ASGIApp:
        return RequestIds(Origins(app, allowed=_origins(settings), refuse=refuse))

    return _App(
        outermost,
        routes=routes,
        middleware=_guard(settings, opened, tenants, refuse),
        exception_handlers=_handlers(refuse),
    )


def refusing(failed: Callable[[int], None]) -> Callable[[Exception], Response]:
    """What makes an answer of an error, of which `failed` hears the status."""

    def refuse(error: Exception) -> Response:
        failed(status_of(error))
        return _problem(error)

    return refuse


class _App(Starlette):
    """A Starlette app with `outermost` middleware around everything, so that it also sees answers to bugs."""

    def __init__(self, outermost: Callable[[ASGIApp], ASGIApp], **options: Any) -> None:
        super().__init__(**options)
        self._outermost = outermost

    def build_middleware_stack(self) -> ASGIApp:
        return self._outermost(super().build_middleware_stack())


def _origins(settings: GatewaySettings) -> tuple[str, ...] | None:
    """With API keys any page may ask: no browser adds a key by itself, as it does cookies."""
    return (ANY,) if settings.origins is None and settings.keys else settings.origins


def _guard(
    settings: GatewaySettings,
    opened: set[str],
    tenants: TenantMeter | None,
    refuse: Callable[[Exception], Response],
) -> list[Middleware]:
    """Middleware that asks for API keys and keeps tenants' limits, if there are any."""
    if not settings.keys:
        return []
    guard = Middleware(ApiKeys, keys=settings.keys, open=opened, refuse=refuse)
    limits = [settings.tenant_default, *settings.tenant_limits.values()]
    if not (settings.names_tenants or any(each.is_limited for each in limits)):
        return [guard]
    return [guard, Middleware(TenantGate, settings=settings, meter=tenants, refuse=refuse)]


def _operations(
    backend: Backend, tokenizer: GatewayTokenizer, settings: GatewaySettings, meter: Meter, preparing: Preparing
) -> list[Operation]:
    """All routes, with their part of the OpenAPI document."""
    service = Service(backend, tokenizer, settings, meter, preparing)
    chat = GenerationEndpoint(service, "chat", ChatDialect)
    completion = GenerationEndpoint(service, "completion", CompletionDialect)
    response = GenerationEndpoint(service, "response", ResponsesDialect)
    tokenize, detokenize = JsonEndpoint(service, "tokenize"), JsonEndpoint(service, "detokenize")
    pages = _Pages(backend, meter)
    streamed, kept_nowhere = partial(Operation, streams=True), "Answer a conversation, of which nothing is kept"
    return [
        streamed("/v1/chat/completions", chat, "Answer messages", ChatRequest, ChatReply),
        streamed("/v1/completions", completion, "Continue a prompt", CompletionRequest, CompletionReply),
        streamed("/v1/responses", response, kept_nowhere, ResponsesRequest, ResponsesReply),
        Operation("/tokenize", tokenize, "Tokens of a text or of messages", TokenizeRequest, TokenizeReply),
        Operation("/detokenize", detokenize, "Text of tokens", DetokenizeRequest, DetokenizeReply),
        Operation("/v1/models", pages.models, "The served model, in a list", reply=ModelList),
        Operation("/v1/models/{name:path}", pages.model, "The served model", reply=ModelEntry),
        Operation("/version", pages.version, "Of this server", reply=Version),
        Operation("/health", pages.health, "Whether requests can be served", open=True),
        Operation("/ping", pages.health, "The same", open=True),
        Operation("/metrics", pages.metrics, "For Prometheus", media="text/plain"),
        Operation("/status", pages.status, "What runs now", reply=Status),
    ]


class ModelEntry(msgspec.Struct, frozen=True):
    """`max_model_len`: of prompt and answer together, in tokens."""

    id: str
    created: int
    max_model_len: int
    root: str
    object: str = "model"
    owned_by: str = "isthmus"
    parent: None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelEntry]
    object: str = "list"


class Version(msgspec.Struct, frozen=True):
    version: str


class _Pages:
    """Endpoints that answer from the present state."""

    def __init__(self, backend: Backend, meter: Meter) -> None:
        self._backend = backend
        self._meter = meter

    async def models(self, request: Request) -> Response:
        return _json(ModelList(_entries(self._backend.card)))

    async def model(self, request: Request) -> Response:
        """Raises HttpError."""
        name = request.path_params["name"]
        for entry in _entries(self._backend.card):
            if entry.id == name:
                return _json(entry)
        raise unknown_model(name, self._backend.card.names)

    async def version(self, request: Request) -> Response:
        return _json(Version(isthmus.__version__))

    async def health(self, request: Request) -> Response:
        if self._backend.healthy:
            return Response()
        return Response(status_code=503, headers={"retry-after": "1"})

    async def metrics(self, request: Request) -> Response:
        await self._backend.poll()
        return Response(self._meter.render(), headers={"content-type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        await self._backend.poll()
        return _json(cluster_status(self._backend, self._meter.num_running))


def _entries(card: ModelCard) -> list[ModelEntry]:
    return [ModelEntry(name, card.created_s, card.max_length, card.name) for name in card.names]


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _handlers(refuse: Callable[[Exception], Response]) -> dict[Any, Any]:
    """Exception handlers for errors that no endpoint answered. Starlette raises a bug's error again, for the server's
    log."""

    async def on_error(request: Request, error: Exception) -> Response:
        return refuse(error)

    async def on_route(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:
            message = f"{request.method} is not allowed on {request.url.path}"
            response = refuse(HttpError(405, message))
            response.headers.update(error.headers or {})
            return response
        return refuse(HttpError(404, f"no such route: {request.url.path}"))

    return {IsthmusError: on_error, HTTPException: on_route, Exception: on_error}


def _problem(error: Exception) -> Response:
    response = Response(problem_json(error), status_of(error), media_type="application/json")
    response.raw_headers.extend(problem_headers(error))
    return response
