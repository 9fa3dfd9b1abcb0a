"""The reference of packing.c in numpy, and what runs without a C compiler, at a tenth of the speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.live.engine.packing import HEADER_BYTES, PLANES, Bytes, Grid

Floats = NDArray[np.float32]

# See packing.c. A scale is `rank << RANK_BITS` as the bits of a float32; a base is granules of some scales.
_RANK_BITS, _LOWEST_RANK, _HIGHEST_RANK, _MOST_BELOW = np.uint32(19), 0x10, 0xFEF, 255
_GRANULE, _MOST_GRANULES, _NO_NUMBER = 8, 127, -128
_LARGEST = {name: np.float32(float.fromhex(text)) for name, text in {
    "float32": "0x1.fffffep127", "bfloat16": "0x1.fep127", "float16": "0x1.ffcp15",
}.items()}  # fmt: skip


class PlainPacking:
    """See `Packing`."""

    def pack(self, grid: Grid, raw: Bytes, packed: Bytes) -> None:
        for block, numbers, data in _blocks(grid, raw, packed):
            x_TC = _widened(block, numbers)
            rank_C, number_C = _ranks(x_TC)
            highest = max([_LOWEST_RANK, *rank_C[number_C]])
            rank_C = np.where(number_C, np.maximum(rank_C, highest - _MOST_BELOW), highest)
            inverse_C = np.float32(1) / _scales(rank_C)
            below_C = (highest - rank_C).astype(np.uint8)
            granules_C, rows_TC = _quantised(x_TC, inverse_C, number_C)
            parts = (np.array(highest, np.uint16), below_C, granules_C, rows_TC)
            data[:] = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])

    @np.errstate(over="ignore")
    def unpack(self, grid: Grid, packed: Bytes, raw: Bytes) -> bool:
        for block, numbers, data in _blocks(grid, raw, packed):
            highest = int(data[:HEADER_BYTES].view(np.uint16)[0])
            columns = data[HEADER_BYTES:].reshape(-1, grid.channels)
            below_C, granules_C = columns[0].astype(np.int64), columns[1].view(np.int8).astype(np.int32)
            if highest > _HIGHEST_RANK or highest < _LOWEST_RANK + below_C.max():
                return False
            scale_C = np.where(granules_C == _NO_NUMBER, np.float32(np.nan), _scales(highest - below_C))
            x_TC = (columns[2:] + _GRANULE * granules_C).astype(np.float32) * scale_C
            numbers[:] = _narrowed(block, np.clip(x_TC, -_LARGEST[grid.dtype], _LARGEST[grid.dtype]))
        return True

    def split(self, width: int, raw: Bytes, planes: Sequence[Bytes]) -> None:
        x: NDArray[Any] = raw.view(f"u{width}")
        turned, at = (x << 1 | x >> 8 * width - 1).view(np.uint8).reshape(-1, width), 0
        for plane, size in zip(planes, PLANES[width], strict=True):
            plane.reshape(-1, size)[:] = turned[:, at : at + size]
            at += size

    def join(self, width: int, planes: Sequence[Bytes], raw: Bytes) -> None:
        pieces = [plane.reshape(-1, size) for plane, size in zip(planes, PLANES[width], strict=True)]
        turned: NDArray[Any] = np.concatenate(pieces, axis=1).reshape(-1).view(f"u{width}")
        raw.view(f"u{width}")[:] = turned >> 1 | turned << 8 * width - 1


def _blocks(grid: Grid, raw: Bytes, packed: Bytes) -> Iterator[tuple[Grid, Bytes, Bytes]]:
    for start in range(0, grid.num_tokens, grid.block_size):
        block = grid._replace(num_tokens=min(grid.block_size, grid.num_tokens - start))
        yield block, raw[: block.raw_bytes], packed[: block.packed_bytes]
        raw, packed = raw[block.raw_bytes :], packed[block.packed_bytes :]


@np.errstate(invalid="ignore", over="ignore")
def _ranks(x_TC: Floats) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The rank of each channel's scale, and whether it has one."""
    low_C, high_C = x_TC.min(axis=0), x_TC.max(axis=0)
    span_C = (high_C - low_C) / np.float32(255 - _GRANULE)
    far_C = np.abs(low_C) / np.float32(_GRANULE * _MOST_GRANULES)
    bits_C = np.where(span_C > far_C, span_C, far_C).view(np.uint32)
    rank_C = (bits_C + ((np.uint32(1) << _RANK_BITS) - np.uint32(1))) >> _RANK_BITS
    number_C = np.isfinite(low_C) & np.isfinite(high_C) & (rank_C <= _HIGHEST_RANK)
    return np.maximum(rank_C.astype(np.int64), _LOWEST_RANK), number_C


@np.errstate(invalid="ignore", over="ignore")
def _quantised(
    x_TC: Floats, inverse_C: Floats, number_C: NDArray[np.bool_]
) -> tuple[NDArray[np.int8], NDArray[np.uint8]]:
    """Granules of each channel, and the bytes."""
    base_C = np.floor(x_TC.min(axis=0) * inverse_C * np.float32(1 / _GRANULE))
    granules_C = np.where(number_C, np.maximum(base_C, -_MOST_GRANULES), _NO_NUMBER).astype(np.int8)
    steps_TC = np.where(number_C, np.rint(x_TC * inverse_C), 0)
    bytes_TC = steps_TC.astype(np.int32) - np.where(number_C, _GRANULE * granules_C.astype(np.int32), 0)
    return granules_C, bytes_TC.astype(np.uint8)


def _scales(rank_C: NDArray[np.int64]) -> Floats:
    return (rank_C.astype(np.uint32) << _RANK_BITS).view(np.float32)


def _widened(grid: Grid, numbers: Bytes) -> Floats:
    if grid.dtype == "bfloat16":
        x = _from_bf16(numbers.view(np.uint16))
    else:
        x = numbers.view(grid.dtype).astype(np.float32)
    return x.reshape(-1, grid.channels)


def _narrowed(grid: Grid, x_TC: Floats) -> Bytes:
    if grid.dtype != "bfloat16":
        return x_TC.astype(grid.dtype).reshape(-1).view(np.uint8)
    bits = x_TC.reshape(-1).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x_TC.reshape(-1)), 0x7FC0, nearest).astype(np.uint16).view(np.uint8)


def _from_bf16(bits: NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
