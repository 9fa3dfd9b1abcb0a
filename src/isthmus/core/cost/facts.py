"""Model facts for the cost formulas from a Hugging Face `config.json`. Counts are elements, not bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from isthmus.core.models import (
    Attention,
    DeltaRule,
    Dense,
    Experts,
    Fields,
    LatentAttention,
    Lightning,
    ModelSpec,
    read_model,
)


class ModelFacts(msgspec.Struct, frozen=True):
    """One decoder-only model, summed over its layers.

    `kv_elements`: per token; `window_elements`, `state_bytes`: per sequence of any length. `attention_flops`: per
    (query, key) pair; `token_flops`: attention per token in windowed and recurrent layers, at any position.
    `kv_shards`: parts that tensor parallelism can cut the KV of a token into, beyond which it is replicated (1 for
    MLA). `kv_layers`: layers whose KV grows with a sequence; `query_heads`, `query_elements`: their sums per token,
    with MLA as they meet the compressed vector.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dense_params: int
    kv_elements: int
    kv_shards: int
    attention_flops: int
    latent: bool = False
    window_elements: int = 0
    state_bytes: int = 0
    token_flops: int = 0
    moe_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0
    weight_dtype: str = "bf16"
    kv_layers: int = 0
    query_heads: int = 0
    query_elements: int = 0

    @property
    def num_params(self) -> int:
        """Parameters of all matrices, experts and one vocabulary matrix included."""
        experts = self.moe_layers * self.num_experts * self.expert_params
        return self.dense_params + experts + self.vocab_size * self.hidden_size

    @property
    def active_params(self) -> int:
        """Parameters one token is multiplied with, without the vocabulary matrix."""
        return self.dense_params + self.moe_layers * self.experts_per_token * self.expert_params

    def prompt_bytes(self, num_tokens: int, element_bytes: int = 2) -> int:
        """Bytes of KV and states of a prompt at least as long as the short windows: S_kv of Prefill-as-a-Service,
        equation (1). `element_bytes`: of a KV value; states keep their own precision."""
        return self.state_bytes + element_bytes * (self.window_elements + self.kv_elements * num_tokens)


def facts_of(config: Mapping[str, Any], where: str = "config.json") -> ModelFacts:
    """Facts of a parsed `config.json`; `where` is how messages name the file. Raises ModelError naming an unknown
    architecture or a bad field."""
    model = read_model(config, where, otherwise="; give a measured curve instead")
    sums: Counter[str] = Counter()
    for layer, count in Counter(model.layers).items():
        for amounts in (
            mixer_amounts(layer.mixer, model.hidden_size),
            mlp_amounts(layer.mlp, model.hidden_size),
        ):
            sums.update({name: count * amount for name, amount in amounts.items()})
    return ModelFacts(
        architecture=model.architecture,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        kv_shards=_kv_shards(model),
        latent=any(isinstance(layer.mixer, LatentAttention) for layer in model.layers),
        weight_dtype=_weight_dtype(Fields(where, config).of_text(model.architecture)),
        **_experts(model),
        **{name: sums[name] for name in _SUMS},
    )


_SUMS = (
    *("dense_params", "kv_elements", "attention_flops", "window_elements", "state_bytes", "token_flops"),
    *("kv_layers", "query_heads", "query_elements"),
)


def _kv_shards(model: ModelSpec) -> int:
    """KV heads of a layer whose KV grows, or else of a windowed one."""
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]
    return next((mixer.num_kv_heads for mixer in sorted(mixers, key=is_short)), 1)


def _experts(model: ModelSpec) -> dict[str, int]:
    """Facts of the experts, equal in all layers that have any."""
    found = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]
    if not found:
        return {}
    return {
        "moe_layers": len(found),
        "num_experts": found[0].num_experts,
        "experts_per_token": found[0].top_k,
        "expert_params": 3 * (found[0].latent or model.hidden_size) * found[0].width,
    }


_STORED = {"mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4", "float-quantized": "fp8"}
"""Formats of compressed-tensors."""
_INTEGERS = {4: "int4", 8: "int8"}
"""By bits."""


def _weight_dtype(fields: Fields) -> str:
    """The precision the weights are stored in; 16-bit and longer formats count as bf16 unless float32."""
    quantization = fields.object("quantization_config") or fields.object("compression_config")
    if not quantization:
        return "fp32" if fields.dtype("bfloat16") == "float32" else "bf16"
    method = str(quantization.get("quant_method", ""))
    algorithm = str(quantization.get("quant_algo", "")).lower()
    found = _quantised(Fields(fields.where, quantization), method, algorithm)
    return found or fields.refuse(f"quantisation {method or algorithm!r} is not known; name the weight dtype")


def _quantised(fields: Fields, method: str, algorithm: str) -> str | None:
    if method in ("fp8", "mxfp4"):
        return method
    if method == "fbgemm_fp8":
        return "fp8"
    if method == "modelopt" and algorithm in ("fp8", "nvfp4"):
        return algorithm
    if method in ("awq", "gptq"):
        return _INTEGERS.get(fields.count("bits"))
    return _STORED.get(str(fields.get("format"))) or _INTEGERS.get(_most_bits(fields))


