"""Metrics after requests, of nodes and of links; a histogram that reads like the library's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from isthmus.core.types import FinishReason, Generated
from isthmus.live.cluster.links import Offload
from isthmus.live.gateway import GatewaySettings, GatewayTokenizer, create_app
from isthmus.live.gateway.metrics import Tally
from isthmus.live.gateway.node_metrics import NODE_METRICS

from .fake import HANG, FakeBackend, FakeLink, Step, says
from .inprocess import Connection, Poster


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
    found = samples(post)
    assert found["prompt_tokens_total"] == 5
    assert found["prompt_tokens_cached_total"] == 1
    assert found["generation_tokens_total"] == 9
    assert found["request_success_total finished_reason=stop"] == 2
    assert found["request_success_total finished_reason=length"] == 1
    assert found["requests_failed_total status=400"] == 1
    assert found["requests_failed_total status=404"] == 1
    assert found["requests_cancelled_total"] == 0
    assert found["num_requests_running"] == 0
    assert found["time_to_first_token_seconds_count"] == 3
    assert found["e2e_request_latency_seconds_count"] == 3
    # Of each four-token answer the second batch had two tokens, with a gap before it.
    assert found["inter_token_latency_seconds_count"] == 4
    assert found["inter_token_latency_seconds_bucket le=+Inf"] == 4


def test_cached_tokens_that_are_told_with_the_last_token(post: Poster, backend: FakeBackend) -> None:
    """As vLLM does."""
    tokens = [Generated(0, 97), Generated(1, 98, FinishReason.STOP, cached_tokens=2)]
    backend.script = lambda _: [[each] for each in tokens]
    post.complete(prompt=[1, 2, 3], n=2)
    found = samples(post)
    assert (found["prompt_tokens_total"], found["prompt_tokens_cached_total"]) == (3, 2)


def test_running_and_cancelled(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    backend.script = lambda _: [HANG]
    app = create_app(backend, tokenizer)
    body = {"model": "acme/tiny", "prompt": [1], "n": 2}

    async def scenario() -> None:
        connection = Connection(app, "/v1/completions", body)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(connection.serve())
            while len(backend.jobs) < 2:
                await asyncio.sleep(0)
            during = await asyncio.to_thread(samples, Poster(app))
            assert during["num_requests_running"] == 2
            connection.disconnect()

    asyncio.run(scenario())
    after = samples(Poster(app))
    assert after["num_requests_running"] == 0
    assert after["requests_cancelled_total"] == 1


def test_gauges_of_the_nodes(post: Poster, backend: FakeBackend) -> None:
    backend.node_gauges = {
        "kv_blocks_free": {"prefill-0": 5, "decode-0": 7.5},
        "isthmus_queue_length": {"prefill-0": 1},
    }
    found = samples(post)
    assert found["kv_blocks_free node=prefill-0"] == 5
    assert found["kv_blocks_free node=decode-0"] == 7.5
    assert found["queue_length node=prefill-0"] == 1


def test_totals_of_the_nodes_are_counters(post: Poster, backend: FakeBackend) -> None:
    backend.node_gauges = {
        "iterations_total": {"mixed-0": 3},
        "kv_blocks": {"mixed-0": 9},
        "new": {"mixed-0": 1},
    }
    families = {family.name: family for family in text_string_to_metric_families(post.get("/metrics").text)}
    kinds = {name: families[f"isthmus_{name}"].type for name in ("iterations", "kv_blocks", "new")}
    assert kinds == {"iterations": "counter", "kv_blocks": "gauge", "new": "gauge"}
    assert families["isthmus_kv_blocks"].documentation == NODE_METRICS["kv_blocks"]
    assert samples(post)["iterations_total node=mixed-0"] == 3


def test_refusals_by_stage(post: Poster, backend: FakeBackend) -> None:
    backend.refused = {"prefill": 3, "decode": 1}
    found = samples(post)
    assert found["requests_refused_total stage=prefill"] == 3
    assert found["requests_refused_total stage=decode"] == 1


def test_requests_inside_their_limits(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    """A limit that every answer keeps, one that none keeps, and a request's own instead of the deployment's."""
    backend.script = lambda _: says([97, 98, 99, 100])
    settings = GatewaySettings(ttft_ms=100_000, tbt_ms=100_000)
    post = Poster(create_app(backend, tokenizer, settings))
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
    link = FakeLink("west", "east", False, 125, 9000, 60, 40, 0)
    backend.offloaded = Offload(1500, "fixed", changes=2, requests=7, conversions=1, links=[link])
    found = samples(post)
    assert found["offload_threshold_tokens"] == 1500
    assert found["offload_threshold_changes_total"] == 2
    assert found["requests_offloaded_total"] == 7
    assert found["node_conversions_total"] == 1
    assert found["link_bytes_total source=west target=east"] == 9000
    assert found["link_queued_bytes source=west target=east"] == 40
    assert found["link_up source=west target=east"] == 0
    backend.offloaded = Offload()
    assert samples(post)["offload_threshold_tokens"] == float("inf")


BOUNDS = (0.5, 1, 2.5)
VALUES = (0.0, 0.5, 0.75, 1.0, 2.0, 99.0)


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_it_reads_like_the_library_s_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("t", "Text.", BOUNDS)
    ours.register(tally)
    histogram = Histogram("t", "Text.", buckets=BOUNDS, registry=theirs)
    for value in VALUES:
        tally.observe(value, times=2)
        histogram.observe(value)
        histogram.observe(value)
    assert lines(ours) == lines(theirs)
