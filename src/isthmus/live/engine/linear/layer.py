"""What both kinds of recurrent layer have in common: their sizes, their live states, and a run over tokens.

Legend: T tokens, R rows (one token each of as many requests), N hidden size, H value heads, J key heads (each serves
H / J value heads side by side), K key size, V value size, C = 2 J K + H V channels of the convolution, W taps less one,
S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from isthmus.core.models import DeltaRule
from isthmus.live.engine.kernels import Kernels


class Recurrent(Protocol):
    """What a layer of either kind offers. Weights named here are float32, but for `output_NM`, which is as stored."""

    @property
    def heads(self) -> DeltaRule: ...

    @property
    def conv_KC(self) -> Tensor:
        """Taps, oldest first."""

    @property
    def norm_V(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    @property
    def output_NM(self) -> Tensor:
        """Of the output projection; M = H V."""

    def gate(self, gate_THV: Tensor) -> Tensor:
        """What the normed output is multiplied with, of the gate's projection (float32)."""


@dataclass(frozen=True)
class Inputs:
    """What the tokens of a batch bring to a layer's recurrence. `decay_TH1` is the logarithm (0 or less) of what the
    state is multiplied with before the token: `[T, H, 1]`, or `[T, H, K]` where every channel has its own."""

    qkv_TC: Tensor
    decay_TH1: Tensor
    beta_TH: Tensor
    gate_THV: Tensor

    def __getitem__(self, tokens: slice) -> Inputs:
        return Inputs(self.qkv_TC[tokens], self.decay_TH1[tokens], self.beta_TH[tokens], self.gate_THV[tokens])


@dataclass(frozen=True)
class State:
    """The live states of a layer, by slot: two views of one float32 tensor `[S, state_numbers]`, each slot's bytes
    contiguous. All zeros is the state before the first token."""

    window_SWC: Tensor
    matrix_SHKV: Tensor

    @staticmethod
    def of(live_SX: Tensor, heads: DeltaRule) -> State:
        window, matrix = live_SX.split(
            (heads.state_numbers - heads.matrix_numbers, heads.matrix_numbers), dim=1
        )
        return State(
            window.unflatten(1, (heads.taps - 1, heads.channels)),
            matrix.unflatten(1, (heads.num_values, heads.key_dim, heads.value_dim)),
        )


def advance(layer: Recurrent, inputs: Inputs, state: State, slot: int, kernels: Kernels) -> Tensor:
    """Runs one or more tokens of one request through the recurrence, `[T, H, V]` float32; its live state moves on.

    Cutting a run in two changes the result by no more than float32 rounding.
    """
    window, matrix = state.window_SWC[slot], state.matrix_SHKV[slot]
    return kernels.delta_run(inputs.qkv_TC, inputs.decay_TH1, inputs.beta_TH, window, matrix, layer.conv_KC)


def step(layer: Recurrent, inputs: Inputs, state: State, slots_R: Tensor, kernels: Kernels) -> Tensor:
    """Runs one token each of R requests through the recurrence, `[R, H, V]` float32; their live states, at the
    distinct slots `slots_R` (integers, on the device), move on."""
    windows, matrices = state.window_SWC, state.matrix_SHKV
    return kernels.delta_step(
        inputs.qkv_TC, inputs.decay_TH1, inputs.beta_TH, windows, matrices, slots_R, layer.conv_KC
    )


def layer_output(layer: Recurrent, out_THV: Tensor, gate_THV: Tensor, kernels: Kernels) -> Tensor:
    """`[T, N]` in the gate's type: each head normed, times the gate, through the output projection."""
    scale = torch.rsqrt(out_THV.square().mean(-1, keepdim=True) + layer.eps)
    gated = out_THV * scale * layer.norm_V * layer.gate(gate_THV.float())
    return kernels.linear(gated.flatten(1).to(gate_THV.dtype), layer.output_NM, None)


# The short causal convolution before a recurrence: each channel by itself, over a token and the few before it.
#
# Legend: T tokens, R rows (one token each of as many requests), C channels, K taps, W = K - 1 inputs kept, S slots.


def convolve(x_TC: Tensor, window_WC: Tensor, weight_KC: Tensor) -> Tensor:
    """silu of the convolution, `[T, C]` float32. The last tap weighs the token itself.

    `window_WC`: the W inputs before the first token, oldest first (zeros at the start of a sequence); it becomes that
    of the last token. Inputs of any type; window and weight float32.
    """
    num_tokens, taps = x_TC.shape[0], weight_KC.shape[0]
    padded = torch.cat((window_WC, x_TC.float()))
    window_WC.copy_(padded[num_tokens:])
    out = padded[:num_tokens] * weight_KC[0]
    for tap in range(1, taps):
        out.addcmul_(padded[tap : tap + num_tokens], weight_KC[tap])
    return torch.nn.functional.silu(out, inplace=True)


