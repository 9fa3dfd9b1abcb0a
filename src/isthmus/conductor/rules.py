"""What the operator decides, in one frozen value that a flight recording begins with."""

from __future__ import annotations

import msgspec

from isthmus.types import NS_PER_S


class LinkRule(msgspec.Struct, frozen=True):
    """One direction of a link between two clusters."""

    source: str
    target: str
    bytes_per_s: int
    rtt_ns: int = 0


class Rules(msgspec.Struct, frozen=True):
    """`max_requests`: accepted at once; `max_attempts`: routes of one request, beside those that lost a node or a link;
    the rest as in the configuration.

    `ttft_ms`, `tbt_ms`: limits of requests that bring none, None for no limit.
    `codecs`: by which KV may be encoded on its way, where that is sooner there.
    `links`: between clusters, both directions of each; `threshold`: more uncached tokens than that are prefilled in
    another cluster, None solves it; `priced`: no threshold, each prompt goes where it is predicted to cost least (see
    `offload`); `cache_mode`, `control`, `convert`, `cool_down_s`: as in `offload`;
    `period_ns`: how often the driver says `LinksMeasured`.
    """

    policy: str = "least_loaded"
    max_requests: int = 1024
    max_attempts: int = 3
    retry_after_ms: int = 1000
    admission: str = "none"
    reserve: float = 0.0
    sticky_blocks: int = 2
    balancing_threshold: float = 1.0
    decode_s: float = 10.0
    load_limit: float = 1.0
    seed: int = 0
    codecs: tuple[str, ...] = ()
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    links: tuple[LinkRule, ...] = ()
    threshold: int | None = None
    priced: bool = False
    cache_mode: str = "scarce"
    control: bool = False
    convert: bool = False
    cool_down_s: float = 60.0
    period_ns: int = NS_PER_S

    @property
    def decode_ns(self) -> int:
        return int(self.decode_s * NS_PER_S)
