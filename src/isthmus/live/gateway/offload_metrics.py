"""What passes between clusters, for Prometheus; nothing where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from isthmus.live.gateway.backend import Backend, LinkView
from isthmus.live.gateway.node_metrics import PREFIX

Family = CounterMetricFamily | GaugeMetricFamily


class OffloadMetrics(Collector):
    """Read when Prometheus asks. Links have labels `source` and `target`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def describe(self) -> list[Family]:
        """Nothing is known yet; without this the registry would ask at once."""
        return []

    def collect(self) -> Iterator[Family]:
        offload = self._backend.offload()
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
        yield from _links(offload.links)


def _links(links: Sequence[LinkView]) -> Iterator[Family]:
    labels = ["source", "target"]
    sent = CounterMetricFamily(PREFIX + "link_bytes", "Bytes that crossed a link.", labels=labels)
    queued = GaugeMetricFamily(PREFIX + "link_queued_bytes", "Bytes that wait for a link.", labels=labels)
    up = GaugeMetricFamily(PREFIX + "link_up", "1 while a session crosses a link, else 0.", labels=labels)
    for link in links:
        sent.add_metric([link.source, link.target], link.sent_bytes)
        queued.add_metric([link.source, link.target], link.queued_bytes)
        up.add_metric([link.source, link.target], link.up)
    yield from (sent, queued, up)
