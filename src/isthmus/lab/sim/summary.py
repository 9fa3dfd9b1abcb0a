"""Token gaps from the nodes' logs: the mean of a request's longest tenth, without visiting each gap.

A request's gaps are slices of its node's runs, and within a run they grow evenly: slices are taken from the top, as
many gaps at a time as exceed the next slice's largest.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from isthmus.core.types import NS_PER_S
from isthmus.lab.sim.node import Gaps, SimNode
from isthmus.lab.sim.records import (
    COMPLETED,
    FAILED,
    REFUSED,
    UNFINISHED,
    LinkRecord,
    NodeRecord,
    RequestRecord,
    RequestStatus,
    Result,
    SimJob,
    ThresholdChange,
)
from isthmus.lab.sim.spread import Percentiles, mean_s, share, spread


def set_tbt(jobs: Iterable[SimJob], nodes: list[SimNode]) -> None:
    """Fills in `tbt_ns` of every request that decoded."""
    for job in jobs:
        if job.spans:
            gaps, count = _gaps(job, nodes)
            if count:
                job.record.tbt_ns = mean_of_longest(gaps, -(-count // 10)) / 1000


def _gaps(job: SimJob, nodes: list[SimNode]) -> tuple[list[Gaps], int]:
    """All gaps of a request, and how many: those of each stay, and after it that to the token of a new prefill."""
    gaps: list[Gaps] = []
    before, count = job.record.first_token_ns * 1000, 0
    for at, (slot, first, last) in enumerate(job.spans):
        if last > first:
            before = _stay(nodes[slot], first, last, before, gaps)
            count += last - first
        if at < len(job.resumed_ns):
            resumed = job.resumed_ns[at] * 1000
            gaps.append((before - resumed, 0, 1))
            before, count = resumed, count + 1
    return gaps, count


def _stay(node: SimNode, first: int, last: int, before: int, gaps: list[Gaps]) -> int:
    """Adds the gaps of iterations `[first, last)` of a node; returns the time (ps) of the last one's end.

    The first gap began `before`, with a token from elsewhere. A stay begins with a run; where the attempt was given up
    it ended within one.
    """
    runs = node.run_steps
    begin, end = bisect_right(runs, first) - 1, bisect_right(runs, last - 1)
    log = node.run_gaps[begin:end]
    largest, growth, size = log[-1]
    over = last - runs[end - 1]
    log[-1] = largest + growth * (size - over), growth, over
    largest, growth, size = log[0]
    shortest = -largest - growth * (size - 1)
    gaps.append((before - node.run_start[begin] * 1000 - shortest, 0, 1))
    if size > 1:
        gaps.append((largest, growth, size - 1))
    gaps += log[1:]
    largest, growth, size = log[-1]
    shortest = -largest - growth * (size - 1)
    return node.run_start[end - 1] * 1000 + size * shortest + growth * (size * (size - 1) // 2)


def mean_of_longest(gaps: list[Gaps], count: int) -> float:
    """Mean of the `count` longest gaps, at least 1. Consumes `gaps`."""
    heapify(gaps)
    total, left = 0, count
    while True:
        largest, growth, size = gaps[0]
        take = size if size < left else left
        if growth and take > 1 and len(gaps) > 1:
            second = gaps[1][0]
            if len(gaps) > 2 and gaps[2][0] < second:
                second = gaps[2][0]
            ahead = (second - largest) // growth + 1
            if ahead < take:
                take = ahead
        total -= largest * take + growth * (take * (take - 1) // 2)
        left -= take
        if not left:
            return total / count
        if take == size:
            heappop(gaps)
        else:
            heapreplace(gaps, (largest + growth * take, growth, size - take))


# What a simulation's records say, in figures. Plain Python; the same records give the same bytes.
#
# Every figure, and over which requests it is taken, is described in docs/simulate.md.


MINUTE_NS = 60 * NS_PER_S

STAGES = ("prefill", "decode")
"""Where a request can be refused; both are always reported."""


class Loss(msgspec.Struct, frozen=True):
    """Prefill work that served nobody: node seconds, and as a share of all prefill work."""

    node_s: float
    share: float


class Waste(msgspec.Struct, frozen=True):
    """Prefill work for requests that were `refused` after it, completed but `missed` a limit, or `failed`."""

    refused: Loss
    missed: Loss
    failed: Loss


class Hits(msgspec.Struct, frozen=True):
    """Share of the prompt tokens taken from the node's own memory, from another node, and from its SSD."""

    memory: float
    fetched: float
    disk: float


