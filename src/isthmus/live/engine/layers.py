"""Mixtures of experts: which experts a token goes to, and their work, expert by expert.

Legend: T tokens, N hidden size, E experts, A experts of a token, I inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from isthmus.core.models import Attention, DeltaRule, Dense, Experts, LatentAttention, Lightning, ModelSpec
from isthmus.live.engine.kernels import Kernels
from isthmus.live.engine.linear import GatedDeltaNet, KimiDelta, projection
from isthmus.live.engine.rope import half_split
from isthmus.live.engine.tiles import Weight, plain, stacked

Choice = tuple[Tensor, Tensor]
"""(experts [T, A], weights [T, A] float32)."""


class Routing(msgspec.Struct, frozen=True):
    """How experts are chosen. `normalise`: a token's weights sum to `scale`.

    `scores`: "softmax" over all experts (Qwen3-Next), or "sigmoid" of each (DeepSeek-V3's noaux_tc, Kimi-Linear), where
    a bias is added for the choice alone, and only experts of the `top_groups` best of `groups` groups can be chosen.
    """

    top_k: int
    scores: str
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class Mlp:
    """silu(gate) * up, down: `gate_up_2IN` with the rows of gate first, matrices as stored `[out, in]`."""

    gate_up_2IN: Tensor
    down_NI: Tensor


@dataclass(frozen=True)
class Mixture:
    """The MLP of a layer with experts. `router_EN`: as stored with softmax scores, float32 with sigmoid ones;
    `bias_E`: float32, of sigmoid scores; `shared`: runs for every token (shared experts side by side are one);
    `shared_gate_1N`: of whose sigmoid the shared one's output is multiplied with, if any."""

    routing: Routing
    router_EN: Tensor
    bias_E: Tensor | None
    gate_up_E2IN: Tensor
    down_ENI: Tensor
    shared: Mlp | None = None
    shared_gate_1N: Tensor | None = None


def mix(mixture: Mixture, x_TN: Tensor, kernels: Kernels) -> Tensor:
    """`[T, N]` in the type of `x_TN`."""
    out = run_experts(mixture, x_TN, choose(mixture, x_TN, kernels), kernels)
    if mixture.shared is None:
        return out
    shared = _mlp(x_TN, mixture.shared.gate_up_2IN, mixture.shared.down_NI, kernels)
    if mixture.shared_gate_1N is not None:
        shared *= kernels.linear(x_TN, mixture.shared_gate_1N, None).sigmoid()
    return out.add_(shared)


def choose(mixture: Mixture, x_TN: Tensor, kernels: Kernels) -> Choice:
    """Each token's experts and their weights."""
    if mixture.routing.scores == "softmax":
        return by_softmax(kernels.linear(x_TN, mixture.router_EN, None), mixture.routing)
    assert mixture.bias_E is not None, "sigmoid scores come with a bias"
    logits_TE = torch.nn.functional.linear(x_TN.float(), mixture.router_EN)
    return by_sigmoid(logits_TE, mixture.bias_E, mixture.routing)


def by_softmax(logits_TE: Tensor, routing: Routing) -> Choice:
    weights, experts = logits_TE.float().softmax(-1).topk(routing.top_k, dim=-1)
    return experts, _scaled(weights, routing)


def by_sigmoid(logits_TE: Tensor, bias_E: Tensor, routing: Routing) -> Choice:
    """DeepSeek-V3 (2024), section 2.1.2. A group counts as much as its two best experts together."""
    scores_TE = logits_TE.float().sigmoid()
    biased = scores_TE + bias_E
    if routing.top_groups < routing.groups:
        grouped = biased.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
        barred = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=biased.device).scatter_(
            -1, best, False
        )
        biased = grouped.masked_fill(barred[..., None], float("-inf")).flatten(-2)
    experts = biased.topk(routing.top_k, dim=-1).indices
    return experts, _scaled(scores_TE.gather(-1, experts), routing)


