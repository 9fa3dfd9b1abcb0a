"""Metrics after requests, of nodes and of links; a histogram that reads like the library's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from isthmus.core.types import FinishReason, Generated
from isthmus.live.cluster.links import Offload
from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.metrics import Tally
from isthmus.live.gateway.node_metrics import NODE_METRICS

from .fake import HANG, FakeBackend, Step, says
from .inprocess import Connection, Poster, Served


def samples(post: Poster) -> dict[str, float]:
    """Name and labels of each sample -> its value, as Prometheus reads them."""
    response = post.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name.removeprefix("isthmus_")
        + "".join(f" {k}={v}" for k, v in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_after_some_requests(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says([97, 98, 99, 100], per_batch=2, cached_tokens=1)
    post.complete(prompt=[1, 2, 3], n=2)
    backend.script = lambda _: says([97], FinishReason.LENGTH)
    post.complete(prompt=[1, 2], stream=True)
    post.complete(temperature=9)
    post.get("/nowhere")
    expected = {
        "prompt_tokens_total": 5,
        "prompt_tokens_cached_total": 1,
        "generation_tokens_total": 9,
        "request_success_total finished_reason=stop": 2,
        "request_success_total finished_reason=length": 1,
        "requests_failed_total status=400": 1,
        "requests_failed_total status=404": 1,
        "requests_cancelled_total": 0,
        "num_requests_running": 0,
        "time_to_first_token_seconds_count": 3,
        "e2e_request_latency_seconds_count": 3,
        # Of each four-token answer the second batch had two tokens, with a gap before it.
        "inter_token_latency_seconds_count": 4,
        "inter_token_latency_seconds_bucket le=+Inf": 4,
    }
    assert samples(post).items() >= expected.items()


def test_cached_tokens_that_are_told_with_the_last_token(post: Poster, backend: FakeBackend) -> None:
    """As vLLM does."""
    tokens = [Generated(0, 97), Generated(1, 98, FinishReason.STOP, cached_tokens=2)]
    backend.script = lambda _: [[each] for each in tokens]
    post.complete(prompt=[1, 2, 3], n=2)
    assert samples(post).items() >= {"prompt_tokens_total": 3, "prompt_tokens_cached_total": 2}.items()


def test_running_and_cancelled(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    backend.script = lambda _: [HANG]
    app = create_app(backend, tokenizer)

    def running() -> tuple[float, int]:
        return samples(Poster(app))["num_requests_running"], Poster(app).get("/status").json()[
            "requests_running"
        ]

    async def scenario() -> None:
        connection = Connection(app, "/v1/completions", {"model": "acme/tiny", "prompt": [1], "n": 2})
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(connection.serve())
            while len(backend.jobs) < 2:
                await asyncio.sleep(0)
            assert await asyncio.to_thread(running) == (2, 2)
            connection.disconnect()

    asyncio.run(scenario())
    assert running() == (0, 0) and samples(Poster(app))["requests_cancelled_total"] == 1


def test_metrics_of_the_nodes(post: Poster, backend: FakeBackend) -> None:
    """Totals are counters; refusals are counted by their stage."""
    backend.refused = {"prefill": 3, "decode": 1}
    backend.node_gauges = {
        "iterations_total": {"mixed-0": 3},
        "kv_blocks": {"mixed-0": 9, "mixed-1": 7.5},
        "isthmus_queue_length": {"mixed-0": 1},
    }
    families = {family.name: family for family in text_string_to_metric_families(post.get("/metrics").text)}
    kinds = {name: families[f"isthmus_{name}"].type for name in ("iterations", "kv_blocks", "queue_length")}
    assert kinds == {"iterations": "counter", "kv_blocks": "gauge", "queue_length": "gauge"}
    assert families["isthmus_kv_blocks"].documentation == NODE_METRICS["kv_blocks"]
    expected = {
        "iterations_total node=mixed-0": 3,
        "kv_blocks node=mixed-0": 9,
        "kv_blocks node=mixed-1": 7.5,
        "queue_length node=mixed-0": 1,
        "requests_refused_total stage=prefill": 3,
        "requests_refused_total stage=decode": 1,
    }
    assert samples(post).items() >= expected.items()


def test_requests_inside_their_limits(backend: FakeBackend, served: Served) -> None:
    """A limit that every answer keeps, one that none keeps, and a request's own instead of the deployment's."""
    backend.script = lambda _: says([97, 98, 99, 100])
    post = served(ttft_ms=100_000, tbt_ms=100_000)
    post.complete()
    assert samples(post)["requests_within_slo_total"] == 1
    body = {"model": "acme/tiny", "prompt": "hi"}
    backend.script = lambda _: slowly(says([97, 98, 99, 100]))
    for header in ("x-isthmus-slo-ttft-ms", "x-isthmus-slo-tbt-ms"):
        assert post.request("POST", "/v1/completions", json=body, headers={header: "1"}).status_code == 200
        assert samples(post)["requests_within_slo_total"] == 1
    post.complete()
    assert samples(post)["requests_within_slo_total"] == 2
    assert samples(post)["request_success_total finished_reason=stop"] == 4


def slowly(steps: Iterable[Step]) -> Iterator[Step]:
    """Each step takes more than the least limit there is."""
    for step in steps:
        time.sleep(0.002)
        yield step


def test_links_between_clusters(post: Poster, backend: FakeBackend) -> None:
    assert not any("offload" in name or "link" in name for name in samples(post)), "there is one cluster"
    link: Any = SimpleNamespace(source="west", target="east", up=False, sent_bytes=9000, queued_bytes=40)
    backend.offloaded = Offload(1500, "fixed", changes=2, requests=7, conversions=1, links=[link])
    expected = {
        "offload_threshold_tokens": 1500,
        "offload_threshold_changes_total": 2,
        "requests_offloaded_total": 7,
        "node_conversions_total": 1,
        "link_bytes_total source=west target=east": 9000,
        "link_queued_bytes source=west target=east": 40,
        "link_up source=west target=east": 0,
    }
    assert samples(post).items() >= expected.items()
    backend.offloaded = Offload()
    assert samples(post)["offload_threshold_tokens"] == float("inf")


def test_a_histogram_reads_like_the_library_s_own() -> None:
    bounds, ours, theirs = (0.5, 1, 2.5), CollectorRegistry(), CollectorRegistry()
    tally = Tally("t", "Text.", bounds)
    ours.register(tally)
    histogram = Histogram("t", "Text.", buckets=bounds, registry=theirs)
    for value in (0.0, 0.5, 0.75, 1.0, 2.0, 99.0):
        tally.observe(value, times=2)
        histogram.observe(value)
        histogram.observe(value)
    found, expected = (generate_latest(registry).decode().splitlines() for registry in (ours, theirs))
    assert found == [line for line in expected if "_created" not in line]