class ReuseUse(msgspec.Struct, frozen=True):
    """Of requests that may be computed with more than their own prefix: how many, how many `assembled`, and tokens of
    their prompts by where their KV came from; what was computed all the same is `recomputed`."""

    requests: int
    assembled: int
    exact_tokens: int
    moved_tokens: int
    similar_tokens: int
    recomputed_tokens: int


class PoolUse(msgspec.Struct, frozen=True):
    """All nodes of one role. Shares of node time from start to end; `busy_share` includes `stalled_share`."""

    nodes: int
    busy_share: float
    stalled_share: float
    iterations: int
    tokens_prefilled: int
    tokens_decoded: int
    preemptions: int
    blocks_evicted: int


_SUMMED = ("busy_ns", "stalled_ns", *PoolUse.__struct_fields__[3:])


class LinkUse(msgspec.Struct, frozen=True):
    """All links of one kind. Utilisation: bytes moved over the bytes its bandwidth allows from start to end."""

    links: int
    bytes_moved: int
    utilisation_mean: float
    utilisation_max: float


class TtftParts(msgspec.Struct, frozen=True):
    """Mean seconds. `queue + load + prefill` is the mean TTFT; `transfer` is what comes after it, until the decode node
    has all KV."""

    queue: float
    load: float
    prefill: float
    transfer: float


class RouteUse(msgspec.Struct, frozen=True):
    """Requests with a first token that were prefilled in one cluster and decode in one. Means of their tokens."""

    requests: int
    share: float
    prompt_tokens: float
    uncached_tokens: float
    ttft_s: Percentiles | None
    ready_s: Percentiles | None
    ttft_parts: TtftParts | None


class CrossUse(msgspec.Struct, frozen=True):
    """One direction of a link between clusters, over the makespan. `gbps`: mean rate; `busy_share`: of the time."""

    bytes_moved: int
    gbps: float
    utilisation: float
    busy_share: float


class ThresholdUse(msgspec.Struct, frozen=True):
    """What the threshold was, in tokens, None for no offloading; how often it changed, after it was first set."""

    first: int | None
    last: int | None
    least: int | None
    most: int | None
    changes: int
    changes_per_min: float
    most_changes_in_a_min: int


class RoleChange(msgspec.Struct, frozen=True):
    """From `at_s` on, `node` had another role."""

    at_s: float
    node: str
    role: str


class RequestGroup(msgspec.Struct, frozen=True):
    """The requests of one priority or one tenant; fields as in `Summary`."""

    requests: int
    completed: int
    goodput_share: float
    rejected: dict[str, int]
    failed: int
    unfinished: int
    ttft_s: Percentiles | None
    tbt_s: Percentiles | None
    hit_rate_tokens: float


class Summary(msgspec.Struct, frozen=True):
    """One simulation in figures. None: no request got there. Groups are empty unless there are at least two."""

    workload: str
    policy: str
    admission: str
    order: str
    requests: int
    completed: int
    goodput_share: float
    goodput_per_s: float
    ttft_s: Percentiles | None
    ttft_parts: TtftParts | None
    ready_s: Percentiles | None
    tbt_s: Percentiles | None
    tpot_s: Percentiles | None
    e2e_s: Percentiles | None
    queue_s: Percentiles | None
    transfer_s: Percentiles | None
    hit_rate_tokens: float
    hit_rate_blocks: float
    hits_by_source: Hits
    reuse: ReuseUse | None
    rejected: dict[str, int]
    failed: int
    unfinished: int
    retried: int
    waste: Waste
    bytes_moved: dict[str, int]
    utilisation: dict[str, PoolUse]
    links: dict[str, LinkUse]
    by_route: dict[str, RouteUse]
    between_clusters: dict[str, CrossUse]
    threshold: ThresholdUse | None
    conversions: list[RoleChange]
    makespan_s: float
    output_tokens_per_s: float
    by_priority: dict[str, RequestGroup]
    by_tenant: dict[str, RequestGroup]
    notes: list[str]
    events: int
    wall_s: float


