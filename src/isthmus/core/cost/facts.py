"""Model facts from a Hugging Face `config.json`: what the cost formulas need, and nothing else.

Counts are elements (parameters, KV values), not bytes: the deployment chooses the precision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from isthmus.core.cost.layers import is_short, mixer_amounts, mlp_amounts
from isthmus.core.models import Attention, Experts, Fields, LatentAttention, ModelSpec, read_model


class ModelFacts(msgspec.Struct, frozen=True):
    """One decoder-only model, summed over its layers.

    `kv_elements` are per token; `window_elements` and `state_bytes` are per sequence, whatever its length.
    `attention_flops` is FLOP for each (query, key) pair; `token_flops` is attention work for each token that
    does not depend on its position (windowed and recurrent layers). `kv_shards`: into how many parts tensor
    parallelism can cut the KV of a token; beyond that it is replicated (1 for MLA). `kv_layers`: whose KV grows with a
    sequence, with so many `query_heads` and `query_elements` a token in sum, those of MLA as they meet the vector kept.
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
        """KV and states of a prompt at least as long as the short windows: what another node needs to decode it.

        S_kv of Prefill-as-a-Service, equation (1). `element_bytes`: of a KV value; states keep their own precision.
        """
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
    """Of the KV that grows, where some does."""
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]
    return next((mixer.num_kv_heads for mixer in sorted(mixers, key=is_short)), 1)


def _experts(model: ModelSpec) -> dict[str, int]:
    """Those of its layers that have experts have the same."""
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
    """That a group of compressed-tensors has; 0 without any."""
    groups = fields.nested("config_groups")
    found = [groups.nested(name).nested("weights") for name in fields.object("config_groups")]
    return max((each.count("num_bits") for each in found if each.get("num_bits")), default=0)
