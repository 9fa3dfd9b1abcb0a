"""Rules of interpolation: what goes through the points does, least squares are least, shapes are kept."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.lab.papers.prfaas.interpolation import (
    RULES,
    Points,
    cubic,
    evaluated,
    held_out,
    linear,
    monotone_cubic,
    polynomial,
    quadratic,
)

POINTS: Points = [(1024, 0.44), (8192, 0.72), (32_000, 1.84), (130_000, 7.40)]
profiles = st.builds(
    lambda lengths, steps: [(length, sum(steps[: at + 1])) for at, length in enumerate(sorted(lengths))],
    st.lists(st.integers(1, 200), min_size=4, max_size=4, unique=True).map(
        lambda each: [1000 * x for x in each]
    ),
    st.lists(st.floats(0.01, 5), min_size=4, max_size=4),
)


@given(profiles)
def test_rules_that_go_through_the_points(points: Points) -> None:
    for rule in (linear, monotone_cubic, cubic):
        times = rule(points)
        for length, seconds in points:
            assert times(length) == pytest.approx(seconds, rel=1e-4, abs=1e-4)


@given(profiles)
def test_a_rising_profile_stays_rising(points: Points) -> None:
    first, last = points[0][0], points[-1][0]
    lengths = [first + (last - first) * at / 60 for at in range(61)]
    for rule in (linear, monotone_cubic):
        times = list(map(rule(points), lengths))
        assert all(one <= other + 1e-9 for one, other in pairwise(times))


@given(st.lists(st.floats(0, 3), min_size=3, max_size=3))
def test_a_quadratic_is_found_again(coefficients: list[float]) -> None:
    scaled = [coefficients[0], coefficients[1] / 1e5, coefficients[2] / 1e10]
    times = evaluated(scaled)
    points = [(length, times(length) + 0.01) for length, _ in POINTS]
    for relative in (False, True):
        found = polynomial(points, 2, relative=relative)
        assert evaluated(found)(50_000) == pytest.approx(times(50_000) + 0.01)


@pytest.mark.parametrize("relative", [False, True])
def test_least_squares_are_least(relative: bool) -> None:
    def error(coefficients: list[float]) -> float:
        times = evaluated(coefficients)
        return sum(((times(x) - y) / (y if relative else 1)) ** 2 for x, y in POINTS)

    found = polynomial(POINTS, 2, relative=relative)
    for power, change in product(range(3), (-1e-3, 1e-3)):
        moved = [c * (1 + change) if at == power else c for at, c in enumerate(found)]
        assert error(found) < error(moved)


def test_outside_the_points() -> None:
    assert linear(POINTS)(1) == 0.44
    assert linear(POINTS)(228_000) == pytest.approx(7.40 + 5.56)
    assert monotone_cubic(POINTS)(1) == 0.44
    assert monotone_cubic(POINTS)(200_000) > 7.40


def test_held_out_points_are_not_seen() -> None:
    exact = [(length, 0.4 + 4e-5 * length + 9e-11 * length**2) for length, _ in POINTS]
    assert held_out(quadratic, exact) == pytest.approx([0, 0], abs=1e-9)
    assert all(error > 0 for error in held_out(linear, exact))  # a chord is above what is convex
    assert len(RULES) == 5
