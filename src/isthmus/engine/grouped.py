"""Matrices that stay quantised in memory: numbers of 4 or 8 bits, in groups of 32 along the width.

A number is d u + m, with d and m of its group and u without a sign: GGUF's Q4_0, Q4_1, Q8_0 and Q4_K are of this form.

Legend: N output width, K input width, G = K / 32 groups of a row, I = ceil(N / 16) tiles.
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


@dataclass(frozen=True)
class Grouped:
    """`tiles_IGB`: bytes, as kernels/groups.h takes them; outputs that fill up the last tile are 0."""

    tiles_IGB: Tensor
    shape: torch.Size
    bits: int

    @property
    def dtype(self) -> str:
        """What stands for a tensor's type."""
        return f"{self.bits} bits"

    @property
    def nbytes(self) -> int:
        return self.tiles_IGB.nbytes

    def numel(self) -> int:
        return self.shape.numel()


Weight = Tensor | Grouped
"""A matrix `[N, K]`."""


def grouped(quads_NGQ: Tensor, factors_2NG: Tensor, bits: int) -> Grouped:
    """Of each group Q = `bits` times 4 bytes: 8 bits in their order; of 4 bits the first 16 are the low halves, the
    others the high ones. `factors`: d, then m, in float16."""
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
    return Grouped(found, torch.Size((rows, groups * GROUP)), bits)


def stacked(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """One below the other; as plain numbers of `dtype` unless all are grouped alike, in whole tiles."""
    first = parts[0]
    if isinstance(first, Grouped):
        alike = [part for part in parts if isinstance(part, Grouped) and part.bits == first.bits]
        if len(alike) == len(parts) and all(part.shape[0] % TILE == 0 for part in alike[:-1]):
            rows = sum(part.shape[0] for part in alike)
            tiles = torch.cat([part.tiles_IGB for part in alike])
            return Grouped(tiles, torch.Size((rows, first.shape[1])), first.bits)
    return torch.cat([plain(part, dtype) for part in parts])


def plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """`[N, K]`; numbers that were grouped are computed in float32 and rounded to `dtype`."""
    if isinstance(weight, Tensor):
        return weight
    tiles, groups, _ = weight.tiles_IGB.shape
    found = torch.empty(tiles, TILE, groups, GROUP, dtype=dtype)
    for tile, to in zip(weight.tiles_IGB, found, strict=True):
        d, m = tile[:, :_HEAD].view(torch.float16).view(groups, 2, TILE, 1).float().permute(1, 2, 0, 3)
        numbers = tile[:, _HEAD:].view(groups, weight.bits, TILE, 4)
        if weight.bits == 4:
            numbers = torch.cat((numbers & 15, numbers >> 4), 1)
        numbers = numbers.permute(2, 0, 1, 3).reshape(TILE, groups, GROUP)
        to.copy_(numbers * d + m)
    return found.view(tiles * TILE, -1)[: weight.shape[0]]
