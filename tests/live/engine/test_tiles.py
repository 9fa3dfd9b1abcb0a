"""Weights in tiles: the same numbers as they were made of, by GGUF's library if quantised, and the same products."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from isthmus.live.engine.kernels import Kernels
from isthmus.live.engine.quantised import GROUPED
from isthmus.live.engine.tiles import GROUP, TILES, Tiled, converted, grouped, plain, rows_of, stacked, tiled
from tests.gguf_files import packed

from .support import largest_error, randn, relative_error

BITS = pytest.mark.parametrize("bits", [4, 8])
ANY_BITS = pytest.mark.parametrize("bits", [4, 8, 16])


def drawn(rows: int, width: int, bits: int, seed: int = 0) -> Tiled:
    """Factors and offsets are powers of two, so that products can be exact."""
    draw = torch.Generator().manual_seed(seed)
    if bits == 16:
        return tiled(torch.randint(-128, 128, (rows, width), generator=draw).bfloat16())
    quads = torch.randint(256, (rows, width // GROUP, 4 * bits), generator=draw, dtype=torch.uint8)
    factors = 2.0 ** torch.randint(-4, 4, (2, rows, width // GROUP), generator=draw)
    return grouped(quads, factors.half(), bits)


def whole_numbers(rows: int, width: int) -> Tensor:
    """Up to 127, which stands in each group: neither bfloat16 nor rounding to 15 bits changes any of them."""
    x = torch.randint(-127, 128, (rows, width), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::GROUP] = 127
    return x


@pytest.mark.parametrize("kind", sorted(GROUPED))
def test_the_numbers_are_those_of_the_file(kind: str) -> None:
    """Of long blocks' factors the last bits are rounded: they are products of a half and 6 bits."""
    rows = packed(
        np.random.default_rng(0).normal(size=(40, 512)).astype(np.float32), GGMLQuantizationType[kind]
    )
    expected = torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind]))
    found = GROUPED[kind](torch.from_numpy(rows))
    assert found is not None and found.shape == (40, 512)
    numbers = plain(found, torch.float32)
    assert numbers.shape == (40, 512)
    assert relative_error(numbers, expected) < 5e-4 if kind.endswith("_K") else torch.equal(numbers, expected)
    assert torch.equal(plain(found, torch.bfloat16), numbers.bfloat16())


def test_offsets_that_a_half_cannot_hold_are_not_taken() -> None:
    rows = packed(np.full((16, 32), 3e6, np.float32), GGMLQuantizationType.Q8_0)
    assert GROUPED["Q8_0"](torch.from_numpy(rows)) is None


@ANY_BITS
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 40, 48, 70, 112])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_products_of_whole_numbers_are_exact(
    native_kernels: Kernels, bits: int, outputs: int, bias: bool
) -> None:
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 300):
        for width in (32, 96):
            weight, x = drawn(outputs, width, bits), whole_numbers(rows, width)
            bias_N = randn(outputs, seed=3) if bias else None
            expected = x.double() @ plain(weight, torch.float32).double().T
            expected += 0 if bias_N is None else bias_N.double()
            found = native_kernels.linear(x, weight, bias_N)
            assert found.shape == (rows, outputs)
            assert largest_error(found, expected) <= 2e-6 * max(1, float(expected.abs().max()) if rows else 1)


@BITS
def test_other_numbers_are_rounded_to_15_bits_in_groups(native_kernels: Kernels, bits: int) -> None:
    """A large number spoils its own group and row alone; a group of zeros is one. Many rows are in bfloat16."""
    weight, x = drawn(64, 320, bits), randn(90, 320, seed=4)
    x[2, 40], x[3, 64:96] = 1e6, 0.0
    exact = x.double() @ plain(weight, torch.float32).double().T
    for rows, error in ((9, 2e-4), (90, 8e-3)):
        found = native_kernels.linear(x[:rows], weight, None)
        for row in range(rows):
            assert relative_error(found[row], exact[row]) < error, row


