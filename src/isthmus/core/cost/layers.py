"""What each kind of layer of a model adds to its facts."""

from __future__ import annotations

from isthmus.core.models import Attention, Delta, Dense, Experts, LatentAttention, Lightning

# A windowed layer is counted as a fixed state when its window is at most this; a longer one as full attention,
# since the contexts served are then mostly inside the window. Both err on the slow side.
SHORT_WINDOW = 1024
_DELTA_CHUNK = 64  # tokens the linear-attention kernels work on at a time (Kimi Linear, section on complexity)
_STATE_BYTES = 4  # recurrent states are kept in float32 by SGLang and vLLM
_CONV_BYTES = 2  # convolution windows in bfloat16

Amounts = dict[str, int]
"""By names of ModelFacts."""


def mixer_amounts(mixer: Attention | LatentAttention | Delta | Lightning, hidden: int) -> Amounts:
    match mixer:
        case Attention():
            return _attention(mixer, hidden)
        case LatentAttention():
            return _latent_attention(mixer, hidden)
        case Delta():
            return _delta(mixer, hidden)
        case Lightning():
            return _lightning(mixer, hidden)


def mlp_amounts(mlp: Dense | Experts, hidden: int) -> Amounts:
    """Of experts: what every token goes through, the router, and the way into a smaller space and back."""
    if isinstance(mlp, Dense):
        return {"dense_params": mlp.matrices * hidden * mlp.width}
    return {"dense_params": hidden * (3 * mlp.shared_width + mlp.num_experts + 2 * mlp.latent)}


def is_short(mixer: Attention) -> bool:
    """Whether what it keeps of a sequence does not grow."""
    return 0 < mixer.window <= SHORT_WINDOW


def _attention(mixer: Attention, hidden: int) -> Amounts:
    """Grouped-query attention; a gate is projected, too, of the outputs' size."""
    queries, size, value_size = mixer.num_heads, mixer.head_dim, mixer.value_dim
    kv_elements = mixer.num_kv_heads * (size + value_size)
    outputs = queries * value_size * (2 if mixer.gated else 1)
    params = {"dense_params": hidden * (queries * size + kv_elements + outputs)}
    pair_flops = 2 * queries * (size + value_size)
    if is_short(mixer):
        return params | {
            "window_elements": kv_elements * mixer.window,
            "token_flops": pair_flops * mixer.window,
        }
    asks = {"query_elements": queries * max(size, value_size), "query_heads": queries, "kv_layers": 1}
    return params | {"kv_elements": kv_elements, "attention_flops": pair_flops} | asks


def _latent_attention(mixer: LatentAttention, hidden: int) -> Amounts:
    """One compressed KV vector for all heads (DeepSeek-V2, section 2.1)."""
    heads, rank, query_rank = mixer.num_heads, mixer.rank, mixer.query_rank
    nope, rope, value = mixer.nope_dim, mixer.rope_dim, mixer.value_dim
    queries = heads * (nope + rope)
    params = query_rank * (hidden + queries) if query_rank else hidden * queries
    params += hidden * (rank + rope) + rank * heads * (nope + value)
    params += heads * value * hidden * (2 if mixer.gated else 1)
    return {
        "dense_params": params,
        "kv_elements": mixer.kept_dim,
        "attention_flops": 2 * heads * (nope + rope + value),
        "query_elements": heads * mixer.kept_dim,
        "query_heads": heads,
        "kv_layers": 1,
    }


def _delta(mixer: Delta, hidden: int) -> Amounts:
    """Gated DeltaNet and Kimi Delta Attention: a fixed state, work linear in the length.

    FLOP per token and value head: 6 d^2 + 3 C d + C^2 (Kimi Linear, equation 13), with the product of key and
    value size for d^2 and their mean for d. State: one matrix a value head of key size by value size, and the
    last inputs of the short convolution.
    """
    values, size, value_size = mixer.num_values, mixer.key_dim, mixer.value_dim
    chunked = 3 * _DELTA_CHUNK * (size + value_size) // 2 + _DELTA_CHUNK**2
    return {
        "dense_params": hidden * (mixer.channels + 2 * values * value_size),  # in, output gate, out
        "token_flops": values * (6 * size * value_size + chunked),
        "state_bytes": mixer.matrix_numbers * _STATE_BYTES + (mixer.taps - 1) * mixer.channels * _CONV_BYTES,
    }


def _lightning(mixer: Lightning, hidden: int) -> Amounts:
    """FLOP per token and head: 4 d^2 to update and read the d x d state, 4 C d within a chunk."""
    heads, size = mixer.num_heads, mixer.head_dim
    return {
        "dense_params": 5 * hidden * heads * size,  # in, output gate, out
        "token_flops": heads * (4 * size * size + 4 * _DELTA_CHUNK * size),
        "state_bytes": heads * size * size * _STATE_BYTES,
    }
