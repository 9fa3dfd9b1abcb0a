"""Model facts from a Hugging Face `config.json`: what the cost formulas need, and nothing else.

Counts are elements (parameters, KV values), not bytes: the deployment chooses the precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from isthmus.cost.families import FAMILIES
from isthmus.cost.layers import Layers
from isthmus.errors import ConfigError


class ModelFacts(msgspec.Struct, frozen=True):
    """One decoder-only model, summed over its layers.

    `kv_elements` are per token; `window_elements` and `state_bytes` are per sequence, whatever its length.
    `attention_flops` is FLOP for each (query, key) pair; `token_flops` is attention work for each token that
    does not depend on its position (windowed and recurrent layers). `kv_shards`: into how many parts tensor
    parallelism can cut the KV of a token; beyond that it is replicated (1 for MLA).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int
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


def facts_of(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a parsed `config.json`. Raises ConfigError naming an unknown architecture or a bad field."""
    names = config.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"config.json: 'architectures' must be a list of names, not {names!r}")
    name = next((name for name in names if name in FAMILIES), None)
    if name is None:
        raise ConfigError(
            f"config.json: architecture {', '.join(names) or 'none'} has no cost model; "
            f"known: {', '.join(FAMILIES)}; give a measured curve instead"
        )
    nested = config.get("text_config")
    merged = {**config, **nested} if isinstance(nested, Mapping) else config
    layers = Layers(merged, name)
    FAMILIES[name](layers)
    return ModelFacts(**layers.facts, weight_dtype=_weight_dtype(merged))


_PACKED = {"mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4", "float-quantized": "fp8"}
"""Formats of compressed-tensors."""


def _weight_dtype(config: Mapping[str, Any]) -> str:
    """The precision the weights are stored in; 16-bit and longer formats count as bf16 unless float32."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = str(quantization.get("quant_method", ""))
        if method in ("fp8", "mxfp4"):
            return method
        algorithm = str(quantization.get("quant_algo", "")).lower()
        if method == "modelopt" and algorithm in ("fp8", "nvfp4"):
            return algorithm
        if (packed := str(quantization.get("format", ""))) in _PACKED:
            return _PACKED[packed]
        if method in ("awq", "gptq") and quantization.get("bits") == 4:
            return "int4"
        raise ConfigError(
            f"config.json: quantisation {method or algorithm!r} is not known; name the weight dtype"
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return "fp32" if dtype == "float32" else "bf16"
