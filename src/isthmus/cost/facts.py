"""Model facts from a Hugging Face `config.json`: what the cost formulas need, and nothing else.

Counts are elements (parameters, KV values), not bytes: the deployment chooses the precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from isthmus.errors import ConfigError

# A windowed layer is counted as a fixed state when its window is at most this; a longer one as full attention,
# since the contexts served are then mostly inside the window. Both err on the slow side.
SHORT_WINDOW = 1024
_DELTA_CHUNK = 64  # tokens the linear-attention kernels work on at a time (Kimi Linear, section on complexity)
_STATE_BYTES = 4  # recurrent states are kept in float32 by SGLang and vLLM
_CONV_BYTES = 2  # convolution windows in bfloat16


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


class _Layers:
    """Sums over layers while a config is read."""

    def __init__(self, config: Mapping[str, Any], architecture: str) -> None:
        self._config = config
        self.architecture = architecture
        self.num_layers = self.count("num_hidden_layers")
        self.hidden = self.count("hidden_size")
        self.facts: dict[str, Any] = {
            "architecture": architecture,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden,
            "vocab_size": self.count("vocab_size"),
            "max_length": self.count("max_position_embeddings", 0),
            "weight_dtype": _weight_dtype(config),
            "dense_params": 0,
            "kv_elements": 0,
            "attention_flops": 0,
            "window_elements": 0,
            "state_bytes": 0,
            "token_flops": 0,
        }

    def get(self, name: str) -> Any:
        return self._config.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number; null counts as absent. Without a default, the field is needed."""
        value = self._config.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(
                f"config.json of {self.architecture}: {name!r} must be a whole number, not {value!r}"
            )
        return value

    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head size."""
        heads = self.count("num_attention_heads")
        if not heads:
            raise ConfigError(f"config.json of {self.architecture}: 'num_attention_heads' must be above 0")
        return (
            heads,
            self.count("num_key_value_heads", heads) or heads,
            self.count("head_dim", self.hidden // heads),
        )

    def add(self, num_layers: int = 1, **amounts: int) -> None:
        for name, amount in amounts.items():
            self.facts[name] += num_layers * amount

    def attention(self, num_layers: int, *, window: int = 0, gated: bool = False) -> None:
        """Grouped-query attention layers; `gated` ones also project an output gate of the queries' size."""
        heads, kv_heads, size = self.heads()
        projections = (3 if gated else 2) * heads + 2 * kv_heads
        self.add(num_layers, dense_params=self.hidden * size * projections)
        self.facts["kv_shards"] = kv_heads
        if 0 < window <= SHORT_WINDOW:
            self.add(
                num_layers, window_elements=2 * kv_heads * size * window, token_flops=4 * heads * size * window
            )
        else:
            self.add(num_layers, kv_elements=2 * kv_heads * size, attention_flops=4 * heads * size)

    def latent_attention(self, num_layers: int) -> None:
        """Multi-head latent attention (DeepSeek-V2, section 2.1): one compressed KV vector for all heads."""
        heads, hidden = self.count("num_attention_heads"), self.hidden
        rank, query_rank = self.count("kv_lora_rank"), self.count("q_lora_rank", 0)
        nope, rope, value = (self.count(n) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        queries = heads * (nope + rope)
        params = query_rank * (hidden + queries) if query_rank else hidden * queries
        params += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        self.add(
            num_layers,
            dense_params=params,
            kv_elements=rank + rope,
            attention_flops=2 * heads * (nope + rope + value),
        )
        self.facts.update(kv_shards=1, latent=True)

    def delta_attention(self, num_layers: int, key_heads: int, value_heads: int, size: int, conv: int) -> None:
        """Gated DeltaNet and Kimi Delta Attention layers: a fixed state, work linear in the length.

        FLOP per token and head: 6 d^2 + 3 C d + C^2 (Kimi Linear, equation 13). State: one d x d matrix a
        head and the last `conv - 1` inputs of the short convolution.
        """
        channels = (2 * key_heads + value_heads) * size
        self.add(
            num_layers,
            dense_params=self.hidden * (channels + 2 * value_heads * size),  # in, output gate, out
            token_flops=value_heads * (6 * size * size + 3 * _DELTA_CHUNK * size + _DELTA_CHUNK**2),
            state_bytes=value_heads * size * size * _STATE_BYTES + max(conv - 1, 0) * channels * _CONV_BYTES,
        )

    def mlp(self, num_layers: int, intermediate: int, *, matrices: int = 3) -> None:
        self.add(num_layers, dense_params=matrices * self.hidden * intermediate)

    def experts(self, num_layers: int, total: int, active: int, intermediate: int, shared: int = 0) -> None:
        """Mixture-of-experts layers; `shared` is the intermediate size of what every token goes through."""
        if not 0 < active <= total:
            raise ConfigError(
                f"config.json of {self.architecture}: {active} experts per token of {total} do not fit"
            )
        self.mlp(num_layers, shared)
        self.add(num_layers, dense_params=self.hidden * total)  # the router
        self.facts.update(
            moe_layers=num_layers,
            num_experts=total,
            experts_per_token=active,
            expert_params=3 * self.hidden * intermediate,
        )

    def done(self) -> ModelFacts:
        self.facts.setdefault("kv_shards", 1)
        return ModelFacts(**self.facts)


def _llama(layers: _Layers) -> None:
    layers.attention(layers.num_layers)
    layers.mlp(layers.num_layers, layers.count("intermediate_size"))


def _mistral(layers: _Layers) -> None:
    layers.attention(layers.num_layers, window=layers.count("sliding_window", 0))
    layers.mlp(layers.num_layers, layers.count("intermediate_size"))


def _qwen(layers: _Layers) -> None:
    """Qwen2 and Qwen3: a window only where `use_sliding_window` says so, from layer `max_window_layers` on."""
    windowed = 0
    if layers.get("use_sliding_window"):
        windowed = max(layers.num_layers - layers.count("max_window_layers", 28), 0)
    layers.attention(layers.num_layers - windowed)
    layers.attention(windowed, window=layers.count("sliding_window", 4096))
    layers.mlp(layers.num_layers, layers.count("intermediate_size"))


def _opt(layers: _Layers) -> None:
    layers.attention(layers.num_layers)
    layers.mlp(layers.num_layers, layers.count("ffn_dim"), matrices=2)


def _mixtral(layers: _Layers) -> None:
    layers.attention(layers.num_layers, window=layers.count("sliding_window", 0))
    _local_experts(layers)


def _minimax(layers: _Layers) -> None:
    layers.attention(layers.num_layers)
    _local_experts(layers)


def _gpt_oss(layers: _Layers) -> None:
    windowed = sum(kind == "sliding_attention" for kind in _layer_types(layers))
    layers.attention(windowed, window=layers.count("sliding_window"))
    layers.attention(layers.num_layers - windowed)
    _local_experts(layers)


def _local_experts(layers: _Layers) -> None:
    total, active = layers.count("num_local_experts"), layers.count("num_experts_per_tok")
    layers.experts(layers.num_layers, total, active, layers.count("intermediate_size"))


def _qwen_moe(layers: _Layers) -> None:
    layers.attention(layers.num_layers)
    _qwen_experts(layers)


def _qwen_next(layers: _Layers) -> None:
    """Qwen3-Next and Qwen3.5: Gated DeltaNet layers with a gated full-attention layer every few."""
    linear = sum(kind == "linear_attention" for kind in _layer_types(layers))
    layers.attention(layers.num_layers - linear, gated=True)
    size, value_size = layers.count("linear_key_head_dim"), layers.count("linear_value_head_dim")
    if size != value_size:
        raise ConfigError(f"config.json of {layers.architecture}: linear key and value head sizes differ")
    keys, values = layers.count("linear_num_key_heads"), layers.count("linear_num_value_heads")
    layers.delta_attention(linear, keys, values, size, layers.count("linear_conv_kernel_dim"))
    if layers.get("num_experts"):
        _qwen_experts(layers)
    else:
        layers.mlp(layers.num_layers, layers.count("intermediate_size"))


def _qwen_experts(layers: _Layers) -> None:
    dense = len(layers.get("mlp_only_layers") or ())
    if layers.count("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"config.json of {layers.architecture}: decoder_sparse_step other than 1 is not supported"
        )
    if dense:
        layers.mlp(dense, layers.count("intermediate_size"))
    layers.experts(
        layers.num_layers - dense,
        layers.count("num_experts"),
        layers.count("num_experts_per_tok"),
        layers.count("moe_intermediate_size"),
        layers.count("shared_expert_intermediate_size", 0),
    )


def _deepseek(layers: _Layers) -> None:
    layers.latent_attention(layers.num_layers)
    _deepseek_experts(layers, "n_routed_experts", "n_shared_experts", "num_experts_per_tok")


def _kimi_linear(layers: _Layers) -> None:
    linear = layers.get("linear_attn_config")
    if not isinstance(linear, Mapping) or not isinstance(linear.get("kda_layers"), list):
        raise ConfigError("config.json of KimiLinearForCausalLM: 'linear_attn_config' must list 'kda_layers'")
    count = len(linear["kda_layers"])
    heads, size, conv = (int(linear[name]) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
    layers.latent_attention(layers.num_layers - count)
    layers.delta_attention(count, heads, heads, size, conv)
    _deepseek_experts(layers, "num_experts", "num_shared_experts", "num_experts_per_token")


def _deepseek_experts(layers: _Layers, total: str, shared: str, active: str) -> None:
    dense, intermediate = layers.count("first_k_dense_replace", 0), layers.count("moe_intermediate_size")
    layers.mlp(dense, layers.count("intermediate_size"))
    layers.experts(
        layers.num_layers - dense,
        layers.count(total),
        layers.count(active),
        intermediate,
        layers.count(shared, 0) * intermediate,
    )


def _layer_types(layers: _Layers) -> list[str]:
    kinds = layers.get("layer_types")
    if kinds is None and (interval := layers.get("full_attention_interval")):
        return [
            "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
            for layer in range(layers.num_layers)
        ]
    if not isinstance(kinds, list) or len(kinds) != layers.num_layers:
        raise ConfigError(
            f"config.json of {layers.architecture}: 'layer_types' must list {layers.num_layers} layers"
        )
    return kinds


_FAMILIES: dict[str, Callable[[_Layers], None]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen,
    "Qwen3ForCausalLM": _qwen,
    "OPTForCausalLM": _opt,
    "MixtralForCausalLM": _mixtral,
    "GptOssForCausalLM": _gpt_oss,
    "MiniMaxM2ForCausalLM": _minimax,
    "Qwen3MoeForCausalLM": _qwen_moe,
    "Qwen3NextForCausalLM": _qwen_next,
    "Qwen3_5MoeForConditionalGeneration": _qwen_next,
    "DeepseekV3ForCausalLM": _deepseek,
    "KimiK2ForCausalLM": _deepseek,
    "KimiK25ForConditionalGeneration": _deepseek,
    "KimiLinearForCausalLM": _kimi_linear,
}


def facts_of(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a parsed `config.json`. Raises ConfigError naming an unknown architecture or a bad field."""
    names = config.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"config.json: 'architectures' must be a list of names, not {names!r}")
    name = next((name for name in names if name in _FAMILIES), None)
    if name is None:
        raise ConfigError(
            f"config.json: architecture {', '.join(names) or 'none'} has no cost model; "
            f"known: {', '.join(_FAMILIES)}; give a measured curve instead"
        )
    nested = config.get("text_config")
    layers = _Layers({**config, **nested} if isinstance(nested, Mapping) else config, name)
    _FAMILIES[name](layers)
    return layers.done()


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
        if method in ("awq", "gptq") and quantization.get("bits") == 4:
            return "int4"
        raise ConfigError(
            f"config.json: quantisation {method or algorithm!r} is not known; name the weight dtype"
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return "fp32" if dtype == "float32" else "bf16"
