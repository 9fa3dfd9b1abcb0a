"""Statistics that the conductor learns: errors of its estimates, arrival rates, cost of evictions, answer lengths."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from isthmus.core.types import NS_PER_S

WINDOW_NS = 120 * NS_PER_S
FORGET = 1 - 1 / 1000
"""Weight of earlier prefills with each new one: about the last thousand count."""


class Calibration:
    """The ratio of measured to estimated prefill time, which cancels a common error of the cost model."""

    __slots__ = ("_estimated", "_measured", "ratio")

    def __init__(self) -> None:
        self._estimated = self._measured = 0.0
        self.ratio = 1.0

    def add(self, measured_ns: int, estimated_ns: int) -> None:
        """Adds a prefill that waited for no KV: its measured time, and the estimate of the cost model."""
        self._measured = self._measured * FORGET + measured_ns
        self._estimated = self._estimated * FORGET + estimated_ns
        if self._estimated > 0:
            self.ratio = min(1e3, max(1e-3, self._measured / self._estimated))


class Decaying:
    """A decaying sum: an amount added one window ago counts 1/e."""

    __slots__ = ("_at_ns", "_value")

    def __init__(self) -> None:
        self._value, self._at_ns = 0.0, 0

    def add(self, amount: float, now: int) -> None:
        self._value = self.at(now) + amount
        self._at_ns = now

    def at(self, now: int) -> float:
        value = self._value
        return value * math.exp((self._at_ns - now) / WINDOW_NS) if value else 0.0


class Recent:
    """Accepted requests per second, and what one inserted block costs, over about the last two minutes."""

    __slots__ = ("_accepted", "_inserted", "_lost")

    def __init__(self) -> None:
        self._accepted: deque[int] = deque()
        self._lost, self._inserted = Decaying(), Decaying()

    def accept(self, now: int) -> None:
        self._accepted.append(now)
        self._forget(now)

    def rate(self, now: int) -> float:
        """Accepted requests per second over the whole window, also while the history is shorter."""
        self._forget(now)
        return len(self._accepted) * NS_PER_S / WINDOW_NS

    def backlog_price(self, waits: Sequence[float], now: int) -> float:
        """The cost of a node-second to others, with queues of `waits` ns: arrivals per node expected while the mean
        queue drains."""
        return self.rate(now) / len(waits) * (sum(waits) / len(waits)) / NS_PER_S

    def _forget(self, now: int) -> None:
        accepted = self._accepted
        while accepted and accepted[0] < now - WINDOW_NS:
            accepted.popleft()

    def insert(self, num_blocks: int, now: int) -> None:
        self._inserted.add(num_blocks, now)

    def lose(self, work_ns: float, now: int) -> None:
        """Adds node time that evicted blocks would have saved."""
        self._lost.add(work_ns, now)

    def loss_per_block_ns(self, now: int) -> float:
        lost = self._lost.at(now)
        if not lost:
            return 0.0
        inserted = self._inserted.at(now)
        return lost / inserted if inserted > 0 else 0.0


class OutputLengths:
    """The survival curve of answers, learned from those that ended: the share longer than so many tokens. In bins that
    grow by an eighth of an octave."""

    BINS_PER_OCTAVE = 8
    NUM_BINS = 20 * BINS_PER_OCTAVE
    REMEMBERED = 10_000
    """Whenever twice as many answers count, all weights are halved."""

    def __init__(self) -> None:
        self._counts = [0.0] * (self.NUM_BINS + 1)
        self._total = self._sum = 0.0
        self._curve: list[float] | None = None
        self._added = 0

    def add(self, num_tokens: int) -> None:
        self._counts[self._bin(num_tokens)] += 1
        self._total += 1
        self._sum += num_tokens
        self._added += 1
        if self._total >= 2 * self.REMEMBERED:
            self._counts = [count / 2 for count in self._counts]
            self._total, self._sum = self._total / 2, self._sum / 2
        if self._added >= max(16, self._total / 32):  # the curve changes slowly
            self._curve = None

    @property
    def mean(self) -> float:
        """Mean tokens of an answer; 0 before any ended."""
        return self._sum / self._total if self._total else 0.0

    def survival(self, num_tokens: float) -> float:
        """The share of answers longer than `num_tokens`; 1 before any ended."""
        if not self._total:
            return 1.0
        if self._curve is None:
            self._curve, self._added = self._build(), 0
        return self._curve[self._bin(num_tokens)]

    def going_on(self, age: float, more: float) -> float:
        """The chance that an answer of `age` tokens so far gets more than `more` further ones."""
        alive = self.survival(age)
        return self.survival(age + more) / alive if alive > 0 else 1.0  # no known answer was that long

    def _build(self) -> list[float]:
        """Half of a bin's answers count as longer than the bin."""
        curve, longer = [0.0] * (self.NUM_BINS + 1), 0.0
        for at in range(self.NUM_BINS, -1, -1):
            curve[at] = (longer + self._counts[at] / 2) / self._total
            longer += self._counts[at]
        return curve

    def _bin(self, num_tokens: float) -> int:
        at = int(self.BINS_PER_OCTAVE * math.log2(num_tokens)) if num_tokens > 1 else 0
        return at if at < self.NUM_BINS else self.NUM_BINS
