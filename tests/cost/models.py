"""config.json parts for the tests, and the instances most of them use."""

from __future__ import annotations

from typing import Any

from isthmus.cost import Analytic, engine_coefficients, facts_of, hardware_named

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28_672,
    "vocab_size": 128_256,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129_280,
    "quantization_config": {"quant_method": "fp8"},
}
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "vocab_size": 151_936,
}
KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "num_hidden_layers": 27,
    "hidden_size": 2304,
    "num_attention_heads": 32,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_shared_experts": 1,
    "num_experts_per_token": 8,
    "first_k_dense_replace": 1,
    "vocab_size": 163_840,
    "linear_attn_config": {
        "kda_layers": [layer for layer in range(1, 28) if layer % 4 and layer != 27],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "vocab_size": 201_088,
    "quantization_config": {"quant_method": "mxfp4"},
}
CONFIGS = {
    "llama": LLAMA_70B,
    "deepseek": DEEPSEEK_V3,
    "qwen-next": QWEN3_NEXT,
    "kimi": KIMI_LINEAR,
    "gpt-oss": GPT_OSS,
}


def instance(
    config: dict[str, Any] = LLAMA_70B,
    gpu: str = "h200",
    num_gpus: int = 4,
    *,
    engine: str = "vllm",
    weight_dtype: str = "fp8",
) -> Analytic:
    hardware = hardware_named(gpu)
    coefficients = engine_coefficients(engine, hardware, weight_dtype=weight_dtype)
    return Analytic(facts_of(config), hardware, coefficients, num_gpus, weight_dtype, "fp8")
