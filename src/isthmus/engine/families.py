"""How each supported family of models writes its `config.json`: one function a family. Loads no torch.

Fields absent from the file have the value that the family's Hugging Face class assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from isthmus.engine.fields import Fields
from isthmus.engine.shapes import (
    Attention,
    Delta,
    Dense,
    Experts,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)

_DEFAULT_WINDOW = 4096


def _llama(fields: Fields) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    attention = _attention(fields, qkv_bias=bias, output_bias=bias)
    mlp = _dense(fields, bias=fields.flag("mlp_bias", False))
    return _dense_model(fields, "llama", attention, mlp, [0] * fields.count("num_hidden_layers"))


def _mistral(fields: Fields) -> ModelSpec:
    window = fields.count("sliding_window", _DEFAULT_WINDOW) if fields.states("sliding_window", True) else 0
    windows = [window] * fields.count("num_hidden_layers")
    return _dense_model(fields, "mistral", _attention(fields), _dense(fields), windows)


def _qwen2(fields: Fields) -> ModelSpec:
    attention = _attention(fields, qkv_bias=True)
    return _dense_model(fields, "qwen2", attention, _dense(fields), _qwen_windows(fields))


def _qwen3(fields: Fields) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    attention = _attention(fields, head_dim=128, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return _dense_model(fields, "qwen3", attention, _dense(fields), _qwen_windows(fields))


def _qwen3_next(fields: Fields) -> ModelSpec:
    num_layers = fields.count("num_hidden_layers")
    bias = fields.flag("attention_bias", False)
    attention = _attention(fields, head_dim=256, qkv_bias=bias, output_bias=bias, qk_norm=True, gated=True)
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
    types = fields.words("layer_types", num_layers, _LAYER_TYPES) or [
        _LAYER_TYPES[(index + 1) % every == 0] for index in range(num_layers)
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
    step = fields.count("decoder_sparse_step", 1)
    plain = fields.layer_numbers("mlp_only_layers", 0, num_layers - 1)
    sparse = [
        experts.num_experts > 0 and index not in plain and (index + 1) % step == 0
        for index in range(num_layers)
    ]
    dim = int(attention.head_dim * fields.rotary_share(0.25))
    if dim % 2 or not dim:
        fields.refuse(f"partial_rotary_factor rotates {dim} numbers of each head, which make no pairs")
    return _model(
        fields,
        "qwen3_next",
        fields.rope(dim, _max_length(fields, 32768)),
        _hybrid_layers(fields, types, delta, attention, sparse, experts),
        norm_offset=1.0,
        max_length=32768,
    )


def _deepseek_v3(fields: Fields) -> ModelSpec:
    num_layers = fields.count("num_hidden_layers")
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    rope = fields.rope(fields.count("qk_rope_head_dim", 64), _max_length(fields, 4096))
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
    num_dense = fields.count("first_k_dense_replace", 3, least=0)
    layers = [
        LayerSpec(latent, _dense(fields) if index < num_dense else experts) for index in range(num_layers)
    ]
    return _model(fields, "deepseek_v3", rope, layers, max_length=4096)


def _kimi_linear(fields: Fields) -> ModelSpec:
    num_layers = fields.count("num_hidden_layers")
    fields.only("mla_use_nope", True)
    fields.only("moe_router_activation_func", "sigmoid")
    fields.only("moe_layer_freq", 1)
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
    )
    num_dense = fields.count("first_k_dense_replace", 1, least=0)
    kinds = fields.words("mlp_layer_types", num_layers, ("dense", "sparse"))
    sparse = [kind == "sparse" for kind in kinds] if kinds else [at >= num_dense for at in range(num_layers)]
    latent = msgspec.structs.replace(_latent(fields, query_rank=0), rotated=False)
    layers = _hybrid_layers(fields, _kimi_types(fields, nested), delta, latent, sparse, experts)
    return _model(fields, "kimi_linear", None, layers, max_length=1 << 20, norm_eps=1e-5)


FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3NextForCausalLM": _qwen3_next,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "KimiLinearForCausalLM": _kimi_linear,
}
_LAYER_TYPES = ("linear_attention", "full_attention")


# ---- parts of more than one family


def _dense_model(
    fields: Fields, family: str, attention: Attention, mlp: Dense, windows: list[int]
) -> ModelSpec:
    if fields.rotary_share(1.0) != 1.0:
        fields.refuse("partial_rotary_factor below 1 is not supported")
    rope = fields.rope(attention.head_dim, _max_length(fields, 2048))
    layers = [LayerSpec(msgspec.structs.replace(attention, window=window), mlp) for window in windows]
    return _model(fields, family, rope, layers, max_length=2048)


def _model(
    fields: Fields,
    family: str,
    rope: RopeSpec | None,
    layers: Sequence[LayerSpec],
    *,
    max_length: int,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> ModelSpec:
    """`max_length` and `norm_eps`: where the file has none."""
    return ModelSpec(
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        max_length=_max_length(fields, max_length),
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        rope=rope,
        layers=tuple(layers),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=fields.dtype(),
        norm_offset=norm_offset,
    )


def _max_length(fields: Fields, default: int) -> int:
    """Kimi-Linear's name for it comes second."""
    return fields.count("max_position_embeddings", fields.count("model_max_length", default))


