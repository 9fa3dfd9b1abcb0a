"""Readers of the `config.json` of each known family of models, one function each.

Absent fields have the value that the family's Hugging Face class assumes. Of families that the engine does not run,
only the fields that costs need are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from isthmus.core.models.fields import ROPE_TYPES, Fields
from isthmus.core.models.parts import (
    MIXERS,
    WINDOWS,
    Mixer,
    Mlp,
    attention_of,
    dense_model,
    dense_of,
    experts_of,
    grouped_experts,
    hybrid_mixers,
    latent_of,
    mlps_of,
    model_of,
    num_layers_of,
    qwen3_attention,
    qwen_sparse_layers,
    qwen_windows,
    sparse_layers,
    window_of,
)
from isthmus.core.models.spec import (
    Attention,
    DeltaRule,
    Dense,
    Experts,
    Lightning,
    ModelSpec,
    RopeSpec,
)


def read_model(
    config: Mapping[str, Any],
    where: str = "config.json",
    known: Collection[str] | None = None,
    otherwise: str = "",
) -> ModelSpec:
    """The model of a parsed `config.json`, which messages call `where`. Raises ModelError naming a wrong field, or an
    architecture that is not one of `known` (by default all of FAMILIES), with the advice `otherwise`."""
    fields, known = Fields(where, config), known or FAMILIES
    names = fields.architectures()
    name = next((name for name in names if name in known), None)
    if name is None:
        named = ", ".join(names)
        fields.refuse(f"architecture {named} is not supported; supported: {', '.join(known)}{otherwise}")
    return FAMILIES[name](fields.of_text(name))


# ---- families that the engine runs


def _llama(fields: Fields) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    attention = attention_of(fields, qkv_bias=bias, output_bias=bias)
    mlp = dense_of(fields, bias=fields.flag("mlp_bias", False))
    return dense_model(fields, attention, mlp, [0] * num_layers_of(fields))


def _mistral(fields: Fields) -> ModelSpec:
    windows = [window_of(fields)] * num_layers_of(fields)
    return dense_model(fields, attention_of(fields), dense_of(fields), windows)


def _qwen2(fields: Fields) -> ModelSpec:
    return dense_model(fields, attention_of(fields, qkv_bias=True), dense_of(fields), qwen_windows(fields))


def _qwen3(fields: Fields) -> ModelSpec:
    return dense_model(fields, qwen3_attention(fields, 128), dense_of(fields), qwen_windows(fields))


def _qwen3_next(fields: Fields) -> ModelSpec:
    """Qwen3-Next and Qwen3.5: Gated DeltaNet layers with a gated full-attention layer every few."""
    num_layers = num_layers_of(fields)
    attention = qwen3_attention(fields, 256, gated=True)
    delta = DeltaRule(
        kind="gdn",
        num_keys=fields.count("linear_num_key_heads", 16),
        num_values=fields.count("linear_num_value_heads", 32),
        key_dim=fields.count("linear_key_head_dim", 128),
        value_dim=fields.count("linear_value_head_dim", 128),
        taps=fields.count("linear_conv_kernel_dim", 4, least=2),
    )
    if delta.num_values % delta.num_keys:
        fields.refuse(f"{delta.num_values} linear value heads over {delta.num_keys} key heads do not fit")
    every = fields.count("full_attention_interval", 4)
    types = fields.each_layer("layer_types", num_layers, MIXERS) or [
        MIXERS[(index + 1) % every == 0] for index in range(num_layers)
    ]
    experts = Experts(
        num_experts=fields.count("num_experts", 512, least=0),
        top_k=fields.count("num_experts_per_tok", 10),
        width=fields.count("moe_intermediate_size", 512),
        shared_width=fields.count("shared_expert_intermediate_size", 512),
        scores="softmax",
        normalise=fields.flag("norm_topk_prob", True),
        shared_gate=True,
    )
    dim = int(attention.head_dim * fields.rotary_share(0.25))
    if dim % 2 or not dim:
        fields.refuse(f"partial_rotary_factor rotates {dim} numbers of each head, which make no pairs")
    return model_of(
        fields,
        hybrid_mixers(fields, types, delta, attention),
        mlps_of(fields, qwen_sparse_layers(fields, experts), experts),
        fields.rope(dim, fields.max_length(32768)),
        norm_offset=1.0,
        max_length=32768,
    )


def _deepseek_v3(fields: Fields) -> ModelSpec:
    rope = fields.rope(fields.count("qk_rope_head_dim", 64), fields.max_length(4096))
    latent = latent_of(fields, query_rank=1536)
    latent = msgspec.structs.replace(
        latent,
        interleaved=fields.flag("rope_interleave", True),
        scale=latent.scale * _yarn_correction(rope),
    )
    experts = grouped_experts(
        fields,
        num_experts=fields.count("n_routed_experts", 256),
        top_k=fields.count("num_experts_per_tok", 8),
        num_shared=fields.count("n_shared_experts", 1, least=0),
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 2.5),
        groups=fields.count("n_group", 8),
        top_groups=fields.count("topk_group", 4),
    )
    mlps = mlps_of(fields, sparse_layers(fields, 3), experts)
    return model_of(fields, [latent] * len(mlps), mlps, rope, max_length=4096)


def _yarn_correction(rope: RopeSpec) -> float:
    """DeepSeek's factor on attention scores beside YaRN's own on cosines and sines: the square of YaRN's with
    `mscale_all_dim` alone."""
    weight = rope.options.get("mscale_all_dim")
    factor = rope.options.get("factor", 1.0)
    if rope.kind == "default" or rope.kind not in ROPE_TYPES or not weight or factor <= 1:
        return 1.0
    return float((0.1 * weight * math.log(factor) + 1.0) ** 2)


def _kimi_linear(fields: Fields) -> ModelSpec:
    """Kimi Linear, and Kimi K3 with gated latent attention and experts of a smaller latent space. Published files have
    the recurrent layers' fields in `linear_attn_config`, those saved by transformers beside the others."""
    nested = fields.nested("linear_attn_config")
    size = nested.count("head_dim", fields.count("linear_head_dim", 128))
    heads = nested.count("num_heads", fields.count("linear_num_heads", 32))
    taps = nested.count("short_conv_kernel_size", fields.count("linear_conv_kernel_dim", 4, least=2), least=2)
    delta = DeltaRule(kind="kda", num_keys=heads, num_values=heads, key_dim=size, value_dim=size, taps=taps)
    experts = grouped_experts(
        fields,
        num_experts=fields.count("num_experts", 256),
        top_k=fields.count("num_experts_per_token", 8),
        num_shared=fields.count("num_shared_experts", 1, least=0),
        normalise=fields.flag("moe_renormalize", True),
        scale=fields.number("routed_scaling_factor", 2.446),
        groups=fields.count("num_expert_group", 1),
        top_groups=fields.count("topk_group", 1),
        latent=fields.count("routed_expert_hidden_size", 0, least=0),
    )
    latent = msgspec.structs.replace(
        latent_of(fields, query_rank=0), rotated=False, gated=fields.flag("mla_use_output_gate", False)
    )
    mixers = hybrid_mixers(fields, _kimi_types(fields, nested), delta, latent)
    return model_of(
        fields, mixers, mlps_of(fields, sparse_layers(fields, 1), experts), max_length=1 << 20, norm_eps=1e-5
    )


