"""Fields of each model's `config.json` that the cost model needs, as `isthmus.core.cost.facts_of` reads them.

Those of Ring-2.5-1T are its configuration class's defaults (its own file was
not at hand); the others are the makers' files, for Kimi K3 and MiMo-V2-Flash as other projects quote them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Config = dict[str, Any]

_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_GATED_DELTA = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def _sizes(layers: int, hidden: int, heads: int, vocab: int, positions: int) -> Config:
    """Fields that every model has."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


def _qwen35(layers: int, hidden: int, heads: int, intermediate: int, experts: int, chosen: int) -> Config:
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": {
            **_sizes(layers, hidden, heads, 248_320, 262_144),
            **_GATED_DELTA,
            "linear_num_value_heads": 2 * heads,
            "moe_intermediate_size": intermediate,
            "shared_expert_intermediate_size": intermediate,
            "num_experts": experts,
            "num_experts_per_tok": chosen,
        },
    }


def _kda(num_layers: int, full: Iterable[int], num_heads: int) -> Config:
    """Layers are counted from 1."""
    full = list(full)
    return {
        "full_attn_layers": full,
        "kda_layers": [layer for layer in range(1, num_layers + 1) if layer not in full],
        "num_heads": num_heads,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    }


KIMI_LINEAR: Config = {
    "architectures": ["KimiLinearForCausalLM"],
    **_sizes(27, 2304, 32, 163_840, 1_048_576),
    "q_lora_rank": None,
    **_LATENT,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_shared_experts": 1,
    "num_experts_per_token": 8,
    "first_k_dense_replace": 1,
    "linear_attn_config": _kda(27, (4, 8, 12, 16, 20, 24, 27), 32),
}
KIMI_K3: Config = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "text_config": {
        **_sizes(93, 7168, 96, 163_840, 1_048_576),
        "q_lora_rank": 1536,
        **_LATENT,
        "mla_use_output_gate": True,
        "intermediate_size": 33_792,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "num_experts": 896,
        "num_shared_experts": 2,
        "num_experts_per_token": 16,
        "first_k_dense_replace": 1,
        "linear_attn_config": _kda(93, (*range(4, 93, 4), 93), 96),
    },
    "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
}
QWEN3_NEXT: Config = {
    "architectures": ["Qwen3NextForCausalLM"],
    **_sizes(48, 2048, 16, 151_936, 262_144),
    **_GATED_DELTA,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
QWEN35_35B = _qwen35(40, 2048, 16, 512, 256, 8)
QWEN35_397B = _qwen35(60, 4096, 32, 1024, 512, 10)
MIMO_V2_FLASH: Config = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    **_sizes(48, 4096, 64, 152_576, 262_144),
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "hybrid_layer_pattern": [int(layer != 0 and (layer + 1) % 6 != 0) for layer in range(48)],
    "moe_layer_freq": [0] + [1] * 47,
    "intermediate_size": 16_384,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "quantization_config": {"quant_method": "fp8"},
}
RING_25_1T: Config = {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    **_sizes(80, 8192, 64, 157_184, 131_072),
    "layer_group_size": 8,
    "q_lora_rank": 1536,
    **_LATENT,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "num_experts": 256,
    "num_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 4,
}
MINIMAX_M25: Config = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    **_sizes(62, 3072, 48, 200_064, 196_608),
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 1536,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "quantization_config": {"quant_method": "fp8"},
}
QWEN3_235B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    **_sizes(94, 4096, 64, 151_936, 40_960),
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
LLAMA_3_70B: Config = {
    "architectures": ["LlamaForCausalLM"],
    **_sizes(80, 8192, 64, 128_256, 131_072),
    "num_key_value_heads": 8,
    "intermediate_size": 28_672,
}
DEEPSEEK_V3: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    **_sizes(61, 7168, 128, 129_280, 163_840),
    "q_lora_rank": 1536,
    **_LATENT,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "quantization_config": {"quant_method": "fp8"},
}
KIMI_K2: Config = {
    **DEEPSEEK_V3,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "vocab_size": 163_840,
    "max_position_embeddings": 131_072,
}

CONFIGS: dict[str, Config] = {
    "Kimi Linear": KIMI_LINEAR,
    "Qwen3-Next-80B": QWEN3_NEXT,
    "Qwen3.5-35B": QWEN35_35B,
    "Qwen3.5-397B": QWEN35_397B,
    "MiMo-V2-Flash": MIMO_V2_FLASH,
    "Ring-2.5-1T": RING_25_1T,
    "Kimi K3": KIMI_K3,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Kimi K2": KIMI_K2,
    "Qwen3-235B": QWEN3_235B,
    "MiniMax-M2.5": MINIMAX_M25,
    "Llama-3-70B": LLAMA_3_70B,
}
