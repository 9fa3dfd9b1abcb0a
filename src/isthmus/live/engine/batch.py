"""Prompts whose KV was packed: each layer keeps other tokens, and fewer the deeper it is (SemShareKV).

What is kept of a prompt's first blocks lies in some blocks of the engine as if all their slices, one layer's after the
other's, were one row of slices: so none of it is lost, whatever the layers keep. A slice is addressed in all of the KV
memory, as block `layer * num_blocks + block`; the kernels do not know.

Legend: L layers, R rows, B blocks of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from isthmus.core.reuse import Packing
from isthmus.core.types import Reused
from isthmus.live.engine.interface import Chunk
from isthmus.live.engine.remote import Rows, rows_of
from isthmus.live.engine.states import LiveStates, Recurrence, steps


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


# A flat batch: the tokens of prefill chunks and decodes side by side, with where their KV lies.
#
# Rows that compute few tokens (decodes above all) attend through the paged kernel; long chunks attend by parts.
# Rows come first in the flat order, chunks after them; of the rows first those that recurrent layers take one step for.


if TYPE_CHECKING:
    from isthmus.live.engine.assembling import Assembled

ROW_TOKENS = 8
"""A chunk of at most so many tokens is computed as rows of the paged kernel."""


@dataclass
class Prefill:
    """A long chunk inside the flat batch: flat range `[first, last)`, `positions` (int32, ascending) in what lies here,
    from `start` on. `asks`: there is more elsewhere."""

    first: int
    last: int
    blocks: Sequence[int]
    positions: np.ndarray
    asks: bool = False

    @property
    def start(self) -> int:
        return int(self.positions[0])

    @property
    def stop(self) -> int:
        return int(self.positions[-1]) + 1


@dataclass(frozen=True)
class Scored:
    """Of the chunk `index`, in the caller's order: what follows the flat tokens `[first, first + len(targets))`, from
    `position` on."""

    index: int
    first: int
    position: int
    targets: Sequence[int]
    num_top: int


@dataclass
class BatchTensors:
    """Legend: T flat tokens, R paged rows (the first R of T), S sampled tokens, B blocks of the longest row."""

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    tables_RB: Tensor
    lens_R: Tensor
    prefills: list[Prefill]
    sample_S: Tensor
    order: list[int]
    """Index of the chunk, in the caller's order, that sample s belongs to."""
    block_size: int
    scored: list[Scored]
    recurrence: Recurrence | None = None
    """What it does with live states, in models that have any."""
    remote: tuple[Rows, ...] = ()
    """Who is asked what of KV that lies elsewhere."""
    before_R: Tensor | None = None
    """Tokens of each row that lie elsewhere, if there are any."""
    packed: PackedRows | None = None
    """Where the rows' KV is, in each layer, if any of them was packed."""
    assembled: tuple[Assembled, ...] = ()
    """Prompts put together from others' KV, each of which passes alone."""
    reused: dict[int, Reused] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def num_rows(self) -> int:
        return self.lens_R.shape[0]

    @property
    def only_decodes(self) -> bool:
        return not self.prefills and self.num_rows == len(self.order)

    def within(self, first: int, stop: int) -> BatchTensors:
        """Rows `[first, stop)` of a batch of decodes, for one iteration. Nothing is copied."""
        assert self.only_decodes, "rows of a prompt stay together"
        at = slice(first, stop)
        return replace(
            self,
            tokens_T=self.tokens_T[at],
            positions_T=self.positions_T[at],
            slots_T=self.slots_T[at],
            tables_RB=self.tables_RB[at],
            lens_R=self.lens_R[at],
            sample_S=self.sample_S[: stop - first],
            order=self.order[at],
            recurrence=None if self.recurrence is None else self.recurrence.within(first, stop),
            remote=tuple([rows for each in self.remote if (rows := each.within(first, stop)) is not None]),
            before_R=None if self.before_R is None else self.before_R[at],
            packed=None if self.packed is None else self.packed.within(at),
        )

    def thinned(self, rows_S: Tensor) -> BatchTensors:
        """Of a batch that is one long chunk, these tokens, ascending; the others are through."""
        (chunk,), device = self.prefills, self.slots_T.device
        positions = chunk.positions[rows_S.cpu().numpy()]
        return replace(
            self,
            tokens_T=self.tokens_T[rows_S],
            positions_T=self.positions_T[rows_S],
            slots_T=self.slots_T[rows_S],
            prefills=[replace(chunk, last=len(positions), positions=positions)],
            sample_S=torch.tensor([len(positions) - 1], device=device),
        )

    def advance(self, tokens: Sequence[int]) -> None:
        """Moves a batch of decodes on by one position each, with the tokens just sampled."""
        assert self.only_decodes, "only decodes advance in place"
        # `order` says which chunk a sample belongs to; rows of a batch of decodes are in that order already.
        self.tokens_T = torch.tensor(tokens, device=self.tokens_T.device)
        self.positions_T += 1
        self.lens_R += 1
        here_R = self.positions_T
        if self.before_R is not None:
            here_R = here_R - self.before_R
            self.remote = tuple([rows.advanced() for rows in self.remote])
        block_R = (here_R // self.block_size).long()
        blocks_R = self.tables_RB.gather(1, block_R[:, None]).squeeze(1)
        self.slots_T = blocks_R * self.block_size + self.positions_T % self.block_size
        if self.recurrence is not None:
            self.recurrence.advance()


def build_batch(
    chunks: Sequence[Chunk],
    block_size: int,
    device: torch.device,
    states: LiveStates | None = None,
    *,
    num_blocks: int = 0,
) -> BatchTensors:
    """Lays out chunks (in any order) as one flat batch. Mutates nothing. `states`: of the model, if it has any;
    `num_blocks`: of the KV memory, for what is packed."""
    by_rows = [index for index, chunk in enumerate(chunks) if len(chunk.tokens) <= ROW_TOKENS]
    by_rows.sort(key=lambda index: not steps(chunks[index]))
    by_parts = [index for index, chunk in enumerate(chunks) if len(chunk.tokens) > ROW_TOKENS]
    tokens: list[int] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    prefills: list[Prefill] = []
    sampled: list[tuple[int, int]] = []
    scored: list[Scored] = []
    placed: list[tuple[int, int, Chunk]] = []
    before: list[int] = []  # of each row, tokens elsewhere
    by_parts = [index for index in by_parts if chunks[index].assembling is None]
    by_rows = [index for index in by_rows if chunks[index].assembling is None]
    for index in by_rows + by_parts:
        chunk = chunks[index]
        first = len(tokens)
        placed.append((first, index, chunk))
        tokens.extend(chunk.tokens)
        at = np.arange(chunk.start, chunk.stop)
        table = np.asarray(chunk.blocks)
        positions.append(at)
        away = chunk.num_absent(block_size)
        at = at - away if away else at
        slots.append(table[at // block_size] * block_size + at % block_size)
        if len(chunk.tokens) > ROW_TOKENS:
            assert chunk.packing is None, "what is packed decodes"
            prefills.append(Prefill(first, len(tokens), chunk.blocks, at.astype(np.int32), away > 0))
        else:
            before += [away] * len(chunk.tokens)
        if chunk.samples:
            sampled.append((len(tokens) - 1, index))
        if chunk.targets:
            scored.append(Scored(index, first, chunk.start + 1, chunk.targets, chunk.num_top))
    nothing = np.empty(0, np.int64)
    flat_positions = np.concatenate([nothing, *positions])
    num_rows = len(before)
    away_R = np.asarray(before) if any(before) else None

    def place(values: Sequence[int] | np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(device)

    row_chunks = [chunks[index] for index in by_rows]
    lens_R = place(flat_positions[:num_rows] + 1 - (0 if away_R is None else away_R), torch.int32)
    packed = None
    if any(chunk.packing is not None for chunk in row_chunks):
        packed = PackedRows(row_chunks, num_blocks, block_size, lens_R)
    return BatchTensors(
        tokens_T=place(tokens, torch.int64),
        positions_T=place(flat_positions, torch.int32),
        slots_T=place(np.concatenate([nothing, *slots]), torch.int32),
        tables_RB=place(_tables(row_chunks), torch.int32),
        lens_R=lens_R,
        prefills=prefills,
        sample_S=place([row for row, _ in sampled], torch.int64),
        order=[index for _, index in sampled],
        block_size=block_size,
        scored=scored,
        recurrence=None if states is None else states.plan([(first, chunk) for first, _, chunk in placed]),
        remote=rows_of(placed, device),
        before_R=None if away_R is None else place(away_R, torch.int32),
        packed=packed,
    )


def _tables(chunks: Sequence[Chunk]) -> np.ndarray:
    """One padded block table for each token row; rows of one chunk share theirs."""
    widest = max((len(chunk.blocks) for chunk in chunks), default=0)
    tables = np.zeros((sum(len(chunk.tokens) for chunk in chunks), widest), dtype=np.int32)
    row = 0
    for chunk in chunks:
        tables[row : row + len(chunk.tokens), : len(chunk.blocks)] = chunk.blocks
        row += len(chunk.tokens)
    return tables
