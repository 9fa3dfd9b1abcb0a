"""The HTTP front of a cluster: routes, and errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from isthmus.errors import IsthmusError
from isthmus.gateway.backend import Backend
from isthmus.gateway.chat_wire import ChatDialect
from isthmus.gateway.completion_wire import CompletionDialect
from isthmus.gateway.generate import GenerationEndpoint, Service
from isthmus.gateway.identity import RequestIds, id_header
from isthmus.gateway.metrics import CONTENT_TYPE, Meter
from isthmus.gateway.prepare import RequestPreparer
from isthmus.gateway.problems import (
    UnknownModelError,
    UnknownRouteError,
    WrongMethodError,
    problem_headers,
    problem_json,
    status_of,
)
from isthmus.gateway.requests import ChatRequest, CompletionRequest
from isthmus.gateway.settings import GatewaySettings
from isthmus.gateway.status import Status, cluster_status
from isthmus.gateway.tokenizer import GatewayTokenizer
from isthmus.types import ModelCard


def create_app(
    backend: Backend, tokenizer: GatewayTokenizer, settings: GatewaySettings | None = None
) -> Starlette:
    """An ASGI app that serves `backend`. `settings` None: the defaults."""
    settings = settings or GatewaySettings()
    meter = Meter(backend)
    service = Service(backend, tokenizer, settings, meter)
    preparer = RequestPreparer(backend.card, tokenizer, settings)
    chat = GenerationEndpoint(service, ChatRequest, preparer.chat, ChatDialect)
    completion = GenerationEndpoint(service, CompletionRequest, preparer.completion, CompletionDialect)
    pages = _Pages(backend, meter)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/{name:path}", pages.model),
            Route("/health", pages.health),
            Route("/metrics", pages.metrics),
            Route("/status", pages.status),
        ],
        middleware=[Middleware(RequestIds)],
        exception_handlers=_handlers(meter),
    )


class _Pages:
    """The endpoints that answer from what is known already."""

    def __init__(self, backend: Backend, meter: Meter) -> None:
        self._backend = backend
        self._meter = meter

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [_model(self._backend.card)]})

    async def model(self, request: Request) -> Response:
        """Raises UnknownModelError."""
        name = request.path_params["name"]
        if name != self._backend.card.name:
            raise UnknownModelError(name, self._backend.card.name)
        return _json(_model(self._backend.card))

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._backend.healthy else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._meter.render(), headers={"content-type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        return _json(cluster_status(self._backend, self._meter.num_running))


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "isthmus",
        "max_model_len": card.max_length,
    }


def _json(content: dict[str, Any] | Status) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _handlers(meter: Meter) -> dict[Any, Any]:
    """How errors that no endpoint answered become answers."""

    async def on_error(request: Request, error: Exception) -> Response:
        meter.failed(status_of(error))
        return _problem(error)

    async def on_route(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:
            message = f"{request.method} is not allowed on {request.url.path}"
            response = await on_error(request, WrongMethodError(message))
            response.headers.update(error.headers or {})
            return response
        return await on_error(request, UnknownRouteError(f"no such route: {request.url.path}"))

    async def on_bug(request: Request, error: Exception) -> Response:
        """Starlette calls this outside our middleware, and raises the error again for the server's log."""
        response = await on_error(request, error)
        response.raw_headers.append(id_header(request.scope))
        return response

    return {IsthmusError: on_error, HTTPException: on_route, Exception: on_bug}


def _problem(error: Exception) -> Response:
    response = Response(problem_json(error), status_of(error), media_type="application/json")
    response.raw_headers.extend(problem_headers(error))
    return response
