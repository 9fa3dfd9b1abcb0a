"""Parts of a `config.json` that several families of models have in common."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from isthmus.core.models.fields import Fields
from isthmus.core.models.spec import (
    Attention,
    DeltaRule,
    Dense,
    Experts,
    LatentAttention,
    LayerSpec,
    Lightning,
    ModelSpec,
    RopeSpec,
)

_DEFAULT_WINDOW = 4096
MIXERS = ("linear_attention", "full_attention")
WINDOWS = ("sliding_attention", "full_attention")

Mixer = Attention | LatentAttention | DeltaRule | Lightning
Mlp = Dense | Experts


def num_layers_of(fields: Fields) -> int:
    return fields.count("num_hidden_layers")


def dense_model(fields: Fields, attention: Attention, mlp: Dense, windows: list[int]) -> ModelSpec:
    rope = fields.rope(int(attention.head_dim * fields.rotary_share(1.0)), fields.max_length(2048))
    mixers = [msgspec.structs.replace(attention, window=window) for window in windows]
    return model_of(fields, mixers, [mlp] * len(mixers), rope)


def model_of(
    fields: Fields,
    mixers: Sequence[Mixer],
    mlps: Sequence[Mlp],
    rope: RopeSpec | None = None,
    *,
    max_length: int = 2048,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> ModelSpec:
    """A model of these layers. `max_length` and `norm_eps`: used where the file has none."""
    return ModelSpec(
        architecture=fields.architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        max_length=fields.max_length(max_length),
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        rope=rope,
        layers=tuple(LayerSpec(*parts) for parts in zip(mixers, mlps, strict=True)),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=fields.dtype("float32"),
        norm_offset=norm_offset,
    )


def attention_of(
    fields: Fields,
    *,
    head_dim: int | None = None,
    window: int = 0,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    gated: bool = False,
) -> Attention:
    """Attention of the file's heads. `head_dim`: used where the file has none; else hidden size over heads."""
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


def qwen3_attention(fields: Fields, head_dim: int | None, *, gated: bool = False) -> Attention:
    bias = fields.flag("attention_bias", False)
    return attention_of(fields, head_dim=head_dim, qkv_bias=bias, output_bias=bias, qk_norm=True, gated=gated)


def latent_of(fields: Fields, *, query_rank: int) -> LatentAttention:
    """Latent attention (MLA). `query_rank`: used where the field is absent; null means none."""
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


def dense_of(fields: Fields, *, bias: bool = False) -> Dense:
    return Dense(fields.count("intermediate_size"), bias)


def experts_of(
    fields: Fields, total: str, scores: str, width: str = "moe_intermediate_size", *, shared_width: int = 0
) -> Experts:
    """A mixture of experts. `total`, `width`: the family's field names of their number and width."""
    return Experts(
        num_experts=fields.count(total),
        top_k=fields.count("num_experts_per_tok"),
        width=fields.count(width),
        shared_width=shared_width,
        scores=scores,
        normalise=True,
    )


def grouped_experts(
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
    """A mixture of experts with DeepSeek-V3's choice by groups (`noaux_tc`)."""
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


def mlps_of(fields: Fields, sparse: Sequence[bool], experts: Experts) -> list[Mlp]:
    """The MLP of each layer. `sparse`: which layers have experts."""
    if any(sparse) and experts.top_k > experts.num_experts:
        fields.refuse(f"{experts.top_k} of {experts.num_experts} experts cannot be chosen")
    dense = None if all(sparse) else dense_of(fields)
    return [dense if dense is not None and not each else experts for each in sparse]


def sparse_layers(fields: Fields, num_dense: int) -> list[bool]:
    """Which layers have experts. `num_dense`: number of first layers without, if the file does not say."""
    num_layers = num_layers_of(fields)
    kinds = fields.each_layer("mlp_layer_types", num_layers, ("dense", "sparse"))
    first = fields.count("first_k_dense_replace", num_dense, least=0)
    return [kind == "sparse" for kind in kinds] if kinds else [at >= first for at in range(num_layers)]


def qwen_sparse_layers(fields: Fields, experts: Experts) -> list[bool]:
    num_layers, step = num_layers_of(fields), fields.count("decoder_sparse_step", 1)
    plain = fields.layer_numbers("mlp_only_layers", 0, num_layers - 1)
    return [
        experts.num_experts > 0 and index not in plain and (index + 1) % step == 0
        for index in range(num_layers)
    ]


def hybrid_mixers(
    fields: Fields, types: Sequence[str], delta: DeltaRule, attention: Attention | LatentAttention
) -> list[Mixer]:
    if "full_attention" not in types:
        fields.refuse("a model without any full_attention layer is not supported")
    return [delta if kind == "linear_attention" else attention for kind in types]


def window_of(fields: Fields) -> int:
    """The sliding window; null means none."""
    return fields.count("sliding_window", _DEFAULT_WINDOW) if fields.states("sliding_window", True) else 0


def qwen_windows(fields: Fields) -> list[int]:
    """The sliding window of each layer: with `use_sliding_window`, of those from `max_window_layers` on."""
    num_layers, window = num_layers_of(fields), window_of(fields)
    if not fields.flag("use_sliding_window", False) or not window:
        return [0] * num_layers
    types = fields.each_layer("layer_types", num_layers, WINDOWS)
    if types:
        return [window if kind == "sliding_attention" else 0 for kind in types]
    first = fields.count("max_window_layers", 28, least=0)
    return [window if layer >= first else 0 for layer in range(num_layers)]
