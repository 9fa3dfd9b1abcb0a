"""What the conductor learns while it runs: how wrong its estimates are, how much comes, how long answers are.

Nothing here is tuned by hand; the windows say only how fast old facts are forgotten.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from isthmus.core.types import NS_PER_S

WINDOW_NS = 120 * NS_PER_S
FORGET = 1 - 1 / 1000
"""Weight of what is known when one more prefill was measured: about the last thousand count."""


class Calibration:
    """Ratio of measured to estimated prefill time, in which any common error of the cost model cancels."""

    __slots__ = ("_estimated", "_measured", "ratio")

    def __init__(self) -> None:
        self._estimated = self._measured = 0.0
        self.ratio = 1.0

    def add(self, measured_ns: int, estimated_ns: int) -> None:
        """One prefill that waited for no KV: its time, and what the cost model alone says."""
        self._measured = self._measured * FORGET + measured_ns
        self._estimated = self._estimated * FORGET + estimated_ns
        if self._estimated > 0:
            self.ratio = min(1e3, max(1e-3, self._measured / self._estimated))


class Decaying:
    """A sum that forgets: what was added one window ago counts 1/e."""

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
        """Accepted requests per second of the whole window, also while there is less history than that: nobody
        who has not come is known to come."""
        self._forget(now)
        return len(self._accepted) * NS_PER_S / WINDOW_NS

    def backlog_price(self, waits: Sequence[float], now: int) -> float:
        """What a node-second costs others, nodes having queues of `waits` ns: arrivals per node expected while the mean
        queue drains."""
        return self.rate(now) / len(waits) * (sum(waits) / len(waits)) / NS_PER_S

    def _forget(self, now: int) -> None:
        accepted = self._accepted
        while accepted and accepted[0] < now - WINDOW_NS:
            accepted.popleft()

    def insert(self, num_blocks: int, now: int) -> None:
        self._inserted.add(num_blocks, now)

    def lose(self, work_ns: float, now: int) -> None:
        """Node time that an evicted block would have saved."""
        self._lost.add(work_ns, now)

    def loss_per_block_ns(self, now: int) -> float:
        lost = self._lost.at(now)
        if not lost:
            return 0.0
        inserted = self._inserted.at(now)
        return lost / inserted if inserted > 0 else 0.0


class OutputLengths:
    """Survival curve of answers: the share that is longer than so many tokens, learned from those that ended.

    Kept in bins that grow by an eighth of an octave, so one answer costs O(1) and a query O(bins).
    """

    BINS_PER_OCTAVE = 8
    NUM_BINS = 20 * BINS_PER_OCTAVE
    REMEMBERED = 10_000
    """Answers that count: at twice as many all weigh half from then on."""

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
        """0 before any answer ended."""
        return self._sum / self._total if self._total else 0.0

    def survival(self, num_tokens: float) -> float:
        """Share of answers longer than `num_tokens`; 1 before any answer ended."""
        if not self._total:
            return 1.0
        if self._curve is None:
            self._curve, self._added = self._build(), 0
        return self._curve[self._bin(num_tokens)]

    def going_on(self, age: float, more: float) -> float:
        """Chance that an answer which has `age` tokens gets more than `more` further ones."""
        alive = self.survival(age)
        return self.survival(age + more) / alive if alive > 0 else 1.0  # no answer was longer: nobody knows

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
