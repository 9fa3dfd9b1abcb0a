"""Numbers as people write them: durations, bytes and shares, each with about three digits."""

from __future__ import annotations

import math


def seconds(value_s: float) -> str:
    """A duration in the unit that suits it: `350 ms`, `2.5 s`, `12 min`, `3 h`."""
    units = (
        (1e-6, "µs", 1e-3),
        (1e-3, "ms", 1.0),
        (1.0, "s", 120.0),
        (60.0, "min", 7200.0),
        (3600.0, "h", math.inf),
    )
    unit_s, unit = next(
        (each_s, each) for each_s, each, limit_s in units if abs(value_s) < limit_s * (1 - 5e-4)
    )
    return f"{_three(value_s / unit_s)} {unit}" if value_s else "0 s"


def clock(span_s: float) -> tuple[float, str]:
    """The unit of a time axis over `span_s`: its length in seconds, and its name."""
    units = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
    return next((unit for unit in units if span_s > 2 * unit[0]), (1.0, "s"))


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


def shorten(text: str, length: int = 24) -> str:
    """At most `length` characters, the middle left out."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def _three(value: float) -> str:
    """Three significant digits, without an exponent and without trailing zeros."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
