"""What the head tells operators of several clusters: links, the threshold, and how often it was crossed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LinkView:
    """One direction of a link. `sent_bytes` since the head started; the rest over the period last measured."""

    source: str
    target: str
    up: bool
    rated_bytes_per_s: int
    sent_bytes: int
    bytes_per_s: int
    queued_bytes: int
    rtt_ns: int


@dataclass
class Offload:
    """`threshold`: in tokens, None: nothing is prefilled in another cluster; `reason`: for the latest change;
    `requests`: attempts sent to another cluster's prefill nodes; `conversions`: nodes that took another role."""

    threshold: int | None = None
    reason: str = ""
    changes: int = 0
    requests: int = 0
    conversions: int = 0
    links: list[LinkView] = field(default_factory=list)
