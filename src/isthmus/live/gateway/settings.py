"""Limits of the gateway. Built once at start, never written again."""

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
    """Limits of HTTP connections, whoever opens them: see `limits` in docs/configuration.md."""

    header_bytes: int = 64 * 1024
    headers: int = 100
    header_s: float = 5.0
    body_s: float = 30.0
    bodies: int = 128 * 1024 * 1024  # bytes of all that are not whole yet
    connections: int = 640


@dataclass(frozen=True)
class TenantLimits:
    """What a tenant may ask for; None: as much as it likes. Rates are kept on average, with so much at once as comes in
    `burst_s`. `concurrent`: HTTP requests in progress."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    burst_s: float = 10.0
    concurrent: int | None = None

    @property
    def is_limited(self) -> bool:
        return any(limit is not None for limit in (self.requests_per_s, self.tokens_per_s, self.concurrent))


@dataclass(frozen=True)
class GatewaySettings:
    """Limits of one HTTP request, and by which of its answers are counted as in time."""

    max_body_bytes: int = 8 * 1024 * 1024
    long_body_bytes: int = 20_000  # larger ones are read and tokenised elsewhere, so that the loop stays free
    max_depth: int = 100  # of lists and objects within each other
    max_messages: int = 10_000
    max_tools: int = 1024
    grammar: GrammarLimits = GRAMMAR_LIMITS
    prepare_s: float = 5.0  # CPU seconds of one large body
    prepare_bytes: int = 512 << 20  # memory of the same
    max_preparing: int = 256  # large bodies that are being read or wait for it
    num_preparers: int = 2
    max_sequences: int = 256  # prompts times `n`
    http: HttpLimits = HttpLimits()
    keys: tuple[ApiKey, ...] = field(default=(), repr=False)
    """Of which every request needs one; none: nobody needs any."""
    origins: tuple[str, ...] | None = None
    """Of web pages that may ask, `*` any; None: any that shows a key, without keys those of this machine."""
    tool_format: str = "auto"  # a name in tools/formats.py, or auto: as the model's chat template says
    # Of requests that bring none.
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    reuse: Reuse = Reuse.EXACT
    tenant_reuse: Mapping[str, Reuse] = field(default_factory=dict)  # of tenants that have another
    tenant_limits: Mapping[str, TenantLimits] = field(
        default_factory=dict
    )  # of tenants that have some of their own
    tenant_default: TenantLimits = TenantLimits()  # of each other tenant
    shares: Shares = field(default_factory=Shares)
    names_tenants: bool = False  # in metrics
