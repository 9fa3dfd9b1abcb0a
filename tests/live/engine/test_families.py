"""The configuration files and tensors of models with latent attention, recurrent layers and experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.core.errors import ModelError
from isthmus.core.models import Attention, DeltaRule, Dense, Experts, LatentAttention, ModelSpec
from isthmus.live.engine.interface import Chunk
from isthmus.live.engine.recipe import kv_layout, read_spec
from tests.models import reference_logits

from .hybrids import FAMILIES, save_tiny
from .support import changed, edit, engine_of, relative_error, tokens_of

QWEN = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 16384,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "num_experts": 16,
    "num_experts_per_token": 2,
    "model_max_length": 4096,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "head_dim": 16,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
    },
}
CONFIGS = {"qwen3_next": QWEN, "deepseek_v3": DEEPSEEK, "kimi_linear": KIMI}


def spec_of(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_spec(folder)


# ---- refusals


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("qwen3_next", {"hidden_act": "gelu"}, "gelu"),
        ("qwen3_next", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("qwen3_next", {"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ("qwen3_next", {"linear_num_value_heads": 24}, "24 linear value heads over 16"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 8}, "full_attention"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 8}, "layer_types"),
        ("qwen3_next", {"mlp_only_layers": [8]}, "mlp_only_layers"),
        ("qwen3_next", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("qwen3_next", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("qwen3_next", {"num_experts": -1}, "num_experts"),
        ("qwen3_next", {"num_key_value_heads": 3}, "3 KV heads"),
        ("qwen3_next", {"attention_bias": "yes"}, "attention_bias"),
        ("qwen3_next", {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ("qwen3_next", {"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "group_limited_greedy"}, "topk_method"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "KV heads"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ("deepseek_v3", {"n_group": 3}, "groups"),
        ("deepseek_v3", {"topk_group": 5}, "groups"),
        ("deepseek_v3", {"num_experts_per_tok": 9}, "9 of 16 experts"),
        ("deepseek_v3", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ("deepseek_v3", {"routed_scaling_factor": 0}, "routed_scaling_factor"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn"}}, "factor"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2]}}, "kda_layers"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [0]}}, "full_attn_layers"),
        ("kimi_linear", {"linear_attn_config": {"kda_layers": [1, 2, 3, 4]}}, "full_attention"),
        ("kimi_linear", {"linear_attn_config": 4}, "linear_attn_config"),
        ("kimi_linear", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ("kimi_linear", {"num_experts": "many"}, "num_experts"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_what_is_wrong_or_not_supported_is_named(
    tmp_path: Path, family: str, fields: dict[str, Any], named: str
) -> None:
    config = {key: value for key, value in (CONFIGS[family] | fields).items() if value is not None}
    with pytest.raises(ModelError) as caught:
        spec_of(tmp_path, config)
    message = str(caught.value)
    assert named in message and "config.json" in message and "\n" not in message


# ---- reading


def test_the_published_files_read_like_those_transformers_saves(tmp_path: Path) -> None:
    old = QWEN | {"rope_theta": 1e7, "rope_scaling": None, "partial_rotary_factor": 0.5}
    new = QWEN | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "mlp_only_layers": [],
    }
    spec = spec_of(tmp_path, old | {"full_attention_interval": 4})
    assert spec == spec_of(tmp_path, new)
    assert spec.rope is not None and (spec.rope.dim, spec.rope.theta) == (16, 1e7)

    numbers = KIMI["linear_attn_config"]
    new = changed(KIMI, linear_attn_config=None) | {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "linear_head_dim": numbers["head_dim"],
        "linear_num_heads": numbers["num_heads"],
        "linear_conv_kernel_dim": 4,
    }
    assert spec_of(tmp_path, KIMI | {"first_k_dense_replace": 1}) == spec_of(tmp_path, new)

    scaling = DEEPSEEK["rope_scaling"]
    rope = changed(scaling, type=None) | {"rope_type": "yarn", "rope_theta": 10000}
    new = changed(DEEPSEEK, rope_scaling=None, rope_theta=None) | {"rope_parameters": rope}
    assert spec_of(tmp_path, DEEPSEEK) == spec_of(tmp_path, new)


def test_each_layer_is_of_its_kind(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, QWEN | {"mlp_only_layers": [5], "decoder_sparse_step": 2})
    assert [type(layer.mixer) for layer in spec.layers] == [DeltaRule, DeltaRule, DeltaRule, Attention] * 2
    sparse = [isinstance(layer.mlp, Experts) for layer in spec.layers]
    assert sparse == [False, True, False, True, False, False, False, True]
    spec = spec_of(tmp_path, DEEPSEEK | {"first_k_dense_replace": 2})
    assert all(isinstance(layer.mixer, LatentAttention) for layer in spec.layers)
    assert [isinstance(layer.mlp, Dense) for layer in spec.layers] == [True, True, False, False, False]


def test_latent_queries_without_a_rank_are_told_by_a_null(tmp_path: Path) -> None:
    ranks = []
    for config in (DEEPSEEK, DEEPSEEK | {"q_lora_rank": None}, changed(DEEPSEEK, q_lora_rank=None)):
        mixer = spec_of(tmp_path, config).layers[0].mixer
        assert isinstance(mixer, LatentAttention)
        ranks.append(mixer.query_rank)
    assert ranks == [24, 0, 1536]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spec_gives_the_layout_of_the_engine(tmp_path: Path, family: str) -> None:
    engine = engine_of(save_tiny(family, tmp_path))
    assert kv_layout(read_spec(tmp_path), "float32", 16) == engine.layout


# ---- tensors


def agrees(folder: Path) -> None:
    """The last logits of a prompt in two chunks are those of transformers."""
    prompt, engine = tokens_of(60, seed=7), engine_of(folder)
    engine.forward(engine.build([Chunk(prompt[:20], 0, range(4), False)]))
    logits = engine.forward(engine.build([Chunk(prompt[20:], 20, range(4), True)]))[0]
    assert relative_error(logits, reference_logits(folder, prompt)[-1]) < 1e-4


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen-biases-whole-rotation": (
        "qwen3_next",
        {"attention_bias": True, "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 1.0}},
    ),
    "qwen-dense": ("qwen3_next", {"num_experts": 0}),
    "qwen-tied-unnormalised": ("qwen3_next", {"tie_word_embeddings": True, "norm_topk_prob": False}),
    "qwen-more-taps-equal-heads": (
        "qwen3_next",
        {"linear_conv_kernel_dim": 6, "linear_num_key_heads": 4, "head_dim": 64, "num_key_value_heads": 1},
    ),
    "deepseek-plain-queries": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek-halves": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    "deepseek-plain-rope-two-shared": (
        "deepseek_v3",
        {"rope_parameters": PLAIN_ROPE, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    ),
    "deepseek-long-values": ("deepseek_v3", {"v_head_dim": 32, "norm_topk_prob": False}),
    "kimi-low-rank-queries": ("kimi_linear", {"q_lora_rank": 16, "attention_bias": True}),
    "kimi-groups": ("kimi_linear", {"n_group": 4, "topk_group": 2, "linear_conv_kernel_dim": 3}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_of_a_family_is_computed(tmp_path: Path, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    agrees(save_tiny(family, tmp_path / variant, **overrides))


def test_the_published_name_of_kimis_dense_mlp_is_taken(tmp_path: Path) -> None:
    folder = save_tiny("kimi_linear", tmp_path / "saved")
    before = engine_of(folder)
    other = shutil.copytree(folder, tmp_path / "published")

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            at = "model.layers.0.{}." + name + ".weight"
            tensors[at.format("mlp")] = tensors.pop(at.format("block_sparse_moe"))

    edit(other, rename)
    after, chunk = engine_of(other), Chunk(tokens_of(30), 0, range(2), True)
    assert torch.equal(after.forward(after.build([chunk])), before.forward(before.build([chunk])))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_ba.weight"),
        ("qwen3_next", "model.layers.3.mlp.experts.7.up_proj.weight"),
        ("qwen3_next", "model.layers.2.self_attn.q_norm.weight"),
        ("deepseek_v3", "model.layers.2.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "model.layers.1.self_attn.kv_b_proj.weight"),
        ("kimi_linear", "model.layers.0.self_attn.A_log"),
        ("kimi_linear", "model.layers.4.block_sparse_moe.experts.0.w2.weight"),
        ("kimi_linear", "model.layers.1.self_attn.v_conv1d.weight"),
    ],
)
def test_a_missing_misshapen_or_changed_tensor_shows(tmp_path: Path, family: str, name: str) -> None:
    folder = save_tiny(family, tmp_path / family)
    revision = engine_of(folder).revision
    edit(folder, lambda tensors: tensors[name].add_(0.25))
    assert engine_of(folder).revision != revision
    edit(folder, lambda tensors: tensors.update({name: tensors[name][..., :-1].contiguous()}))
    with pytest.raises(ModelError, match=f"{name} has shape"):
        engine_of(folder)
    edit(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"no tensor '{name}'"):
        engine_of(folder)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_next", {"num_experts_per_tok": 3}),
        ("qwen3_next", {"norm_topk_prob": False}),
        ("qwen3_next", {"rms_norm_eps": 1e-5}),
        ("deepseek_v3", {"routed_scaling_factor": 2.0}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"topk_group": 1}),
        ("kimi_linear", {"moe_renormalize": False}),
    ],
)
def test_a_config_that_computes_something_else_changes_the_revision(
    tmp_path: Path, family: str, fields: dict[str, Any]
) -> None:
    folder = save_tiny(family, tmp_path)
    before, path = engine_of(folder).revision, folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert engine_of(folder).revision != before
