"""The description of a model in numbers, from which costs, weights, network and KV layout are built.

A model is a list of layers; a layer is a mixer (what tokens exchange) and an MLP, each of one of a few kinds.
"""

from __future__ import annotations

from typing import Any

import msgspec


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary embedding: `kind` as the file names it; `options` are the variant's own numbers. `dim`: the numbers of
    each head that are rotated."""

    dim: int
    theta: float = 10_000.0
    kind: str = "default"
    options: dict[str, Any] = {}


class Attention(msgspec.Struct, frozen=True, tag="attention"):
    """Attention over K and V of each KV head. `head_dim`: of queries and keys, `value_dim`: of values.

    `window`: sliding, in tokens, 0 for none. `gated`: the output of each head is multiplied with the sigmoid of a
    second output of the query projection.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    gated: bool = False


class LatentAttention(msgspec.Struct, frozen=True, tag="latent"):
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Of a token are kept `rank` numbers, which keys and values of all heads are projected from, and `rope_dim` numbers
    of the keys that all heads share. `query_rank`: of the queries' own low-rank projection, 0 for none. `rotated`:
    whether the shared numbers carry positions; `interleaved`: their pairs stand side by side in the weights. `gated`:
    an output gate of the values' size is projected, too.
    """

    num_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    query_rank: int = 0
    bias: bool = False
    rotated: bool = True
    interleaved: bool = False
    gated: bool = False

    @property
    def kept_dim(self) -> int:
        return self.rank + self.rope_dim


class DeltaRule(msgspec.Struct, frozen=True, tag="delta"):
    """A gated delta rule: Gated DeltaNet ("gdn") or Kimi Delta Attention ("kda"). `taps` of the convolution."""

    kind: str
    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries and keys, of one size, and values."""
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim

    @property
    def matrix_numbers(self) -> int:
        """Numbers in the matrices of one sequence's state, one for each value head."""
        return self.num_values * self.key_dim * self.value_dim

    @property
    def state_numbers(self) -> int:
        """Numbers in one sequence's state: the window of the convolution, then the matrices."""
        return (self.taps - 1) * self.channels + self.matrix_numbers


class Lightning(msgspec.Struct, frozen=True, tag="lightning"):
    """Linear attention with a decay for each head, and no convolution."""

    num_heads: int
    head_dim: int


class Dense(msgspec.Struct, frozen=True, tag="dense"):
    """The gated MLP: down(silu(gate) * up); with two `matrices` there is no gate."""

    width: int
    bias: bool = False
    matrices: int = 3


class Experts(msgspec.Struct, frozen=True, tag="experts"):
    """A mixture of experts of `width` each, and one of `shared_width` for every token (0: none).

    `scores`: "softmax" over all experts (Qwen3-Next), or "sigmoid" of each (DeepSeek-V3's noaux_tc, Kimi-Linear),
    where a bias is added for the choice alone, and only experts of the `top_groups` best of `groups` groups can be
    chosen. `normalise`: a token's weights sum to `scale`. `shared_gate`: the shared one is multiplied with a gate.
    `latent`: the size that routed experts work in, 0 for the hidden size.
    """

    num_experts: int
    top_k: int
    width: int
    shared_width: int
    scores: str
    normalise: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    shared_gate: bool = False
    latent: int = 0


class LayerSpec(msgspec.Struct, frozen=True):
    mixer: Attention | LatentAttention | DeltaRule | Lightning
    mlp: Dense | Experts


class ModelSpec(msgspec.Struct, frozen=True):
    """One decoder-only transformer. `norm_offset`: added to the stored weights of norms. `dtype`: of the weights, as
    the file names it. `rope`: None where nothing is rotated, and for models that are only priced."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_length: int
    norm_eps: float
    rope: RopeSpec | None
    layers: tuple[LayerSpec, ...]
    tied_embeddings: bool
    dtype: str
    norm_offset: float = 0.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_mixer(self) -> Attention | LatentAttention:
        """The first mixer that keeps KV of every token; all are of one size in models that the engine runs."""
        mixers = (layer.mixer for layer in self.layers)
        return next(mixer for mixer in mixers if isinstance(mixer, Attention | LatentAttention))

    @property
    def recurrent(self) -> tuple[DeltaRule, ...]:
        """Its mixers that keep the state of a delta rule, in order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaRule))

    @property
    def no_reuse(self) -> str:
        """Why KV of its prompts cannot be moved to other positions; "" if it can."""
        if self.recurrent:
            return f"{self.architecture} has recurrent layers, whose states hold at one position only"
        if not isinstance(self.kv_mixer, Attention) or self.rope is None:
            return f"{self.architecture} keeps latent vectors, which are not moved yet"
        if any(isinstance(layer.mixer, Attention) and layer.mixer.window for layer in self.layers):
            return f"{self.architecture} has sliding windows, which need every token's position"
        return ""

    @property
    def num_kv_heads(self) -> int:
        mixer = self.kv_mixer
        return mixer.num_kv_heads if isinstance(mixer, Attention) else 1

    @property
    def head_dim(self) -> int:
        """Numbers kept of a token: in K and in V of each KV head, or in the latent vector."""
        mixer = self.kv_mixer
        return mixer.head_dim if isinstance(mixer, Attention) else mixer.kept_dim
