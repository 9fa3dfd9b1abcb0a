"""Prometheus metrics of the nodes and of the links between clusters. A node's metric whose name ends in `_total` is a
counter, any other a gauge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from isthmus.live.gateway.backend import Backend

PREFIX = "isthmus_"

NODE_METRICS = {
    # Requests and iterations.
    "node_requests_running": "Requests that hold KV memory of the node: computed now or between two iterations.",
    "node_requests_waiting": "Requests on the node that wait for room, or for their KV.",
    "node_beats_total": "Signs of life of the node since it joined, each with all that is said of it here.",
    "tls_certificate_seconds": "What is left of the 24 h of the node's certificate; renewed when that is a third.",
    "num_preemptions_total": "Requests put back into the queue because KV memory ran out.",
    "iterations_total": "Iterations of the engine.",
    "engine_seconds_total": "Time spent in iterations of the engine.",
    "kv_wait_seconds_total": "The part of it in which the engine waited for cached KV to be loaded.",
    "tokens_computed_total": "Tokens whose KV was computed.",
    "tokens_sampled_total": "Tokens generated.",
    "grammars": "Grammars that are compiled, each in a process of its own.",
    "grammar_bytes": "Memory that they take.",
    "grammar_deaths_total": "Processes that died over a grammar.",
    # KV memory of the engine, and reuse of prefixes.
    "kv_blocks": "KV blocks of the engine's memory.",
    "kv_blocks_available": "Those that hold nothing, or only what may be evicted.",
    "kv_blocks_cached": "Those that hold a named block, in use or not.",
    "kv_blocks_transfer": "Those that hold what leaves with a request, such as its recurrent state, until it has left.",
    "kv_blocks_evicted_total": "Named blocks that left the node altogether.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the caches.",
    "prefix_cache_hits_total": "Prompt tokens found in a cache of the node, or fetched from another node.",
    # The cache beside the engine.
    "cache_memory_bytes": "DRAM tier: bytes in use.",
    "cache_memory_capacity_bytes": "DRAM tier: bytes it can hold.",
    "cache_memory_blocks": "DRAM tier: blocks in it.",
    "cache_memory_hits_total": "DRAM tier: blocks read, by this node or for others.",
    "cache_memory_bytes_in_total": "DRAM tier: bytes stored.",
    "cache_memory_bytes_out_total": "DRAM tier: bytes read, by this node or for others.",
    "cache_memory_evictions_total": "DRAM tier: blocks that left it, to the SSD or altogether.",
    "cache_disk_bytes": "SSD tier: bytes in use.",
    "cache_disk_capacity_bytes": "SSD tier: bytes it can hold.",
    "cache_disk_blocks": "SSD tier: blocks written, copies of those in DRAM included.",
    "cache_disk_hits_total": "SSD tier: blocks read, by this node or for others.",
    "cache_disk_bytes_in_total": "SSD tier: bytes written.",
    "cache_disk_bytes_out_total": "SSD tier: bytes read, by this node or for others.",
    "cache_disk_evictions_total": "SSD tier: blocks that left it.",
    "cache_misses_total": "Blocks that were to be read and were in no tier any more.",
    "cache_pinned_blocks": "Blocks of the DRAM tier that are being read, written behind or lent.",
    "cache_write_queue_blocks": "Blocks that are not on the SSD yet.",
    "cache_degraded": "1 while the SSD takes nothing (full, failing, not opened) and the cache is DRAM alone, else 0.",
    "cache_io_errors_total": "Reads and writes of the SSD that failed.",
    "cache_lost_blocks_total": "Blocks that could not be written when they had to, or read again.",
    "tenant_cache_bytes": "Bytes of KV that the node keeps for later prompts, by tenant, where metrics may name them.",
    "cache_seal_mismatches_total": "Blocks found damaged on the SSD.",
    # A pipeline group, from its first stage.
    "pipeline_runs_total": "Batches that the first stage gave to the second.",
    "pipeline_runs_in_flight": "Those of them that have not left the last stage.",
    "pipeline_runs_in_flight_max": "The most that there were at once.",
    "pipeline_wait_seconds_total": "Time the first stage waited because later ones were behind.",
    # Beside a vLLM server.
    "vllm_blocks_saved_total": "KV blocks that vLLM computed and the node's cache keeps.",
    "vllm_blocks_loaded_total": "KV blocks that vLLM took from the node's cache.",
    "vllm_kv_events_lost_total": "Times that what vLLM keeps was forgotten, since KV events were lost.",
    # Between processes; of the head too, as node "head".
    "connections_refused_total": "Connections from elsewhere that came to nothing: no token, or no greeting in time.",
    "kv_bytes_in_total": "KV received for requests that decode here.",
    "kv_bytes_out_total": "KV sent for requests that decode elsewhere.",
    "kv_bytes_fetched_total": "Cached KV received from other nodes.",
    "kv_bytes_borrowed_total": "Cached KV read where it lies, in the DRAM of other nodes of this machine.",
    "kv_bytes_given_total": "Cached KV sent to other nodes.",
    "seal_mismatches_total": "Pieces of KV that came damaged from another node.",
    "kv_blocks_hosted": "Blocks of the KV memory that hold KV of requests computed on other nodes.",
    "kv_bytes_shipped_total": "KV sent to nodes that hold it for requests computed here.",
    "kv_bytes_returned_total": "KV that came back from nodes that held it.",
    "kv_bytes_stowed_total": "KV taken in for requests computed on other nodes.",
    "attention_asked_total": "Questions to holders of KV: one a holder, layer and iteration.",
    "attention_bytes_asked_total": "Queries sent to holders of KV.",
    "attention_bytes_answered_total": "Sums that came back from holders of KV.",
    "attention_answered_total": "Attention computed here for other nodes: one a request, layer and iteration.",
}
"""Help text of each metric. A node may report others, which are shown with a general one."""


Family = CounterMetricFamily | GaugeMetricFamily


class Reading(Collector):
    """A collector that calls `read` whenever Prometheus scrapes."""

    def __init__(self, read: Callable[[], Iterable[Family]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Family]:
        return self._read()

    def describe(self) -> list[Family]:
        """Empty, so that the registry does not collect at registration."""
        return []


def counted(name: str, text: str, label: str, counts: Mapping[str, float]) -> Family:
    """A counter with one label."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def of_refusals(backend: Backend) -> Iterator[Family]:
    text = "Requests turned away, by the stage that could not take them."
    yield counted("requests_refused", text, "stage", backend.refusals())


