from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from isthmus.core.blocks import KVLayout
from isthmus.core.types import NodeId, Role
from isthmus.live.cluster.links import Offload
from isthmus.live.gateway.status import cluster_status
from isthmus.live.store import StoreStat, TierStat

from .fake import FakeBackend
from .inprocess import Poster

LAYOUT = KVLayout("float32", block_size=16, num_layers=2, num_kv_heads=1, head_dim=4)  # 1,024 bytes a block
STAT = StoreStat(
    memory=TierStat(8192, 5120, 5, hits=30, bytes_in=9216, bytes_out=30720, evictions=4),
    disk=TierStat(1 << 20, 40960, 10, hits=10, bytes_in=10240, bytes_out=10240, evictions=1),
    misses=2,
    num_pinned=3,
    num_reserved=0,
    file_bytes=65536,
    queued_blocks=6,
    lost_blocks=7,
    seal_mismatches=8,
    io_errors=9,
    degraded=True,
)
BASE = {
    "node_requests_running": 2,
    "node_requests_waiting": 1,
    "num_preemptions_total": 5,
    "kv_blocks": 64,
    "kv_blocks_available": 48,
    "kv_blocks_cached": 20,
    "kv_blocks_evicted_total": 11,
    "prefix_cache_queries_total": 0,
    "prefix_cache_hits_total": 0,
    "kv_bytes_in_total": 0,
    "kv_bytes_out_total": 0,
    "seal_mismatches_total": 0,
}
BETWEEN = {"source": "west", "target": "east", "up": True}
BANDWIDTH = {
    "rated_bytes_per_s": 125_000_000,
    "sent_bytes": 9000,
    "bytes_per_s": 62_500_000,
    "queued_bytes": 40,
}
LINK: Any = SimpleNamespace(**BETWEEN, **BANDWIDTH, rtt_ns=20_500_000)
CACHE = {"kv_bytes_fetched_total": 100, "kv_bytes_borrowed_total": 200, "kv_bytes_given_total": 300}
TRANSFERS = (
    *("handover_bytes_in", "handover_bytes_out"),
    *("fetched_bytes", "borrowed_bytes", "given_bytes", "seal_mismatches"),
)


def report(backend: FakeBackend, node: str, role: Role, **gauges: float) -> None:
    backend.members[NodeId(node)] = role, LAYOUT, ""
    for name, value in (BASE | gauges).items():
        backend.node_gauges.setdefault(name, {})[node] = value


def status(post: Poster) -> dict[str, Any]:
    response = post.get("/status")
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    return dict(response.json())


def test_before_any_node_is_in(post: Poster, backend: FakeBackend) -> None:
    backend.healthy = False
    found = status(post)
    assert found.pop("time_s") > 1_700_000_000
    assert found == {
        "model": "acme/tiny",
        "healthy": False,
        "requests_running": 0,
        "requests_refused": {},
        "hit_rate": None,
        "nodes": [],
        "offload": None,
    }


def test_a_node_without_a_cache(post: Poster, backend: FakeBackend) -> None:
    report(backend, "mixed-0", Role.MIXED, prefix_cache_queries_total=200, prefix_cache_hits_total=50)
    backend.node_gauges["kv_bytes_out_total"]["prefill-0.1"] = 7  # a later stage of a group is no node
    backend.refused = {"prefill": 3}
    backend.multiplied = {NodeId("mixed-0"): ("8x8 float32: native",), NodeId("mixed-1"): ("not reported yet",)}
    backend.remarked = {NodeId("mixed-0"): "without seals"}
    found = status(post)
    assert found["hit_rate"] == 0.25 and found["requests_refused"] == {"prefill": 3}
    prefix = {"queried_tokens": 200, "hit_tokens": 50, "hit_rate": 0.25, "evicted_blocks": 11}
    assert found["nodes"] == [
        {
            "node": "mixed-0",
            "role": "mixed",
            "requests_running": 2,
            "requests_waiting": 1,
            "preemptions": 5,
            "kv_memory": {"capacity_bytes": 65536, "used_bytes": 16384, "cached_bytes": 20480},
            "prefix_cache": prefix,
            "transfers": dict.fromkeys(TRANSFERS, 0),
            "cache": None,
            "cluster": "",
            "products": ["8x8 float32: native"],
            "remark": "without seals",
        }
    ]


