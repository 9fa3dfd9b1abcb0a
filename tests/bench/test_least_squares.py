"""Least squares within bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from isthmus.bench.least_squares import least_squares


def test_least_squares_solves_a_curved_problem() -> None:
    """Rosenbrock's valley in positive values."""

    def residuals(values: Sequence[float]) -> list[float]:
        x, y = values
        return [10 * (y - x * x), 1 - x]

    assert least_squares(residuals, (3.0, 0.2), ((1e-3, 10), (1e-3, 10)), max_iterations=300) == pytest.approx(
        [1.0, 1.0], rel=1e-4
    )


def test_least_squares_respects_bounds_and_useless_values() -> None:
    found = least_squares(lambda v: [math.log(v[0] / 5)], (1.0, 2.0), ((0.1, 3.0), (1.0, 4.0)))
    assert found == pytest.approx([3.0, 2.0])
