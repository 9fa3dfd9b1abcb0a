"""Everything a request says before its body is read: its id, its web page, its API key, and its terms.

A browser sends most requests of a page without asking first and only hides the answer, so any page could make a
server on the user's machine compute: requests of pages that are not allowed are refused. Other programs send no
`Origin` and are not concerned. A key comes as `Authorization: Bearer KEY`; only digests of keys are known here.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.core.errors import RequestError
from isthmus.core.types import ModelCard, Reuse
from isthmus.live.gateway.http import NOTE, HttpError
from isthmus.live.gateway.settings import ApiKey, GatewaySettings

_HEX_ID = "isthmus.hex_id"
_ID_HEADER = b"x-request-id"
_ID_PATTERN = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class RequestIds:
    """ASGI middleware: every answer carries X-Request-Id, the client's own if that is well-formed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_HEX_ID] = uuid.uuid4().hex
        header = id_header(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        await self._app(scope, receive, send_with_id)


def hex_id(scope: Scope) -> str:
    """The server's own id of the request. The client's may repeat, and jobs need unique names."""
    found: Any = scope[_HEX_ID]
    return str(found)


def id_header(scope: Scope) -> tuple[bytes, bytes]:
    """The X-Request-Id header of the answer."""
    for name, value in scope["headers"]:
        if name == _ID_HEADER and _ID_PATTERN.fullmatch(value):
            return _ID_HEADER, value
    return _ID_HEADER, hex_id(scope).encode()


_TENANT = "isthmus.tenant"
_KEY_HEADER = b"authorization"


class ApiKeys:
    """ASGI middleware inside `RequestIds`: a request without a known key is answered by `refuse`, its body unread.
    GET of the paths in `open` needs no key."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[ApiKey],
        open: Collection[str],
        refuse: Callable[[Exception], ASGIApp],
    ) -> None:
        self._app, self._keys, self._open, self._refuse = app, keys, open, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and not self._is_open(scope):
            try:
                scope[_TENANT] = _tenant_by(self._keys, shown_key(scope))
            except HttpError as error:
                app = self._refuse(error)
        await app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self._open


def tenant_of(scope: Scope) -> str | None:
    """The tenant whose key came with the request; None where no keys are configured."""
    found: str | None = scope.get(_TENANT)
    return found


def salt_of(tenant: str | None, cache_salt: str) -> str:
    """The salt of a request's KV blocks: different for every pair of tenant and client's salt, since the tenant's
    length stands in front. Without keys it is the client's salt alone."""
    return cache_salt if tenant is None else f"{len(tenant)}:{tenant}:{cache_salt}"


def shown_key(scope: Scope) -> bytes:
    """The API key, or the operator's token, that a request shows. Raises HttpError when there is none, or more."""
    values = [value for name, value in scope["headers"] if name == _KEY_HEADER]
    if len(values) > 1:
        raise HttpError(401, f"the header 'Authorization' is given {len(values)} times")
    scheme, _, key = b"".join(values).strip().partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise HttpError(401, "this server needs an API key: send the header 'Authorization: Bearer KEY'")
    return key.strip()


def _tenant_by(keys: Sequence[ApiKey], shown: bytes) -> str:
    """The tenant of a key. Takes the same time for every key: all digests are compared, each to its end. Raises
    HttpError for an unknown key."""
    digest = hashlib.sha256(shown).digest()
    tenants = [key.tenant for key in keys if hmac.compare_digest(key.digest, digest)]
    if not tenants:
        raise HttpError(401, "the API key is not known to this server", code="invalid_api_key")
    return tenants[0]


ANY = "*"
OF_THIS_MACHINE = (
    r"https?://(([a-z0-9-]+\.)*localhost|127\.0\.0\.1|\[::1\])(:\d+)?|(?!https?:)[a-z][a-z0-9+.-]*://.*"
)
"""Origins of pages that a program on this machine serves (`localhost`, `app://…`, `vscode-webview://…`); no web site
can have one."""
READABLE = ("Retry-After", "X-Request-Id", NOTE.decode())
"""Headers of answers that scripts may read, besides the usual ones."""
MAX_SHOWN_CHARS = 200


class Origins:
    """ASGI middleware: answers preflights and allows pages of the origins `allowed` (None: those of this machine) to
    read answers; requests of other pages are answered by `refuse`, their bodies unread."""

    def __init__(
        self, app: ASGIApp, *, allowed: tuple[str, ...] | None, refuse: Callable[[Exception], ASGIApp]
    ) -> None:
        self._refuse = refuse
        self._cors = CORSMiddleware(
            app,
            allow_origins=allowed or (),
            allow_origin_regex=OF_THIS_MACHINE if allowed is None else None,
            allow_methods=["*"],  # a wrong one is refused where its answer can be read
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=READABLE,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        if origin is None or self._cors.is_allowed_origin(origin):
            await self._cors(scope, receive, send)
        else:
            shown = repr(origin[:MAX_SHOWN_CHARS])
            message = f"pages of {shown} may not ask this server; whoever runs it can allow them (cors.origins)"
            await self._refuse(HttpError(403, message))(scope, receive, send)


_INTEGER = re.compile(rb"[+-]?[0-9]{1,10}")
MAX_MS = 2**31 - 1
MAX_PRIORITY = 1000
SLO_TTFT, SLO_TBT, PRIORITY = "x-isthmus-slo-ttft-ms", "x-isthmus-slo-tbt-ms", "x-isthmus-priority"
HEADERS = {SLO_TTFT: (1, MAX_MS), SLO_TBT: (1, MAX_MS), PRIORITY: (-MAX_PRIORITY, MAX_PRIORITY)}
"""The range of each integer header."""
REUSE = "x-isthmus-reuse"


class RequestTerms(msgspec.Struct, frozen=True):
    """A request's terms, from its headers and key. `ttft_ms`, `tbt_ms`: None takes the deployment's; a higher
    `priority` is shed later; `tenant`: None without keys; `reuse`: None takes the setting."""

    priority: int = 0
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    tenant: str | None = None
    reuse: Reuse | None = None


def terms_of(scope: Scope) -> RequestTerms:
    """Raises RequestError naming a header with a wrong value, or given twice."""
    return RequestTerms(
        priority=_integer(scope, PRIORITY) or 0,
        ttft_ms=_integer(scope, SLO_TTFT),
        tbt_ms=_integer(scope, SLO_TBT),
        tenant=tenant_of(scope),
        reuse=_reuse(scope),
    )


def _integer(scope: Scope, name: str) -> int | None:
    low, high = HEADERS[name]
    text = _value(scope, name)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
        raise _wrong(name, f"an integer from {low} to {high}", text)
    return int(text)


def _reuse(scope: Scope) -> Reuse | None:
    text = _value(scope, REUSE)
    if text is None:
        return None
    try:
        return Reuse(text.decode("latin-1"))
    except ValueError:
        *words, last = Reuse
        raise _wrong(REUSE, f"{', '.join(words)} or {last}", text) from None


def _value(scope: Scope, name: str) -> bytes | None:
    """Raises RequestError when the header is given more than once."""
    values = [value for header, value in scope["headers"] if header == name.encode()]
    if len(values) > 1:
        raise RequestError(f"the header {name!r} is given {len(values)} times", param=name)
    return values[0].strip() if values else None


def _wrong(name: str, expected: str, text: bytes) -> RequestError:
    shown = text.decode("latin-1")[:40]
    return RequestError(f"the header {name!r} must be {expected}, got {shown!r}", param=name)


def reuse_of(terms: RequestTerms, scored: str, settings: GatewaySettings, card: ModelCard) -> Reuse:
    """The KV reuse of a request: the header's, else the tenant's, else the default. `scored`: the fields that ask for
    log-probabilities of the prompt, whose tokens must then all be computed; "" if none.

    Raises RequestError where the header asks for more than is possible; settings then fall back to exact.
    """
    if terms.reuse is None:
        usual = settings.tenant_reuse.get(terms.tenant or "", settings.reuse)
        return Reuse.EXACT if scored or card.no_reuse else usual
    if terms.reuse is not Reuse.EXACT and card.no_reuse:
        raise RequestError(f"the header {REUSE!r} can only be exact here: {card.no_reuse}", param=REUSE)
    if terms.reuse is not Reuse.EXACT and scored:
        message = (
            f"{scored} and the header '{REUSE}: {terms.reuse}' contradict each other, since a prompt that is scored "
            "is computed whole: give one"
        )
        raise RequestError(message, param=REUSE)
    return terms.reuse
