"""How each known family of models writes its `config.json`: one function a family.

Fields absent from the file have the value that the family's Hugging Face class assumes. Of a family that the engine
does not run, only what its costs need is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from isthmus.models.fields import ROPE_TYPES, Fields
from isthmus.models.spec import (
    Attention,
    Delta,
    Dense,
    Experts,
    LatentAttention,
    LayerSpec,
    Lightning,
    ModelSpec,
    RopeSpec,
)

_DEFAULT_WINDOW = 4096
_MIXERS = ("linear_attention", "full_attention")
_WINDOWS = ("sliding_attention", "full_attention")


def read_model(
    config: Mapping[str, Any],
    where: str = "config.json",
    known: Collection[str] | None = None,
    otherwise: str = "",
) -> ModelSpec:
    """The model of a parsed `config.json`; `where` is how messages name the file.

    Raises ModelError naming a field that is wrong, or the architecture when it is not one of `known` (all of FAMILIES
    by default), with what to do `otherwise`.
    """
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
    attention = _attention(fields, qkv_bias=bias, output_bias=bias)
    mlp = _dense(fields, bias=fields.flag("mlp_bias", False))
    return _dense_model(fields, attention, mlp, [0] * _num_layers(fields))


def _mistral(fields: Fields) -> ModelSpec:
    windows = [_window(fields)] * _num_layers(fields)
    return _dense_model(fields, _attention(fields), _dense(fields), windows)


def _qwen2(fields: Fields) -> ModelSpec:
    return _dense_model(fields, _attention(fields, qkv_bias=True), _dense(fields), _qwen_windows(fields))


def _qwen3(fields: Fields) -> ModelSpec:
    return _dense_model(fields, _qwen3_attention(fields, 128), _dense(fields), _qwen_windows(fields))


def _qwen3_next(fields: Fields) -> ModelSpec:
    """Qwen3-Next and Qwen3.5: Gated DeltaNet layers with a gated full-attention layer every few."""
    num_layers = _num_layers(fields)
    attention = _qwen3_attention(fields, 256, gated=True)
    delta = Delta(
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
    types = fields.each_layer("layer_types", num_layers, _MIXERS) or [
        _MIXERS[(index + 1) % every == 0] for index in range(num_layers)
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
    return _model(
        fields,
        _hybrid_mixers(fields, types, delta, attention),
        _mlps(fields, _qwen_sparse(fields, experts), experts),
        fields.rope(dim, fields.max_length(32768)),
        norm_offset=1.0,
        max_length=32768,
    )


def _deepseek_v3(fields: Fields) -> ModelSpec:
    rope = fields.rope(fields.count("qk_rope_head_dim", 64), fields.max_length(4096))
    latent = _latent(fields, query_rank=1536)
    latent = msgspec.structs.replace(
        latent,
        interleaved=fields.flag("rope_interleave", True),
        scale=latent.scale * _yarn_correction(rope),
    )
    experts = _grouped_experts(
        fields,
        num_experts=fields.count("n_routed_experts", 256),
        top_k=fields.count("num_experts_per_tok", 8),
        num_shared=fields.count("n_shared_experts", 1, least=0),
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 2.5),
        groups=fields.count("n_group", 8),
        top_groups=fields.count("topk_group", 4),
    )
    mlps = _mlps(fields, _sparse(fields, 3), experts)
    return _model(fields, [latent] * len(mlps), mlps, rope, max_length=4096)


def _kimi_linear(fields: Fields) -> ModelSpec:
    """Kimi Linear and Kimi K3; the latter gates its latent attention and routes in a smaller latent space.

    Published configurations say what is recurrent in `linear_attn_config`; those that transformers saves, beside the
    rest.
    """
    nested = fields.nested("linear_attn_config")
    size = nested.count("head_dim", fields.count("linear_head_dim", 128))
    heads = nested.count("num_heads", fields.count("linear_num_heads", 32))
    taps = nested.count("short_conv_kernel_size", fields.count("linear_conv_kernel_dim", 4, least=2), least=2)
    delta = Delta(kind="kda", num_keys=heads, num_values=heads, key_dim=size, value_dim=size, taps=taps)
    experts = _grouped_experts(
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
        _latent(fields, query_rank=0), rotated=False, gated=fields.flag("mla_use_output_gate", False)
    )
    mixers = _hybrid_mixers(fields, _kimi_types(fields, nested), delta, latent)
    return _model(fields, mixers, _mlps(fields, _sparse(fields, 1), experts), max_length=1 << 20, norm_eps=1e-5)


# ---- families that are only priced


def _opt(fields: Fields) -> ModelSpec:
    mlp = Dense(fields.count("ffn_dim"), bias=True, matrices=2)
    return _priced(fields, _attention(fields, qkv_bias=True, output_bias=True), mlp)


def _mixtral(fields: Fields) -> ModelSpec:
    window = fields.count("sliding_window", 0, least=0)
    return _priced(fields, _attention(fields, window=window), _local_experts(fields, "softmax"))


def _minimax(fields: Fields) -> ModelSpec:
    return _priced(fields, _attention(fields), _local_experts(fields, "sigmoid"))


def _gpt_oss(fields: Fields) -> ModelSpec:
    full, window = _attention(fields), fields.count("sliding_window")
    types = fields.each_layer("layer_types", _num_layers(fields), _WINDOWS)
    if types is None:
        fields.refuse("the field 'layer_types' is missing")
    windowed = msgspec.structs.replace(full, window=window)
    mixers = [windowed if kind == "sliding_attention" else full for kind in types]
    return _model(fields, mixers, [_local_experts(fields, "softmax")] * len(mixers))


def _qwen3_moe(fields: Fields) -> ModelSpec:
    experts = Experts(
        num_experts=fields.count("num_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=fields.count("moe_intermediate_size"),
        shared_width=fields.count("shared_expert_intermediate_size", 0, least=0),
        scores="softmax",
        normalise=fields.flag("norm_topk_prob", False),
    )
    mlps = _mlps(fields, _qwen_sparse(fields, experts), experts)
    return _model(fields, [_qwen3_attention(fields, None)] * len(mlps), mlps)


def _mimo(fields: Fields) -> ModelSpec:
    """MiMo-V2-Flash: `hybrid_layer_pattern` has a 1 for a windowed layer, whose heads have fields of their own."""
    num_layers = _num_layers(fields)
    full = _attention(fields)
    full = msgspec.structs.replace(full, value_dim=fields.count("v_head_dim", full.head_dim))
    windowed = Attention(
        num_heads=fields.count("swa_num_attention_heads", full.num_heads),
        num_kv_heads=fields.count("swa_num_key_value_heads", full.num_kv_heads),
        head_dim=fields.count("swa_head_dim", full.head_dim),
        value_dim=fields.count("swa_v_head_dim", full.value_dim),
        window=fields.count("sliding_window"),
    )
    experts = Experts(
        num_experts=fields.count("n_routed_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=fields.count("moe_intermediate_size"),
        shared_width=0,
        scores="sigmoid",
        normalise=True,
    )
    pattern, sparse = (
        fields.each_layer(name, num_layers, (0, 1)) for name in ("hybrid_layer_pattern", "moe_layer_freq")
    )
    if pattern is None or sparse is None:
        fields.refuse("the fields 'hybrid_layer_pattern' and 'moe_layer_freq' are needed")
    mixers = [windowed if each else full for each in pattern]
    return _model(fields, mixers, _mlps(fields, list(map(bool, sparse)), experts))


def _bailing(fields: Fields) -> ModelSpec:
    """Ling and Ring 2.5: of each `layer_group_size` layers the last has latent attention, the others Lightning."""
    num_layers, group = _num_layers(fields), fields.count("layer_group_size")
    if num_layers % group:
        fields.refuse(f"'layer_group_size' is {group}; it must divide {num_layers} layers")
    full, heads = _latent(fields, query_rank=0), fields.count("num_attention_heads")
    recurrent = Lightning(heads, fields.count("head_dim", max(1, fields.count("hidden_size") // heads)))
    width = fields.count("moe_intermediate_size")
    shared = fields.count("moe_shared_expert_intermediate_size", width)
    experts = Experts(
        num_experts=fields.count("num_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=width,
        shared_width=fields.count("num_shared_experts", 0, least=0) * shared,
        scores="sigmoid",
        normalise=True,
    )
    mixers = ([recurrent] * (group - 1) + [full]) * (num_layers // group)
    return _model(fields, mixers, _mlps(fields, _sparse(fields, 0), experts))


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


# ---- parts of more than one family

Mixer = Attention | LatentAttention | Delta | Lightning
Mlp = Dense | Experts


def _num_layers(fields: Fields) -> int:
    return fields.count("num_hidden_layers")


def _dense_model(fields: Fields, attention: Attention, mlp: Dense, windows: list[int]) -> ModelSpec:
    rope = fields.rope(int(attention.head_dim * fields.rotary_share(1.0)), fields.max_length(2048))
    mixers = [msgspec.structs.replace(attention, window=window) for window in windows]
    return _model(fields, mixers, [mlp] * len(mixers), rope)


def _priced(fields: Fields, mixer: Mixer, mlp: Mlp) -> ModelSpec:
    """All layers alike."""
    num_layers = _num_layers(fields)
    return _model(fields, [mixer] * num_layers, [mlp] * num_layers)


def _model(
    fields: Fields,
    mixers: Sequence[Mixer],
    mlps: Sequence[Mlp],
    rope: RopeSpec | None = None,
    *,
    max_length: int = 2048,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> ModelSpec:
    """`max_length` and `norm_eps`: where the file has none."""
    return ModelSpec(
        architecture=fields.architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        max_length=fields.max_length(max_length),
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        rope=rope,
        layers=tuple(map(LayerSpec, mixers, mlps)),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=fields.dtype("float32"),
        norm_offset=norm_offset,
    )


def _attention(
    fields: Fields,
    *,
    head_dim: int | None = None,
    window: int = 0,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    gated: bool = False,
) -> Attention:
    """`head_dim`: where the file has none; hidden size over heads without it."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    size = fields.count("head_dim", head_dim or max(1, hidden // heads))
    if heads % kv_heads or size % 2:
        fields.refuse(f"{heads} heads over {kv_heads} KV heads of size {size} do not fit")
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        value_dim=size,
        window=window,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        gated=gated,
    )


