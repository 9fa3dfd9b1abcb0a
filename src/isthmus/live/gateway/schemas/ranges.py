"""Lark terminals for the decimal texts of numbers within bounds, built digit by digit from the bounds' texts, which
may have any length. No exponents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext

MAX_DIGITS = 400
"""Of a number: no double has more before or behind its point."""
MAX_PLACES = 100
"""Behind the point of a bound: with more, llguidance's lexer may become too large during the answer."""

_FRACTION = r"(\.[0-9]+)?"


@dataclass(frozen=True)
class Bound:
    value: Decimal
    inclusive: bool = True


def written(value: Decimal) -> str:
    """All digits of a number, without exponent and superfluous zeros. Raises OverflowError."""
    _sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or max(len(digits) + exponent, -exponent) > MAX_DIGITS:
        raise OverflowError(f"{value:.20g} has more than {MAX_DIGITS} digits")
    text = format(value, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def terminal(least: Bound | None, most: Bound | None, *, integer: bool) -> str:
    """Lark of the numbers from `least` to `most`; "" if there are none. Raises OverflowError."""
    if integer:
        least, most = _whole(least, upwards=True), _whole(most, upwards=False)
    for bound in filter(None, (least, most)):
        if len(written(bound.value).partition(".")[2]) > MAX_PLACES:
            raise OverflowError(f"{bound.value:.20g} has more than {MAX_PLACES} digits behind its point")
    if least and most and (least.value, not (least.inclusive and most.inclusive)) > (most.value, False):
        return ""
    parts = []
    if most is None or most.value > 0 or (most.value == 0 and most.inclusive):
        parts.append(_unsigned(least if least and _reaches(least) else None, most, integer))
    if least is None or least.value < 0:
        least_negated = most and Bound(most.value.copy_negate(), most.inclusive)
        bottom = least_negated if least_negated and _reaches(least_negated) else None
        parts.append(
            f'"-" {_unsigned(bottom, least and Bound(least.value.copy_negate(), least.inclusive), integer)}'
        )
    return " | ".join(parts)


def _reaches(bound: Bound) -> bool:
    """Whether the lower bound excludes some number that is not negative."""
    return bound.value > 0 or (bound.value == 0 and not bound.inclusive)


def _whole(bound: Bound | None, *, upwards: bool) -> Bound | None:
    """The equivalent inclusive bound for integers."""
    if bound is None:
        return None
    with localcontext() as context:
        context.prec = 2 * MAX_DIGITS
        nearest = bound.value.to_integral_value("ROUND_CEILING" if upwards else "ROUND_FLOOR")
        if nearest == bound.value and not bound.inclusive:
            nearest += 1 if upwards else -1
    return Bound(nearest)


def _unsigned(least: Bound | None, most: Bound | None, integer: bool) -> str:
    """Lark of the unsigned texts between bounds that are not negative."""
    fraction = "" if integer else _FRACTION
    terms = [f"/(0|[1-9][0-9]*){fraction}/"] if least is None and most is None else []
    if least is not None:
        terms.append(f"/{'|'.join(_from(written(least.value), fraction))}/")
    if most is not None:
        terms.append(f"/{'|'.join(_up_to(written(most.value), fraction))}/")
    terms += [f"~/{_equal(written(each.value))}/" for each in (least, most) if each and not each.inclusive]
    return f"({' & '.join(terms)})"


def _from(text: str, fraction: str) -> Iterator[str]:
    """Regexes of unsigned numbers that are at least `text`."""
    whole, _, part = text.partition(".")
    yield f"[1-9][0-9]{{{len(whole)},}}{fraction}"
    for at, digit in enumerate(whole):
        if digit < "9":
            yield f"{whole[:at]}[{int(digit) + 1}-9][0-9]{{{len(whole) - at - 1}}}{fraction}"
    if not part:
        yield f"{whole}{fraction}"
        return
    for at, digit in enumerate(part):
        if digit < "9":
            yield rf"{whole}\.{part[:at]}[{int(digit) + 1}-9][0-9]*"
    yield rf"{whole}\.{part}[0-9]*"


def _up_to(text: str, fraction: str) -> Iterator[str]:
    """Regexes of unsigned numbers that are at most `text`."""
    whole, _, part = text.partition(".")
    if len(whole) > 1:
        yield f"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){fraction}"
    for at, digit in enumerate(whole):
        first = 1 if at == 0 and len(whole) > 1 else 0
        if int(digit) > first:
            yield f"{whole[:at]}[{first}-{int(digit) - 1}][0-9]{{{len(whole) - at - 1}}}{fraction}"
    yield rf"{whole}(\.0+)?" if fraction else whole
    for at, digit in enumerate(part):
        if at:
            yield rf"{whole}\.{part[:at]}"
        if digit > "0":
            yield rf"{whole}\.{part[:at]}[0-{int(digit) - 1}][0-9]*"
    if part:
        yield rf"{whole}\.{part}0*"


def _equal(text: str) -> str:
    whole, _, part = text.partition(".")
    return rf"{whole}\.{part}0*" if part else rf"{whole}(\.0+)?"
