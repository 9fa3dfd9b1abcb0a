"""The object that `GET /status` answers with, made from the nodes' gauges. Its keys are stable; docs/status.md
explains each. Counters count from the start of their node."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from isthmus.core.types import NS_PER_MS, NodeId, Role
from isthmus.live.gateway.backend import Backend, BlockShape, GatewayLink, OffloadView

Gauges = Mapping[str, float]


class TierStatus(msgspec.Struct, frozen=True):
    """One tier of a node's cache. `hits`: blocks read from it; `hit_rate`: the tokens of these blocks over all prompt
    tokens looked up in the cluster, None before the first."""

    tier: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    hits: int
    hit_rate: float | None
    evictions: int
    bytes_in: int
    bytes_out: int


class CacheStatus(msgspec.Struct, frozen=True):
    """The cache beside the engine's memory. `tiers`: "memory" and, with an SSD, "disk"."""

    tiers: tuple[TierStatus, ...]
    pinned_blocks: int
    write_queue_blocks: int
    degraded: bool
    io_errors: int
    lost_blocks: int
    seal_mismatches: int
    misses: int


class MemoryStatus(msgspec.Struct, frozen=True):
    """KV memory of a node's engine."""

    capacity_bytes: int
    used_bytes: int
    cached_bytes: int


class ReuseStatus(msgspec.Struct, frozen=True):
    """Prefix-cache lookups of a node, in prompt tokens. `hit_rate` is None before the first."""

    queried_tokens: int
    hit_tokens: int
    hit_rate: float | None
    evicted_blocks: int


class TransferStatus(msgspec.Struct, frozen=True):
    """KV bytes between this node and others: `handover` of requests that decode elsewhere than they prefill; cached
    blocks received (`fetched`), read in another node's memory (`borrowed`), sent (`given`)."""

    handover_bytes_in: int
    handover_bytes_out: int
    fetched_bytes: int
    borrowed_bytes: int
    given_bytes: int
    seal_mismatches: int


class NodeStatus(msgspec.Struct, frozen=True):
    """One node. `cache`: None without one; `cluster`: "" if there is only one; `products` and `remark`: as in
    `Backend`."""

    node: str
    role: Role
    requests_running: int
    requests_waiting: int
    preemptions: int
    kv_memory: MemoryStatus
    prefix_cache: ReuseStatus
    transfers: TransferStatus
    cache: CacheStatus | None
    cluster: str = ""
    products: tuple[str, ...] = ()
    remark: str = ""


class LinkStatus(msgspec.Struct, frozen=True):
    """One direction of a link between clusters. `sent_bytes` counts since the gateway started; `gbps` is the mean of
    the last period; `queued_bytes` were handed over and have not arrived; `rtt_ms` is None before the first message.
    """

    source: str
    target: str
    up: bool
    sent_bytes: int
    gbps: float
    rated_gbps: float
    queued_bytes: int
    rtt_ms: float | None


class OffloadStatus(msgspec.Struct, frozen=True):
    """Prefill offload between clusters: as in `OffloadView`."""

    threshold: int | None
    reason: str
    changes: int
    requests: int
    conversions: int
    links: tuple[LinkStatus, ...]


class Status(msgspec.Struct, frozen=True):
    """The cluster at one moment. `time_s`: since 1970; `requests_running`: choices under way."""

    time_s: float
    model: str
    healthy: bool
    requests_running: int
    requests_refused: dict[str, int]
    hit_rate: float | None
    nodes: tuple[NodeStatus, ...]
    offload: OffloadStatus | None = None


def cluster_status(backend: Backend, requests_running: int) -> Status:
    """The cluster as its nodes last reported it; a node that joined appears with its first report."""
    gauges: dict[str, dict[str, float]] = {}
    for name, by_node in backend.gauges().items():
        for node, value in by_node.items():
            gauges.setdefault(node, {})[name] = value
    # Later stages of a pipeline group report as well, but look up no prompts.
    queried = sum(found.get("prefix_cache_queries_total", 0) for found in gauges.values())
    hits = sum(found.get("prefix_cache_hits_total", 0) for found in gauges.values())
    return Status(
        time_s=time.time(),
        model=backend.card.name,
        healthy=backend.healthy,
        requests_running=requests_running,
        requests_refused=backend.refusals(),
        hit_rate=_share(hits, queried),
        nodes=tuple(_nodes(backend, gauges, queried)),
        offload=_offload(backend.offload()),
    )


def _offload(found: OffloadView | None) -> OffloadStatus | None:
    if found is None:
        return None
    return OffloadStatus(
        threshold=found.threshold,
        reason=found.reason,
        changes=found.changes,
        requests=found.requests,
        conversions=found.conversions,
        links=tuple([_link(link) for link in found.links]),
    )


def _link(link: GatewayLink) -> LinkStatus:
    return LinkStatus(
        source=link.source,
        target=link.target,
        up=link.up,
        sent_bytes=link.sent_bytes,
        gbps=link.bytes_per_s * 8 / 1e9,
        rated_gbps=link.rated_bytes_per_s * 8 / 1e9,
        queued_bytes=link.queued_bytes,
        rtt_ms=link.rtt_ns / NS_PER_MS if link.rtt_ns else None,
    )


