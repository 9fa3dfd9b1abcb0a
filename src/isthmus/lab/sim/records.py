"""One request on its way through the simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from isthmus.core.attempts import Route, key_of
from isthmus.core.types import NodeId, RequestId, Role
from isthmus.lab.sim.workloads import Request


class SimJob:
    """A request, and where its attempt under way has got to.

    `name`: what the conductor calls it; `key`: what its nodes call its attempt, the last one that began, by `route`.
    `prefill_slot`, `decode_slot`: its nodes. `age`: which admission of the node where it computes was its own.

    `length`: of what this attempt prefills, the tokens that an earlier one gave included. Its prefill waits until
    `loaded_ns`.

    `num_generated`: tokens before `first_step`, the iterations of the node `decodes_on` before its first there;
    its last token is the `last_step`-th there. `spans`: (node, first step, last step) of each stay that is over;
    `resumed_ns`: when the prefill after a pre-emption, or of another attempt, gave a token.
    """

    __slots__ = (
        "age", "decode_slot", "decodes_on", "first_step", "index", "key", "last_step", "length",
        "loaded_ns", "name", "num_generated", "prefill_slot", "record", "request", "resumed_ns", "route",
        "spans",
    )  # fmt: skip

    route: Route

    def __init__(self, index: int, request: Request) -> None:
        self.index, self.request = index, request
        self.name = self.key = RequestId(str(index))
        self.record = RequestRecord(index, request, arrival_ns=request.arrival_ns)
        self.length = request.num_tokens
        self.age = self.num_generated = self.loaded_ns = 0
        self.prefill_slot = self.decode_slot = -1
        self.decodes_on = self.first_step = self.last_step = -1
        self.spans: list[tuple[int, int, int]] = []
        self.resumed_ns: list[int] = []

    @property
    def num_left(self) -> int:
        """Tokens that are still to come, while it does not decode."""
        return self.request.output_tokens - self.num_generated

    def begin(self, route: Route) -> None:
        """Another attempt, of whose way nothing is done."""
        self.route, self.key = route, key_of(self.name, route.attempt)
        self.record.attempts += 1
        self.length = self.request.num_tokens + self.num_generated
        if self.record.first_token_ns < 0:
            self.record.prefill_start_ns, self.record.stalled_ns = -1, 0
            self.record.moved_tokens = self.record.similar_tokens = 0

    def withdraw(self) -> None:
        """Its attempt is over, whatever it had come to. It decodes nowhere."""
        self.loaded_ns = 0
        if self.record.first_token_ns >= 0 and len(self.spans) == len(self.resumed_ns):
            self.spans.append((0, 0, 0))  # a token came, and the next will be that of another prefill

    def join(self, slot: int, step: int) -> None:
        """It decodes on a node after `step` of its iterations."""
        self.decodes_on, self.first_step, self.last_step = slot, step, step + self.num_left

    def leave(self, step: int) -> None:
        """It decodes no more; the node's `step`-th iteration was its last there."""
        self.num_generated += step - self.first_step
        self.spans.append((self.decodes_on, self.first_step, step))
        self.decodes_on = self.last_step = -1


# What one simulation leaves behind: a record for each request, node and link. Times in ns of virtual time.


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
