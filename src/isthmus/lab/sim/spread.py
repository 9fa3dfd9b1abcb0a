"""Means, percentiles and shares: the same records give the same bytes, in whatever order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from isthmus.core.types import NS_PER_S

_Number = TypeVar("_Number", int, float)


class Percentiles(msgspec.Struct, frozen=True):
    """Mean and nearest-rank percentiles, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


def spread(values_ns: Sequence[float]) -> Percentiles | None:
    """Mean and percentiles of times in ns; None for no times."""
    if not values_ns:
        return None
    ordered = sorted(map(float, values_ns))  # floats sort faster than large integers
    percentiles = (nearest_rank(ordered, percent) / NS_PER_S for percent in (50, 90, 99))
    return Percentiles(mean_s(values_ns), *percentiles)


def mean_s(values_ns: Sequence[float]) -> float:
    """Mean in seconds of times in ns; 0 for no times."""
    # fsum rounds once, so the mean does not depend on the order of the requests.
    return math.fsum(values_ns) / len(values_ns) / NS_PER_S if values_ns else 0.0


def nearest_rank(ordered: Sequence[_Number], percent: int) -> _Number:
    """The smallest value that `percent` of all values do not exceed; `ordered` is ascending, not empty."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def share(part: float, whole: float) -> float:
    """`part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole > 0 else 0.0
