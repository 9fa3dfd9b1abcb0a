"""The network: one pass of a flat batch through its layers, or through those that one pipeline stage has.

Each layer is a mixer and an MLP, of kinds chosen once when the model is built; what comes in which order, and what is
kept while attention is elsewhere, is the program's (`isthmus.core.models.graph`). Legend: T flat tokens, N hidden
size, S sampled tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from isthmus.core.models import Attention, LatentAttention, LayerSpec, ModelSpec
from isthmus.core.models.graph import ATTEND, graph_of
from isthmus.live.engine.batch import BatchTensors
from isthmus.live.engine.interface import BeforeLayer
from isthmus.live.engine.kernels import Kernels
from isthmus.live.engine.kv import KVMemory
from isthmus.live.engine.layers import (
    AttentionWeights,
    DenseWeights,
    LatentWeights,
    MixerWeights,
    Mixture,
    MlpWeights,
    mix,
)
from isthmus.live.engine.mixers import AttentionMixer, LatentMixer, Pass, RecurrentMixer
from isthmus.live.engine.program import Compute, Program, Residual, through
from isthmus.live.engine.rope import cos_sin_table, padded
from isthmus.live.engine.tiles import rows_of
from isthmus.live.engine.turns import BatchTurns
from isthmus.live.engine.weights import Weights


class Model:
    """Weights plus kernels: `embed`, `run_layers`, then `add` to go on elsewhere or `logits`. It keeps no state of
    requests, and repeats a pass that was broken off with the same result."""

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: Kernels, max_length: int) -> None:
        self.spec, self._weights, self._kernels = spec, weights, kernels
        self.activations = kernels.activation_dtype(weights.dtype)
        graph = graph_of(spec, weights.range, self.activations.itemsize)
        builder = _ModelBuilder(spec, weights, kernels, max_length)
        self.cos_sin = builder.cos_sin
        self._program = Program(graph, builder.computes())

    def embed(self, tokens_T: Tensor) -> Tensor:
        """`[T, N]`, for the first layer."""
        assert self._weights.embedding is not None, "only the first stage has the embedding"
        return rows_of(self._weights.embedding, tokens_T).to(self.activations)

    def run_layers(self, x_TN: Tensor, run: Pass, turns: BatchTurns | None = None) -> Residual:
        """Writes the new KV of all layers. Changes `x_TN`. `turns`: how a batch of decodes may be split whose KV lies
        elsewhere; None: it is not."""
        if turns is not None and turns.splits(run):
            return turns.run(self._program, x_TN, run)
        plan, memory = run.batch.recurrence, run.memory
        if plan is not None:
            _all_before(run.before_layer, memory)
            run = replace(run, before_layer=None)
            plan.begin(memory)
        residual = through(self._program.passing(x_TN, run))
        if plan is not None:
            plan.finish(memory)
        return residual

    def add(self, residual: Residual) -> Tensor:
        """`[T, N]`, for the next layer, which may be in another stage: bit for bit what it would add up itself."""
        x_TN, delta_TN = residual
        return x_TN.add_(delta_TN)

    def logits(self, residual: Residual, batch: BatchTensors) -> Tensor:
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


class _ModelBuilder:
    """Puts weights and kernels of each layer together."""

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: Kernels, max_length: int) -> None:
        self._spec, self._weights, self._kernels = spec, weights, kernels
        self.cos_sin: Tensor | None = None
        if spec.rope is not None:
            self.cos_sin = cos_sin_table(spec.rope, max_length).to(weights.layers[0].mixer_norm.device)
            if isinstance(spec.kv_mixer, Attention) and spec.rope.dim < spec.head_dim:
                self.cos_sin = padded(self.cos_sin, spec.head_dim)

    def computes(self) -> dict[tuple[int, str], Any]:
        """Of every operator of `graph_of`, by layer and kind."""
        found, num_kv = dict[tuple[int, str], Any](), 0
        first, stop = self._weights.range
        for place, index in enumerate(range(first, stop)):
            layer = self._weights.layers[place]
            keeps_kv = isinstance(layer.mixer, AttentionWeights | LatentWeights)
            kinds = self._mixer(num_kv if keeps_kv else place - num_kv, self._spec.layers[index], layer.mixer)
            kinds |= {"norm": self._norm(layer.mixer_norm), "mlp_norm": self._norm(layer.mlp_norm)}
            kinds["mlp"] = self._mlp(layer.mlp)
            found |= {(index, kind): compute for kind, compute in kinds.items()}
            num_kv += keeps_kv
        return found

    def _norm(self, weight_N: Tensor) -> Compute:
        add_rms_norm, eps = self._kernels.add_rms_norm, self._spec.norm_eps

        def norm(run: Pass, x_TN: Tensor, delta_TN: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return x_TN, add_rms_norm(x_TN, delta_TN, weight_N, eps)

        return norm

    def _mixer(self, index: int, shape: LayerSpec, weights: MixerWeights) -> dict[str, Any]:
        """`index`: among the layers of its group."""
        kernels, cos_sin = self._kernels, self.cos_sin
        if isinstance(weights, AttentionWeights):
            assert isinstance(shape.mixer, Attention) and cos_sin is not None
            plain = AttentionMixer(index, shape.mixer, weights, kernels, cos_sin, self._spec.norm_eps)
            return {"project": plain.project, "gate": plain.gate, ATTEND: plain, "output": plain.output}
        if isinstance(weights, LatentWeights):
            assert isinstance(shape.mixer, LatentAttention)
            latent = LatentMixer(index, shape.mixer, weights, kernels, cos_sin)
            return {"queries": latent.queries, "keep": latent.keep, ATTEND: latent, "output": latent.output}
        return {"recur": RecurrentMixer(index, weights, kernels).recur}

    def _mlp(self, weights: MlpWeights) -> Compute:
        kernels = self._kernels
        if isinstance(weights, Mixture):
            return lambda run, x_TN: mix(weights, x_TN, kernels)
        return lambda run, x_TN: _dense(weights, x_TN, kernels)


def _dense(weights: DenseWeights, x_TN: Tensor, kernels: Kernels) -> Tensor:
    inner = kernels.silu_mul(kernels.linear(x_TN, weights.gate_up.weight, weights.gate_up.bias))
    return kernels.linear(inner, weights.down.weight, weights.down.bias)
