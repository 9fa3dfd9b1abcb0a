"""What the operator decides, in one frozen value that a flight recording begins with."""

from __future__ import annotations

import msgspec

from isthmus.core.types import NS_PER_S

Parameters = tuple[tuple[str, float], ...]
"""What a policy is given by name, beside the facts."""


class LinkRule(msgspec.Struct, frozen=True):
    """One direction of a link between two clusters."""

    source: str
    target: str
    bytes_per_s: int
    rtt_ns: int = 0


class Rules(msgspec.Struct, frozen=True):
    """What is not explained here is an option of `scheduling` or `offload` in docs/configuration.md."""

    policy: str = "least_loaded"
    policy_parameters: Parameters = ()
    max_requests: int = 1024  # accepted at once
    max_attempts: int = 3  # routes of one request, beside those that lost a node or a link
    retry_after_ms: int = 1000
    wait_ms: int = 0  # how long a new request waits for a node of a kind of which there is none
    admission: str = "none"
    admission_parameters: Parameters = ()
    reserve: float = 0.0
    load_limit: float = 1.0
    codecs: tuple[str, ...] = ()  # by which KV may be encoded on its way, where that is sooner there
    # Limits of requests that bring none; None for no limit.
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    links: tuple[LinkRule, ...] = ()  # between clusters, both directions of each
    threshold: int | None = None  # uncached tokens; prompts with more are prefilled elsewhere; None: is solved
    priced: bool = False  # no threshold: each prompt goes where it is predicted to cost least
    cache_mode: str = "scarce"
    control: bool = False
    convert: bool = False
    cool_down_s: float = 60.0
    period_ns: int = NS_PER_S  # how often the driver says `LinksMeasured`
    lending: str = "none"
    lending_reserve: float = 0.1
    # Of prompts that may be computed with more than their own prefix; see `reuse` in docs/configuration.md.
    reuse_selector: str = "cacheblend"
    reuse_packs: bool = True
    reuse_prompts: int = 1024
    reuse_tokens: int = 700
