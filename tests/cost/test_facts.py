"""Facts of published models against their published sizes; wrong files are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.cost import facts_of
from isthmus.errors import ConfigError
from tests.cost.models import DEEPSEEK_V3, GPT_OSS, KIMI_LINEAR, LLAMA_70B, QWEN3_NEXT

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
    ],
)
def test_parameters_are_those_the_makers_publish(config: dict[str, Any], total: float, active: float) -> None:
    assert billions(config) == pytest.approx((total, active), rel=0.03)


@pytest.mark.parametrize(
    ("config", "kv_bytes", "state_mib"),
    [
        (LLAMA_70B, 327_680, 0.0),
        (DEEPSEEK_V3, 70_272, 0.0),
        (QWEN3_NEXT, 24_576, 73.69),
        (KIMI_LINEAR, 8_064, 41.41),
    ],
)
def test_kv_of_a_token_and_fixed_state(config: dict[str, Any], kv_bytes: int, state_mib: float) -> None:
    facts = facts_of(config)
    assert 2 * facts.kv_elements == kv_bytes
    assert facts.state_bytes / MIB == pytest.approx(state_mib, abs=0.01)


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


def test_a_nested_text_model_is_read() -> None:
    nested = {name: value for name, value in QWEN3_NEXT.items() if name != "architectures"}
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": nested}
    assert facts_of(config).kv_elements == facts_of(QWEN3_NEXT).kv_elements


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "bf16"),
        ({"torch_dtype": "float32"}, "fp32"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "nvfp4"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "int4"),
    ],
)
def test_weight_dtype(changes: dict[str, Any], dtype: str) -> None:
    assert facts_of(LLAMA_70B | changes).weight_dtype == dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM has no cost model"),
        ({"architectures": None}, "'architectures' must be a list of names"),
        ({"hidden_size": "8192"}, "'hidden_size' must be a whole number, not '8192'"),
        ({"num_attention_heads": 0}, "'num_attention_heads' must be above 0"),
        ({"vocab_size": None}, "'vocab_size' must be a whole number"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantisation 'hqq' is not known"),
    ],
)
def test_a_wrong_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        facts_of(LLAMA_70B | changes)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DEEPSEEK_V3, {"num_experts_per_tok": 300}, "300 experts per token of 256"),
        (GPT_OSS, {"layer_types": ["full_attention"]}, "'layer_types' must list 36 layers"),
        (QWEN3_NEXT, {"linear_value_head_dim": 64}, "linear key and value head sizes differ"),
        (QWEN3_NEXT, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (KIMI_LINEAR, {"linear_attn_config": {}}, "must list 'kda_layers'"),
    ],
)
def test_wrong_layers_are_refused(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        facts_of(config | changes)