@BITS
def test_a_product_in_bfloat16_is_that_of_the_widened_weights(native_kernels: Kernels, bits: int) -> None:
    for outputs, rows in ((70, 40), (16, 300), (96, 17)):
        weight, x = drawn(outputs, 320, bits), randn(rows, 320, seed=4)
        found = native_kernels.linear(x, weight, None)
        assert torch.equal(found, native_kernels.linear(x, tiled(plain(weight, torch.bfloat16)), None))


@pytest.mark.parametrize("shape", [(16, 32), (1, 1), (17, 3), (48, 5), (100, 31)])
def test_bfloat16_numbers_are_those_of_the_matrix(shape: tuple[int, int]) -> None:
    weight = randn(*shape, dtype=torch.bfloat16)
    found = tiled(weight)
    assert found.shape == weight.shape and found.dtype == TILES
    assert torch.equal(plain(found, torch.bfloat16), weight)
    assert torch.equal(plain(found, torch.float32), weight.float())
    rows = torch.tensor([shape[0] - 1, 0, shape[0] // 2])
    assert torch.equal(rows_of(found, rows), weight[rows]) and torch.equal(rows_of(weight, rows), weight[rows])


@pytest.mark.parametrize("width", [1, 2, 3, 31, 64, 97])
@pytest.mark.parametrize("outputs", [5, 16, 50])
def test_bfloat16_products_of_any_width(native_kernels: Kernels, width: int, outputs: int) -> None:
    """Of numbers that bfloat16 holds; the memory beside them is never read into a sum."""
    weight = randn(outputs, width, dtype=torch.bfloat16)
    for rows in (1, 2, 7, 8, 9, 20):
        x = randn(rows, width, seed=1).bfloat16().float()
        found = native_kernels.linear(x, tiled(weight), None)
        assert largest_error(found, x.double() @ weight.double().T) < 1e-5 * width**0.5


@ANY_BITS
def test_a_large_product_is_shared_among_threads_without_a_change(native_kernels: Kernels, bits: int) -> None:
    weight, x = drawn(515, 256, bits), whole_numbers(9, 256)
    expected = x.double() @ plain(weight, torch.float32).double().T
    assert relative_error(native_kernels.linear(x, weight, None), expected) < 1e-6


def test_stacked_alike_they_stay_quantised() -> None:
    parts = [drawn(32, 64, 4, seed) for seed in range(3)]
    found = stacked(parts, torch.bfloat16)
    assert isinstance(found, Tiled) and found.shape == (96, 64)
    assert torch.equal(plain(found, torch.float32), torch.cat([plain(part, torch.float32) for part in parts]))


@pytest.mark.parametrize("other", ["plain", "8 bits", "part of a tile"])
def test_stacked_with_others_they_are_widened(other: str) -> None:
    parts = [
        drawn(20 if other == "part of a tile" else 32, 64, 4),
        drawn(32, 64, 8 if other == "8 bits" else 4),
    ]
    if other == "plain":
        parts[1] = plain(parts[1], torch.bfloat16)
    for order in (parts, parts[::-1]):
        found = stacked(order, torch.bfloat16)
        expected = torch.cat([plain(part, torch.bfloat16) for part in order])
        if isinstance(found, Tiled):
            assert other == "part of a tile" and order is not parts, "the last may end within a tile"
            found = plain(found, torch.bfloat16)
        assert torch.equal(found, expected)


def test_conversions() -> None:
    quantised = drawn(20, 64, 4)
    assert converted(quantised, "4 bits") is quantised
    for other in (torch.bfloat16, TILES):
        found = converted(quantised, other)
        assert found.dtype == other
        assert torch.equal(plain(found, torch.bfloat16), plain(quantised, torch.bfloat16))
    weight = randn(20, 64, dtype=torch.bfloat16)
    assert converted(weight, torch.bfloat16) is weight
    assert torch.equal(plain(converted(weight, TILES), torch.bfloat16), weight)
