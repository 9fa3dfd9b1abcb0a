from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.lab.sim.report import page

WRITTEN: dict[Callable[[float], str], dict[float, str]] = {
    page.seconds: {
        0: "0 s", 3.2e-5: "32 µs", 0.0405: "40.5 ms", 0.9999: "1 s", 21.94: "21.9 s", 119: "119 s",
        120: "2 min", 4000: "66.7 min", 7200: "2 h", 400_000: "111 h",
    },
    page.percent: {
        0: "0 %", 1e-5: "< 0.1 %", 0.0177: "1.77 %", 0.9591: "95.9 %", 0.99999: "> 99.9 %", 1: "100 %",
    },
    page.size: {0: "0 B", 999: "999 B", 1500: "1.5 kB", 7e14: "700 TB"},
}  # fmt: skip


@pytest.mark.parametrize("write", WRITTEN)
def test_numbers_as_people_write_them(write: Callable[[float], str]) -> None:
    assert {value: write(value) for value in WRITTEN[write]} == WRITTEN[write]


@pytest.mark.parametrize(("span_s", "unit"), [(0, "s"), (100, "s"), (600, "min"), (9000, "h"), (10**6, "d")])
def test_an_axis_has_one_unit(span_s: float, unit: str) -> None:
    assert page.clock(span_s)[1] == unit


@given(st.text(), st.integers(3, 40))
def test_short_names_keep_their_ends(text: str, length: int) -> None:
    short = page.shorten(text, length)
    assert len(short) <= length and (short == text or (short[0], short[-1]) == (text[0], text[-1]))