def test_the_tiers_of_a_cache(post: Poster, backend: FakeBackend) -> None:
    """Tiers of all nodes share one denominator: the prompt tokens looked up anywhere, 3,200 here."""
    report(backend, "prefill-0", Role.PREFILL, prefix_cache_queries_total=2400, prefix_cache_hits_total=600)
    report(backend, "mixed-0", Role.MIXED, prefix_cache_queries_total=800, **STAT.gauges(), **CACHE)
    node = status(post)["nodes"][1]
    kept = {"fetched_bytes": 100, "borrowed_bytes": 200, "given_bytes": 300}
    assert node["transfers"] == dict.fromkeys(TRANSFERS, 0) | kept
    memory, disk = node["cache"].pop("tiers")
    assert memory == {
        "tier": "memory",
        "capacity_bytes": 8192,
        "used_bytes": 5120,
        "blocks": 5,
        "hits": 30,
        "hit_rate": 30 * 16 / 3200,
        "evictions": 4,
        "bytes_in": 9216,
        "bytes_out": 30720,
    }
    assert disk["tier"] == "disk" and disk["hit_rate"] == 10 * 16 / 3200 and disk["evictions"] == 1
    counts = {"pinned_blocks": 3, "write_queue_blocks": 6, "io_errors": 9, "lost_blocks": 7, "misses": 2}
    assert node["cache"] == counts | {"degraded": True, "seal_mismatches": 8}


def test_without_an_ssd_there_is_one_tier(backend: FakeBackend) -> None:
    gauges = STAT.gauges() | {"cache_disk_capacity_bytes": 0.0}
    report(backend, "mixed-0", Role.MIXED, **gauges, **CACHE)
    (node,) = cluster_status(backend, 0).nodes
    assert node.cache is not None
    assert [(tier.tier, tier.hit_rate) for tier in node.cache.tiers] == [("memory", None)], "nothing looked up"


def test_nodes_are_in_order_once_they_reported(backend: FakeBackend) -> None:
    for name in ("decode-0", "prefill-10", "prefill-9"):
        report(backend, name, Role(name.split("-")[0]))
    backend.members[NodeId("prefill-1")] = Role.PREFILL, LAYOUT, ""
    assert [node.node for node in cluster_status(backend, 0).nodes] == ["prefill-9", "prefill-10", "decode-0"]


def test_links_between_clusters(post: Poster, backend: FakeBackend) -> None:
    report(backend, "west-prefill-0", Role.PREFILL)
    backend.members[NodeId("west-prefill-0")] = Role.PREFILL, LAYOUT, "west"
    backend.offloaded = Offload(1500, "fixed", changes=2, requests=7, conversions=1, links=[LINK])
    found = status(post)
    assert found["nodes"][0]["cluster"] == "west"
    bandwidth = {"sent_bytes": 9000, "gbps": 0.5, "rated_gbps": 1.0, "queued_bytes": 40, "rtt_ms": 20.5}
    link = {"source": "west", "target": "east", "up": True} | bandwidth
    counts = {"changes": 2, "requests": 7, "conversions": 1}
    assert found["offload"] == {"threshold": 1500, "reason": "fixed", "links": [link]} | counts
    backend.offloaded = Offload(links=[SimpleNamespace(**BETWEEN, **BANDWIDTH, rtt_ns=0)])
    found = status(post)
    assert found["offload"]["threshold"] is None and found["offload"]["links"][0]["rtt_ms"] is None
