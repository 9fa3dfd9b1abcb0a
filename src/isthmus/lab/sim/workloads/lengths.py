"""Distributions of token counts, as a specification writes them: `1024`, `lognormal(p50=900,p99=8000)`.

`max` cuts a tail off by making what is beyond it the largest value. `truncated_lognormal`, the paper's workload in
Prefill-as-a-Service (arXiv 2604.15039, section 4), has no values beyond its limits instead: it is drawn again.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

import msgspec

_CALL = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
_Z99 = 2.3263478740408408  # below it lie 99 % of a standard normal variable

_LEAST_INSIDE = 0.01  # else drawing again would take long

Draw = Callable[[random.Random], int]


class LengthDistribution(msgspec.Struct, frozen=True):
    """A distribution of token counts, all at least 1. `fixed`: the only value, where there is but one."""

    draw: Draw
    fixed: int | None = None


def parse_lengths(text: str) -> LengthDistribution:
    """Reads a distribution. Raises ValueError saying what is wrong with `text`."""
    match = _CALL.fullmatch(text)
    if match is None:
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise ValueError(f"{text!r} is neither a whole number above 0 nor one of {_KNOWN}")
        return _fixed(int(text))
    name, inside = match.groups()
    if name not in _FORMS:
        raise ValueError(f"no distribution {name!r}; known: {_KNOWN}")
    values = _values(name, inside)
    for names, make in _FORMS[name].items():
        if "max" in names and set(names) == set(values):
            return LengthDistribution(make(*(values[each] for each in names)))
        if set(names) == set(values) - {"max"}:
            return _limited(make(*(values[each] for each in names)), values.get("max"))
    raise ValueError(f"{name} takes {_forms(name)}")


def _values(name: str, inside: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in inside.split(","):
        key, _, text = (piece.strip() for piece in part.partition("="))
        try:
            value = float(text)
        except ValueError:
            raise ValueError(
                f"{name}: {part.strip()!r} is not name=number; {name} takes {_forms(name)}"
            ) from None
        if not (value >= 0.0 and math.isfinite(value)):
            raise ValueError(f"{name}: {key} of {text} is not a number from 0 up")
        if key in values:
            raise ValueError(f"{name}: {key} twice")
        values[key] = value
    return values


def _fixed(length: int) -> LengthDistribution:
    return LengthDistribution(lambda rng: length, length)


def _uniform(low: float, high: float) -> Draw:
    if not 1 <= low <= high or low % 1 or high % 1:
        raise ValueError(f"uniform: low={low:g}, high={high:g} are not whole numbers with 1 <= low <= high")
    least, width = int(low), int(high) - int(low) + 1
    return lambda rng: least + int(rng.random() * width)


def _exponential(mean: float) -> Draw:
    if mean < 1:
        raise ValueError(f"exponential: mean={mean:g} is below 1 token")
    return lambda rng: max(1, round(rng.expovariate(1.0 / mean)))


def _lognormal(mean: float, sigma: float) -> Draw:
    if mean < 1:
        raise ValueError(f"lognormal: mean={mean:g} is below 1 token")
    mu = math.log(mean) - sigma * sigma / 2.0
    return lambda rng: max(1, round(rng.lognormvariate(mu, sigma)))


def _lognormal_of_quantiles(p50: float, p99: float) -> Draw:
    if not 1 <= p50 <= p99:
        raise ValueError(f"lognormal: p50={p50:g}, p99={p99:g} are not 1 <= p50 <= p99")
    mu, sigma = math.log(p50), math.log(p99 / p50) / _Z99
    return lambda rng: max(1, round(rng.lognormvariate(mu, sigma)))


def _truncated_lognormal(mu: float, sigma: float, low: float, high: float) -> Draw:
    if not (1 <= low < high and sigma > 0) or low % 1 or high % 1:
        raise ValueError(
            f"truncated_lognormal: min={low:g}, max={high:g}, sigma={sigma:g} are not whole numbers with "
            "1 <= min < max, and a sigma above 0"
        )
    inside = _normal_below((math.log(high) - mu) / sigma) - _normal_below((math.log(low) - mu) / sigma)
    if inside < _LEAST_INSIDE:
        raise ValueError(f"truncated_lognormal: only {inside:.2g} of it lies between min and max")

    def draw(rng: random.Random) -> int:
        while True:
            value = rng.lognormvariate(mu, sigma)
            if low <= value <= high:
                return round(value)

    return draw


def _normal_below(z: float) -> float:
    """Share of a standard normal variable below `z`."""
    return (1.0 + math.erf(z / math.sqrt(2.0))) / 2.0


def _limited(draw: Draw, most: float | None) -> LengthDistribution:
    if most is None:
        return LengthDistribution(draw)
    if most < 1 or most % 1:
        raise ValueError(f"max={most:g} is not a whole number above 0")
    limit = int(most)
    return LengthDistribution(lambda rng: min(limit, draw(rng)))


# Per distribution, the sets of names it can be given by; `max` may be added to each without one and cuts the tail off.
_FORMS: dict[str, dict[tuple[str, ...], Callable[..., Draw]]] = {
    "uniform": {("low", "high"): _uniform},
    "exponential": {("mean",): _exponential},
    "lognormal": {("mean", "sigma"): _lognormal, ("p50", "p99"): _lognormal_of_quantiles},
    "truncated_lognormal": {("mu", "sigma", "min", "max"): _truncated_lognormal},
}


def _forms(name: str) -> str:
    forms = " or ".join(",".join(f"{each}=" for each in names) for names in _FORMS[name])
    return forms if "max=" in forms else f"{forms}, and max= if wanted"


_KNOWN = ", ".join(
    f"{name}({','.join(f'{each}=' for each in names)})" for name in _FORMS for names in _FORMS[name]
)