def _nodes(backend: Backend, gauges: Mapping[str, Gauges], queried: float) -> Iterable[NodeStatus]:
    """By cluster, role and name, so that a node that was started again keeps its place."""
    roles, products, remarks = list(Role), backend.products(), backend.remarks()

    def place(item: tuple[NodeId, tuple[Role, BlockShape, str]]) -> tuple[str, int, int, str]:
        node, (role, _, cluster) = item
        return cluster, roles.index(role), len(node), node

    for node, (role, shape, cluster) in sorted(backend.nodes().items(), key=place):
        if node in gauges:
            yield NodeStatus(
                node=node,
                role=role,
                **_engine(shape, gauges[node]),
                cache=_cache(gauges[node], shape, queried) if "cache_memory_bytes" in gauges[node] else None,
                cluster=cluster,
                products=tuple(products.get(node, ())),
                remark=remarks.get(node, ""),
            )


def _engine(shape: BlockShape, gauges: Gauges) -> dict[str, Any]:
    """The fields of a NodeStatus that every engine reports. A node without a cache neither fetches nor gives."""
    found = collections.defaultdict(int, {name: int(value) for name, value in gauges.items()})
    blocks, block_bytes = found["kv_blocks"], shape.block_bytes
    queried, hits = found["prefix_cache_queries_total"], found["prefix_cache_hits_total"]
    return {
        "requests_running": found["node_requests_running"],
        "requests_waiting": found["node_requests_waiting"],
        "preemptions": found["num_preemptions_total"],
        "kv_memory": MemoryStatus(
            capacity_bytes=blocks * block_bytes,
            used_bytes=(blocks - found["kv_blocks_available"]) * block_bytes,
            cached_bytes=found["kv_blocks_cached"] * block_bytes,
        ),
        "prefix_cache": ReuseStatus(queried, hits, _share(hits, queried), found["kv_blocks_evicted_total"]),
        "transfers": TransferStatus(
            handover_bytes_in=found["kv_bytes_in_total"],
            handover_bytes_out=found["kv_bytes_out_total"],
            fetched_bytes=found["kv_bytes_fetched_total"],
            borrowed_bytes=found["kv_bytes_borrowed_total"],
            given_bytes=found["kv_bytes_given_total"],
            seal_mismatches=found["seal_mismatches_total"],
        ),
    }


def _cache(found: Gauges, shape: BlockShape, queried: float) -> CacheStatus:
    tiers = ["memory", "disk"] if found["cache_disk_capacity_bytes"] else ["memory"]
    return CacheStatus(
        tiers=tuple([_tier(tier, found, shape, queried) for tier in tiers]),
        pinned_blocks=int(found["cache_pinned_blocks"]),
        write_queue_blocks=int(found["cache_write_queue_blocks"]),
        degraded=bool(found["cache_degraded"]),
        io_errors=int(found["cache_io_errors_total"]),
        lost_blocks=int(found["cache_lost_blocks_total"]),
        seal_mismatches=int(found["cache_seal_mismatches_total"]),
        misses=int(found["cache_misses_total"]),
    )


def _tier(tier: str, found: Gauges, shape: BlockShape, queried: float) -> TierStatus:
    hits = int(found[f"cache_{tier}_hits_total"])
    return TierStatus(
        tier=tier,
        capacity_bytes=int(found[f"cache_{tier}_capacity_bytes"]),
        used_bytes=int(found[f"cache_{tier}_bytes"]),
        blocks=int(found[f"cache_{tier}_blocks"]),
        hits=hits,
        hit_rate=_share(hits * shape.block_size, queried),
        evictions=int(found[f"cache_{tier}_evictions_total"]),
        bytes_in=int(found[f"cache_{tier}_bytes_in_total"]),
        bytes_out=int(found[f"cache_{tier}_bytes_out_total"]),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class ServerStatus(msgspec.Struct, frozen=True):
    """One server behind `isthmus route`. `models`, `kind`, `version`, `longest` (tokens of a request) and `kv_tokens`:
    what it says of itself, empty or 0 if it does not; `role`: by the option that names it; `draining`: it gets no new
    requests, and is removed when those that it has have ended; `slow`: it gets none until it is as quick as it was;
    `continued_total`: answers that broke off there and went on elsewhere; `cache_blocks`, `cache_capacity_blocks`: that
    it has or is believed to have, now and at most; `cache_from`: what the latter is known from: `told` by the server,
    `guessed`, or `learnt` from its answers; `expected_tokens_total`: that were expected to be cached;
    `prompt_tokens_total`, `cache_told_tokens_total` (of answers that say how many were cached), `cached_tokens_total`:
    as its answers say."""

    server: str
    up: bool
    requests_running: int
    requests_total: int
    failures_total: int
    leaves_total: int
    continued_total: int
    cache_blocks: int
    cache_capacity_blocks: int
    prompt_tokens_total: int
    cached_tokens_total: int
    expected_tokens_total: int = 0
    cache_told_tokens_total: int = 0
    draining: bool = False
    slow: bool = False
    models: tuple[str, ...] = ()
    kind: str = ""
    version: str = ""
    longest: int = 0
    kv_tokens: int = 0
    cache_from: str = ""
    role: str = "mixed"


class RouterStatus(msgspec.Struct, frozen=True):
    """What `GET /status` of `isthmus route` answers with."""

    servers: tuple[ServerStatus, ...]