def summarize(result: Result) -> Summary:
    """The figures of a finished simulation."""
    all_requests = _Requests(result.records)
    started, first, completed = all_requests.started, all_requests.first, all_requests.completed
    span_ns = result.end_ns - result.start_ns
    num_blocks = sum([len(each.request.blocks) for each in started])
    return Summary(
        workload=result.workload,
        policy=result.policy,
        admission=result.admission,
        order=result.order,
        **msgspec.structs.asdict(_group(all_requests)),
        goodput_per_s=share(all_requests.good * NS_PER_S, span_ns),
        ttft_parts=_parts(first),
        ready_s=spread([ready_ns(each) - each.arrival_ns for each in first if ready_ns(each) >= 0]),
        tpot_s=spread(_mean_gaps_ns(completed)),
        e2e_s=spread([each.end_ns - each.arrival_ns for each in completed]),
        queue_s=spread([each.prefill_start_ns - each.arrival_ns for each in started]),
        transfer_s=spread([each.joined_ns - each.first_token_ns for each in first if each.joined_ns >= 0]),
        hit_rate_blocks=share(sum([each.cached_blocks for each in started]), num_blocks),
        hits_by_source=_hits(all_requests),
        reuse=_reuse(started),
        retried=sum([each.attempts > 1 for each in result.records]),
        waste=_waste(all_requests),
        bytes_moved=dict(result.bytes_moved),
        utilisation=_pools(result.nodes, span_ns),
        links=_links(result.links, span_ns),
        by_route=_routes(result, first),
        between_clusters=_crossings(result.links, span_ns),
        threshold=threshold_use(result.thresholds, span_ns),
        conversions=[
            RoleChange(at_ns / NS_PER_S, node, role.value) for at_ns, node, role in result.conversions
        ],
        makespan_s=span_ns / NS_PER_S,
        output_tokens_per_s=share(sum([each.request.output_tokens for each in completed]) * NS_PER_S, span_ns),
        by_priority=_groups(result.records, attrgetter("request.priority"), highest_first=True),
        by_tenant=_groups(result.records, attrgetter("request.tenant")),
        notes=list(result.notes),
        events=result.num_events,
        wall_s=result.wall_s,
    )


def to_json(summary: Summary, *, wall: bool = True) -> bytes:
    """Indented JSON, keys in a fixed order. `wall=False` leaves out `wall_s`, which alone varies by run."""
    values = msgspec.to_builtins(summary)
    if not wall:
        del values["wall_s"]
    return msgspec.json.format(msgspec.json.encode(values), indent=1) + b"\n"


def within_limits(record: RequestRecord) -> bool:
    """Whether a request counts as goodput: completed, TTFT and TBT inside its limits. A missing limit holds."""
    return record.status is COMPLETED and not _missed_limit(record)


def _missed_limit(record: RequestRecord) -> bool:
    """Of a completed request."""
    late = record.ttft_limit_ns and record.first_token_ns - record.arrival_ns > record.ttft_limit_ns
    return bool(late or (record.tbt_limit_ns and record.tbt_ns > record.tbt_limit_ns))


