"""Limits and options of the gateway, fixed at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.core.types import Reuse, Shares
from isthmus.model_files.grammar_limits import GRAMMAR_LIMITS, GrammarLimits


@dataclass(frozen=True)
class ApiKey:
    """`digest`: the key's SHA-256."""

    tenant: str
    digest: bytes


@dataclass(frozen=True)
class HttpLimits:
    """Limits of HTTP connections: see `limits` in docs/configuration.md. `bodies`: bytes of all bodies that are not
    complete."""

    header_bytes: int = 64 * 1024
    headers: int = 100
    header_s: float = 5.0
    body_s: float = 30.0
    bodies: int = 128 * 1024 * 1024
    connections: int = 640


@dataclass(frozen=True)
class TenantLimits:
    """A tenant's limits; None: unlimited. Rates are averages, with bursts of `burst_s` seconds' worth; `concurrent`:
    HTTP requests in progress."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    burst_s: float = 10.0
    concurrent: int | None = None

    @property
    def is_limited(self) -> bool:
        return any(limit is not None for limit in (self.requests_per_s, self.tokens_per_s, self.concurrent))


@dataclass(frozen=True)
class GatewaySettings:
    """Limits of one HTTP request, and the defaults of its terms."""

    max_body_bytes: int = 8 * 1024 * 1024
    long_body_bytes: int = 20_000  # larger ones are prepared in workers, so that the event loop stays free
    max_depth: int = 100  # of nested lists and objects
    max_messages: int = 10_000
    max_tools: int = 1024
    grammar: GrammarLimits = GRAMMAR_LIMITS
    prepare_s: float = 5.0  # CPU seconds of one large body
    prepare_bytes: int = 512 << 20  # its memory
    remembered_bytes: int = 0  # of texts with their tokens, in each worker; 0: none
    max_preparing: int = 256  # large bodies being prepared or waiting
    num_preparers: int = 2
    max_sequences: int = 256  # prompts times `n`
    http: HttpLimits = HttpLimits()
    keys: tuple[ApiKey, ...] = field(default=(), repr=False)
    """API keys; if there are any, every request needs one."""
    operator: bytes | None = field(default=None, repr=False)
    """SHA-256 of the token that opens the operator's path of a router; None: nothing opens it."""
    origins: tuple[str, ...] | None = None
    """Origins of web pages that may ask, `*` any; None: with keys any, without keys those of this machine."""
    tool_format: str = "auto"  # a key of tools.FORMATS, or auto: by the model's chat template
    # Of requests that say nothing else.
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    reuse: Reuse = Reuse.EXACT
    tenant_reuse: Mapping[str, Reuse] = field(default_factory=dict)
    tenant_limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    tenant_default: TenantLimits = TenantLimits()  # of tenants that are not in `tenant_limits`
    shares: Shares = field(default_factory=Shares)
    names_tenants: bool = False  # in metrics
