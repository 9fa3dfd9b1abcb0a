"""From values to places on the page: scales, round ticks, and numbers as people write them."""

from __future__ import annotations

import math
from typing import NamedTuple

_TIME_STEPS_S = (
    *(10, 15, 30),
    *(60 * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(3600 * hours for hours in (1, 2, 3, 6, 12)),
)
_DAY_S = 86_400


class Scale(NamedTuple):
    """Maps values from `[low, high]` to coordinates from `start` to `stop`; values outside go to the edge."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = min(self.high, max(self.low, value))
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def inverse(self, share: float) -> float:
        """The value at a share, 0 to 1, of the way."""
        if self.log:
            return self.low * (self.high / self.low) ** share
        return self.low + share * (self.high - self.low)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten within `[low, high]`."""
    step = _round_up((high - low) / max(1, count))
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def nice_high(high: float, count: int = 5) -> float:
    """The end of an axis from 0 that shows `high`: the tick at or above it; 1 if there is nothing to show."""
    if high <= 0:
        return 1.0
    step = _round_up(high / count)
    return step * math.ceil(high / step - 1e-9)


def time_ticks(span_s: float, count: int = 8) -> list[float]:
    """About `count` round times from 0 to `span_s`."""
    step = time_step(span_s / count)
    return [index * step for index in range(math.floor(span_s / step + 1e-9) + 1)]


def time_step(at_least_s: float) -> float:
    """The next round length of time: 1, 2 or 5 of a power of ten up to 10 s, then 15 s, 30 s, 1 min ..."""
    if at_least_s <= 0:
        return 1.0
    if at_least_s <= 10:
        return _round_up(at_least_s)
    step = next((each for each in _TIME_STEPS_S if each >= at_least_s), None)
    return step or _DAY_S * max(1.0, _round_up(at_least_s / _DAY_S))


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten, fewer of them the more decades there are."""
    decades = math.log10(high / low)
    parts = (1, 2, 5) if decades <= 2.4 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [part * 10.0**power for power in powers for part in parts]
    return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def log_range(low: float, high: float) -> tuple[float, float]:
    """The nearest values of 1, 2 or 5 times a power of ten around two positive values."""
    return _round_down(low), _round_up(max(high, low * 1.01))


def _round_up(value: float) -> float:
    """The next of 1, 2 or 5 times a power of ten; `value` is positive."""
    power = 10.0 ** math.floor(math.log10(value) + 1e-9)
    return next(part * power for part in (1, 2, 5, 10) if part * power >= value * (1 - 1e-9))


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value) + 1e-9)
    return next(part * power for part in (5, 2, 1) if part * power <= value * (1 + 1e-9))


def seconds(value_s: float) -> str:
    """A duration in the unit that suits it: `350 ms`, `2.5 s`, `12 min`, `3 h`."""
    for unit_s, unit in ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h")):
        limit_s = {"µs": 1e-3, "ms": 1.0, "s": 120.0, "min": 7200.0}.get(unit, math.inf)
        if abs(value_s) < limit_s * (1 - 5e-4):
            return "0 s" if value_s == 0 else f"{_three(value_s / unit_s)} {unit}"
    raise AssertionError("the last unit has no limit")


def clock(value_s: float, span_s: float) -> str:
    """A time on an axis of `span_s`, in one unit for the whole axis."""
    from_s = {"d": 2 * _DAY_S, "h": 2 * 3600, "min": 2 * 60, "s": 0.999}
    unit = next((each for each, least_s in from_s.items() if span_s > least_s), "ms")
    unit_s = {"d": _DAY_S, "h": 3600, "min": 60, "s": 1, "ms": 1e-3}[unit]
    return f"{_three(value_s / unit_s)} {unit}" if value_s else "0"


def amount(value: float) -> str:
    """A count or an amount: `12`, `3.4`, `1,234`, `1.2 million`."""
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if abs(value) >= unit * (1 - 5e-4):
            return f"{_three(value / unit)} {word}"
    return f"{value:,.0f}" if abs(value) >= 1000 else _three(value)


def size(num_bytes: float) -> str:
    """Bytes with a decimal unit."""
    for unit, word in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit * (1 - 5e-4):
            return f"{_three(num_bytes / unit)} {word}"
    return f"{num_bytes:.0f} B"


def percent(share: float) -> str:
    """A share as a percentage; a little more than nothing is not shown as nothing."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    if share == 1:
        return "100 %"
    return f"{_three(100 * share)} %" if share < 0.1 else f"{100 * share:.1f} %"


def _three(value: float) -> str:
    """Three significant digits, without an exponent and without trailing zeros."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