def _scaled(weights_TA: Tensor, routing: Routing) -> Tensor:
    if routing.normalise:
        weights_TA = weights_TA / (weights_TA.sum(-1, keepdim=True) + 1e-20)
    return weights_TA * routing.scale


def run_experts(mixture: Mixture, x_TN: Tensor, choice: Choice, kernels: Kernels) -> Tensor:
    """The weighted sum of each token's experts, `[T, N]`, in the type of `x_TN`.

    Tokens are brought together by expert, so that each expert that is needed runs once. A token's parts are added in
    the order of its choice, whatever else is in the batch.
    """
    experts_TA, weights_TA = choice
    num_tokens, num_chosen = experts_TA.shape
    order = experts_TA.flatten().argsort(stable=True)
    counts = experts_TA.flatten().bincount(minlength=mixture.gate_up_E2IN.shape[0]).tolist()
    rows = x_TN[order // num_chosen]
    parts = kernels.expert_mlps(rows, counts, mixture.gate_up_E2IN, mixture.down_ENI)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    chosen_TAN = parts[back].unflatten(0, (num_tokens, num_chosen))
    return torch.einsum("tan,ta->tn", chosen_TAN.float(), weights_TA).to(x_TN.dtype)


def _mlp(x_TN: Tensor, gate_up_2IN: Tensor, down_NI: Tensor, kernels: Kernels) -> Tensor:
    return kernels.linear(kernels.silu_mul(kernels.linear(x_TN, gate_up_2IN, None)), down_NI, None)


# The weights of one layer in the engine's own arrangement, from the tensors of the published formats.
#
# Fused once here: Q, K, V in one matrix, gate and up in one, so that a step of a plain layer is four matrix products.
# Numbers of heads that are rotated come in the order of `rope.half_split`. Norm weights are float32 whatever the
# compute type: they are small and the kernels want them so.


class TensorSource(Protocol):
    """Where the tensors of a model come from, each of an exact shape. Raises ModelError naming file or tensor.

    `dtype`: of matrices that are not quantised.
    """

    dtype: torch.dtype

    def has(self, name: str) -> bool: ...

    def matrix(self, name: str, *shape: int) -> Tensor:
        """In `dtype`."""

    def weight(self, name: str, rows: int, width: int) -> Weight:
        """What is only multiplied with: quantised, or in `dtype`."""

    def bias(self, name: str, size: int) -> Tensor:
        """In the activations' type."""

    def vector(self, name: str, *shape: int) -> Tensor:
        """In float32."""


@dataclass(frozen=True)
class Linear:
    """`x @ weight.T + bias`; weight `[out, in]`, bias in the activations' type."""

    weight: Weight
    bias: Tensor | None = None


@dataclass(frozen=True)
class AttentionWeights:
    """`gate`: of gated attention, one row for each number of the heads' outputs."""

    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    gate: Linear | None
    output: Linear


@dataclass(frozen=True)
class LatentWeights:
    """Legend: H heads, R rank, P numbers of a key without position, V numbers of a value.

    `query_down` and its norm: of the low-rank queries, if any. `down`: rank and shared numbers of a token. `key_HPR`
    and `value_HVR`: what keys and values are projected from the latent vector with; `up`: the same as one matrix, a
    head's P rows of keys before its V rows of values.
    """

    query_down: Linear | None
    query_norm: Tensor | None
    query: Linear
    down: Linear
    norm: Tensor
    up: Linear
    key_HPR: Tensor
    value_HVR: Tensor
    output: Linear


@dataclass(frozen=True)
class DenseWeights:
    gate_up: Linear
    down: Linear


MixerWeights = AttentionWeights | LatentWeights | GatedDeltaNet | KimiDelta
MlpWeights = DenseWeights | Mixture


@dataclass(frozen=True)
class Layer:
    mixer_norm: Tensor
    mixer: MixerWeights
    mlp_norm: Tensor
    mlp: MlpWeights


def load_layer(source: TensorSource, spec: ModelSpec, index: int) -> Layer:
    """One layer of a model; every tensor of it is taken, always in the same order."""
    at, layer = f"model.layers.{index}", spec.layers[index]
    assert not isinstance(layer.mixer, Lightning), "read_spec refuses such a model"
    loader = _LayerLoader(source, spec, at)
    return Layer(
        mixer_norm=loader.norm(f"{at}.input_layernorm", spec.hidden_size),
        mixer=loader.mixer(layer.mixer),
        mlp_norm=loader.norm(f"{at}.post_attention_layernorm", spec.hidden_size),
        mlp=loader.mlp(layer.mlp),
    )


class _LayerLoader:
    def __init__(self, source: TensorSource, spec: ModelSpec, at: str) -> None:
        self._source, self._spec, self._at, self._hidden = source, spec, at, spec.hidden_size

    def mixer(self, kind: Attention | LatentAttention | DeltaRule) -> MixerWeights:
        match kind:
            case Attention():
                return self._attention(kind)
            case LatentAttention():
                return self._latent(kind)
            case DeltaRule(kind="gdn"):
                return self._gated_delta_net(kind)
            case DeltaRule():
                return self._kimi_delta(kind)

    def mlp(self, kind: Dense | Experts) -> MlpWeights:
        at = f"{self._at}.mlp"
        if self._spec.architecture == "KimiLinearForCausalLM":
            return self._kimi_mlp(kind)
        if isinstance(kind, Dense):
            return self._dense(at, kind.width, kind.bias)
        shared = "shared_expert" if kind.shared_gate else "shared_experts"
        return self._experts(kind, at, ("gate_proj", "up_proj", "down_proj"), shared)

    def norm(self, name: str, size: int) -> Tensor:
        return self._source.vector(f"{name}.weight", size) + self._spec.norm_offset

    # ---- mixers

    def _attention(self, kind: Attention) -> AttentionWeights:
        at, size, hidden = f"{self._at}.self_attn", kind.head_dim, self._hidden
        order = self._rotated(kind)
        sides = 2 if kind.gated else 1
        q = self._linear(f"{at}.q_proj", kind.num_heads * size * sides, hidden, bias=kind.qkv_bias)
        k = self._linear(f"{at}.k_proj", kind.num_kv_heads * size, hidden, bias=kind.qkv_bias)
        v = self._linear(f"{at}.v_proj", kind.num_kv_heads * size, hidden, bias=kind.qkv_bias)
        q_norm = self.norm(f"{at}.q_norm", size) if kind.qk_norm else None
        k_norm = self.norm(f"{at}.k_norm", size) if kind.qk_norm else None
        gate = None
        if kind.gated:  # each head has the rows of its query first, then those of its gate
            both = (kind.num_heads, 2, size)
            q, gate = self._rows(q, both, lambda x: x[:, 0]), self._rows(q, both, lambda x: x[:, 1])
        if order is not None:
            q, k = (self._rows(part, (-1, size), lambda x: x[:, order]) for part in (q, k))
            q_norm, k_norm = (None if norm is None else norm[order] for norm in (q_norm, k_norm))
        output = self._linear(f"{at}.o_proj", hidden, kind.num_heads * size, bias=kind.output_bias)
        return AttentionWeights(self._stacked(q, k, v), q_norm, k_norm, gate, output)

    def _rotated(self, kind: Attention) -> Tensor | None:
        """The order of a head's numbers, where it is not that of its weights."""
        rope = self._spec.rope
        if rope is None or rope.dim == kind.head_dim:
            return None
        return half_split(kind.head_dim, rope.dim)

    def _latent(self, kind: LatentAttention) -> LatentWeights:
        at, hidden, bias = f"{self._at}.self_attn", self._hidden, kind.bias
        size = kind.nope_dim + kind.rope_dim
        down, norm = None, None
        if kind.query_rank:
            down = self._linear(f"{at}.q_a_proj", kind.query_rank, hidden, bias=bias)
            norm = self.norm(f"{at}.q_a_layernorm", kind.query_rank)
            query = self._linear(f"{at}.q_b_proj", kind.num_heads * size, kind.query_rank)
        else:
            query = self._linear(f"{at}.q_proj", kind.num_heads * size, hidden)
        kept = self._linear(f"{at}.kv_a_proj_with_mqa", kind.kept_dim, hidden, bias=bias)
        if kind.interleaved:
            shared = half_split(kind.rope_dim, kind.rope_dim, interleaved=True)
            query = self._rows(query, (-1, size), lambda x: x[:, _after(kind.nope_dim, shared)])
            kept = self._rows(kept, (1, -1), lambda x: x[:, _after(kind.rank, shared)])
        up = self._linear(f"{at}.kv_b_proj", kind.num_heads * (kind.nope_dim + kind.value_dim), kind.rank)
        rows = plain(up.weight, self._source.dtype)
        key, value = rows.unflatten(0, (kind.num_heads, -1)).split((kind.nope_dim, kind.value_dim), dim=1)
        return LatentWeights(
            query_down=down,
            query_norm=norm,
            query=query,
            down=kept,
            norm=self.norm(f"{at}.kv_a_layernorm", kind.rank),
            up=up,
            key_HPR=key.contiguous(),
            value_HVR=value.contiguous(),
            output=self._linear(f"{at}.o_proj", hidden, kind.num_heads * kind.value_dim, bias=bias),
        )

    def _gated_delta_net(self, kind: DeltaRule) -> GatedDeltaNet:
        at, heads, hidden, take = f"{self._at}.linear_attn", kind, self._hidden, self._source
        values = kind.num_values * kind.value_dim
        keys = kind.num_keys * kind.key_dim
        return GatedDeltaNet(
            heads=heads,
            project_PN=projection(
                take.matrix(f"{at}.in_proj_qkvz.weight", 2 * (keys + values), hidden),
                take.matrix(f"{at}.in_proj_ba.weight", 2 * kind.num_values, hidden),
                heads,
            ),
            conv_KC=_taps(take.vector(f"{at}.conv1d.weight", heads.channels, 1, kind.taps)),
            rate_H=-take.vector(f"{at}.A_log", kind.num_values).exp(),
            dt_bias_H=take.vector(f"{at}.dt_bias", kind.num_values),
            norm_V=take.vector(f"{at}.norm.weight", kind.value_dim),
            output_NM=take.matrix(f"{at}.out_proj.weight", hidden, values),
            eps=self._spec.norm_eps,
        )

    def _kimi_delta(self, kind: DeltaRule) -> KimiDelta:
        at, hidden, take = f"{self._at}.self_attn", self._hidden, self._source
        heads, size = kind.num_values, kind.value_dim
        wide = heads * size
        rows = {"q": wide, "k": wide, "v": wide, "f_a": size, "g_a": size, "b": heads}
        projections = [take.matrix(f"{at}.{name}_proj.weight", rows[name], hidden) for name in rows]
        convs = [take.vector(f"{at}.{name}_conv1d.weight", wide, 1, kind.taps) for name in "qkv"]
        return KimiDelta(
            heads=kind,
            project_PN=torch.cat(projections),
            conv_KC=_taps(torch.cat(convs)),
            forget_MD=take.matrix(f"{at}.f_b_proj.weight", wide, size),
            gate_MD=take.matrix(f"{at}.g_b_proj.weight", wide, size),
            rate_H=-take.vector(f"{at}.A_log", 1, 1, heads, 1).flatten().exp(),
            dt_bias_HK=take.vector(f"{at}.dt_bias", wide).view(heads, size),
            norm_V=take.vector(f"{at}.o_norm.weight", size),
            output_NM=take.matrix(f"{at}.o_proj.weight", hidden, wide),
            eps=self._spec.norm_eps,
        )

    # ---- MLPs

    def _dense(self, at: str, width: int, bias: bool) -> DenseWeights:
        gate, up = (
            self._linear(f"{at}.{name}_proj", width, self._hidden, bias=bias) for name in ("gate", "up")
        )
        return DenseWeights(
            self._stacked(gate, up), self._linear(f"{at}.down_proj", self._hidden, width, bias=bias)
        )

    def _kimi_mlp(self, kind: Dense | Experts) -> MlpWeights:
        """Published files call a dense MLP `mlp`; those that transformers saves call it like one of experts."""
        at = f"{self._at}.block_sparse_moe"
        if isinstance(kind, Experts):
            return self._experts(kind, at, ("w1", "w3", "w2"), "shared_experts")
        own = f"{self._at}.mlp"
        return self._dense(at if self._source.has(f"{at}.gate_proj.weight") else own, kind.width, kind.bias)

    def _experts(self, kind: Experts, at: str, names: tuple[str, str, str], shared: str) -> Mixture:
        take, hidden = self._source, self._hidden
        sigmoid = kind.scores == "sigmoid"
        router = (take.vector if sigmoid else take.matrix)(f"{at}.gate.weight", kind.num_experts, hidden)
        bias = take.vector(f"{at}.gate.e_score_correction_bias", kind.num_experts) if sigmoid else None
        gate_up, down = [], []
        for expert in range(kind.num_experts):
            gate, up, out = (f"{at}.experts.{expert}.{name}.weight" for name in names)
            gate_up.append(torch.cat([take.matrix(name, kind.width, hidden) for name in (gate, up)]))
            down.append(take.matrix(out, hidden, kind.width))
        always, gate_row = None, None
        if kind.shared_width:
            dense = self._dense(f"{at}.{shared}", kind.shared_width, bias=False)
            always = Mlp(plain(dense.gate_up.weight, take.dtype), plain(dense.down.weight, take.dtype))
        if kind.shared_gate:
            gate_row = take.matrix(f"{at}.shared_expert_gate.weight", 1, hidden)
        return Mixture(
            routing=Routing(kind.top_k, kind.scores, kind.normalise, kind.scale, kind.groups, kind.top_groups),
            router_EN=router,
            bias_E=bias,
            gate_up_E2IN=torch.stack(gate_up),
            down_ENI=torch.stack(down),
            shared=always,
            shared_gate_1N=gate_row,
        )

    def _linear(self, name: str, rows: int, width: int, *, bias: bool = False) -> Linear:
        weight = self._source.weight(f"{name}.weight", rows, width)
        return Linear(weight, self._source.bias(f"{name}.bias", rows) if bias else None)

    def _stacked(self, *parts: Linear) -> Linear:
        """One product instead of several."""
        weight = stacked([part.weight for part in parts], self._source.dtype)
        biases = [part.bias for part in parts if part.bias is not None]
        return Linear(weight, torch.cat(biases) if biases else None)

    def _rows(self, linear: Linear, shape: tuple[int, ...], pick: Callable[[Tensor], Tensor]) -> Linear:
        """Some of its outputs, or all in another order: `pick` sees the rows in this shape."""

        def picked(rows: Tensor) -> Tensor:
            return pick(rows.unflatten(0, shape)).flatten(0, 1).contiguous()

        weight = picked(plain(linear.weight, self._source.dtype))
        return Linear(weight, None if linear.bias is None else picked(linear.bias))


def _after(count: int, order: Tensor) -> Tensor:
    """The first `count` numbers as they are, those after them in this order."""
    return torch.cat((torch.arange(count), count + order))


def _taps(weight_C1K: Tensor) -> Tensor:
    return weight_C1K.squeeze(1).t().contiguous()