def _kimi_types(fields: Fields, nested: Fields) -> Sequence[str]:
    """The kind of each layer; published files list the numbers of each kind's layers, from 1."""
    num_layers = num_layers_of(fields)
    full = nested.layer_numbers("full_attn_layers", 1, num_layers)
    linear = nested.layer_numbers("kda_layers", 1, num_layers)
    stated = fields.each_layer("layer_types", num_layers, MIXERS)
    if stated:
        return stated
    if not full and not linear:
        return [MIXERS[index > 0 and index % 4 == 0] for index in range(num_layers)]
    if sorted(full + linear) != list(range(1, num_layers + 1)):
        fields.refuse(f"'full_attn_layers' and 'kda_layers' must name each of {num_layers} layers once")
    return [MIXERS[number in full] for number in range(1, num_layers + 1)]


# ---- families that are only priced


def _opt(fields: Fields) -> ModelSpec:
    mlp = Dense(fields.count("ffn_dim"), bias=True, matrices=2)
    return _priced_model(fields, attention_of(fields, qkv_bias=True, output_bias=True), mlp)


def _mixtral(fields: Fields) -> ModelSpec:
    window = fields.count("sliding_window", 0, least=0)
    return _priced_model(fields, attention_of(fields, window=window), _local_experts(fields, "softmax"))


