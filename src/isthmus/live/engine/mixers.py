"""What the tokens of a batch exchange: by attention over K and V of each head or over latent vectors, or by a recurrent
state. One object a layer, whose operators (`isthmus.core.models.graph`) are its methods.

Legend: T flat tokens, N hidden size, H query heads, D head size, L tokens of KV; of latent attention R rank, E shared
numbers of a key, P its others, V numbers of a value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from isthmus.core.models import Attention, LatentAttention
from isthmus.live.engine import linear
from isthmus.live.engine.attention import Part, merge, partial
from isthmus.live.engine.batch import BatchTensors, Prefill
from isthmus.live.engine.interface import BeforeLayer, Elsewhere, OnLayer, runs_of
from isthmus.live.engine.kernels import Kernels
from isthmus.live.engine.kernels.plain import attend_parts
from isthmus.live.engine.kv import KVMemory
from isthmus.live.engine.layers import AttentionWeights, LatentWeights
from isthmus.live.engine.remote import RemoteAttention
from isthmus.live.engine.rope import rotate

EXPANDED_TOKENS = 4096
"""Tokens whose K and V are projected from latent vectors at once: with many heads they are a hundred times larger."""
LATENT_EPS = 1e-6
"""Of the norms inside latent attention, whatever the model's other norms have."""


class Thinning(Protocol):
    """A pass that loses tokens on its way: from some layer on only those go on that must be computed."""

    def enter(self, layer: int) -> None:
        """The KV of this layer is about to be written: what is not computed comes first."""

    def thin(
        self, layer: int, values: dict[str, Tensor], queries: str, kv: str, run: Pass
    ) -> tuple[dict[str, Tensor], Pass]:
        """Between the keys and values of a layer and its attention: what is left of the values, and of the pass."""


