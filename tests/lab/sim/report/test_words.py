from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.lab.sim.report import page


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(0, "0 s"), (3.2e-5, "32 µs"), (0.0405, "40.5 ms"), (0.9999, "1 s"), (21.94, "21.9 s"), (119, "119 s"),
     (120, "2 min"), (4000, "66.7 min"), (7200, "2 h"), (400_000, "111 h")],
)  # fmt: skip
def test_durations(value_s: float, text: str) -> None:
    assert page.seconds(value_s) == text


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
    assert page.percent(share) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (7e14, "700 TB")]
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert page.size(num_bytes) == text


@pytest.mark.parametrize(("span_s", "unit"), [(0, "s"), (100, "s"), (600, "min"), (9000, "h"), (10**6, "d")])
def test_an_axis_has_one_unit(span_s: float, unit: str) -> None:
    assert page.clock(span_s)[1] == unit


@given(st.text(), st.integers(2, 40))
def test_short_names_keep_their_ends(text: str, length: int) -> None:
    short = page.shorten(text, length)
    assert len(short) <= length and (
        short == text or (short[0], short[-1]) == (text[0], text[-1]) or length == 2
    )
