"""Matrices in tiles of 16 outputs, one for each vector lane, in the order in which products read them.

Numbers are bfloat16, or stay quantised: of 4 or 8 bits, in groups of 32 along the width. Such a number is d u + m, with
d and m of its group and u without a sign: GGUF's types of 4, 5 and 8 bits are of this form.

Legend: N output width, K input width, I = ceil(N / 16) tiles, P = ceil(K / 2) pairs, G = K / 32 groups of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
TILE = 16
"""Outputs whose numbers lie side by side, one for each lane of a vector."""
_HEAD = 2 * TILE * 2
"""Bytes before a group's numbers in a tile: d and m of each output, in float16."""
TILES = "bfloat16 tiles"


@dataclass(frozen=True)
class Tiled:
    """`tiles`: as kernels/tiles.h and kernels/groups.h take them, `[I, P, 16, 2]` bfloat16 if `bits` is 16, else `[I,
    G, bytes]`; padded with 0."""

    tiles: Tensor
    shape: torch.Size
    bits: int

    @property
    def dtype(self) -> str:
        """Name in place of a tensor's type."""
        return TILES if self.bits == 16 else f"{self.bits} bits"

    def numel(self) -> int:
        return self.shape.numel()


Weight = Tensor | Tiled
"""A matrix `[N, K]`."""


def tiled(weight_NK: Tensor) -> Tiled:
    """A copy of a matrix of bfloat16."""
    rows, width = weight_NK.shape
    tiles, pairs = -(-rows // TILE), -(-width // 2)
    whole = weight_NK
    if (rows, width) != (tiles * TILE, pairs * 2):
        whole = torch.nn.functional.pad(weight_NK, (0, pairs * 2 - width, 0, tiles * TILE - rows))
    return Tiled(whole.view(tiles, TILE, pairs, 2).transpose(1, 2).contiguous(), weight_NK.shape, 16)


def grouped(quads_NGQ: Tensor, factors_2NG: Tensor, bits: int) -> Tiled:
    """Tiles of quantised groups of Q = 4 `bits` bytes: numbers of 8 bits in order; of 4 bits the first 16 in the low
    halves, the others in the high halves. `factors`: d, then m, in float16."""
    rows, groups, _ = quads_NGQ.shape
    tiles = -(-rows // TILE)
    rest = tiles * TILE - rows
    if rest:
        quads_NGQ = torch.nn.functional.pad(quads_NGQ, (0, 0, 0, 0, 0, rest))
        factors_2NG = torch.nn.functional.pad(factors_2NG, (0, 0, 0, rest))
    found = torch.empty(tiles, groups, _HEAD + bits * 64, dtype=torch.uint8)
    head = found[:, :, :_HEAD].view(torch.float16).view(tiles, groups, 2, TILE)
    head.copy_(factors_2NG.view(2, tiles, TILE, groups).permute(1, 3, 0, 2))
    body = found[:, :, _HEAD:].view(torch.int32).view(tiles, groups, bits, TILE)
    body.copy_(quads_NGQ.contiguous().view(torch.int32).view(tiles, TILE, groups, bits).permute(0, 2, 3, 1))
    return Tiled(found, torch.Size((rows, groups * GROUP)), bits)


def stacked(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """One below the other; as plain numbers of `dtype` unless all are quantised alike, in whole tiles."""
    first = parts[0]
    if isinstance(first, Tiled):
        alike = [part for part in parts if isinstance(part, Tiled) and part.bits == first.bits]
        if len(alike) == len(parts) and all(part.shape[0] % TILE == 0 for part in alike[:-1]):
            rows = sum(part.shape[0] for part in alike)
            return Tiled(
                torch.cat([part.tiles for part in alike]), torch.Size((rows, first.shape[1])), first.bits
            )
    return torch.cat([plain(part, dtype) for part in parts])


def plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """`[N, K]`; quantised numbers are computed in float32 and rounded to `dtype`."""
    if isinstance(weight, Tensor):
        return weight
    rows, width = weight.shape
    if weight.bits == 16:
        return weight.tiles.transpose(1, 2).flatten(2).flatten(0, 1)[:rows, :width].to(dtype).contiguous()
    tiles, groups, _ = weight.tiles.shape
    found = torch.empty(tiles, TILE, groups, GROUP, dtype=dtype)
    for tile, to in zip(weight.tiles, found, strict=True):
        d, m = tile[:, :_HEAD].view(torch.float16).view(groups, 2, TILE, 1).float().permute(1, 2, 0, 3)
        numbers = tile[:, _HEAD:].view(groups, weight.bits, TILE, 4)
        if weight.bits == 4:
            numbers = torch.cat((numbers & 15, numbers >> 4), 1)
        to.copy_(numbers.permute(2, 0, 1, 3).reshape(TILE, groups, GROUP) * d + m)
    return found.view(tiles * TILE, -1)[:rows]


def converted(weight: Weight, dtype: torch.dtype | str) -> Weight:
    """To another type, or bfloat16 in `TILES`."""
    if weight.dtype == dtype:
        return weight
    if isinstance(dtype, torch.dtype):
        return plain(weight, dtype)
    assert dtype == TILES, "nothing is quantised that was not"
    return tiled(plain(weight, torch.bfloat16))


def rows_of(weight: Weight, rows_T: Tensor) -> Tensor:
    """`[T, K]`: these rows of a matrix that is plain, or of bfloat16 in tiles."""
    if isinstance(weight, Tensor):
        return weight[rows_T]
    assert weight.bits == 16, "of quantised rows the embedding is kept"
    return weight.tiles[rows_T // TILE, :, rows_T % TILE].flatten(1)[:, : weight.shape[1]]