def convolve_step(x_RC: Tensor, windows_SWC: Tensor, slots_R: Tensor, weight_KC: Tensor) -> Tensor:
    """The same for one token each of R requests, `[R, C]`, whose windows lie at `slots_R` (distinct) and move on."""
    padded_RKC = torch.cat((windows_SWC[slots_R], x_RC.float()[:, None]), dim=1)
    windows_SWC[slots_R] = padded_RKC[:, 1:]
    out = (padded_RKC * weight_KC).sum(dim=1)
    return torch.nn.functional.silu(out, inplace=True)


# Gated DeltaNet as in Qwen3-Next: the state of a head decays by one factor a token.
#
# Source of the formulas: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024),
# section 3; the gates are those of the published model. Legend: see `layer`; P rows of the fused projection, G = H / J.


@dataclass(frozen=True)
class GatedDeltaNet:
    """Weights of one layer. Matrices as stored `[out, in]`, the rest float32.

    `project_PN`: rows of queries, keys, values, gates z, then b and a (`projection`); `rate_H`: -exp(A_log).
    """

    heads: DeltaRule
    project_PN: Tensor
    conv_KC: Tensor
    rate_H: Tensor
    dt_bias_H: Tensor
    norm_V: Tensor
    output_NM: Tensor
    eps: float

    def gate(self, gate_THV: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate_THV)


def projection(qkvz: Tensor, ba: Tensor, heads: DeltaRule) -> Tensor:
    """`project_PN` from the two matrices of the published format, whose rows go key head by key head: in_proj_qkvz
    with q, k, G values and G gates of each, in_proj_ba with G b and G a of each."""
    group = heads.num_values // heads.num_keys
    wide = group * heads.value_dim
    parts = qkvz.unflatten(0, (heads.num_keys, -1)).split((heads.key_dim, heads.key_dim, wide, wide), dim=1)
    gates = ba.unflatten(0, (heads.num_keys, -1)).split((group, group), dim=1)
    return torch.cat([part.flatten(0, 1) for part in (*parts, *gates)])


def inputs_gdn(layer: GatedDeltaNet, x_TN: Tensor, kernels: Kernels) -> Inputs:
    """Projects the tokens of a batch."""
    heads = layer.heads
    values = heads.num_values * heads.value_dim
    projected = kernels.linear(x_TN, layer.project_PN, None)
    qkv, z, b, a = projected.split((heads.channels, values, heads.num_values, heads.num_values), dim=-1)
    decay_TH = layer.rate_H * torch.nn.functional.softplus(a.float() + layer.dt_bias_H)
    gate_THV = z.unflatten(-1, (heads.num_values, heads.value_dim))
    return Inputs(qkv, decay_TH[..., None], b.float().sigmoid(), gate_THV)


# Kimi Delta Attention as in Kimi-Linear: each channel of a head's state decays by a factor of its own.
#
# Source of the formulas: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025), sections 3
# and 4. Legend: see `layer`; here J = H and K = V, and D = K is also the rank of the two low-rank gates.


@dataclass(frozen=True)
class KimiDelta:
    """Weights of one layer. Matrices as stored `[out, in]`, the rest float32.

    `project_PN`: rows of queries, keys, values (q_proj, k_proj, v_proj), then of the low-rank forget gate (f_a_proj),
    the low-rank output gate (g_a_proj) and beta (b_proj); `conv_KC` has its channels in the order q, k, v;
    `forget_MD`: f_b_proj, `gate_MD`: g_b_proj; `rate_H`: -exp(A_log); `dt_bias_HK` with one bias a channel.
    """

    heads: DeltaRule
    project_PN: Tensor
    conv_KC: Tensor
    forget_MD: Tensor
    gate_MD: Tensor
    rate_H: Tensor
    dt_bias_HK: Tensor
    norm_V: Tensor
    output_NM: Tensor
    eps: float

    def gate(self, gate_THV: Tensor) -> Tensor:
        return gate_THV.sigmoid()


def inputs_kda(layer: KimiDelta, x_TN: Tensor, kernels: Kernels) -> Inputs:
    """Projects the tokens of a batch."""
    heads, rank = layer.heads, layer.forget_MD.shape[1]
    projected = kernels.linear(x_TN, layer.project_PN, None)
    qkv, forget, gate, b = projected.split((heads.channels, rank, rank, heads.num_values), dim=-1)
    forget_TM = kernels.linear(forget.contiguous(), layer.forget_MD, None)
    gate_TM = kernels.linear(gate.contiguous(), layer.gate_MD, None)
    forget_THK = forget_TM.float().unflatten(-1, (heads.num_values, heads.key_dim)) + layer.dt_bias_HK
    decay_THK = layer.rate_H[:, None] * torch.nn.functional.softplus(forget_THK)
    gate_THV = gate_TM.unflatten(-1, (heads.num_values, heads.value_dim))
    return Inputs(qkv, decay_THK, b.float().sigmoid(), gate_THV)
