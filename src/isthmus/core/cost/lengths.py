"""Distributions of prompt lengths, in uncached tokens, cut by a threshold t: `L > t` is above, `L <= t` below."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import msgspec

from isthmus.core.errors import ConfigError


class Lengths(Protocol):
    """A distribution; immutable."""

    def share(self, threshold: float) -> float:
        """P(L > threshold)."""
        ...

    def mean_above(self, threshold: float) -> float:
        """E[L | L > threshold], where `share(threshold) > 0`."""
        ...

    def mean_below(self, threshold: float) -> float:
        """E[L | L <= threshold], where `share(threshold) < 1`."""
        ...

    def sums(self, function: Callable[[float], float], thresholds: Sequence[float]) -> list[float]:
        """E[function(L); L <= t], not divided by the share, for each t of ascending `thresholds`. Calls the function,
        which may be slow, once for each length."""
        ...

    def quantile(self, share: float) -> float:
        """The smallest l with P(L <= l) >= share, 0 <= share <= 1."""
        ...


def mean_of(lengths: Lengths, function: Callable[[float], float] = float) -> float:
    """E[function(L)]."""
    return lengths.sums(function, (math.inf,))[0]


class Sample:
    """The empirical distribution of `lengths`. Raises ConfigError if empty."""

    def __init__(self, lengths: Sequence[float]) -> None:
        if not lengths:
            raise ConfigError("lengths: the sample is empty; give at least one length")
        self._lengths = sorted(lengths)
        self._totals = [0.0, *accumulate(self._lengths)]

    def share(self, threshold: float) -> float:
        return 1 - self._rank(threshold) / len(self._lengths)

    def mean_above(self, threshold: float) -> float:
        rank = self._rank(threshold)
        return (self._totals[-1] - self._totals[rank]) / (len(self._lengths) - rank)

    def mean_below(self, threshold: float) -> float:
        rank = self._rank(threshold)
        return self._totals[rank] / rank

    def sums(self, function: Callable[[float], float], thresholds: Sequence[float]) -> list[float]:
        totals = [0.0, *accumulate(map(function, self._lengths))]
        return [totals[self._rank(threshold)] / len(self._lengths) for threshold in thresholds]

    def quantile(self, share: float) -> float:
        return self._lengths[max(math.ceil(share * len(self._lengths)), 1) - 1]

    def _rank(self, threshold: float) -> int:
        """The number of lengths at most the threshold."""
        return bisect_right(self._lengths, threshold)


class LogNormal(msgspec.Struct, frozen=True):
    """exp(normal(mu, sigma)), kept within [low, high]: closed forms of the truncated log-normal.

    P(x < L <= y) = (N(z(y)) - N(z(x))) / Z with z(x) = (ln x - mu) / sigma, and
    E[L; x < L <= y] = exp(mu + sigma^2 / 2) (N(z(y) - sigma) - N(z(x) - sigma)) / Z.
    """

    mu: float
    sigma: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (self.sigma > 0 and 0 < self.low < self.high < math.inf and math.isfinite(self.mu)):
            raise ConfigError(
                f"lengths: lognormal({self.mu}, {self.sigma}) in [{self.low}, {self.high}] is none; sigma must be "
                "above 0, low above 0 and below high"
            )
        if not self._mass(self.low, self.high) > 0:
            raise ConfigError(
                f"lengths: lognormal({self.mu}, {self.sigma}) has no length within [{self.low}, {self.high}]"
            )

    def share(self, threshold: float) -> float:
        return self._mass(threshold, self.high) / self._mass(self.low, self.high)

    def mean_above(self, threshold: float) -> float:
        return self._first_moment(threshold, self.high) / self._mass(threshold, self.high)

    def mean_below(self, threshold: float) -> float:
        return self._first_moment(self.low, threshold) / self._mass(self.low, threshold)

    def sums(self, function: Callable[[float], float], thresholds: Sequence[float]) -> list[float]:
        """Integrated in z by 3-point Gauss-Legendre rules on panels no wider than `_PANEL`."""
        scale = math.sqrt(2 * math.pi) * self._mass(self.low, self.high)
        found, total, reached = [], 0.0, self._z(self.low)
        for threshold in thresholds:
            until = self._z(threshold)
            if until > reached:
                total += self._integral(function, reached, until)
                reached = until
            found.append(total / scale)
        return found

    def quantile(self, share: float) -> float:
        """Bisects to the precision of a float."""
        low, high = self.low, self.high
        while (middle := (low + high) / 2) not in (low, high):
            if 1 - self.share(middle) >= share:
                high = middle
            else:
                low = middle
        return high

    def _integral(self, function: Callable[[float], float], start: float, stop: float) -> float:
        num_panels = math.ceil((stop - start) / _PANEL)
        half = (stop - start) / num_panels / 2
        total = 0.0
        for panel in range(num_panels):
            middle = start + (2 * panel + 1) * half
            for node, weight in _GAUSS:
                z = middle + half * node
                total += weight * math.exp(-z * z / 2) * function(math.exp(self.mu + self.sigma * z))
        return half * total

    def _z(self, length: float) -> float:
        """z of a length clipped to [low, high]."""
        return (math.log(min(max(length, self.low), self.high)) - self.mu) / self.sigma

    def _mass(self, start: float, stop: float) -> float:
        """Probability of [start, stop] in the distribution before truncation."""
        return _between(self._z(start), self._z(stop))

    def _first_moment(self, start: float, stop: float) -> float:
        moment = _between(self._z(start) - self.sigma, self._z(stop) - self.sigma)
        return math.exp(self.mu + self.sigma**2 / 2) * moment


_PANEL = 1 / 16  # of a standard deviation
_GAUSS = ((-math.sqrt(0.6), 5 / 9), (0.0, 8 / 9), (math.sqrt(0.6), 5 / 9))


def _between(start: float, stop: float) -> float:
    """N(stop) - N(start) of the standard normal distribution, precise in both tails."""
    if start > 0:
        start, stop = -stop, -start
    return (math.erfc(-stop / math.sqrt(2)) - math.erfc(-start / math.sqrt(2))) / 2
