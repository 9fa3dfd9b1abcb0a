"""What the `config.json` of each model says of its layers: facts, by name, as `isthmus.core.cost.facts_of` reads them.

Only the fields that the cost model needs. Those of Ring-2.5-1T are its configuration class's defaults (its own file was
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
    "num_hidden_layers": 27,
    "hidden_size": 2304,
    "num_attention_heads": 32,
    "q_lora_rank": None,
    **_LATENT,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_shared_experts": 1,
    "num_experts_per_token": 8,
    "first_k_dense_replace": 1,
    "vocab_size": 163_840,
    "max_position_embeddings": 1_048_576,
    "linear_attn_config": _kda(27, (4, 8, 12, 16, 20, 24, 27), 32),
}
KIMI_K3: Config = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 93,
        "hidden_size": 7168,
        "num_attention_heads": 96,
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
        "vocab_size": 163_840,
        "max_position_embeddings": 1_048_576,
        "linear_attn_config": _kda(93, (*range(4, 93, 4), 93), 96),
    },
    "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
}
QWEN3_NEXT: Config = {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    **_GATED_DELTA,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "vocab_size": 151_936,
    "max_position_embeddings": 262_144,
}
QWEN35_35B: Config = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        **_GATED_DELTA,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 248_320,
        "max_position_embeddings": 262_144,
    },
}
QWEN35_397B: Config = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 60,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        **_GATED_DELTA,
        "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "vocab_size": 248_320,
        "max_position_embeddings": 262_144,
    },
}
MIMO_V2_FLASH: Config = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 4096,
    "num_attention_heads": 64,
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
    "vocab_size": 152_576,
    "max_position_embeddings": 262_144,
    "quantization_config": {"quant_method": "fp8"},
}
RING_25_1T: Config = {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "num_hidden_layers": 80,
    "layer_group_size": 8,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    **_LATENT,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "num_experts": 256,
    "num_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 4,
    "vocab_size": 157_184,
    "max_position_embeddings": 131_072,
}
MINIMAX_M25: Config = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "num_hidden_layers": 62,
    "hidden_size": 3072,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 1536,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 200_064,
    "max_position_embeddings": 196_608,
    "quantization_config": {"quant_method": "fp8"},
}
QWEN3_235B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}
LLAMA_3_70B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28_672,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}
DEEPSEEK_V3: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    **_LATENT,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129_280,
    "max_position_embeddings": 163_840,
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
