"""What offloading did, in figures: requests by the clusters they went through, links between these, the threshold.

Every figure is described in docs/simulate.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from isthmus.sim.records import LinkRecord, RequestRecord, Result, ThresholdChange
from isthmus.sim.spread import Spread, mean_s, share, spread
from isthmus.types import NS_PER_S

MINUTE_NS = 60 * NS_PER_S


class Parts(msgspec.Struct, frozen=True):
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
    ttft_s: Spread | None
    ready_s: Spread | None
    ttft_parts: Parts | None


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


def ready_ns(record: RequestRecord) -> int:
    """When the decode node could go on after the first token; -1: it never could."""
    return record.first_token_ns if record.prefill == record.decode else record.landed_ns


def parts(first: Sequence[RequestRecord]) -> Parts | None:
    """Of requests with a first token."""
    if not first:
        return None
    return Parts(
        queue=mean_s([each.prefill_start_ns - each.arrival_ns for each in first]),
        load=mean_s([each.stalled_ns for each in first]),
        prefill=mean_s([each.first_token_ns - each.prefill_start_ns - each.stalled_ns for each in first]),
        transfer=mean_s([ready_ns(each) - each.first_token_ns for each in first if ready_ns(each) >= 0]),
    )


def routes(result: Result, first: Sequence[RequestRecord]) -> dict[str, RouteUse]:
    """By `prefill cluster > home`; nothing where there is only one cluster."""
    clusters = [node.cluster for node in result.nodes]
    if len(set(clusters)) < 2:
        return {}
    members: dict[tuple[str, str], list[RequestRecord]] = {}
    for each in first:
        members.setdefault((clusters[each.prefill], clusters[each.decode]), []).append(each)
    return {f"{one} > {other}": _route(members[one, other], len(first)) for one, other in sorted(members)}


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
        ttft_parts=parts(records),
    )


def crossings(links: Sequence[LinkRecord], span_ns: int) -> dict[str, CrossUse]:
    """Of links between clusters, by name."""
    return {
        link.name: CrossUse(
            bytes_moved=link.bytes_moved,
            gbps=share(8 * link.bytes_moved, span_ns),  # bits a nanosecond
            utilisation=share(link.bytes_moved, link.bytes_per_s * span_ns / NS_PER_S),
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
