"""The profiles that come with the package: each is a curve that can be read, with its origin."""

from __future__ import annotations

from pathlib import Path

import pytest

import isthmus.core.cost
from isthmus.core.cost import compile_cost, curve_of
from isthmus.yaml_file import read_document

PROFILES = sorted((Path(isthmus.core.cost.__file__).parent / "profiles").iterdir())


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name)
def test_a_profile_is_a_curve_with_an_origin(path: Path) -> None:
    curve = curve_of(read_document(path).values)
    assert path.suffix == ".yaml"
    assert "arXiv 2604.15039" in curve.origin and "nferred" in curve.origin
    cost = compile_cost(curve)
    times = [cost.prefill_ns(length, 0) for length in (1, 1_000, 10_000, 100_000)]
    assert times == sorted(times) and times[0] > 10**8


def test_there_are_profiles() -> None:
    assert len(PROFILES) == 8