def _attention(
    fields: Fields,
    *,
    head_dim: int | None = None,
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
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        gated=gated,
    )


def _latent(fields: Fields, *, query_rank: int) -> LatentAttention:
    """`query_rank`: where the file does not name it; a null there means none."""
    heads = fields.count("num_attention_heads")
    if fields.count("num_key_value_heads", heads) != heads:
        fields.refuse("latent attention with fewer KV heads than heads is not supported")
    nope_dim, rope_dim = fields.count("qk_nope_head_dim", 128), fields.count("qk_rope_head_dim", 64)
    if rope_dim % 2:
        fields.refuse(f"'qk_rope_head_dim' must be even, not {rope_dim}")
    return LatentAttention(
        num_heads=heads,
        rank=fields.count("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.count("v_head_dim", 128),
        scale=(nope_dim + rope_dim) ** -0.5,
        query_rank=fields.count("q_lora_rank", query_rank)
        if fields.states("q_lora_rank", query_rank > 0)
        else 0,
        bias=fields.flag("attention_bias", False),
    )


def _yarn_correction(rope: RopeSpec) -> float:
    """What DeepSeek multiplies the scores with beside YaRN's factor on cosines and sines: the square of the latter
    as it were with `mscale_all_dim` alone."""
    weight = rope.options.get("mscale_all_dim")
    factor = rope.options.get("factor", 1.0)
    if rope.kind == "default" or not weight or factor <= 1:
        return 1.0
    return float((0.1 * weight * math.log(factor) + 1.0) ** 2)


def _dense(fields: Fields, *, bias: bool = False) -> Dense:
    return Dense(fields.count("intermediate_size"), bias)


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
    )


def _hybrid_layers(
    fields: Fields,
    types: Sequence[str],
    delta: Delta,
    attention: Attention | LatentAttention,
    sparse: Sequence[bool],
    experts: Experts,
) -> list[LayerSpec]:
    if "full_attention" not in types:
        fields.refuse("a model without any full_attention layer is not supported")
    if any(sparse) and experts.top_k > experts.num_experts:
        fields.refuse(f"{experts.top_k} of {experts.num_experts} experts cannot be chosen")
    dense = Dense(0) if all(sparse) else _dense(fields)
    return [
        LayerSpec(delta if kind == "linear_attention" else attention, experts if has_experts else dense)
        for kind, has_experts in zip(types, sparse, strict=True)
    ]


def _kimi_types(fields: Fields, nested: Fields) -> Sequence[str]:
    """The published files number the layers of each kind from 1."""
    num_layers = fields.count("num_hidden_layers")
    full = nested.layer_numbers("full_attn_layers", 1, num_layers)
    linear = nested.layer_numbers("kda_layers", 1, num_layers)
    stated = fields.words("layer_types", num_layers, _LAYER_TYPES)
    if stated:
        return stated
    if not full and not linear:
        return [_LAYER_TYPES[index > 0 and index % 4 == 0] for index in range(num_layers)]
    if sorted(full + linear) != list(range(1, num_layers + 1)):
        fields.refuse(f"'full_attn_layers' and 'kda_layers' must name each of {num_layers} layers once")
    return [_LAYER_TYPES[number in full] for number in range(1, num_layers + 1)]


def _qwen_windows(fields: Fields) -> list[int]:
    num_layers = fields.count("num_hidden_layers")
    window = fields.count("sliding_window", _DEFAULT_WINDOW) if fields.states("sliding_window", True) else 0
    if not fields.flag("use_sliding_window", False) or not window:
        return [0] * num_layers
    types = fields.words("layer_types", num_layers, ("sliding_attention", "full_attention"))
    if types:
        return [window if kind == "sliding_attention" else 0 for kind in types]
    first = fields.count("max_window_layers", 28, least=0)
    return [window if layer >= first else 0 for layer in range(num_layers)]