def _minimax(fields: Fields) -> ModelSpec:
    return _priced_model(fields, attention_of(fields), _local_experts(fields, "sigmoid"))


def _gpt_oss(fields: Fields) -> ModelSpec:
    full, window = attention_of(fields), fields.count("sliding_window")
    types = fields.each_layer("layer_types", num_layers_of(fields), WINDOWS)
    if types is None:
        fields.refuse("the field 'layer_types' is missing")
    windowed = msgspec.structs.replace(full, window=window)
    mixers = [windowed if kind == "sliding_attention" else full for kind in types]
    return model_of(fields, mixers, [_local_experts(fields, "softmax")] * len(mixers))


def _qwen3_moe(fields: Fields) -> ModelSpec:
    shared = fields.count("shared_expert_intermediate_size", 0, least=0)
    experts = experts_of(fields, "num_experts", "softmax", shared_width=shared)
    mlps = mlps_of(fields, qwen_sparse_layers(fields, experts), experts)
    return model_of(fields, [qwen3_attention(fields, None)] * len(mlps), mlps)


def _mimo(fields: Fields) -> ModelSpec:
    """MiMo-V2-Flash: `hybrid_layer_pattern` has a 1 for a windowed layer, whose heads have fields of their own."""
    num_layers = num_layers_of(fields)
    full = attention_of(fields)
    full = msgspec.structs.replace(full, value_dim=fields.count("v_head_dim", full.head_dim))
    windowed = Attention(
        num_heads=fields.count("swa_num_attention_heads", full.num_heads),
        num_kv_heads=fields.count("swa_num_key_value_heads", full.num_kv_heads),
        head_dim=fields.count("swa_head_dim", full.head_dim),
        value_dim=fields.count("swa_v_head_dim", full.value_dim),
        window=fields.count("sliding_window"),
    )
    pattern, sparse = (
        fields.each_layer(name, num_layers, (0, 1)) for name in ("hybrid_layer_pattern", "moe_layer_freq")
    )
    if pattern is None or sparse is None:
        fields.refuse("the fields 'hybrid_layer_pattern' and 'moe_layer_freq' are needed")
    mixers = [windowed if each else full for each in pattern]
    return model_of(fields, mixers, mlps_of(fields, sparse, experts_of(fields, "n_routed_experts", "sigmoid")))


def _bailing(fields: Fields) -> ModelSpec:
    """Ling and Ring 2.5: of each `layer_group_size` layers the last has latent attention, the others Lightning."""
    num_layers, group = num_layers_of(fields), fields.count("layer_group_size")
    if num_layers % group:
        fields.refuse(f"'layer_group_size' is {group}; it must divide {num_layers} layers")
    full, heads = latent_of(fields, query_rank=0), fields.count("num_attention_heads")
    recurrent = Lightning(heads, fields.count("head_dim", max(1, fields.count("hidden_size") // heads)))
    width = fields.count("moe_shared_expert_intermediate_size", fields.count("moe_intermediate_size"))
    shared = fields.count("num_shared_experts", 0, least=0) * width
    experts = experts_of(fields, "num_experts", "sigmoid", shared_width=shared)
    mixers = ([recurrent] * (group - 1) + [full]) * (num_layers // group)
    return model_of(fields, mixers, mlps_of(fields, sparse_layers(fields, 0), experts))


def _priced_model(fields: Fields, mixer: Mixer, mlp: Mlp) -> ModelSpec:
    """A model whose layers are all alike."""
    num_layers = num_layers_of(fields)
    return model_of(fields, [mixer] * num_layers, [mlp] * num_layers)


def _local_experts(fields: Fields, scores: str) -> Experts:
    return experts_of(fields, "num_local_experts", scores, "intermediate_size")


FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "OPTForCausalLM": _opt,
    "MixtralForCausalLM": _mixtral,
    "GptOssForCausalLM": _gpt_oss,
    "MiniMaxM2ForCausalLM": _minimax,
    "MiMoV2FlashForCausalLM": _mimo,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_next,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "KimiK2ForCausalLM": _deepseek_v3,
    "KimiK25ForConditionalGeneration": _deepseek_v3,
    "KimiLinearForCausalLM": _kimi_linear,
    "KimiK3ForConditionalGeneration": _kimi_linear,
    "BailingMoeV2_5ForCausalLM": _bailing,
}