class _Requests:
    """Some requests by how far they got. `started`: prefill began; `first`: the first token was there."""

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        self.count = len(records)
        self.started = [each for each in records if each.prefill_start_ns >= 0]
        self.first = [each for each in self.started if each.first_token_ns >= 0]
        ended: dict[RequestStatus, list[RequestRecord]] = {status: [] for status in RequestStatus}
        for each in records:
            ended[each.status].append(each)
        self.completed = ended[COMPLETED]
        self.refused = ended[REFUSED]
        self.failed = ended[FAILED]
        self.unfinished = len(ended[UNFINISHED])
        self.missed = [each for each in self.completed if _missed_limit(each)]
        self.prompt_tokens = sum([each.request.num_tokens for each in self.started])
        self.cached_tokens = sum([each.cached_tokens for each in self.started])
        self.rejected = dict.fromkeys(STAGES, 0)
        for each in self.refused:
            self.rejected[each.stage] = self.rejected.get(each.stage, 0) + 1

    @property
    def good(self) -> int:
        return len(self.completed) - len(self.missed)


_Record = TypeVar("_Record", RequestRecord, NodeRecord, LinkRecord)


def _by(key: Callable[[_Record], Any], records: Sequence[_Record]) -> dict[Any, list[_Record]]:
    """The records by `key`, in its order."""
    members: dict[Any, list[_Record]] = {name: [] for name in sorted(set(map(key, records)))}
    for record in records:
        members[key(record)].append(record)
    return members


def _mean_gaps_ns(completed: Sequence[RequestRecord]) -> list[float]:
    return [
        (each.end_ns - each.first_token_ns) / (each.request.output_tokens - 1)
        for each in completed
        if each.request.output_tokens > 1
    ]


def _hits(requests: _Requests) -> Hits:
    fetched = sum([each.fetched_tokens for each in requests.started])
    disk = sum([each.disk_tokens for each in requests.started])
    memory = max(0, requests.cached_tokens - fetched - disk)
    return Hits(*(share(part, requests.prompt_tokens) for part in (memory, fetched, disk)))


def _reuse(started: Sequence[RequestRecord]) -> ReuseUse | None:
    """None where no request asked for it."""
    asked = [each for each in started if each.request.content is not None]
    if not asked:
        return None
    exact = sum([each.cached_tokens for each in asked])
    moved, similar = sum([each.moved_tokens for each in asked]), sum([each.similar_tokens for each in asked])
    whole = sum([each.request.num_tokens for each in asked])
    assembled = sum([each.moved_tokens + each.similar_tokens > 0 for each in asked])
    return ReuseUse(len(asked), assembled, exact, moved, similar, max(0, whole - exact - moved - similar))


def _waste(requests: _Requests) -> Waste:
    whole_ns = sum([each.prefill_ns for each in requests.started])
    parts_ns = [
        sum([each.prefill_ns for each in part]) for part in (requests.refused, requests.missed, requests.failed)
    ]
    return Waste(*(Loss(part_ns / NS_PER_S, share(part_ns, whole_ns)) for part_ns in parts_ns))


def _pools(nodes: Sequence[NodeRecord], span_ns: int) -> dict[str, PoolUse]:
    uses = {}
    for role, pool in _by(attrgetter("role.value"), nodes).items():
        busy, stalled, *counts = (sum(getattr(node, name) for node in pool) for name in _SUMMED)
        time_ns = span_ns * len(pool)
        uses[role] = PoolUse(len(pool), share(busy, time_ns), share(stalled, time_ns), *counts)
    return uses


def link_utilisation(link: LinkRecord, span_ns: int) -> float:
    """Bytes moved over the bytes that fit in `span_ns`; 0 for a link without a limit."""
    fits = link.bytes_per_s * span_ns / NS_PER_S
    return share(link.bytes_moved, fits) if math.isfinite(fits) else 0.0


def _links(links: Sequence[LinkRecord], span_ns: int) -> dict[str, LinkUse]:
    uses: dict[str, LinkUse] = {}
    for kind, members in _by(attrgetter("kind"), links).items():
        shares = [link_utilisation(link, span_ns) for link in members]
        moved = sum(link.bytes_moved for link in members)
        uses[kind] = LinkUse(len(shares), moved, math.fsum(shares) / len(shares), max(shares))
    return uses