def of_nodes(backend: Backend, names_tenants: bool) -> Iterator[Family]:
    """One family for each gauge, with the label `node`. A gauge of one tenant, reported as `METRIC/TENANT`, also has
    the label `tenant` and is shown only if metrics may name tenants."""
    of_tenants: dict[str, Family] = {}
    for name, by_node in backend.gauges().items():
        short, _, tenant = name.removeprefix(PREFIX).partition("/")
        if tenant:
            family = of_tenants.setdefault(short, _family(short, "node", "tenant"))
            for node, value in by_node.items():
                family.add_metric([node, tenant], value)
            continue
        family = _family(short, "node")
        for node, value in by_node.items():
            family.add_metric([node], value)
        yield family
    if names_tenants:
        yield from of_tenants.values()


def _family(short: str, *labels: str) -> Family:
    family_of = CounterMetricFamily if short.endswith("_total") else GaugeMetricFamily
    return family_of(PREFIX + short, NODE_METRICS.get(short, "Reported by the nodes."), labels=labels)


def of_offload(backend: Backend) -> Iterator[Family]:
    """Offload and links between clusters; nothing if there is one cluster. Links have the labels `source` and
    `target`."""
    offload = backend.offload()
    if offload is None:
        return
    threshold = float("inf") if offload.threshold is None else float(offload.threshold)
    text = "Prompts with more uncached tokens are prefilled in another cluster; +Inf: none is."
    yield GaugeMetricFamily(PREFIX + "offload_threshold_tokens", text, value=threshold)
    text = "How often the threshold was set."
    yield CounterMetricFamily(PREFIX + "offload_threshold_changes", text, value=offload.changes)
    text = "Prefills sent to another cluster."
    yield CounterMetricFamily(PREFIX + "requests_offloaded", text, value=offload.requests)
    text = "Nodes that took another role."
    yield CounterMetricFamily(PREFIX + "node_conversions", text, value=offload.conversions)
    labels = ["source", "target"]
    sent = CounterMetricFamily(PREFIX + "link_bytes", "Bytes that crossed a link.", labels=labels)
    queued = GaugeMetricFamily(PREFIX + "link_queued_bytes", "Bytes that wait for a link.", labels=labels)
    up = GaugeMetricFamily(PREFIX + "link_up", "1 while a session crosses a link, else 0.", labels=labels)
    for link in offload.links:
        for family, value in ((sent, link.sent_bytes), (queued, link.queued_bytes), (up, link.up)):
            family.add_metric([link.source, link.target], value)
    yield from (sent, queued, up)
