from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.lab.sim.report import scales
from isthmus.lab.sim.report.scales import Scale

POSITIVE = st.floats(1e-9, 1e15)


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(0, "0 s"), (3.2e-5, "32 µs"), (0.0405, "40.5 ms"), (0.9999, "1 s"), (21.94, "21.9 s"), (119, "119 s"),
     (120, "2 min"), (4000, "66.7 min"), (7200, "2 h"), (400_000, "111 h")],
)  # fmt: skip
def test_durations(value_s: float, text: str) -> None:
    assert scales.seconds(value_s) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (3.14159, "3.14"), (999, "999"), (12_345, "12,345"), (1.63e6, "1.63 million"),
     (999_999, "1 million"), (2e9, "2 billion")],
)  # fmt: skip
def test_amounts(value: float, text: str) -> None:
    assert scales.amount(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (1e-5, "< 0.1 %"),
        (0.0177, "1.77 %"),
        (0.9591, "95.9 %"),
        (0.99999, "> 99.9 %"),
        (1, "100 %"),
    ],
)
def test_percentages_do_not_round_to_none_or_all(share: float, text: str) -> None:
    assert scales.percent(share) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (7e14, "700 TB")]
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert scales.size(num_bytes) == text


def test_ticks_are_round() -> None:
    assert scales.ticks(0, 230, 5) == [0, 50, 100, 150, 200]
    assert scales.time_ticks(2350) == [0, 300, 600, 900, 1200, 1500, 1800, 2100]
    assert scales.time_ticks(3600 * 24 * 3) == [3600 * 12 * index for index in range(7)]
    assert scales.log_ticks(0.01, 0.2) == pytest.approx([0.01, 0.02, 0.05, 0.1, 0.2])
    assert scales.log_ticks(1e-3, 1e2) == pytest.approx([1e-3, 1e-2, 1e-1, 1, 10, 100])
    assert scales.clock(600, 2350) == "10 min" and scales.clock(0, 2350) == "0"


@given(POSITIVE)
def test_an_axis_from_0_holds_its_highest_value_without_much_waste(high: float) -> None:
    top = scales.nice_high(high)
    assert high * (1 - 1e-9) <= top <= 2 * high
    assert 2 <= len(scales.ticks(0, top)) <= 7


@given(POSITIVE, POSITIVE)
def test_a_log_axis_holds_its_values_and_has_a_tick(first: float, second: float) -> None:
    low, high = scales.log_range(min(first, second), max(first, second))
    assert low <= min(first, second) * (1 + 1e-9) and high >= max(first, second) * (1 - 1e-9)
    assert low < high and scales.log_ticks(low, high)


@given(st.floats(1e-6, 1e9), st.integers(3, 12))
def test_time_ticks_start_at_0_and_are_neither_none_nor_too_many(span_s: float, count: int) -> None:
    marks = scales.time_ticks(span_s, count)
    assert marks[0] == 0 and marks[-1] <= span_s * (1 + 1e-6)
    assert 1 <= len(marks) <= count + 1


@given(st.floats(allow_nan=False), st.booleans())
def test_a_scale_never_leaves_its_range(value: float, log: bool) -> None:
    place = Scale(1, 1000, 50, 10, log=log)(value)
    assert math.isfinite(place) and 10 <= place <= 50


@pytest.mark.parametrize("log", [True, False])
def test_a_scale_and_its_inverse_agree(log: bool) -> None:
    scale = Scale(2, 2000, 0, 1, log=log)
    assert [scale(scale.inverse(share)) for share in (0, 0.3, 1)] == pytest.approx([0, 0.3, 1])
