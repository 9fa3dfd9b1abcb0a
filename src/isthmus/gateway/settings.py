"""Limits of the gateway. Built once at start, never written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.types import Reuse, Shares


@dataclass(frozen=True)
class ApiKey:
    """`digest`: the key's SHA-256."""

    tenant: str
    digest: bytes


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
    long_prompt_chars: int = 20_000  # longer texts are tokenised in a thread, so that the loop stays free
    max_sequences: int = 256  # prompts times `n`
    keys: tuple[ApiKey, ...] = field(default=(), repr=False)
    """Of which every request needs one; none: nobody needs any."""
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
