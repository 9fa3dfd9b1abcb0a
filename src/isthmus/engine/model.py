"""The network: one pass of a flat batch through its layers, or through those that one pipeline stage has.

Legend: T flat tokens, N hidden size, H query heads, D head size, S sampled tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.engine.attention import Part, merge, partial
from isthmus.engine.batch import Batch, Prefill
from isthmus.engine.interface import BeforeLayer, OnLayer, runs_of
from isthmus.engine.kernels import Kernels
from isthmus.engine.kv import KVMemory
from isthmus.engine.rope import cos_sin_table
from isthmus.engine.spec import ModelSpec
from isthmus.engine.weights import Layer, Linear, Weights

MAX_PARTS = 8
"""More pieces of KV than this are gathered into one: each part costs a call."""

Residual = tuple[Tensor, Tensor]
"""(x [T, N], delta [T, N]): their sum is what the next layer takes. The norm that comes first there adds them up."""


class Model:
    """Weights plus kernels: `embed`, `run_layers`, then `add` to go on elsewhere or `logits`. It keeps no state of
    requests, and repeats a pass that was broken off with the same result."""

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: Kernels, max_length: int) -> None:
        self.spec, self._weights, self._kernels = spec, weights, kernels
        stored = weights.layers[0].qkv.weight
        self.activations = kernels.activation_dtype(stored.dtype)
        self._cos_sin = cos_sin_table(spec.rope, spec.head_dim, max_length).to(stored.device)
        self._scale = spec.head_dim**-0.5

    def embed(self, batch: Batch) -> Tensor:
        """`[T, N]`, for the first layer."""
        assert self._weights.embedding is not None, "only the first stage has the embedding"
        return self._weights.embedding[batch.tokens_T].to(self.activations)

    def run_layers(
        self,
        x_TN: Tensor,
        batch: Batch,
        memory: KVMemory,
        on_layer: OnLayer | None = None,
        before_layer: BeforeLayer | None = None,
    ) -> Residual:
        """Writes the new KV of all layers. Changes `x_TN`. `on_layer(i)` runs when layer i's KV is in place."""
        kernels, eps = self._kernels, self.spec.norm_eps
        delta: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            normed = kernels.add_rms_norm(x_TN, delta, layer.attention_norm, eps)
            qkv = self._linear(layer.qkv, normed)
            if before_layer is not None:
                before_layer(index)
            delta = self._linear(layer.output, self._attend(layer, qkv, batch, memory.layers[index]))
            memory.written(index)
            if on_layer is not None:
                on_layer(index)
            normed = kernels.add_rms_norm(x_TN, delta, layer.mlp_norm, eps)
            delta = self._linear(layer.down, kernels.silu_mul(self._linear(layer.gate_up, normed)))
        assert delta is not None
        return x_TN, delta

    def add(self, residual: Residual) -> Tensor:
        """`[T, N]`, for the next layer, which may be in another stage: bit for bit what it would add up itself."""
        x_TN, delta_TN = residual
        return x_TN.add_(delta_TN)

    def logits(self, residual: Residual, batch: Batch) -> Tensor:
        """`[S, V]`, float32, of the sampled tokens."""
        x_TN, delta_TN = residual
        final_norm, head = self._weights.final_norm, self._weights.head
        assert final_norm is not None and head is not None, "only the last stage has the head"
        if not batch.only_decodes:
            x_TN, delta_TN = x_TN[batch.sample_S], delta_TN[batch.sample_S]
        normed_SN = self._kernels.add_rms_norm(x_TN, delta_TN, final_norm, self.spec.norm_eps)
        return self._linear(head, normed_SN).float()

    def _linear(self, linear: Linear, x: Tensor) -> Tensor:
        return self._kernels.linear(x, linear.weight, linear.bias)

    def _attend(self, layer: Layer, qkv: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        """Attention of the batch over a layer's KV, into which its own K and V go first."""
        spec = self.spec
        q_THD = self._kernels.rope_store(
            qkv,
            batch.positions_T,
            batch.slots_T,
            self._cos_sin,
            layer.q_norm,
            layer.k_norm,
            spec.norm_eps,
            kv,
            spec.num_heads,
        )
        num_rows = batch.num_rows
        outs: list[Tensor] = []
        if num_rows:
            out, _ = self._kernels.attend_paged(
                q_THD[:num_rows],
                kv,
                batch.tables_RB,
                batch.lens_R,
                batch.block_size,
                layer.window,
                self._scale,
            )
            outs.append(out)
        outs += [
            self._attend_chunk(q_THD[chunk.first : chunk.last], kv, chunk, batch.block_size, layer.window)
            for chunk in batch.prefills
        ]
        out_THD = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out_THD.reshape(batch.num_tokens, -1)

    def _attend_chunk(self, q_THD: Tensor, kv: Tensor, chunk: Prefill, block_size: int, window: int) -> Tensor:
        """A chunk over the KV before it and itself: one part for each run of slots, merged."""

        def pieces(start: int, stop: int) -> list[Tensor]:
            found = [kv[first:last] for first, last in runs_of(chunk.blocks, block_size, start, stop)]
            return found if len(found) <= MAX_PARTS else [torch.cat(found)]

        def joined(start: int, stop: int) -> Tensor:
            found = pieces(start, stop)
            return found[0] if len(found) == 1 else torch.cat(found)

        if window and chunk.stop > window:
            low = max(0, chunk.start - window + 1)
            part = partial(
                q_THD,
                joined(low, chunk.stop),
                scale=self._scale,
                causal_from=chunk.start - low,
                window=window,
            )
            return part[0]
        parts: list[Part] = [partial(q_THD, kv_LKD, scale=self._scale) for kv_LKD in pieces(0, chunk.start)]
        parts.append(partial(q_THD, joined(chunk.start, chunk.stop), scale=self._scale, causal_from=0))
        return merge(parts)[0]
