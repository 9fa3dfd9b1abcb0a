"""Numbers within bounds: a text is allowed exactly where its value is."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from isthmus.live.gateway.schemas.ranges import Bound, terminal, written

from ..grammars import follows

TOKENIZER = LLTokenizer("byte")
VALUES = st.one_of(
    st.integers(-120, 120).map(Decimal),
    st.integers(-(2**65), 2**65).map(Decimal),
    st.decimals(-12, 12, places=3),
    st.sampled_from([2**63, 2**63 - 1, 2**64 - 1, -(2**63), 10**25]).map(Decimal),
)
BOUNDS = st.none() | st.builds(Bound, VALUES, st.booleans())
STEPS = [Decimal(step) for step in ("0", "1", "-1", "0.001", "-0.001", "9", "-10", "1e20", "-1e20")]


def allowed(lark: str, text: str) -> bool:
    return follows(TOKENIZER, f"start: N\nN: {lark}", text)


def is_within(value: Decimal, least: Bound | None, most: Bound | None) -> bool:
    above = least is None or value > least.value or (least.inclusive and value == least.value)
    return above and (most is None or value < most.value or (most.inclusive and value == most.value))


@settings(max_examples=60)
@given(BOUNDS, BOUNDS, VALUES, st.booleans())
def test_a_number_is_allowed_where_it_is_within(
    least: Bound | None, most: Bound | None, other: Decimal, integer: bool
) -> None:
    lark = terminal(least, most, integer=integer)
    near = [bound.value + step for bound in (least, most) if bound for step in STEPS]
    for value in (*near, other, Decimal(0)):
        if integer and value != value.to_integral_value():
            continue
        fits = is_within(value, least, most)
        assert (bool(lark) and allowed(lark, written(value))) == fits, (lark, value)
        if lark and not integer and value == value.to_integral_value():
            assert allowed(lark, f"{written(value)}.00") == fits
    if not lark:
        assert not is_within(Decimal(0), least, most) and not is_within(other.to_integral_value(), least, most)


@pytest.mark.parametrize("sign", [1, -1])
def test_bounds_of_more_digits_than_decimals_compute_with(sign: int) -> None:
    least, most = sorted(sign * (10**40 + end) for end in (1, 3))
    lark = terminal(Bound(Decimal(least)), Bound(Decimal(most)), integer=True)
    fits = [allowed(lark, str(sign * (10**40 + value))) for value in range(5)]
    assert fits == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("value", "text"),
    [("1e3", "1000"), ("-0.0", "0"), ("1.50", "1.5"), ("1E-7", "0.0000001"), ("12345678901234567890.10", None)],
)
def test_all_digits_are_written(value: str, text: str | None) -> None:
    assert written(Decimal(value)) == (text or value.rstrip("0"))


@pytest.mark.parametrize("value", ["1e400", "1e-401", "-1e1000000000", "Infinity", "NaN"])
def test_numbers_of_too_many_digits(value: str) -> None:
    with pytest.raises(OverflowError):
        written(Decimal(value))
