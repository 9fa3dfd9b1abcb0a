"""The two forms of `BitPacking` give the same bytes, for numbers of every kind."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.live.engine import compiled, packing
from isthmus.live.engine.packing import DTYPE_BYTES, PLANES, Bytes, Grid
from isthmus.live.engine.packing.native import NativePacking
from isthmus.live.engine.packing.plain import PlainPacking

PLAIN = PlainPacking()
NUMBERS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "bits": lambda rng, count: rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32),
    "normal": lambda rng, count: rng.standard_normal(count),
    "offset": lambda rng, count: 40 + rng.standard_normal(count),
    "far offset": lambda rng, count: -3e4 + rng.standard_normal(count) / 100,
    "subnormal": lambda rng, count: 1e-39 * rng.standard_normal(count),
    "signed zeros": lambda rng, count: rng.choice([0.0, -0.0], count),
    "one zero": lambda rng, count: np.full(count, -0.0),
    "largest": lambda rng, count: rng.choice([-6e4, 6.5e4, 3e38, -3.4e38], count),
    "not finite": lambda rng, count: rng.choice([0.5, -3, np.inf, -np.inf, np.nan, -np.nan], count, p=PORTIONS),
}
PORTIONS = (0.6, 0.3, 0.025, 0.025, 0.025, 0.025)

grids = st.builds(
    Grid,
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    num_tokens=st.integers(1, 40),
    block_size=st.integers(1, 20),
    channels=st.sampled_from([2, 12, 16, 66, 300]),
)


@pytest.fixture(scope="module")
def native() -> NativePacking:
    """A C compiler is a stated prerequisite: without one these tests fail, they are not skipped."""
    found = packing.select()
    assert isinstance(found, NativePacking), "packing.c could not be built: is gcc installed?"
    return found


def drawn(kind: str, grid: Grid, seed: int) -> Bytes:
    values = NUMBERS[kind](np.random.default_rng(seed), grid.num_tokens * grid.channels)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wide = values.astype(np.float32)
        if grid.dtype == "bfloat16":
            return (wide.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return wide.astype(grid.dtype).view(np.uint8)


@pytest.mark.parametrize("kind", NUMBERS)
@settings(max_examples=25)
@given(grid=grids, seed=st.integers(0, 1000))
def test_native_packs_and_unpacks_as_plain_does(
    native: NativePacking, kind: str, grid: Grid, seed: int
) -> None:
    raw = drawn(kind, grid, seed)
    packed = np.empty((2, grid.packed_bytes), np.uint8)
    native.pack(grid, raw, packed[0])
    PLAIN.pack(grid, raw, packed[1])
    assert (packed[0] == packed[1]).all()
    unpacked = np.empty((2, grid.raw_bytes), np.uint8)
    assert native.unpack(grid, packed[0], unpacked[0])
    assert PLAIN.unpack(grid, packed[0], unpacked[1])
    assert (unpacked[0] == unpacked[1]).all()


@settings(max_examples=100)
@given(grid=grids, seed=st.integers(0, 1000))
def test_both_refuse_the_same_garbage_and_make_the_same_of_the_rest(
    native: NativePacking, grid: Grid, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, grid.packed_bytes, dtype=np.uint8)
    if seed % 2:  # a valid head, and the rest random
        packed[:2] = np.array([0x7F0], np.uint16).view(np.uint8)
    unpacked = np.zeros((2, grid.raw_bytes), np.uint8)
    accepted = native.unpack(grid, packed, unpacked[0])
    assert PLAIN.unpack(grid, packed, unpacked[1]) == accepted
    if accepted:
        assert (unpacked[0] == unpacked[1]).all()


@pytest.mark.parametrize("width", PLANES)
@settings(max_examples=25)
@given(count=st.integers(0, 200), seed=st.integers(0, 1000))
def test_native_splits_as_plain_does_and_joining_restores(
    native: NativePacking, width: int, count: int, seed: int
) -> None:
    raw = np.random.default_rng(seed).integers(0, 256, count * width, dtype=np.uint8)
    planes = [[np.empty(count * size, np.uint8) for size in PLANES[width]] for _ in range(2)]
    native.split(width, raw, planes[0])
    PLAIN.split(width, raw, planes[1])
    assert all((one == other).all() for one, other in zip(*planes, strict=True))
    for form in (native, PLAIN):
        joined = np.empty_like(raw)
        form.join(width, planes[0], joined)
        assert (joined == raw).all()


def test_without_a_compiler_numpy_does_it_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert isinstance(packing.select.__wrapped__(), PlainPacking)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["no C compiler found"]
