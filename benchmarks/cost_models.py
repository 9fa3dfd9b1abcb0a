"""The parts of published `config.json` files that the validation of the cost model needs."""

from __future__ import annotations

from typing import Any

from isthmus.core.cost import ModelFacts, facts_of
from isthmus.lab.papers.prfaas import configs as published


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "head_dim": hidden // heads,
    }


def _latent(layers: int, heads: int, experts: int, dense: int, vocab: int) -> dict[str, Any]:
    """DeepSeek-V3 and its relatives."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": 7168,
        "num_attention_heads": heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": dense,
        "vocab_size": vocab,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-70B": _llama(80, 8192, 64, 8, 28_672, 128_256),
    "Llama-3.1-8B": _llama(32, 4096, 32, 8, 14_336, 128_256),
    "Llama-2-70B": _llama(80, 8192, 64, 8, 28_672, 32_000),
    "gpt-oss-120b": {
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
    },
    # The measured rows say in which precision each ran.
    "MiniMax-M2.5": published.CONFIGS["MiniMax-M2.5"] | {"quantization_config": None},
    "Qwen3-235B-A22B": published.CONFIGS["Qwen3-235B"],
    "Qwen3.5-397B-A17B": published.CONFIGS["Qwen3.5-397B"],
    "DeepSeek-R1": _latent(61, 128, 256, 3, 129_280),
    "Kimi-K2.5": _latent(61, 64, 384, 1, 163_840),
}


def facts(name: str) -> ModelFacts:
    return facts_of(CONFIGS[name])