@dataclass(frozen=True)
class Pass:
    """A batch on its way through the layers; KV layers say when they touch their KV and when it is in place."""

    batch: BatchTensors
    memory: KVMemory
    on_layer: OnLayer | None = None
    before_layer: BeforeLayer | None = None
    elsewhere: Elsewhere | None = None
    thinning: Thinning | None = None

    def remote(self, layer: int, window: int = 0) -> RemoteAttention | None:
        """Whom to ask for the rest of a layer's sums, if KV of the batch lies elsewhere."""
        if not self.batch.remote:
            return None
        assert self.elsewhere is not None, "KV lies elsewhere, and nobody to ask was named"
        return RemoteAttention(self.elsewhere, self.batch.remote, layer, window, self.memory.kernels)

    def enter(self, layer: int) -> Tensor:
        """The KV of a layer, once it may be read and written."""
        if self.before_layer is not None:
            self.before_layer(layer)
        if self.thinning is not None:
            self.thinning.enter(layer)
        return self.memory.layers[layer]

    def rows(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """KV, tables and lengths of the batch's rows in a layer."""
        batch = self.batch
        if batch.packed is None:
            return kv, batch.tables_RB, batch.lens_R
        return self.memory.whole, *batch.packed.at(layer, batch.lens_R)

    def leave(self, layer: int) -> None:
        """The batch's KV of a layer is in place."""
        self.memory.written(layer)
        if self.on_layer is not None:
            self.on_layer(layer)


@dataclass(frozen=True)
class SentQueries:
    """Queries of a layer as they were sent to all who have more of its KV."""

    remote: RemoteAttention
    q_THD: Tensor


Sums = tuple[Tensor, Tensor | None]
"""Of the KV here: out [T, H, D], and lse [T, H] where others were asked for the rest."""


class AttendingMixer(Protocol):
    """Attention of a layer, in the three parts between which others may run: queries are sent, what is here is summed,
    and what came back is added. `index`: which of the layers that keep KV it is."""

    index: int

    def ask(self, q_THD: Tensor, run: Pass) -> SentQueries | None:
        """None where all KV is here."""

    def attend(self, q_THD: Tensor, kv: Tensor, run: Pass, asked: SentQueries | None) -> Sums:
        """`kv`: of the layer, the batch's own in place. Where nobody was asked, that is all: `out [T, H, V]`."""

    def add(self, sums: Sums, asked: SentQueries) -> Tensor:
        """`[T, H, V]`, with what those who were asked answer. Waits for them; raises HolderLost."""


@dataclass(frozen=True)
class AttentionMixer:
    """Attention over K and V. `cos_sin`: of the whole head (`rope.padded`)."""

    index: int
    shape: Attention
    weights: AttentionWeights
    kernels: Kernels
    cos_sin: Tensor
    eps: float

    def project(self, run: Pass, x_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Queries `[T, H, D]`; keys and values are put in their place in the layer's KV, which is returned."""
        weights, batch = self.weights, run.batch
        qkv = self.kernels.linear(x_TN, weights.qkv.weight, weights.qkv.bias)
        kv = run.enter(self.index)
        q_THD = self.kernels.rope_store(
            qkv,
            batch.positions_T,
            batch.slots_T,
            self.cos_sin,
            weights.q_norm,
            weights.k_norm,
            self.eps,
            kv,
            self.shape.num_heads,
        )
        return q_THD, kv

    def gate(self, run: Pass, x_TN: Tensor) -> Tensor:
        """`[T, H D]`."""
        gate = self.weights.gate
        assert gate is not None, "the model's layers are gated, or they are not"
        return self.kernels.linear(x_TN, gate.weight, gate.bias).sigmoid()

    def ask(self, q_THD: Tensor, run: Pass) -> SentQueries | None:
        remote = run.remote(self.index, self.shape.window)
        if remote is None:
            return None
        remote.ask(q_THD)
        return SentQueries(remote, q_THD)

    def attend(self, q_THD: Tensor, kv: Tensor, run: Pass, asked: SentQueries | None) -> Sums:
        window, scale = self.shape.window, self.shape.head_dim**-0.5
        remote = None if asked is None else asked.remote
        rows = run.rows(self.index, kv)
        return sum_here(q_THD, kv, run.batch, self.kernels, remote, rows, window=window, scale=scale)

    def add(self, sums: Sums, asked: SentQueries) -> Tensor:
        return sum_all(sums, asked.remote)

    def output(self, run: Pass, out_THD: Tensor, gate: Tensor | None = None) -> Tensor:
        """`[T, N]`."""
        out = out_THD.reshape(out_THD.shape[0], -1)
        if gate is not None:
            out = out * gate
        output = self.weights.output
        return self.kernels.linear(out, output.weight, output.bias)


@dataclass(frozen=True)
class LatentMixer:
    """Multi-head latent attention. Only the latent vector of a token is kept, and the E numbers all heads share.

    Two forms of one sum: *absorbed*, where queries are brought into the latent space and all heads read the kept
    vectors as they are (one KV head whose V is its K); *expanded*, where K and V of each head are projected from them
    first. The second does less work for long chunks, the first for few tokens. Others are asked in the first.
    """

    index: int
    shape: LatentAttention
    weights: LatentWeights
    kernels: Kernels
    cos_sin: Tensor | None

    def queries(self, run: Pass, x_TN: Tensor) -> Tensor:
        """`[T, H, P + E]`."""
        weights, kernels = self.weights, self.kernels
        if weights.query_down is not None and weights.query_norm is not None:
            down = kernels.linear(x_TN, weights.query_down.weight, weights.query_down.bias)
            x_TN = kernels.add_rms_norm(down, None, weights.query_norm, LATENT_EPS)
        q = kernels.linear(x_TN, weights.query.weight, weights.query.bias)
        q_THD = q.unflatten(1, (self.shape.num_heads, -1))
        self._rotate(q_THD[..., self.shape.nope_dim :], run)
        return q_THD

    def keep(self, run: Pass, x_TN: Tensor) -> Tensor:
        """Puts what is kept of each token in its place: the layer's KV."""
        weights, rank = self.weights, self.shape.rank
        kept = self.kernels.linear(x_TN, weights.down.weight, weights.down.bias)
        latent = kept[:, :rank].contiguous()
        kept[:, :rank] = self.kernels.add_rms_norm(latent, None, weights.norm, LATENT_EPS)
        self._rotate(kept[:, None, rank:], run)
        kv = run.enter(self.index)
        kv[run.batch.slots_T, 0, 0] = kept.to(kv.dtype)
        return kv

    def _rotate(self, heads: Tensor, run: Pass) -> None:
        """The E shared numbers of queries or keys, in place."""
        if self.cos_sin is not None:
            heads.copy_(rotate(heads, self.cos_sin[run.batch.positions_T]))

    def ask(self, q_THD: Tensor, run: Pass) -> SentQueries | None:
        remote = run.remote(self.index)
        if remote is None:
            return None
        absorbed = self._absorb(q_THD).contiguous()
        remote.ask(absorbed)
        return SentQueries(remote, absorbed)

    def attend(self, q_THD: Tensor, kv: Tensor, run: Pass, asked: SentQueries | None) -> Sums:
        """In the latent space if others were asked, in that of the values otherwise."""
        if asked is None:
            return self._attend(q_THD, kv, run.batch), None
        scale = self.shape.scale
        rows = run.rows(self.index, kv)
        return sum_here(asked.q_THD, kv, run.batch, self.kernels, asked.remote, rows, window=0, scale=scale)

    def add(self, sums: Sums, asked: SentQueries) -> Tensor:
        return self._values(sum_all(sums, asked.remote))

    def output(self, run: Pass, out_THV: Tensor) -> Tensor:
        """`[T, N]`."""
        output = self.weights.output
        return self.kernels.linear(out_THV.flatten(1), output.weight, output.bias)

    def _attend(self, q_THD: Tensor, kv: Tensor, batch: BatchTensors) -> Tensor:
        """`[T, H, V]`, of KV that is all here."""
        rows, scale = batch.num_rows, self.shape.scale
        both = kv.expand(-1, 2, -1, -1)
        outs = []
        if rows:
            out, _ = self.kernels.attend_paged(
                self._absorb(q_THD[:rows]), kv, batch.tables_RB, batch.lens_R, batch.block_size, 0, scale
            )
            outs.append(self._values(out))
        for chunk in batch.prefills:
            q = q_THD[chunk.first : chunk.last]
            if self._expands(chunk.last - chunk.first):
                outs.append(self._attend_expanded(q, kv, chunk, batch.block_size))
            else:
                out, _ = attend_parts(
                    self._absorb(q), both, chunk.blocks, chunk.start, batch.block_size, 0, scale
                )
                outs.append(self._values(out))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _absorb(self, q_THD: Tensor) -> Tensor:
        """Queries in the latent space, `[T, H, R + E]`."""
        own, shared = q_THD.split((self.shape.nope_dim, self.shape.rope_dim), dim=-1)
        latent_HTR = torch.bmm(own.transpose(0, 1), self.weights.key_HPR.to(q_THD.dtype))
        return torch.cat((latent_HTR.transpose(0, 1), shared), dim=-1)

    def _values(self, out_THD: Tensor) -> Tensor:
        """Values, `[T, H, V]`, from sums of kept vectors."""
        latent_HTR = out_THD[..., : self.shape.rank].transpose(0, 1)
        value_HRV = self.weights.value_HVR.to(out_THD.dtype).transpose(1, 2)
        return torch.bmm(latent_HTR, value_HRV).transpose(0, 1)

    def _expands(self, num_tokens: int) -> bool:
        """Whether to expand each kept vector (R (P + V) products a head) costs less than it saves in the products of
        each query with it (2 R + E instead of P + E + V)."""
        shape = self.shape
        saved = 2 * shape.rank - shape.nope_dim - shape.value_dim
        fits = shape.value_dim <= shape.nope_dim + shape.rope_dim
        return fits and num_tokens * saved > shape.rank * (shape.nope_dim + shape.value_dim)

    def _attend_expanded(self, q_THD: Tensor, kv: Tensor, chunk: Prefill, block_size: int) -> Tensor:
        """`[T, H, V]`, the KV before the chunk in pieces."""
        parts: list[Part] = []
        for start in range(0, chunk.start, EXPANDED_TOKENS):
            runs = runs_of(chunk.blocks, block_size, start, min(start + EXPANDED_TOKENS, chunk.start))
            parts.append(partial(q_THD, self._expand(kv, runs, q_THD.dtype), scale=self.shape.scale))
        own = self._expand(kv, runs_of(chunk.blocks, block_size, chunk.start, chunk.stop), q_THD.dtype)
        parts.append(partial(q_THD, own, scale=self.shape.scale, causal_from=0))
        return merge(parts)[0][..., : self.shape.value_dim]

    def _expand(self, kv: Tensor, runs: Iterable[tuple[int, int]], dtype: torch.dtype) -> Tensor:
        """K and V `[L, 2, H, P + E]` of the tokens in these slots; the values, which are shorter, with zeros behind."""
        shape, up = self.shape, self.weights.up
        kept_LD = torch.cat([kv[first:last, 0, 0] for first, last in runs]).to(dtype)
        latent, shared = kept_LD.split((shape.rank, shape.rope_dim), dim=1)
        projected = self.kernels.linear(latent.contiguous(), up.weight, up.bias)
        key, value = projected.unflatten(1, (shape.num_heads, -1)).split((shape.nope_dim, shape.value_dim), -1)
        size = shape.nope_dim + shape.rope_dim
        kv_L2HD = kept_LD.new_zeros(len(kept_LD), 2, shape.num_heads, size)
        kv_L2HD[:, 0, :, : shape.nope_dim] = key
        kv_L2HD[:, 0, :, shape.nope_dim :] = shared[:, None]
        kv_L2HD[:, 1, :, : shape.value_dim] = value
        return kv_L2HD


@dataclass(frozen=True)
class RecurrentMixer:
    """A gated delta rule over the live states of the batch's requests (`states.Recurrence`)."""

    index: int
    weights: linear.GatedDeltaNet | linear.KimiDelta
    kernels: Kernels

    def recur(self, run: Pass, x_TN: Tensor) -> Tensor:
        """`[T, N]`."""
        weights, plan, kernels = self.weights, run.batch.recurrence, self.kernels
        assert plan is not None, "a model with recurrent layers plans its batches' states"
        if isinstance(weights, linear.GatedDeltaNet):
            inputs = linear.inputs_gdn(weights, x_TN, kernels)
        else:
            inputs = linear.inputs_kda(weights, x_TN, kernels)
        state, outs = plan.states.layers[self.index], []
        if plan.num_steps:
            outs.append(linear.step(weights, inputs[: plan.num_steps], state, plan.slots_R, kernels))
        for stretch in plan.stretches:
            part = inputs[stretch.first : stretch.last]
            outs.append(linear.advance(weights, part, state, stretch.slot, kernels))
            if stretch.snapshot is not None:
                plan.states.take(stretch.snapshot, self.index, stretch.slot)
        out_THV = outs[0] if len(outs) == 1 else torch.cat(outs)
        return linear.layer_output(weights, out_THV, inputs.gate_THV, kernels)


def sum_here(
    q_THD: Tensor,
    kv: Tensor,
    batch: BatchTensors,
    kernels: Kernels,
    remote: RemoteAttention | None,
    rows_in: tuple[Tensor, Tensor, Tensor],
    *,
    window: int,
    scale: float,
) -> Sums:
    """Attention of a batch over what is here of a layer's KV, its own in place. `remote`: was asked for the rest;
    `rows_in`: memory, tables and lengths of its rows."""
    (memory, tables, lens), size = rows_in, batch.block_size
    if not batch.prefills:  # rows are all there is
        out, lse = kernels.attend_paged(q_THD, memory, tables, lens, size, window, scale)
        return out, None if remote is None else lse
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    if rows := batch.num_rows:
        out, lse = kernels.attend_paged(q_THD[:rows], memory, tables, lens, size, window, scale)
        outs.append(out)
        lses.append(lse)
    both = kv if kv.shape[1] == 2 else kv.expand(-1, 2, -1, -1)
    for chunk in batch.prefills:
        q, where = q_THD[chunk.first : chunk.last], (size, window, scale)
        if remote is None:
            outs.append(kernels.attend_chunk(q, both, chunk.blocks, chunk.positions, *where))
        else:
            out, lse = attend_parts(q, both, chunk.blocks, chunk.start, *where)
            outs.append(out)
            lses.append(lse)
    out_THD = outs[0] if len(outs) == 1 else torch.cat(outs)
    if remote is None:
        return out_THD, None
    return out_THD, lses[0] if len(lses) == 1 else torch.cat(lses)


def sum_all(sums: Sums, remote: RemoteAttention) -> Tensor:
    """`[T, H, D]`: of what is here and what others answer."""
    out_THD, lse_TH = sums
    assert lse_TH is not None, "what was asked for comes to a weight"
    return remote.add(out_THD, lse_TH)
