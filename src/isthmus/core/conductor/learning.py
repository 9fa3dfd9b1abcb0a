"""Statistics that the conductor learns: errors of its estimates, arrival rates, cost of evictions, answer lengths."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from isthmus.core.types import NS_PER_S

WINDOW_NS = 120 * NS_PER_S
FORGET = 1 - 1 / 1000
"""Weight of earlier prefills with each new one: about the last thousand count."""
FORGET_OWN = 1 - 1 / 32
"""The same for one node: its speed changes as its neighbours on the machine do."""


class Calibration:
    """The ratio of measured to estimated time, which cancels a common error of the cost model. `forget`: the weight of
    earlier measurements with each new one."""

    __slots__ = ("_estimated", "_forget", "_measured", "ratio")

    def __init__(self, forget: float = FORGET) -> None:
        self._forget = forget
        self.clear()

    def clear(self) -> None:
        """Forgets all that was measured."""
        self._estimated = self._measured = 0.0
        self.ratio = 1.0

    @property
    def is_taught(self) -> bool:
        return self._estimated > 0

    def add(self, measured_ns: float, estimated_ns: float) -> None:
        """Adds a time that was measured, of a prefill one that waited for no KV, and the estimate of the cost model."""
        self._measured = self._measured * self._forget + measured_ns
        self._estimated = self._estimated * self._forget + estimated_ns
        if self._estimated > 0:
            self.ratio = min(1e3, max(1e-3, self._measured / self._estimated))


LATE_NS = NS_PER_S // 2
"""A prefill is late when it takes so much longer than expected, and twice as long."""


CLEAR, ENOUGH = 2.0, 8
"""How clear the difference of a node's speed must be, and how many times one measurement that is alone counts."""


def is_late(late_ns: float, expected_ns: float) -> bool:
    """Whether a prefill that takes `late_ns` longer than `expected_ns` is far slower than its node was."""
    return late_ns >= LATE_NS and late_ns >= expected_ns


class Speed:
    """Statistics of a node that tells no cost. `prefill`, `tokens`: calibrations of its prefills and its time between
    tokens; `quick_ns`: when it last gave a first token that was not late.

    Times of one node scatter, and nodes that are alike shall be taken in turn: a node has a speed of its own only while
    the sum of its differences from the common speed is more than `CLEAR` times what chance would make it.
    """

    __slots__ = ("_common", "_differences", "_squares", "prefill", "quick_ns", "tokens")

    def __init__(self, common: Calibration) -> None:
        self._common = common
        self.prefill, self.tokens = Calibration(FORGET_OWN), Calibration(FORGET_OWN)
        self.quick_ns = 0
        self.restart()

    def restart(self, took_ns: float = 0, estimated_ns: float = 0) -> None:
        """Forgets all that was learnt of prefills but the one given, if it is, which is then the node's speed."""
        self.prefill.clear()
        self._differences = self._squares = 0.0
        for _ in range(ENOUGH if estimated_ns else 0):
            self.add(took_ns, estimated_ns)

    @property
    def ratio(self) -> float:
        """Measured over estimated prefill time."""
        is_own = self._differences**2 > CLEAR**2 * self._squares
        return self.prefill.ratio if is_own else self._common.ratio

    def add(self, took_ns: float, estimated_ns: float) -> None:
        """Adds the measured time of a prefill, and the estimate of the cost model."""
        difference = took_ns - self._common.ratio * estimated_ns
        self._differences = self._differences * FORGET_OWN + difference
        self._squares = self._squares * FORGET_OWN + difference**2
        self.prefill.add(took_ns, estimated_ns)


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