def _most_bits(fields: Fields) -> int:
    """The most bits of any group of compressed-tensors; 0 without groups."""
    groups = fields.nested("config_groups")
    found = [groups.nested(name).nested("weights") for name in fields.object("config_groups")]
    return max((each.count("num_bits") for each in found if each.get("num_bits")), default=0)


# A windowed layer is counted as a fixed state when its window is at most this; a longer one as full attention,
# since the contexts served are then mostly inside the window. Both err on the slow side.
SHORT_WINDOW = 1024
_DELTA_CHUNK = 64  # tokens the linear-attention kernels work on at a time (Kimi Linear, section on complexity)
_STATE_BYTES = 4  # recurrent states are kept in float32 by SGLang and vLLM
_CONV_BYTES = 2  # convolution windows in bfloat16

Amounts = dict[str, int]
"""By names of ModelFacts."""


def mixer_amounts(mixer: Attention | LatentAttention | DeltaRule | Lightning, hidden: int) -> Amounts:
    match mixer:
        case Attention():
            return _attention(mixer, hidden)
        case LatentAttention():
            return _latent_attention(mixer, hidden)
        case DeltaRule():
            return _delta(mixer, hidden)
        case Lightning():
            return _lightning(mixer, hidden)


def mlp_amounts(mlp: Dense | Experts, hidden: int) -> Amounts:
    """Dense parameters; of experts the shared one, the router, and projections to a smaller space and back."""
    if isinstance(mlp, Dense):
        return {"dense_params": mlp.matrices * hidden * mlp.width}
    return {"dense_params": hidden * (3 * mlp.shared_width + mlp.num_experts + 2 * mlp.latent)}


def is_short(mixer: Attention) -> bool:
    """Whether its KV of a sequence does not grow."""
    return 0 < mixer.window <= SHORT_WINDOW


def _attention(mixer: Attention, hidden: int) -> Amounts:
    """Grouped-query attention; a gate is one more projection of the outputs' size."""
    queries, size, value_size = mixer.num_heads, mixer.head_dim, mixer.value_dim
    kv_elements = mixer.num_kv_heads * (size + value_size)
    outputs = queries * value_size * (2 if mixer.gated else 1)
    params = {"dense_params": hidden * (queries * size + kv_elements + outputs)}
    pair_flops = 2 * queries * (size + value_size)
    if is_short(mixer):
        return params | {
            "window_elements": kv_elements * mixer.window,
            "token_flops": pair_flops * mixer.window,
        }
    asks = {"query_elements": queries * max(size, value_size), "query_heads": queries, "kv_layers": 1}
    return params | {"kv_elements": kv_elements, "attention_flops": pair_flops} | asks


def _latent_attention(mixer: LatentAttention, hidden: int) -> Amounts:
    """One compressed KV vector for all heads (DeepSeek-V2, section 2.1)."""
    heads, rank, query_rank = mixer.num_heads, mixer.rank, mixer.query_rank
    nope, rope, value = mixer.nope_dim, mixer.rope_dim, mixer.value_dim
    queries = heads * (nope + rope)
    params = query_rank * (hidden + queries) if query_rank else hidden * queries
    params += hidden * (rank + rope) + rank * heads * (nope + value)
    params += heads * value * hidden * (2 if mixer.gated else 1)
    return {
        "dense_params": params,
        "kv_elements": mixer.kept_dim,
        "attention_flops": 2 * heads * (nope + rope + value),
        "query_elements": heads * mixer.kept_dim,
        "query_heads": heads,
        "kv_layers": 1,
    }


def _delta(mixer: DeltaRule, hidden: int) -> Amounts:
    """Gated DeltaNet and Kimi Delta Attention: a fixed state, work linear in the length.

    FLOP per token and value head: 6 d^2 + 3 C d + C^2 (Kimi Linear, equation 13), with the product of key and
    value size for d^2 and their mean for d. State: one matrix a value head of key size by value size, and the
    last inputs of the short convolution.
    """
    values, size, value_size = mixer.num_values, mixer.key_dim, mixer.value_dim
    chunked = 3 * _DELTA_CHUNK * (size + value_size) // 2 + _DELTA_CHUNK**2
    return {
        "dense_params": hidden * (mixer.channels + 2 * values * value_size),  # in, output gate, out
        "token_flops": values * (6 * size * value_size + chunked),
        "state_bytes": mixer.matrix_numbers * _STATE_BYTES + (mixer.taps - 1) * mixer.channels * _CONV_BYTES,
    }


def _lightning(mixer: Lightning, hidden: int) -> Amounts:
    """FLOP per token and head: 4 d^2 to update and read the d x d state, 4 C d within a chunk."""
    heads, size = mixer.num_heads, mixer.head_dim
    return {
        "dense_params": 5 * hidden * heads * size,  # in, output gate, out
        "token_flops": heads * (4 * size * size + 4 * _DELTA_CHUNK * size),
        "state_bytes": heads * size * size * _STATE_BYTES,
    }
