"""Facts of published models against their published sizes; wrong files are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.core.cost import facts_of
from isthmus.core.errors import ModelError
from isthmus.lab.papers.prfaas.case import PUBLISHED_SIZES
from isthmus.lab.papers.prfaas.configs import CONFIGS
from tests.core.cost.models import (
    DEEPSEEK_V3,
    GPT_OSS,
    KIMI_K3,
    KIMI_LINEAR,
    LLAMA_70B,
    MIMO_V2_FLASH,
    MINIMAX_M25,
    QWEN3_NEXT,
    RING_25_1T,
)

MIB = 1 << 20


def billions(config: dict[str, Any]) -> tuple[float, float]:
    """All parameters with both vocabulary matrices, and what one token is multiplied with, lm_head included."""
    facts = facts_of(config)
    vocabulary = facts.vocab_size * facts.hidden_size
    return (facts.num_params + vocabulary) / 1e9, (facts.active_params + vocabulary) / 1e9


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (LLAMA_70B, 70.6, 69.5),
        (DEEPSEEK_V3, 671, 36.6),
        (QWEN3_NEXT, 80, 3.56),
        (KIMI_LINEAR, 48, 3.2),
        (GPT_OSS, 117, 5.1),
        (MIMO_V2_FLASH, 309, 14.8),
        (MINIMAX_M25, 229, 10.4),
        (RING_25_1T, 1_000, 62.3),
        (KIMI_K3, 2_800, 104),
        (CONFIGS["Qwen3.5-397B"], 397, 16.3),
        (CONFIGS["Qwen3-235B"], 235, 21.6),
    ],
)
def test_parameters_are_those_the_makers_publish(config: dict[str, Any], total: float, active: float) -> None:
    assert billions(config) == pytest.approx((total, active), rel=0.03)


def test_a_kimi_config_as_transformers_saves_it_is_the_published_one() -> None:
    """It has no `linear_attn_config`, and lists the layers instead."""
    linear = KIMI_LINEAR["linear_attn_config"]
    layers = KIMI_LINEAR["num_hidden_layers"]
    kinds = ["linear_attention" if at + 1 in linear["kda_layers"] else "full_attention" for at in range(layers)]
    saved = {
        key: value
        for key, value in KIMI_LINEAR.items()
        if key not in ("linear_attn_config", "first_k_dense_replace")
    }
    saved |= {
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "linear_num_heads": linear["num_heads"],
        "linear_head_dim": linear["head_dim"],
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
        "max_position_embeddings": None,
        "model_max_length": KIMI_LINEAR.get("max_position_embeddings")
        or KIMI_LINEAR.get("model_max_length", 0),
    }
    assert facts_of(saved) == facts_of(KIMI_LINEAR)


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_bytes_of_a_prompt(name: str) -> None:
    facts, (token_bytes, state_mib, *prompts_mib) = facts_of(CONFIGS[name]), PUBLISHED_SIZES[name]
    assert facts.prompt_bytes(1) - facts.prompt_bytes(0) == 2 * facts.kv_elements == token_bytes
    assert facts.prompt_bytes(0) / MIB == pytest.approx(state_mib, abs=0.006)
    sizes = [facts.prompt_bytes(length * 1024) / MIB for length in (1, 8, 32, 128)]
    assert sizes == pytest.approx(prompts_mib, rel=5e-4, abs=0.051)


def test_every_known_config_is_checked() -> None:
    assert list(CONFIGS) == list(PUBLISHED_SIZES)


def test_a_short_window_is_a_fixed_state() -> None:
    facts = facts_of(GPT_OSS)
    assert facts.kv_elements == 18 * 2 * 8 * 64
    assert facts.window_elements == 128 * facts.kv_elements
    assert facts.token_flops == 18 * 4 * 64 * 64 * 128


def test_a_long_window_counts_as_full_attention() -> None:
    config = LLAMA_70B | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    facts = facts_of(config)
    assert (facts.kv_elements, facts.window_elements) == (80 * 2 * 8 * 128, 0)


def test_mla_is_not_cut_by_tensor_parallelism() -> None:
    facts = facts_of(DEEPSEEK_V3)
    assert facts.latent
    assert facts.kv_shards == 1
    assert facts.moe_layers == 58


def test_windows_of_qwen_start_at_a_layer() -> None:
    config = LLAMA_70B | {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 512,
        "max_window_layers": 60,
    }
    facts = facts_of(config)
    assert facts.kv_elements == 60 * 2 * 8 * 128
    assert facts.window_elements == 20 * 2 * 8 * 128 * 512


def test_layers_without_experts_are_told_by_numbers_or_by_steps() -> None:
    config = QWEN3_NEXT | {"intermediate_size": 8192}
    assert facts_of(config | {"decoder_sparse_step": 2}).moe_layers == 24
    assert facts_of(config | {"mlp_only_layers": [0, 5]}).moe_layers == 46


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}, "group_1": {"weights": None}},
}


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "bf16"),
        ({"torch_dtype": "float32"}, "fp32"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "nvfp4"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "int4"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "int8"),
        ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, "fp8"),
        ({"compression_config": COMPRESSED | {"format": "pack-quantized"}}, "int4"),
        ({"quantization_config": COMPRESSED | {"format": "float-quantized"}}, "fp8"),
    ],
)
def test_weight_dtype(changes: dict[str, Any], dtype: str) -> None:
    assert facts_of(LLAMA_70B | changes).weight_dtype == dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM is not supported; .*a measured curve",
        ),
        ({"architectures": 7}, "'architectures' must be a list of names"),
        ({"architectures": None, "model_type": "mamba"}, "architecture mamba is not supported"),
        ({"hidden_size": "8192"}, "'hidden_size' must be a whole number above 0, not '8192'"),
        ({"num_attention_heads": 0}, "'num_attention_heads' must be a whole number above 0, not 0"),
        ({"vocab_size": None}, "the field 'vocab_size' is missing"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantisation 'hqq' is not known"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantisation 'gptq' is not known"),
    ],
)
def test_a_wrong_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        facts_of(LLAMA_70B | changes)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DEEPSEEK_V3, {"num_experts_per_tok": 300}, "300 of 256 experts"),
        (GPT_OSS, {"layer_types": None}, "the field 'layer_types' is missing"),
        (
            GPT_OSS,
            {"layer_types": ["full_attention"]},
            "'layer_types' must give one of .* for each of 36 layers",
        ),
        (QWEN3_NEXT, {"decoder_sparse_step": 2}, "the field 'intermediate_size' is missing"),
        (KIMI_LINEAR, {"linear_attn_config": {"kda_layers": [1, 2]}}, "must name each of 27 layers once"),
        (
            MIMO_V2_FLASH,
            {"hybrid_layer_pattern": [0, 1]},
            "'hybrid_layer_pattern' must give one of 0, 1 for each of 48",
        ),
        (RING_25_1T, {"layer_group_size": 7}, "'layer_group_size' is 7; it must divide 80 layers"),
        (RING_25_1T, {"layer_group_size": 0}, "'layer_group_size' must be a whole number above 0"),
        (MIMO_V2_FLASH, {"moe_layer_freq": None}, "'moe_layer_freq' are needed"),
    ],
)
def test_wrong_layers_are_refused(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        facts_of(config | changes)


def test_values_of_another_size_than_keys_make_another_state() -> None:
    wide = facts_of(QWEN3_NEXT | {"linear_value_head_dim": 256})
    usual = facts_of(QWEN3_NEXT)
    heads, layers = QWEN3_NEXT["linear_num_value_heads"], 36
    assert wide.state_bytes - usual.state_bytes == layers * heads * (128 * 128 * 4 + 3 * 128 * 2)
