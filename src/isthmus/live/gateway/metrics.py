"""Prometheus metrics of the gateway, in base units. Names follow vLLM's behind the prefix `isthmus_`.

Times, lengths and finish reasons count choices (what the cluster calls a request: a call with `n: 4` is four);
failures and cancellations count HTTP requests.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from isthmus.live.gateway.backend import Backend
from isthmus.live.gateway.choice import Choice, Delta
from isthmus.live.gateway.node_metrics import (
    PREFIX,
    Family,
    Reading,
    counted,
    of_nodes,
    of_offload,
    of_refusals,
)
from isthmus.live.gateway.preparing import Preparing
from isthmus.live.gateway.settings import GatewaySettings
from isthmus.live.gateway.tenants import TenantMeter, Traffic


class Tally(Collector):
    """`bounds`: upper bounds of the buckets, inclusive, ascending; one without bound is added."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value` as often as `times`."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*self._bounds, math.inf]
        labels = ["+Inf" if bound == math.inf else str(float(bound)) for bound in bounds]
        buckets = list(zip(labels, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
WHOLE_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)


class Meter:
    """All metrics of one app, in a registry of their own. `tenants`: those that name tenants, if any may."""

    def __init__(
        self, backend: Backend, preparing: Preparing, traffic: Traffic, *, names_tenants: bool = False
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self.tenants = TenantMeter(registry) if names_tenants else None
        for read in (
            partial(_of_preparing, preparing),
            partial(_of_traffic, traffic),
            partial(of_nodes, backend, names_tenants),
            partial(of_refusals, backend),
            partial(of_offload, backend),
        ):
            registry.register(Reading(read))
        self.first_token = self._tally(
            "time_to_first_token_seconds", "From the arrival of a request to its first token.", FIRST_TOKEN_S
        )
        self.between_tokens = self._tally(
            "inter_token_latency_seconds", "Time between two tokens of a request.", BETWEEN_TOKENS_S
        )
        self.whole_request = self._tally(
            "e2e_request_latency_seconds", "From the arrival of a request to its last token.", WHOLE_REQUEST_S
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that started.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens that came from the cache.")
        self.moved_tokens = self._counter(
            "prompt_tokens_moved", "Prompt tokens whose KV came from the same text at another place."
        )
        self.similar_tokens = self._counter(
            "prompt_tokens_similar", "Prompt tokens whose KV came from a prompt that means nearly the same."
        )
        self.generated_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.succeeded = self._counter("request_success", "Requests that ended well.", "finished_reason")
        self.within_slo = self._counter("requests_within_slo", "Requests that ended well inside their limits.")
        self._failed = self._counter("requests_failed", "HTTP requests that failed.", "status")
        self._cancelled = self._counter("requests_cancelled", "HTTP requests given up by clients.")
        self.running = Gauge(PREFIX + "num_requests_running", "Requests in the cluster now.", registry=registry)

    @property
    def num_running(self) -> int:
        """Choices under way."""
        return int(self._registry.get_sample_value(f"{PREFIX}num_requests_running") or 0)

    def failed(self, status: int) -> None:
        self._failed.labels(str(status)).inc()

    def cancelled(self) -> None:
        self._cancelled.inc()

    def render(self) -> bytes:
        """The Prometheus text of all metrics, those of the nodes included."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)

    def _tally(self, name: str, text: str, bounds: Sequence[float]) -> Tally:
        tally = Tally(PREFIX + name, text, bounds)
        self._registry.register(tally)
        return tally


class ChoiceTimer:
    """Feeds the meter from one choice. `arrival_s`: the request's, by `time.perf_counter`."""

    def __init__(
        self, meter: Meter, settings: GatewaySettings, choice: Choice, *, arrival_s: float, leads: bool
    ) -> None:
        """`leads`: it is the first choice of its prompt, so the prompt is counted here."""
        self._meter = meter
        self._slo = _Slo(choice.job.ttft_ms or settings.ttft_ms, choice.job.tbt_ms or settings.tbt_ms)
        self._choice = choice
        self._arrival_s = arrival_s
        self._leads = leads
        self._last_s: float | None = None
        self._num_cached = 0

    def observe(self, delta: Delta) -> None:
        """A batch of tokens came. Its tokens share the gap before it, as they came at once."""
        now_s = time.perf_counter()
        num_tokens = len(delta.tokens)
        self._meter.generated_tokens.inc(num_tokens)
        if self._last_s is None:
            self._observe_first(now_s)
        elif num_tokens:
            gap_s = (now_s - self._last_s) / num_tokens
            self._meter.between_tokens.observe(gap_s, times=num_tokens)
            self._slo.observe_gap(gap_s, num_tokens)
        self._last_s = now_s
        if (
            self._leads and self._choice.cached_tokens > self._num_cached
        ):  # some engines tell it with the last token
            self._meter.cached_tokens.inc(self._choice.cached_tokens - self._num_cached)
            self._num_cached = self._choice.cached_tokens
        if delta.finish is not None:
            self._meter.whole_request.observe(now_s - self._arrival_s)
            self._meter.succeeded.labels(delta.finish).inc()
            self._meter.within_slo.inc(self._slo.kept)

    def _observe_first(self, now_s: float) -> None:
        self._meter.first_token.observe(now_s - self._arrival_s)
        self._slo.observe_first(now_s - self._arrival_s)
        if self._leads:
            self._meter.prompt_tokens.inc(len(self._choice.job.tokens))
            self._meter.moved_tokens.inc(self._choice.reused.moved)
            self._meter.similar_tokens.inc(self._choice.reused.similar)


class _Slo:
    """Whether one choice keeps its limits: time to first token, and the mean of its longest tenth of gaps."""

    def __init__(self, ttft_ms: int | None, tbt_ms: int | None) -> None:
        self._ttft_ms, self._tbt_ms = ttft_ms, tbt_ms
        self._in_time = True
        self._gaps_s: list[float] = []

    def observe_first(self, ttft_s: float) -> None:
        self._in_time = self._ttft_ms is None or ttft_s * 1000 <= self._ttft_ms

    def observe_gap(self, gap_s: float, times: int) -> None:
        if self._tbt_ms is not None:
            self._gaps_s += [gap_s] * times

    @property
    def kept(self) -> bool:
        if not self._in_time or self._tbt_ms is None or not self._gaps_s:
            return self._in_time
        longest = sorted(self._gaps_s, reverse=True)[: math.ceil(len(self._gaps_s) / 10)]
        return sum(longest) / len(longest) * 1000 <= self._tbt_ms


def _of_traffic(traffic: Traffic) -> Iterator[Family]:
    yield counted(
        "http_refused",
        "HTTP connections and requests turned away, by the limit (limits.*) that did it.",
        "reason",
        traffic.refused,
    )
    yield GaugeMetricFamily(f"{PREFIX}http_connections", "Open HTTP connections.", traffic.num_connections)
    text = "Bytes of request bodies that are not whole yet."
    yield GaugeMetricFamily(f"{PREFIX}http_body_bytes", text, traffic.body_bytes)


def _of_preparing(preparing: Preparing) -> Iterator[Family]:
    waiting = "Large bodies, or with a grammar, that are being read or wait for it."
    yield GaugeMetricFamily(f"{PREFIX}requests_preparing", waiting, preparing.num_waiting)
    deaths = "Processes that died over such a body; its request was refused."
    yield CounterMetricFamily(f"{PREFIX}preparing_deaths", deaths, preparing.num_deaths)