def _qwen3_attention(fields: Fields, head_dim: int | None, *, gated: bool = False) -> Attention:
    bias = fields.flag("attention_bias", False)
    return _attention(fields, head_dim=head_dim, qkv_bias=bias, output_bias=bias, qk_norm=True, gated=gated)


def _latent(fields: Fields, *, query_rank: int) -> LatentAttention:
    """`query_rank`: where the file does not name it; a null there means none."""
    heads = fields.count("num_attention_heads")
    if fields.count("num_key_value_heads", heads) != heads:
        fields.refuse("latent attention with fewer KV heads than heads is not supported")
    nope_dim, rope_dim = fields.count("qk_nope_head_dim", 128), fields.count("qk_rope_head_dim", 64)
    if rope_dim % 2:
        fields.refuse(f"'qk_rope_head_dim' must be even, not {rope_dim}")
    low_rank = fields.states("q_lora_rank", query_rank > 0)
    return LatentAttention(
        num_heads=heads,
        rank=fields.count("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.count("v_head_dim", 128),
        scale=(nope_dim + rope_dim) ** -0.5,
        query_rank=fields.count("q_lora_rank", query_rank) if low_rank else 0,
        bias=fields.flag("attention_bias", False),
    )


def _yarn_correction(rope: RopeSpec) -> float:
    """What DeepSeek multiplies the scores with beside YaRN's factor on cosines and sines: the square of the latter
    as it were with `mscale_all_dim` alone."""
    weight = rope.options.get("mscale_all_dim")
    factor = rope.options.get("factor", 1.0)
    if rope.kind == "default" or rope.kind not in ROPE_TYPES or not weight or factor <= 1:
        return 1.0
    return float((0.1 * weight * math.log(factor) + 1.0) ** 2)


def _dense(fields: Fields, *, bias: bool = False) -> Dense:
    return Dense(fields.count("intermediate_size"), bias)


def _local_experts(fields: Fields, scores: str) -> Experts:
    return Experts(
        num_experts=fields.count("num_local_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=fields.count("intermediate_size"),
        shared_width=0,
        scores=scores,
        normalise=True,
    )


def _grouped_experts(
    fields: Fields,
    *,
    num_experts: int,
    top_k: int,
    num_shared: int,
    normalise: bool,
    scale: float,
    groups: int,
    top_groups: int,
    latent: int = 0,
) -> Experts:
    """DeepSeek-V3's choice of experts (`noaux_tc`)."""
    width = fields.count("moe_intermediate_size")
    per_group = num_experts // groups
    if num_experts % groups or top_groups > groups or top_k > top_groups * per_group or per_group < 2:
        fields.refuse(f"{top_k} of {num_experts} experts from {top_groups} of {groups} groups cannot be chosen")
    return Experts(
        num_experts=num_experts,
        top_k=top_k,
        width=width,
        shared_width=num_shared * width,
        scores="sigmoid",
        normalise=normalise,
        scale=scale,
        groups=groups,
        top_groups=top_groups,
        latent=latent,
    )


def _mlps(fields: Fields, sparse: Sequence[bool], experts: Experts) -> list[Mlp]:
    if any(sparse) and experts.top_k > experts.num_experts:
        fields.refuse(f"{experts.top_k} of {experts.num_experts} experts cannot be chosen")
    dense = None if all(sparse) else _dense(fields)
    return [dense if dense is not None and not each else experts for each in sparse]


def _sparse(fields: Fields, num_dense: int) -> list[bool]:
    """Which layers have experts; `num_dense`: so many first layers have none where the file does not say."""
    num_layers = _num_layers(fields)
    kinds = fields.each_layer("mlp_layer_types", num_layers, ("dense", "sparse"))
    first = fields.count("first_k_dense_replace", num_dense, least=0)
    return [kind == "sparse" for kind in kinds] if kinds else [at >= first for at in range(num_layers)]


def _qwen_sparse(fields: Fields, experts: Experts) -> list[bool]:
    num_layers, step = _num_layers(fields), fields.count("decoder_sparse_step", 1)
    plain = fields.layer_numbers("mlp_only_layers", 0, num_layers - 1)
    return [
        experts.num_experts > 0 and index not in plain and (index + 1) % step == 0
        for index in range(num_layers)
    ]


def _hybrid_mixers(
    fields: Fields, types: Sequence[str], delta: Delta, attention: Attention | LatentAttention
) -> list[Mixer]:
    if "full_attention" not in types:
        fields.refuse("a model without any full_attention layer is not supported")
    return [delta if kind == "linear_attention" else attention for kind in types]


def _kimi_types(fields: Fields, nested: Fields) -> Sequence[str]:
    """The published files number the layers of each kind from 1."""
    num_layers = _num_layers(fields)
    full = nested.layer_numbers("full_attn_layers", 1, num_layers)
    linear = nested.layer_numbers("kda_layers", 1, num_layers)
    stated = fields.each_layer("layer_types", num_layers, _MIXERS)
    if stated:
        return stated
    if not full and not linear:
        return [_MIXERS[index > 0 and index % 4 == 0] for index in range(num_layers)]
    if sorted(full + linear) != list(range(1, num_layers + 1)):
        fields.refuse(f"'full_attn_layers' and 'kda_layers' must name each of {num_layers} layers once")
    return [_MIXERS[number in full] for number in range(1, num_layers + 1)]


def _window(fields: Fields) -> int:
    """A null means none."""
    return fields.count("sliding_window", _DEFAULT_WINDOW) if fields.states("sliding_window", True) else 0


def _qwen_windows(fields: Fields) -> list[int]:
    """Only where `use_sliding_window` says so, from layer `max_window_layers` on."""
    num_layers, window = _num_layers(fields), _window(fields)
    if not fields.flag("use_sliding_window", False) or not window:
        return [0] * num_layers
    types = fields.each_layer("layer_types", num_layers, _WINDOWS)
    if types:
        return [window if kind == "sliding_attention" else 0 for kind in types]
    first = fields.count("max_window_layers", 28, least=0)
    return [window if layer >= first else 0 for layer in range(num_layers)]
