"""Attention over KV in several engines: queries of the home engine, and answers of the holders.

A layer's attention is a sum of parts (`attention.merge`; DistAttention of Infinite-LLM): queries go to the holders,
local KV is summed meanwhile, and sums come back with their lse. `R H D` float32 numbers go out and `R H (D + 1)` come
back, however much KV there is.

Legend: T flat tokens, R rows of queries, H query heads, D head size, B blocks of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from isthmus.core.errors import ProtocolError
from isthmus.core.models import Attention, LatentAttention, ModelSpec
from isthmus.live.engine.attention import Part, partial
from isthmus.live.engine.interface import Asking, Chunk, Elsewhere, HolderLost, HolderQueries, runs_of
from isthmus.live.engine.kernels import Kernels, Scope

FEW_ROWS = 8
"""Up to this many queries of one request read its KV one by one; more gather it once."""
_NUMBER_BYTES = 4


@dataclass(frozen=True)
class AttentionShape:
    """Shape of a layer's attention. A `window` of 0 is none."""

    num_heads: int
    head_dim: int
    window: int
    scale: float


def shapes_of(spec: ModelSpec, layers: tuple[int, int]) -> tuple[AttentionShape, ...]:
    """Shapes of the layers in a half-open range that keep KV."""
    found = []
    for layer in spec.layers[slice(*layers)]:
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            found.append(AttentionShape(mixer.num_heads, mixer.head_dim, mixer.window, mixer.head_dim**-0.5))
        elif isinstance(mixer, LatentAttention):
            found.append(AttentionShape(mixer.num_heads, mixer.kept_dim, 0, mixer.scale))
    return tuple(found)


@dataclass(frozen=True)
class Rows:
    """Flat tokens of a batch that ask one holder for the same part of their heads."""

    asking: Asking
    flat: slice | Tensor

    def heads(self, num_heads: int) -> slice:
        """Query heads whose KV the holder has."""
        count = num_heads // self.asking.parts
        return slice(self.asking.part * count, (self.asking.part + 1) * count)

    def advanced(self) -> Rows:
        """One position on, in a batch of decodes."""
        chunks = tuple(
            [(at, rows, num, first + 1, there) for at, rows, num, first, there in self.asking.chunks]
        )
        return replace(self, asking=replace(self.asking, chunks=chunks))

    def within(self, first: int, stop: int) -> Rows | None:
        """Rows among the flat tokens `[first, stop)` of a batch of decodes, counted from `first`; None for none."""
        flat = range(self.flat.start, self.flat.stop) if isinstance(self.flat, slice) else self.flat.tolist()
        found = [
            (range(at - first, at - first + 1), chunk)
            for at, chunk in zip(flat, self.asking.chunks, strict=True)
            if first <= at < stop
        ]
        if not found:
            return None
        device = torch.device("cpu") if isinstance(self.flat, slice) else self.flat.device
        asking = replace(self.asking, chunks=tuple([chunk for _, chunk in found]))
        return Rows(asking, _flat([rows for rows, _ in found], device))

    def sees(self, window: int) -> bool:
        """Whether a query sees anything there."""
        if not window:
            return True
        return any(first - window < there + num - 1 for _, _, num, first, there in self.asking.chunks)


def rows_of(placed: Sequence[tuple[int, int, Chunk]], device: torch.device) -> tuple[Rows, ...]:
    """One for each holder and part. `placed`: first flat token and index of each chunk, in flat order."""
    chunks: dict[tuple[str, int, int], list[tuple[int, int, int, int, int]]] = {}
    flat: dict[tuple[str, int, int], list[range]] = {}
    for first, index, chunk in placed:
        position, count = 0, len(chunk.tokens)
        for held in chunk.holdings:
            entry = index, count, held.num_tokens, chunk.start, position
            for part, holder in enumerate(held.holders):
                at = holder, part, len(held.holders)
                chunks.setdefault(at, []).append(entry)
                flat.setdefault(at, []).append(range(first, first + count))
            position += held.num_tokens
    return tuple(
        [
            Rows(Asking(holder, tuple(each), part, parts), _flat(flat[holder, part, parts], device))
            for (holder, part, parts), each in chunks.items()
        ]
    )


