"""The network: one pass of a flat batch through its layers, or through those that one pipeline stage has.

Each layer is a mixer and an MLP, of kinds chosen once when the model is built. Legend: T flat tokens, N hidden size,
S sampled tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from isthmus.engine.batch import Batch
from isthmus.engine.experts import Mixture, mix
from isthmus.engine.interface import BeforeLayer, Elsewhere, OnLayer
from isthmus.engine.kernels import Kernels
from isthmus.engine.kv import KVMemory
from isthmus.engine.layers import AttentionWeights, DenseWeights, LatentWeights, MixerWeights, MlpWeights
from isthmus.engine.mixers import AttentionMixer, LatentMixer, Mixer, Pass, RecurrentMixer
from isthmus.engine.rope import cos_sin_table, padded
from isthmus.engine.tiles import rows_of
from isthmus.engine.weights import Weights
from isthmus.models import Attention, LatentAttention, LayerSpec, ModelSpec

Residual = tuple[Tensor, Tensor]
"""(x [T, N], delta [T, N]): their sum is what the next layer takes. The norm that comes first there adds them up."""


@dataclass(frozen=True)
class _Layer:
    mixer_norm: Tensor
    mixer: Mixer
    mlp_norm: Tensor
    mlp: Callable[[Tensor], Tensor]


class Model:
    """Weights plus kernels: `embed`, `run_layers`, then `add` to go on elsewhere or `logits`. It keeps no state of
    requests, and repeats a pass that was broken off with the same result."""

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: Kernels, max_length: int) -> None:
        self.spec, self._weights, self._kernels = spec, weights, kernels
        self.activations = kernels.activation_dtype(weights.dtype)
        self._layers = _Builder(spec, weights, kernels, max_length).layers()

    def embed(self, batch: Batch) -> Tensor:
        """`[T, N]`, for the first layer."""
        assert self._weights.embedding is not None, "only the first stage has the embedding"
        return rows_of(self._weights.embedding, batch.tokens_T).to(self.activations)

    def run_layers(
        self,
        x_TN: Tensor,
        batch: Batch,
        memory: KVMemory,
        on_layer: OnLayer | None = None,
        before_layer: BeforeLayer | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> Residual:
        """Writes the new KV of all layers. Changes `x_TN`. `on_layer(i)` runs when layer i's KV is in place."""
        kernels, eps, plan = self._kernels, self.spec.norm_eps, batch.recurrence
        if plan is not None:
            _all_before(before_layer, memory)
            before_layer = None
            plan.begin(memory)
        run, delta = Pass(batch, memory, on_layer, before_layer, elsewhere), None
        for layer in self._layers:
            delta = layer.mixer(kernels.add_rms_norm(x_TN, delta, layer.mixer_norm, eps), run)
            delta = layer.mlp(kernels.add_rms_norm(x_TN, delta, layer.mlp_norm, eps))
        if plan is not None:
            plan.finish(memory)
        assert delta is not None
        return x_TN, delta

    def add(self, residual: Residual) -> Tensor:
        """`[T, N]`, for the next layer, which may be in another stage: bit for bit what it would add up itself."""
        x_TN, delta_TN = residual
        return x_TN.add_(delta_TN)

    def logits(self, residual: Residual, batch: Batch) -> Tensor:
        """`[S, V]`, float32, of the sampled tokens."""
        x_TN, delta_TN = residual
        if not batch.only_decodes:
            x_TN, delta_TN = x_TN[batch.sample_S], delta_TN[batch.sample_S]
        return self.logits_of((x_TN, delta_TN))

    def logits_of(self, residual: Residual) -> Tensor:
        """`[S, V]`, float32, of all S tokens of `residual`, which it changes."""
        final_norm, head = self._weights.final_norm, self._weights.head
        assert final_norm is not None and head is not None, "only the last stage has the head"
        normed_SN = self._kernels.add_rms_norm(*residual, final_norm, self.spec.norm_eps)
        return self._kernels.linear(normed_SN, head.weight, head.bias).float()


def _all_before(before_layer: BeforeLayer | None, memory: KVMemory) -> None:
    """Calls it for every layer now: recurrent layers move their states on as they run, so whatever may break off
    the pass, or bring the states, comes before the first of them."""
    if before_layer is not None:
        for layer in range(len(memory.layers)):
            before_layer(layer)


class _Builder:
    """Puts weights and kernels of each layer together."""

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: Kernels, max_length: int) -> None:
        self._spec, self._weights, self._kernels = spec, weights, kernels
        self._cos_sin: Tensor | None = None
        if spec.rope is not None:
            self._cos_sin = cos_sin_table(spec.rope, max_length).to(weights.layers[0].mixer_norm.device)
            if isinstance(spec.kv_mixer, Attention) and spec.rope.dim < spec.head_dim:
                self._cos_sin = padded(self._cos_sin, spec.head_dim)

    def layers(self) -> tuple[_Layer, ...]:
        found, num_kv = [], 0
        first, stop = self._weights.range
        for place, (shape, layer) in enumerate(
            zip(self._spec.layers[first:stop], self._weights.layers, strict=True)
        ):
            keeps_kv = isinstance(layer.mixer, AttentionWeights | LatentWeights)
            mixer = self._mixer(num_kv if keeps_kv else place - num_kv, shape, layer.mixer)
            found.append(_Layer(layer.mixer_norm, mixer, layer.mlp_norm, self._mlp(layer.mlp)))
            num_kv += keeps_kv
        return tuple(found)

    def _mixer(self, index: int, shape: LayerSpec, weights: MixerWeights) -> Mixer:
        """`index`: among the layers of its group."""
        kernels, cos_sin = self._kernels, self._cos_sin
        if isinstance(weights, AttentionWeights):
            assert isinstance(shape.mixer, Attention) and cos_sin is not None
            return AttentionMixer(index, shape.mixer, weights, kernels, cos_sin, self._spec.norm_eps)
        if isinstance(weights, LatentWeights):
            assert isinstance(shape.mixer, LatentAttention)
            return LatentMixer(index, shape.mixer, weights, kernels, cos_sin)
        return RecurrentMixer(index, weights, kernels)

    def _mlp(self, weights: MlpWeights) -> Callable[[Tensor], Tensor]:
        kernels = self._kernels
        if isinstance(weights, Mixture):
            return lambda x_TN: mix(weights, x_TN, kernels)
        return lambda x_TN: _dense(weights, x_TN, kernels)


def _dense(weights: DenseWeights, x_TN: Tensor, kernels: Kernels) -> Tensor:
    inner = kernels.silu_mul(kernels.linear(x_TN, weights.gate_up.weight, weights.gate_up.bias))
    return kernels.linear(inner, weights.down.weight, weights.down.bias)