def _groups(
    records: Sequence[RequestRecord], key: Callable[[RequestRecord], Any], *, highest_first: bool = False
) -> dict[str, RequestGroup]:
    """The records by `key`, in its order; nothing if all have the same."""
    groups = list(_by(key, records).items())
    if len(groups) < 2:
        return {}
    return {str(name): _group(_Requests(each)) for name, each in groups[:: -1 if highest_first else 1]}


def _group(requests: _Requests) -> RequestGroup:
    return RequestGroup(
        requests=requests.count,
        completed=len(requests.completed),
        goodput_share=share(requests.good, requests.count),
        rejected=requests.rejected,
        failed=len(requests.failed),
        unfinished=requests.unfinished,
        ttft_s=spread([each.first_token_ns - each.arrival_ns for each in requests.first]),
        tbt_s=spread([each.tbt_ns for each in requests.completed if each.request.output_tokens > 1]),
        hit_rate_tokens=share(requests.cached_tokens, requests.prompt_tokens),
    )


# Between clusters.


def ready_ns(record: RequestRecord) -> int:
    """When the decode node could go on after the first token; -1: it never could."""
    return record.first_token_ns if record.prefill == record.decode else record.landed_ns


def _parts(first: Sequence[RequestRecord]) -> TtftParts | None:
    """Of requests with a first token."""
    if not first:
        return None
    return TtftParts(
        queue=mean_s([each.prefill_start_ns - each.arrival_ns for each in first]),
        load=mean_s([each.stalled_ns for each in first]),
        prefill=mean_s([each.first_token_ns - each.prefill_start_ns - each.stalled_ns for each in first]),
        transfer=mean_s([ready_ns(each) - each.first_token_ns for each in first if ready_ns(each) >= 0]),
    )


def _routes(result: Result, first: Sequence[RequestRecord]) -> dict[str, RouteUse]:
    """By `prefill cluster > home`; nothing where there is only one cluster."""
    clusters = [node.cluster for node in result.nodes]
    if len(set(clusters)) < 2:
        return {}
    members = _by(lambda each: (clusters[each.prefill], clusters[each.decode]), first)
    return {f"{one} > {other}": _route(each, len(first)) for (one, other), each in members.items()}


def _route(records: Sequence[RequestRecord], num_all: int) -> RouteUse:
    prompts = [each.request.num_tokens for each in records]
    uncached = [each.request.num_tokens - each.cached_tokens for each in records]
    return RouteUse(
        requests=len(records),
        share=share(len(records), num_all),
        prompt_tokens=sum(prompts) / len(records),
        uncached_tokens=sum(uncached) / len(records),
        ttft_s=spread([each.first_token_ns - each.arrival_ns for each in records]),
        ready_s=spread([ready_ns(each) - each.arrival_ns for each in records if ready_ns(each) >= 0]),
        ttft_parts=_parts(records),
    )


def _crossings(links: Sequence[LinkRecord], span_ns: int) -> dict[str, CrossUse]:
    """Of links between clusters, by name."""
    return {
        link.name: CrossUse(
            bytes_moved=link.bytes_moved,
            gbps=share(8 * link.bytes_moved, span_ns),  # bits a nanosecond
            utilisation=link_utilisation(link, span_ns),
            busy_share=share(link.busy_ns, span_ns),
        )
        for link in links
        if link.kind == "cluster"
    }


def threshold_use(changes: Sequence[ThresholdChange], span_ns: int) -> ThresholdUse | None:
    """None where nothing was ever set."""
    if not changes:
        return None
    tokens = [change.threshold for change in changes if change.threshold is not None]
    times = [change.at_ns for change in changes[1:]]
    crowd = [sum(1 for time in times[at:] if time < begin + MINUTE_NS) for at, begin in enumerate(times)]
    return ThresholdUse(
        first=changes[0].threshold,
        last=changes[-1].threshold,
        least=min(tokens, default=None),
        most=None if len(tokens) < len(changes) else max(tokens, default=None),
        changes=len(times),
        changes_per_min=share(len(times) * MINUTE_NS, span_ns),
        most_changes_in_a_min=max(crowd, default=0),
    )
