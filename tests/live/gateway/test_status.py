from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from isthmus.core.blocks import KVLayout
from isthmus.core.types import NodeId, Role
from isthmus.live.cluster.links import Offload
from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.status import cluster_status
from isthmus.live.store import StoreStat, TierStat

from .fake import HANG, FakeBackend, FakeLink
from .inprocess import Connection, Poster

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
LINK = FakeLink("west", "east", True, 125_000_000, 9000, 62_500_000, 40, 20_500_000)
CACHE = {"kv_bytes_fetched_total": 100, "kv_bytes_borrowed_total": 200, "kv_bytes_given_total": 300}


def report(backend: FakeBackend, node: str, role: Role, **gauges: float) -> None:
    """A node joins and reports."""
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
    found = status(post)
    assert found["hit_rate"] == 0.25 and found["requests_refused"] == {"prefill": 3}
    assert found["nodes"] == [
        {
            "node": "mixed-0",
            "role": "mixed",
            "requests_running": 2,
            "requests_waiting": 1,
            "preemptions": 5,
            "kv_memory": {"capacity_bytes": 65536, "used_bytes": 16384, "cached_bytes": 20480},
            "prefix_cache": {
                "queried_tokens": 200,
                "hit_tokens": 50,
                "hit_rate": 0.25,
                "evicted_blocks": 11,
            },
            "transfers": {
                "handover_bytes_in": 0,
                "handover_bytes_out": 0,
                "fetched_bytes": 0,
                "borrowed_bytes": 0,
                "given_bytes": 0,
                "seal_mismatches": 0,
            },
            "cache": None,
            "cluster": "",
            "products": [],
            "remark": "",
        }
    ]


def test_how_each_node_multiplies(post: Poster, backend: FakeBackend) -> None:
    for node in ("mixed-0", "mixed-1"):
        report(backend, node, Role.MIXED)
    backend.multiplied = {NodeId("mixed-1"): ("8x8 float32: native", "9x9 float32: native")}
    backend.multiplied[NodeId("mixed-2")] = ("8x8 float32: native",)  # has not reported yet
    found = {node["node"]: node["products"] for node in status(post)["nodes"]}
    assert found == {"mixed-0": [], "mixed-1": ["8x8 float32: native", "9x9 float32: native"]}


def test_what_to_know_of_a_node(post: Poster, backend: FakeBackend) -> None:
    for node in ("mixed-0", "mixed-1"):
        report(backend, node, Role.MIXED)
    backend.remarked = {NodeId("mixed-1"): "without seals"}
    assert [node["remark"] for node in status(post)["nodes"]] == ["", "without seals"]


def test_the_tiers_of_a_cache(post: Poster, backend: FakeBackend) -> None:
    """Tiers of all nodes share one denominator: the prompt tokens looked up anywhere, 3,200 here."""
    report(backend, "prefill-0", Role.PREFILL, prefix_cache_queries_total=2400, prefix_cache_hits_total=600)
    report(backend, "mixed-0", Role.MIXED, prefix_cache_queries_total=800, **STAT.gauges(), **CACHE)
    node = status(post)["nodes"][1]
    assert node["transfers"] | {"seal_mismatches": 0} == {
        "handover_bytes_in": 0,
        "handover_bytes_out": 0,
        "fetched_bytes": 100,
        "borrowed_bytes": 200,
        "given_bytes": 300,
        "seal_mismatches": 0,
    }
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
    assert node["cache"] == {
        "pinned_blocks": 3,
        "write_queue_blocks": 6,
        "degraded": True,
        "io_errors": 9,
        "lost_blocks": 7,
        "seal_mismatches": 8,
        "misses": 2,
    }


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


def test_answers_under_way(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    backend.script = lambda _: [HANG]
    app = create_app(backend, tokenizer)

    async def scenario() -> None:
        connection = Connection(app, "/v1/completions", {"model": "acme/tiny", "prompt": [1], "n": 3})
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(connection.serve())
            while len(backend.jobs) < 3:
                await asyncio.sleep(0)
            assert (await asyncio.to_thread(status, Poster(app)))["requests_running"] == 3
            connection.disconnect()

    asyncio.run(scenario())
    assert status(Poster(app))["requests_running"] == 0


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_it_can_only_be_read(post: Poster, method: str) -> None:
    assert post.request(method, "/status").status_code == 405


def test_links_between_clusters(post: Poster, backend: FakeBackend) -> None:
    report(backend, "west-prefill-0", Role.PREFILL)
    backend.members[NodeId("west-prefill-0")] = Role.PREFILL, LAYOUT, "west"
    backend.offloaded = Offload(1500, "fixed", changes=2, requests=7, conversions=1, links=[LINK])
    found = status(post)
    assert found["nodes"][0]["cluster"] == "west"
    assert found["offload"] == {
        "threshold": 1500,
        "reason": "fixed",
        "changes": 2,
        "requests": 7,
        "conversions": 1,
        "links": [
            {
                "source": "west",
                "target": "east",
                "up": True,
                "sent_bytes": 9000,
                "gbps": 0.5,
                "rated_gbps": 1.0,
                "queued_bytes": 40,
                "rtt_ms": 20.5,
            }
        ],
    }
    backend.offloaded = Offload(links=[replace(LINK, rtt_ns=0)])
    found = status(post)
    assert found["offload"]["threshold"] is None and found["offload"]["links"][0]["rtt_ms"] is None
