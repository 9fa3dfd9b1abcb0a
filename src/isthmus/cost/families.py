"""Which layers a model of each family has: one reader of its `config.json` for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.cost.layers import Heads, Layers
from isthmus.errors import ConfigError


def _llama(layers: Layers) -> None:
    layers.attention(layers.num_layers)
    layers.mlp(layers.num_layers, layers.count("intermediate_size"))


def _mistral(layers: Layers) -> None:
    layers.attention(layers.num_layers, window=layers.count("sliding_window", 0))
    layers.mlp(layers.num_layers, layers.count("intermediate_size"))


def _qwen(layers: Layers) -> None:
    """Qwen2 and Qwen3: a window only where `use_sliding_window` says so, from layer `max_window_layers` on."""
    windowed = 0
    if layers.get("use_sliding_window"):
        windowed = max(layers.num_layers - layers.count("max_window_layers", 28), 0)
    layers.attention(layers.num_layers - windowed)
    layers.attention(windowed, window=layers.count("sliding_window", 4096))
    layers.mlp(layers.num_layers, layers.count("intermediate_size"))


def _opt(layers: Layers) -> None:
    layers.attention(layers.num_layers)
    layers.mlp(layers.num_layers, layers.count("ffn_dim"), matrices=2)


def _mixtral(layers: Layers) -> None:
    layers.attention(layers.num_layers, window=layers.count("sliding_window", 0))
    _local_experts(layers)


def _minimax(layers: Layers) -> None:
    layers.attention(layers.num_layers)
    _local_experts(layers)


def _gpt_oss(layers: Layers) -> None:
    windowed = sum(kind == "sliding_attention" for kind in _layer_types(layers))
    layers.attention(windowed, window=layers.count("sliding_window"))
    layers.attention(layers.num_layers - windowed)
    _local_experts(layers)


def _local_experts(layers: Layers) -> None:
    total, active = layers.count("num_local_experts"), layers.count("num_experts_per_tok")
    layers.experts(layers.num_layers, total, active, layers.count("intermediate_size"))


def _qwen_moe(layers: Layers) -> None:
    layers.attention(layers.num_layers)
    _qwen_experts(layers)


def _qwen_next(layers: Layers) -> None:
    """Qwen3-Next and Qwen3.5: Gated DeltaNet layers with a gated full-attention layer every few."""
    linear = sum(kind == "linear_attention" for kind in _layer_types(layers))
    layers.attention(layers.num_layers - linear, gated=True)
    heads = Heads(
        queries=layers.count("linear_num_value_heads"),
        keys=layers.count("linear_num_key_heads"),
        size=layers.count("linear_key_head_dim"),
        value_size=layers.count("linear_value_head_dim"),
    )
    layers.delta_attention(linear, heads, layers.count("linear_conv_kernel_dim"))
    if layers.get("num_experts"):
        _qwen_experts(layers)
    else:
        layers.mlp(layers.num_layers, layers.count("intermediate_size"))


def _qwen_experts(layers: Layers) -> None:
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


def _deepseek(layers: Layers) -> None:
    layers.latent_attention(layers.num_layers)
    _deepseek_experts(layers, "n_routed_experts", "n_shared_experts", "num_experts_per_tok")


def _mimo(layers: Layers) -> None:
    """MiMo-V2-Flash: `hybrid_layer_pattern` has a 1 for a windowed layer, whose heads have fields of their own."""
    pattern, sparse = layers.per_layer("hybrid_layer_pattern"), layers.per_layer("moe_layer_freq")
    windowed, moe_layers = sum(map(bool, pattern)), sum(map(bool, sparse))
    layers.attention(windowed, window=layers.count("sliding_window"), heads=layers.heads("swa_"))
    layers.attention(layers.num_layers - windowed)  # last: the KV that grows is what is cut over GPUs
    layers.mlp(layers.num_layers - moe_layers, layers.count("intermediate_size"))
    layers.experts(
        moe_layers,
        layers.count("n_routed_experts"),
        layers.count("num_experts_per_tok"),
        layers.count("moe_intermediate_size"),
    )


def _bailing(layers: Layers) -> None:
    """Ling and Ring 2.5: of each `layer_group_size` layers the last has latent attention, the others Lightning."""
    group = layers.count("layer_group_size")
    if not group or layers.num_layers % group:
        raise ConfigError(
            f"config.json of {layers.architecture}: 'layer_group_size' is {group}; it must divide "
            f"{layers.num_layers} layers"
        )
    full = layers.num_layers // group
    heads = layers.count("num_attention_heads")
    layers.latent_attention(full)
    layers.lightning_attention(
        layers.num_layers - full, heads, layers.count("head_dim", layers.hidden // max(heads, 1))
    )
    dense = layers.count("first_k_dense_replace", 0)
    layers.mlp(dense, layers.count("intermediate_size"))
    intermediate = layers.count("moe_intermediate_size")
    layers.experts(
        layers.num_layers - dense,
        layers.count("num_experts"),
        layers.count("num_experts_per_tok"),
        intermediate,
        layers.count("num_shared_experts", 0)
        * layers.count("moe_shared_expert_intermediate_size", intermediate),
    )


def _kimi_linear(layers: Layers) -> None:
    """Kimi Linear and Kimi K3; the latter gates its latent attention and routes in a smaller latent space.

    Published configurations say what is recurrent in `linear_attn_config`; those that transformers saves, beside the
    rest.
    """
    linear = layers.get("linear_attn_config")
    if linear is None and layers.get("layer_types") is not None:
        count = _layer_types(layers).count("linear_attention")
        heads, size = layers.count("linear_num_heads"), layers.count("linear_head_dim")
        conv = layers.count("linear_conv_kernel_dim", 4)
    elif isinstance(linear, Mapping) and isinstance(linear.get("kda_layers"), list):
        count = len(linear["kda_layers"])
        heads, size, conv = (int(linear[name]) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
    else:
        raise ConfigError(f"config.json of {layers.architecture}: 'linear_attn_config' must list 'kda_layers'")
    layers.latent_attention(layers.num_layers - count, gated=bool(layers.get("mla_use_output_gate")))
    layers.delta_attention(count, Heads(heads, heads, size, size), conv)
    _deepseek_experts(layers, "num_experts", "num_shared_experts", "num_experts_per_token")


def _deepseek_experts(layers: Layers, total: str, shared: str, active: str) -> None:
    dense, intermediate = layers.count("first_k_dense_replace", 0), layers.count("moe_intermediate_size")
    if layers.get("mlp_layer_types") is not None:
        dense = layers.per_layer("mlp_layer_types").count("dense")
    layers.mlp(dense, layers.count("intermediate_size"))
    layers.experts(
        layers.num_layers - dense,
        layers.count(total),
        layers.count(active),
        intermediate,
        layers.count(shared, 0) * intermediate,
        layers.count("routed_expert_hidden_size", 0),
    )


def _layer_types(layers: Layers) -> list[str]:
    interval = layers.count("full_attention_interval", 0)
    if interval and layers.get("layer_types") is None:
        return [
            "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
            for layer in range(layers.num_layers)
        ]
    return layers.per_layer("layer_types")


FAMILIES: dict[str, Callable[[Layers], None]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen,
    "Qwen3ForCausalLM": _qwen,
    "OPTForCausalLM": _opt,
    "MixtralForCausalLM": _mixtral,
    "GptOssForCausalLM": _gpt_oss,
    "MiniMaxM2ForCausalLM": _minimax,
    "MiMoV2FlashForCausalLM": _mimo,
    "Qwen3MoeForCausalLM": _qwen_moe,
    "Qwen3NextForCausalLM": _qwen_next,
    "Qwen3_5MoeForConditionalGeneration": _qwen_next,
    "DeepseekV3ForCausalLM": _deepseek,
    "KimiK2ForCausalLM": _deepseek,
    "KimiK25ForConditionalGeneration": _deepseek,
    "KimiLinearForCausalLM": _kimi_linear,
    "KimiK3ForConditionalGeneration": _kimi_linear,
    "BailingMoeV2_5ForCausalLM": _bailing,
}
