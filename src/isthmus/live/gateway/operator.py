"""The operator's path of a router, `POST /isthmus/servers`: adds servers and removes them while it runs.

Whoever adds a server sees the prompts that go there, so no client's API key opens the path: it takes the operator's
token. The path is the router's own and never passed on.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.core.errors import IsthmusError
from isthmus.live.gateway.headers import shown_key
from isthmus.live.gateway.http import ClientGoneError, HttpError, read_body

PATH = "/isthmus/servers"
MAX_BYTES = 1 << 16
MAX_ENTRIES = 256
NO_TOKEN = "this router has no operator's token, so that nobody may change its servers: start it with ISTHMUS_TOKEN set"
WRONG_TOKEN = "this needs the operator's token: the ISTHMUS_TOKEN that the router was started with"

Change = Callable[[Sequence[str], Sequence[str]], Awaitable[list[str]]]
"""Adds the first entries and removes the second ones; returns what becomes of each, in lines."""


class Changes(msgspec.Struct, forbid_unknown_fields=True):
    """Entries as in `servers` of the file."""

    add: list[str] = []
    remove: list[str] = []


class OperatorDoor:
    """ASGI middleware that answers the operator's path. `digest`: the token's SHA-256; None: nobody may change
    servers."""

    def __init__(
        self, app: ASGIApp, *, digest: bytes | None, change: Change, refuse: Callable[[Exception], ASGIApp]
    ) -> None:
        self._app, self._digest, self._change, self._refuse = app, digest, change, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and scope["path"] == PATH:
            try:
                answer = await self._answer(scope, receive)
            except ClientGoneError:
                return
            except IsthmusError as error:
                answer = self._refuse(error)
        await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """Raises IsthmusError, ClientGoneError. Nothing of a body is read before the token is checked."""
        if self._digest is None:
            raise HttpError(403, NO_TOKEN)
        try:
            shown = shown_key(scope)
        except HttpError:
            shown = b""
        if not hmac.compare_digest(hashlib.sha256(shown).digest(), self._digest):
            raise HttpError(401, WRONG_TOKEN)
        if scope["method"] != "POST":
            raise HttpError(405, f"{scope['method']} is not allowed on {PATH}: send POST")
        try:
            changes = msgspec.json.decode(await read_body(scope, receive, MAX_BYTES), type=Changes)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HttpError(400, f"the body is not {{add: [URL], remove: [URL]}}: {error}") from None
        if not 0 < len(changes.add) + len(changes.remove) <= MAX_ENTRIES:
            raise HttpError(400, f"name 1 to {MAX_ENTRIES} servers to add or remove")
        lines = await self._change(changes.add, changes.remove)
        return Response(msgspec.json.encode({"servers": lines}), media_type="application/json")
