"""Who asks: API keys before anything else is read, and tenants, whose caches are apart.

A key comes as `Authorization: Bearer KEY`, as all clients of OpenAI's API send it. Only digests of keys are known here.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.live.gateway.problems import UnauthorizedError
from isthmus.live.gateway.settings import ApiKey

_TENANT = "isthmus.tenant"
_HEADER = b"authorization"


class ApiKeys:
    """ASGI middleware: what has no known key is answered by `refuse`, its body unread. GET of `open` paths needs none.

    It stands inside `RequestIds`, so that refusals have an id, too. Nothing is served but HTTP.
    """

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
                scope[_TENANT] = _tenant_by(self._keys, _shown(scope))
            except UnauthorizedError as error:
                app = self._refuse(error)
        await app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self._open


def tenant_of(scope: Scope) -> str | None:
    """Whose key came with the request; None where nobody needs one."""
    found: str | None = scope.get(_TENANT)
    return found


def salt_of(tenant: str | None, cache_salt: str) -> str:
    """What a request's blocks are salted with: another for every pair of a tenant and a client's salt.

    The length in front says where the tenant ends. Without keys it is the client's salt, as it stands.
    """
    return cache_salt if tenant is None else f"{len(tenant)}:{tenant}:{cache_salt}"


def _shown(scope: Scope) -> bytes:
    """The key that a request shows. Raises UnauthorizedError when there is none, or more than one."""
    values = [value for name, value in scope["headers"] if name == _HEADER]
    if len(values) > 1:
        raise UnauthorizedError(f"the header 'Authorization' is given {len(values)} times")
    scheme, _, key = b"".join(values).strip().partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise UnauthorizedError("this server needs an API key: send the header 'Authorization: Bearer KEY'")
    return key.strip()


def _tenant_by(keys: Sequence[ApiKey], shown: bytes) -> str:
    """Raises UnauthorizedError. Takes as long for a wrong key as for each right one: digests are compared, all of them,
    and each to its end."""
    digest = hashlib.sha256(shown).digest()
    tenants = [key.tenant for key in keys if hmac.compare_digest(key.digest, digest)]
    if not tenants:
        raise UnauthorizedError("the API key is not known to this server", code="invalid_api_key")
    return tenants[0]
