"""Likeness of signatures: symmetric, 0 to 1, and close to the cosine of what was signed."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.reuse import SIMILAR, similarity

signatures = st.binary(min_size=1, max_size=64)
pairs = st.integers(1, 64).flatmap(
    lambda size: st.tuples(st.binary(min_size=size, max_size=size), st.binary(min_size=size, max_size=size))
)


@given(pairs)
def test_it_is_symmetric_and_a_share(pair: tuple[bytes, bytes]) -> None:
    one, other = pair
    assert similarity(one, other) == similarity(other, one)
    assert 0 <= similarity(one, other) <= 1


@given(signatures)
def test_equal_ones_are_entirely_alike(one: bytes) -> None:
    assert similarity(one, one) == 1.0
    assert similarity(one, bytes(byte ^ 0xFF for byte in one)) == 0.0


@given(pairs)
def test_only_equal_ones_are(pair: tuple[bytes, bytes]) -> None:
    one, other = pair
    assert (similarity(one, other) == 1.0) == (one == other)


@given(signatures, signatures)
def test_those_of_two_lengths_are_not_alike(one: bytes, other: bytes) -> None:
    if len(one) != len(other):
        assert similarity(one, other) == 0.0


def test_no_signature_is_like_none() -> None:
    assert similarity(b"", b"") == 0.0


@given(signatures, st.data())
def test_each_bit_that_differs_makes_it_less(one: bytes, data: st.DataObject) -> None:
    flipped = int.from_bytes(one, "little")
    before = 1.0
    for bit in data.draw(st.permutations(range(8 * len(one)))):
        flipped ^= 1 << bit
        found = similarity(one, flipped.to_bytes(len(one), "little"))
        assert found < before or found == before == 0.0
        before = found


@pytest.mark.parametrize("cosine", [1.0, 0.9, SIMILAR, 0.5, 0.0])
def test_signs_of_projections_stand_for_the_cosine(cosine: float) -> None:
    random = Random(1)
    sine, one, other = math.sqrt(1 - cosine**2), 0, 0
    num_bits = 8192
    for bit in range(num_bits):
        # A direction matters by its two numbers in the plane of the two vectors.
        first, second = random.gauss(0, 1), random.gauss(0, 1)
        one |= (first > 0) << bit
        other |= (cosine * first + sine * second > 0) << bit
    signed = [each.to_bytes(num_bits // 8, "little") for each in (one, other)]
    assert similarity(*signed) == pytest.approx(cosine, abs=0.04)
