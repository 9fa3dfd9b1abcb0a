"""Ids of HTTP requests: the client's own, echoed for its logs, and ours, which is unique."""

from __future__ import annotations

import re
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KEY = "isthmus.hex_id"
_HEADER = b"x-request-id"
_VALID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class RequestIds:
    """ASGI middleware: every answer carries X-Request-Id, the client's if it sent a fair one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_KEY] = uuid.uuid4().hex
        header = id_header(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        await self._app(scope, receive, send_with_id)


def hex_id(scope: Scope) -> str:
    """Our id of the request: the client's may come twice, and the cluster needs names that do not."""
    found: Any = scope[_KEY]
    return str(found)


def id_header(scope: Scope) -> tuple[bytes, bytes]:
    """The header that answers carry."""
    for name, value in scope["headers"]:
        if name == _HEADER and _VALID.fullmatch(value):
            return _HEADER, value
    return _HEADER, hex_id(scope).encode()
