"""Interpolation of prefill times measured at a few lengths.

The paper does not say how it interpolates, and its results depend on it, so each rule is here, to be seen side by side.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

Points = Sequence[tuple[float, float]]
"""(length, seconds), lengths rising."""
Times = Callable[[float], float]
_SCALE = 1e5  # lengths are brought near 1, so that their powers are


def polynomial(points: Points, degree: int, *, relative: bool = False) -> list[float]:
    """Coefficients, the constant first, of the polynomial of least squares: through all points if it can be.

    Needs `degree + 1` points. Errors are counted in seconds, `relative`: in shares of the measured time. By
    Gram-Schmidt on the powers.
    """
    assert len(points) > degree
    weights = [1 / seconds**2 if relative else 1.0 for _, seconds in points]

    def value(coefficients: Sequence[float], length: float) -> float:
        return sum(c * (length / _SCALE) ** power for power, c in enumerate(coefficients))

    def product(one: Sequence[float], other: Sequence[float]) -> float:
        each = zip(points, weights, strict=True)
        return sum(w * value(one, length) * value(other, length) for (length, _), w in each)

    basis: list[list[float]] = []
    fitted = [0.0] * (degree + 1)
    for power in range(degree + 1):
        vector = [float(at == power) for at in range(degree + 1)]
        for _ in range(2):  # the second time takes away what rounding left
            for other in basis:
                part = product(vector, other) / product(other, other)
                vector = [a - part * b for a, b in zip(vector, other, strict=True)]
        basis.append(vector)
        along = sum(
            w * value(vector, length) * seconds for (length, seconds), w in zip(points, weights, strict=True)
        )
        part = along / product(vector, vector)
        fitted = [a + part * b for a, b in zip(fitted, vector, strict=True)]
    return [c / _SCALE**power for power, c in enumerate(fitted)]


def evaluated(coefficients: Sequence[float]) -> Times:
    return lambda length: sum(c * length**power for power, c in enumerate(coefficients))


def quadratic(points: Points) -> Times:
    """The form of `isthmus.core.cost`: fixed, per token, per pair of tokens; least squares in seconds."""
    return evaluated(polynomial(points, 2))


def quadratic_relative(points: Points) -> Times:
    return evaluated(polynomial(points, 2, relative=True))


def cubic(points: Points) -> Times:
    """Through four points."""
    return evaluated(polynomial(points, 3))


def linear(points: Points) -> Times:
    """Between points; the first value below them, the last segment beyond."""

    def seconds(length: float) -> float:
        at = _segment(points, length)
        (start, low), (stop, high) = points[at], points[at + 1]
        return low + (high - low) * max(length - start, 0.0) / (stop - start)

    return seconds


def monotone_cubic(points: Points) -> Times:
    """Piecewise cubic that keeps the shape (Fritsch and Butland, 1984); straight outside the points."""
    slopes = _slopes(points)

    def seconds(length: float) -> float:
        if length <= points[0][0]:
            return points[0][1]
        if length >= points[-1][0]:
            return points[-1][1] + slopes[-1] * (length - points[-1][0])
        at = _segment(points, length)
        (start, low), (stop, high) = points[at], points[at + 1]
        width = stop - start
        x = (length - start) / width
        rise = low + (high - low) * x * x * (3 - 2 * x)
        return rise + width * x * (1 - x) * (slopes[at] * (1 - x) - slopes[at + 1] * x)

    return seconds


def _slopes(points: Points) -> list[float]:
    """At each point: a weighted harmonic mean of the segments' slopes, and a one-sided estimate at the ends."""
    widths = [stop - start for (start, _), (stop, _) in pairwise(points)]
    steps = [(high - low) / w for ((_, low), (_, high)), w in zip(pairwise(points), widths, strict=True)]
    inner = []
    for (before, after), (one, other) in zip(pairwise(widths), pairwise(steps), strict=True):
        near, far = 2 * after + before, after + 2 * before
        inner.append((near + far) / (near / one + far / other))
    return [_end(widths, steps), *inner, _end(widths[::-1], steps[::-1])]


def _end(widths: Sequence[float], steps: Sequence[float]) -> float:
    (first, second), (one, other) = widths[:2], steps[:2]
    return max(((2 * first + second) * one - first * other) / (first + second), 0.0)


def _segment(points: Points, length: float) -> int:
    at = bisect_right(points, length, key=lambda point: point[0]) - 1
    return min(max(at, 0), len(points) - 2)


RULES: dict[str, Callable[[Points], Times]] = {
    "linear": linear,
    "monotone cubic": monotone_cubic,
    "cubic": cubic,
    "quadratic, least squares in seconds": quadratic,
    "quadratic, least squares in shares": quadratic_relative,
}


def held_out(rule: Callable[[Points], Times], points: Points) -> list[float]:
    """The error, as a share, of each inner point predicted from all others."""
    errors = []
    for at in range(1, len(points) - 1):
        length, seconds = points[at]
        rest = [*points[:at], *points[at + 1 :]]
        errors.append(rule(rest)(length) / seconds - 1)
    return errors
