"""Prompts whose KV was packed: each layer keeps other tokens, and fewer the deeper it is (SemShareKV).

What is kept of a prompt's first blocks lies in some blocks of the engine as if all their slices, one layer's after the
other's, were one row of slices: so none of it is lost, whatever the layers keep. A slice is addressed in all of the KV
memory, as block `layer * num_blocks + block`; the kernels do not know.

Legend: L layers, R rows, B blocks of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from isthmus.core.reuse import Packing
from isthmus.live.engine.interface import Chunk


def slices_of(packing: Packing, packed: Sequence[int] | np.ndarray, num_blocks: int) -> list[np.ndarray]:
    """Of each layer, where the blocks that it keeps lie in all of the memory, which has `num_blocks` a layer."""
    num_layers, blocks = len(packing.kept), np.asarray(packed)
    stops = np.cumsum(packing.kept)
    pieces = [np.arange(stop - count, stop) for count, stop in zip(packing.kept, stops, strict=True)]
    return [piece % num_layers * num_blocks + blocks[piece // num_layers] for piece in pieces]


class PackedRows:
    """Tables and lengths of rows in each layer, of which at least one was packed."""

    def __init__(self, chunks: Sequence[Chunk], num_blocks: int, block_size: int, lens_R: Tensor) -> None:
        num_layers = len(next(chunk.packing for chunk in chunks if chunk.packing is not None).kept)
        tables, more = list[list[np.ndarray]](), list[np.ndarray]()
        for chunk in chunks:
            blocks, packing = np.asarray(chunk.blocks), chunk.packing
            if packing is None:
                row, beyond = [layer * num_blocks + blocks for layer in range(num_layers)], np.zeros(num_layers)
            else:
                packed, rest = blocks[: packing.num_packed], blocks[packing.num_packed :]
                slices = slices_of(packing, packed, num_blocks)
                row = [np.concatenate((kept, layer * num_blocks + rest)) for layer, kept in enumerate(slices)]
                beyond = (np.asarray(packing.kept) - packing.num_packed) * block_size
            tables += [row] * len(chunk.tokens)
            more += [beyond] * len(chunk.tokens)
        widest = max(len(table) for row in tables for table in row)
        found = np.zeros((num_layers, len(tables), widest), np.int32)
        for at, row in enumerate(tables):
            for layer, table in enumerate(row):
                found[layer, at, : len(table)] = table
        device = lens_R.device
        self._tables_LRB = torch.as_tensor(found).to(device)
        self._more_LR = torch.as_tensor(np.stack(more, axis=1), dtype=torch.int32).to(device)

    def at(self, layer: int, lens_R: Tensor) -> tuple[Tensor, Tensor]:
        """Tables `[R, B]` and lengths `[R]` of a layer, in all of the memory. `lens_R`: as if nothing was packed."""
        return self._tables_LRB[layer], lens_R + self._more_LR[layer]

    def within(self, rows: slice) -> PackedRows:
        """Of these rows; nothing but tables is copied."""
        found = object.__new__(PackedRows)
        found._tables_LRB, found._more_LR = self._tables_LRB[:, rows].contiguous(), self._more_LR[:, rows]
        return found
