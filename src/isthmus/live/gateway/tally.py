"""A histogram for values that come with every token.

prometheus_client's own takes a lock and walks its buckets for each value, some microseconds a token. The
gateway records from one thread only, so counting is enough.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


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
