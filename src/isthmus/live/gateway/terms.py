"""What a request's headers say: its own limits, its priority, what it may be computed with, and whose it is."""

from __future__ import annotations

import re

import msgspec
from starlette.types import Scope

from isthmus.core.errors import RequestError
from isthmus.core.types import Reuse
from isthmus.live.gateway.auth import tenant_of

_INTEGER = re.compile(rb"[+-]?[0-9]{1,10}")
MAX_MS = 2**31 - 1
MAX_PRIORITY = 1000
SLO_TTFT, SLO_TBT, PRIORITY = "x-isthmus-slo-ttft-ms", "x-isthmus-slo-tbt-ms", "x-isthmus-priority"
HEADERS = {SLO_TTFT: (1, MAX_MS), SLO_TBT: (1, MAX_MS), PRIORITY: (-MAX_PRIORITY, MAX_PRIORITY)}
"""The least and the largest value of each."""
REUSE = "x-isthmus-reuse"


class Terms(msgspec.Struct, frozen=True):
    """`ttft_ms`, `tbt_ms`: None takes the deployment's. A higher `priority` is refused last. `tenant`: whose key came,
    None where nobody needs one. `reuse`: which KV it may be computed with, None if that is not said."""

    priority: int = 0
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    tenant: str | None = None
    reuse: Reuse | None = None


def terms_of(scope: Scope) -> Terms:
    """Raises RequestError naming a header that is none of its values, or given twice."""
    return Terms(
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
