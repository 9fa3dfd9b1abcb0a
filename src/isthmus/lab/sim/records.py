"""What one simulation leaves behind: a record for each request, node and link. Times in ns of virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from isthmus.core.types import NodeId, Role
from isthmus.lab.sim.workloads import Request


class RequestStatus(StrEnum):
    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"
    UNFINISHED = "unfinished"


COMPLETED, REFUSED, FAILED, UNFINISHED = RequestStatus


@dataclass(slots=True)
class RequestRecord:
    """One request's way; a time is -1 for a station it did not reach. `index`: its place in the workload.

    `stage`: where it was refused, `prefill` or `decode`; `cached_tokens`: prompt tokens that needed no computing,
    of which `fetched_tokens` came from another node, in `fetch_ns`, and `disk_tokens` from SSD. `moved_tokens`,
    `similar_tokens`: that were not computed since they are those of donors, by passages and by likeness.
    `tbt_ns`: mean of the longest tenth of its token gaps (Mooncake, FAST'25, 5.1), the first gap included; 0 with one
    output token.
    `prefill_ns`: from the start of its prefill to its first token; `stalled_ns`: part of that in which its node only
    waited for KV. `ttft_limit_ns`, `tbt_limit_ns`: what it was promised, 0: nothing. `attempts`: how often it was
    routed; times up to the first token are those of the attempt that gave it.
    """

    index: int
    request: Request
    status: RequestStatus = UNFINISHED
    stage: str = ""
    prefill: int = -1
    decode: int = -1
    arrival_ns: int = 0
    prefill_start_ns: int = -1
    first_token_ns: int = -1
    landed_ns: int = -1
    joined_ns: int = -1
    end_ns: int = -1
    prefill_ns: int = 0
    stalled_ns: int = 0
    attempts: int = 0
    cached_tokens: int = 0
    cached_blocks: int = 0
    fetched_tokens: int = 0
    fetch_ns: int = 0
    disk_tokens: int = 0
    tbt_ns: float = 0.0
    ttft_limit_ns: int = 0
    tbt_limit_ns: int = 0
    moved_tokens: int = 0
    similar_tokens: int = 0


@dataclass(slots=True)
class NodeRecord:
    """One node. `role`: its first. `busy_ns`: time it computed; `stalled_ns`: part of that in which it only waited for
    KV to load."""

    node: NodeId
    role: Role
    busy_ns: int = 0
    stalled_ns: int = 0
    iterations: int = 0
    tokens_prefilled: int = 0
    tokens_decoded: int = 0
    preemptions: int = 0
    blocks_evicted: int = 0
    cluster: str = ""


@dataclass(slots=True)
class LinkRecord:
    """One link. `kind`: `network`, `handover`, `cluster` (between two, one direction), `memory` or `disk`."""

    name: str
    kind: str
    bytes_per_s: float
    bytes_moved: int = 0
    busy_ns: int = 0


class ThresholdChange(NamedTuple):
    """From `at_ns` on, prompts with more uncached tokens than `threshold` are offloaded; None: no prompt is."""

    at_ns: int
    threshold: int | None
    reason: str


class LinkSample(NamedTuple):
    """Of each link between clusters: what left since the sample before, and what is computed and not sent."""

    at_ns: int
    sent_bytes: tuple[int, ...]
    queued_bytes: tuple[int, ...]


class RoleConversion(NamedTuple):
    """From `at_ns` on, a node has another role."""

    at_ns: int
    node: NodeId
    role: Role


@dataclass(slots=True)
class Result:
    """A finished simulation.

    `bytes_moved` by purpose: `handover`, `recall` (what a hand-over from another cluster left out), `fetch`,
    `load`, `disk_read`, `disk_write`, `shipment` and `return` (to holders and from them), `queries`.
    """

    workload: str
    policy: str
    admission: str
    order: str
    records: list[RequestRecord]
    nodes: list[NodeRecord]
    links: list[LinkRecord]
    start_ns: int
    end_ns: int
    bytes_moved: dict[str, int]
    thresholds: list[ThresholdChange] = field(default_factory=list)
    conversions: list[RoleConversion] = field(default_factory=list)
    link_samples: list[LinkSample] = field(default_factory=list)
    wall_s: float = 0.0
    num_events: int = 0
    notes: list[str] = field(default_factory=list)