def _flat(ranges: list[range], device: torch.device) -> slice | Tensor:
    if all(one.stop == after.start for one, after in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return torch.tensor([at for each in ranges for at in each], device=device)


class RemoteAttention:
    """One layer's questions to others. Nothing is asked of a holder whose part no query sees."""

    def __init__(
        self, elsewhere: Elsewhere, rows: Sequence[Rows], layer: int, window: int, kernels: Kernels
    ) -> None:
        self._elsewhere, self._layer, self._kernels = elsewhere, layer, kernels
        self._rows = [each for each in rows if each.sees(window)]

    def ask(self, q_THD: Tensor) -> None:
        for each in self._rows:
            q = q_THD[each.flat, each.heads(q_THD.shape[1])].to("cpu", torch.float32).contiguous()
            self._elsewhere.ask(self._layer, each.asking, q.view(-1).view(torch.uint8).numpy().data)

    def add(self, out_THD: Tensor, lse_TH: Tensor) -> Tensor:
        """The sums here and there together. `lse` of rows that ask nobody may be anything. Raises HolderLost, also for
        an answer of another size."""
        wide, lse_TH = out_THD.float().contiguous(), lse_TH.contiguous()
        _, num_heads, head_dim = wide.shape
        for each in self._rows:
            data, heads, asking = (
                self._elsewhere.answer(self._layer, each.asking),
                each.heads(num_heads),
                each.asking,
            )
            size = asking.num_rows * (num_heads // asking.parts) * (head_dim + 1) * _NUMBER_BYTES
            if data.nbytes != size:
                raise HolderLost(asking.holder, f"it answered {data.nbytes} bytes, not {size}")
            out, lse = part_of(data, asking.num_rows, num_heads // asking.parts, head_dim)
            there = out.to(wide.device), lse.to(wide.device)
            self._kernels.add_part(wide, lse_TH, each.flat, heads, there)
        return wide.to(out_THD.dtype)


def part_of(data: memoryview, num_rows: int, num_heads: int, head_dim: int) -> Part:
    """`(out [R, H, D], lse [R, H])` from what an engine answered."""
    numbers = torch.frombuffer(data, dtype=torch.float32)
    split = num_rows * num_heads * head_dim
    return numbers[:split].view(num_rows, num_heads, head_dim), numbers[split:].view(num_rows, num_heads)


def split_of(kv: Tensor, shape: AttentionShape, parts: int) -> tuple[Tensor, AttentionShape]:
    """A layer's KV `[S, 2, K, D]` as blocks with a `parts`-th of the heads each, and attention of so many heads."""
    if parts == 1:
        return kv, shape
    _, vectors, num_kv_heads, head_dim = kv.shape
    view = kv.view(-1, vectors, num_kv_heads // parts, head_dim)
    return view, replace(shape, num_heads=shape.num_heads // parts)


def queries_of(q: memoryview, shape: AttentionShape, asked: Sequence[HolderQueries]) -> Tensor:
    """`[R, H, D]`, one for each row that is asked. Raises ProtocolError for more or fewer."""
    num_rows = sum([each.num_rows for each in asked])
    if q.nbytes != num_rows * shape.num_heads * shape.head_dim * _NUMBER_BYTES:
        heads = f"{shape.num_heads} heads of {shape.head_dim} numbers"
        raise ProtocolError(f"{q.nbytes} bytes are not the queries of {num_rows} rows, {heads}")
    return torch.frombuffer(q, dtype=torch.float32).view(-1, shape.num_heads, shape.head_dim)


def answer_to(
    asked: Sequence[HolderQueries],
    q_RHD: Tensor,
    kv: Tensor,
    block_size: int,
    shape: AttentionShape,
    kernels: Kernels,
) -> memoryview:
    """Attention of each query over this layer's KV here: `out [R, H, D]`, then `lse [R, H]`, float32."""
    parts, first = [], 0
    for are_few, group in groupby(asked, lambda each: each.num_rows <= FEW_ROWS and not shape.window):
        for each in [list(group)] if are_few else [[one] for one in group]:
            stop = first + sum([one.num_rows for one in each])
            q = q_RHD[first:stop].to(kv.device, kernels.activation_dtype(kv.dtype))
            if are_few:
                tables, lens = _tables(each, kv.device)
                parts.append(kernels.attend_paged(q, kv, tables, lens, Scope(block_size, 0, shape.scale)))
            else:
                parts.append(_gathered(each[0], q, kv, block_size, shape))
            first = stop
    return _answer_of(parts)


def _answer_of(parts: Sequence[Part]) -> memoryview:
    """Joins parts of consecutive rows into one answer."""
    outs, lses = [out.reshape(-1) for out, _ in parts], [lse.reshape(-1) for _, lse in parts]
    data = torch.cat([each.to("cpu", torch.float32) for each in (*outs, *lses)])
    answer: memoryview = data.view(torch.uint8).numpy().data
    return answer


def _gathered(asked: HolderQueries, q_RHD: Tensor, kv: Tensor, block_size: int, shape: AttentionShape) -> Part:
    """Part of many queries of one request, or of queries with windows."""
    if kv.shape[1] == 1:  # one vector that is key and value
        kv = kv.expand(-1, 2, -1, -1)
    pieces = [kv[low:high] for low, high in runs_of(asked.blocks, block_size, 0, asked.num_tokens)]
    joined = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(q_RHD.dtype)
    causal_from = asked.first - asked.position if shape.window else None
    return partial(q_RHD, joined, scale=shape.scale, causal_from=causal_from, window=shape.window)


def _tables(asked: Sequence[HolderQueries], device: torch.device) -> tuple[Tensor, Tensor]:
    counts = [each.num_rows for each in asked]
    tables = np.zeros((sum(counts), max(len(each.blocks) for each in asked)), np.int32)
    row = 0
    for each in asked:
        tables[row : row + each.num_rows, : len(each.blocks)] = each.blocks
        row += each.num_rows
    lens = np.repeat(np.asarray([each.num_tokens for each in asked], np.int32), counts)
    return torch.from_numpy(tables).to(device), torch.from_numpy(lens).to(device)
