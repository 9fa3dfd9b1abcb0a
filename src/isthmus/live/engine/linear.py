"""Layers whose memory of a sequence is a matrix a head instead of the KV of every token.

Two kinds, both a gated delta rule behind a short convolution: `gdn` (Gated DeltaNet, one decay a head) and `kda` (Kimi
Delta Attention, one decay a channel). A layer runs in three moves:

    inputs = gdn.inputs(layer, x_TN, kernels)              # all tokens of the batch at once
    out = step(layer, inputs[:R], state, slots_R, kernels)          # decodes: one token each of R requests
    out = advance(layer, inputs[first:last], state, slot, kernels)  # a run of tokens of one request
    y_TN = layer_output(layer, torch.cat(outs), inputs.gate_THV, kernels)

`step` and `advance` change the live states they are given; nothing else here keeps any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from isthmus.core.models import DeltaRule
from isthmus.live.engine.kernels import Kernels

CHUNK = 64
"""Tokens of a chunk: a power of two."""


def advance_rule(
    q_TJK: Tensor, k_TJK: Tensor, v_THV: Tensor, decay_TH1: Tensor, beta_TH: Tensor, state_HKV: Tensor
) -> Tensor:
    """`[T, H, V]`, float32 as all inputs. `state_HKV` becomes the state after the last token. `decay_TH1`: logarithms,
    0 or less, `[T, H, 1]` or `[T, H, K]`."""
    num_tokens, num_heads, value_dim = v_THV.shape
    length = min(CHUNK, 1 << (num_tokens - 1).bit_length())
    q, k, v, decay = (_chunks(x, length) for x in (q_TJK, k_TJK, v_THV, decay_TH1))
    beta = _chunks(beta_TH[..., None], length)
    weigh = _weigh_by_head if decay.shape[-1] == 1 else _weigh_by_channel
    kk_BHLL, qk_BHLL, since, until = weigh(q, k, decay)
    group = num_heads // q.shape[1]
    if group > 1:
        q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    solved_BHLL = _solved(kk_BHLL * beta)
    reading_BHXK = torch.cat((q * since, k * since * -beta), dim=2)  # X: queries, then keys
    writing_BHKL = (k * until).transpose(-1, -2)
    kept_BHK1 = since[:, :, -1, :, None]
    v *= beta
    out = torch.empty_like(v)
    for chunk in range(q.shape[0]):
        read_HXV = reading_BHXK[chunk] @ state_HKV
        change_HLV = solved_BHLL[chunk] @ v[chunk].add_(read_HXV[:, length:])
        torch.baddbmm(read_HXV[:, :length], qk_BHLL[chunk], change_HLV, out=out[chunk])
        state_HKV.mul_(kept_BHK1[chunk]).baddbmm_(writing_BHKL[chunk], change_HLV)
    return out.transpose(1, 2).reshape(-1, num_heads, value_dim)[:num_tokens]


def _chunks(x_THX: Tensor, length: int) -> Tensor:
    """`[B, H, L, X]`, filled up with tokens of zeros: they neither decay the state nor write to it."""
    padded = torch.nn.functional.pad(x_THX, (0, 0, 0, 0, 0, -x_THX.shape[0] % length))
    return padded.unflatten(0, (-1, length)).transpose(1, 2).contiguous()


def _solved(lower_BHLL: Tensor) -> Tensor:
    """The inverse of the identity plus what lies below the diagonal."""
    length = lower_BHLL.shape[-1]
    identity = torch.eye(length, device=lower_BHLL.device).expand_as(lower_BHLL)
    return torch.linalg.solve_triangular(lower_BHLL, identity, upper=False, unitriangular=True)


Weighed = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of each chunk: products of keys with keys `[B, H, L, L]` and of queries with keys, row t and column j times the decay
from j to t (above the diagonal the first may hold anything, the second is 0); the decay of the state from before the
chunk to each token, and from each token to the chunk's end, `[B, H, L, 1]` or `[B, H, L, K]`."""


def _weigh_by_head(q_BJLK: Tensor, k_BJLK: Tensor, decay_BHL1: Tensor) -> Weighed:
    """One decay a head: a matrix of decays, times the products. Sums in float64: their differences are small."""
    total_BHL1 = decay_BHL1.double().cumsum(dim=2)
    apart_BHLL = total_BHL1 - total_BHL1.transpose(-1, -2)
    above = torch.ones(apart_BHLL.shape[-2:], dtype=torch.bool, device=apart_BHLL.device).triu(1)
    factor_BHLL = apart_BHLL.float().masked_fill_(above, float("-inf")).exp_()
    group = factor_BHLL.shape[1] // q_BJLK.shape[1]
    kk, qk = (
        (x @ k_BJLK.transpose(-1, -2)).repeat_interleave(group, dim=1) * factor_BHLL for x in (k_BJLK, q_BJLK)
    )
    return kk, qk, total_BHL1.float().exp(), (total_BHL1[:, :, -1:] - total_BHL1).float().exp()


def _weigh_by_channel(q_BHLK: Tensor, k_BHLK: Tensor, decay_BHLK: Tensor) -> Weighed:
    """A decay a channel, which must be inside the products: `sum_K(q_t exp(decay from j to t) k_j)`.

    Neighbouring runs of tokens are joined, 1 and 1 to 2, 2 and 2 to 4 and so on. Between them lies a point that
    every pair of an earlier and a later token passes: the decay up to it goes into the earlier one's key, the decay
    from it on into the later one's. Both are sums, so that no exponential overflows and no difference loses digits.
    """
    length = q_BHLK.shape[2]
    both_BHL2K = torch.stack((k_BHLK, q_BHLK), dim=3)
    found_BHL2L = torch.zeros(*both_BHL2K.shape[:4], length, device=q_BHLK.device)
    found_BHL2L[:, :, :, 1].diagonal(dim1=-2, dim2=-1).copy_((q_BHLK * k_BHLK).sum(-1))
    since, until = decay_BHLK.clone(), torch.zeros_like(decay_BHLK)
    size = 1
    while size < length:
        # D pairs of neighbouring runs, an earlier and a later one, of X = `size` tokens each.
        k_D2XK, since_D2XK, until_D2XK = (x.unflatten(2, (-1, 2, size)) for x in (k_BHLK, since, until))
        earlier_DXK = k_D2XK[:, :, :, 0] * until_D2XK[:, :, :, 0].exp()
        later_DX2K = both_BHL2K.unflatten(2, (-1, 2, size))[:, :, :, 1]
        later_DX2K = later_DX2K * since_D2XK[:, :, :, 1, :, None].exp()
        products_DYX = later_DX2K.flatten(3, 4) @ earlier_DXK.transpose(-1, -2)
        pairs = found_BHL2L.unflatten(2, (-1, 2, size)).unflatten(-1, (-1, 2, size))[:, :, :, 1, :, :, :, 0]
        pairs.diagonal(dim1=2, dim2=5).copy_(products_DYX.unflatten(3, (size, 2)).movedim(2, -1))
        until_D2XK[:, :, :, 0] += since_D2XK[:, :, :, 1, -1:]
        since_D2XK[:, :, :, 1] += since_D2XK[:, :, :, 0, -1:]
        size *= 2
    kk, qk = found_BHL2L.unbind(3)
    return kk, qk, since.exp_(), until.exp_()


def step_rule(
    q_RJK: Tensor,
    k_RJK: Tensor,
    v_RHV: Tensor,
    decay_RH1: Tensor,
    beta_RH: Tensor,
    states_SHKV: Tensor,
    slots_R: Tensor,
) -> Tensor:
    """`[R, H, V]`: one token each of R requests, whose states lie at `slots_R` (distinct) and move on."""
    update = step_each if states_SHKV.is_cpu else step_together
    return update(q_RJK, k_RJK, v_RHV, decay_RH1, beta_RH, states_SHKV, slots_R)


def step_each(*rule: Tensor) -> Tensor:
    """`step_rule` one request after the other: a state is not copied, and stays in a CPU's cache meanwhile."""
    *rows, states_SHKV, slots_R = rule
    return _step(rows, [states_SHKV[slot : slot + 1] for slot in slots_R.tolist()])


def step_together(*rule: Tensor) -> Tensor:
    """`step_rule` all at once: few launches on a GPU, and the slots need not be known on the host."""
    *rows, states_SHKV, slots_R = rule
    states_RHKV = states_SHKV[slots_R]
    out = _step(rows, [states_RHKV])
    states_SHKV[slots_R] = states_RHKV
    return out


def _step(rows: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
    """`rows`: what `step_rule` takes before the states. `states`: those of the R requests, in equal parts; changed in
    place."""
    q_RJK, k_RJK, v_RHV, decay_RH1, beta_RH = rows
    num_rows, num_heads, value_dim = v_RHV.shape
    group = num_heads // q_RJK.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q_RJK, k_RJK))
    factor = decay_RH1.exp()

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        return x.split(num_rows // len(states))

    # Query and key read the decayed state in one pass over it; the query also reads what its own token writes.
    reading_RH2K = torch.stack((q * factor, k * factor), dim=2)
    read_RH2V = torch.empty(num_rows, num_heads, 2, value_dim, device=v_RHV.device)
    for state, reading, read in zip(states, parts(reading_RH2K), parts(read_RH2V), strict=True):
        torch.matmul(reading, state, out=read)
    out, seen = read_RH2V.unbind(2)
    change_RHV = (v_RHV - seen) * beta_RH[..., None]
    written = parts(factor[..., None]), parts(k[..., None]), parts(change_RHV[:, :, None])
    for state, kept, key, change in zip(states, *written, strict=True):
        state.mul_(kept).addcmul_(key, change)
    return out + (q * k).sum(-1, keepdim=True) * change_RHV


# What both kinds of recurrent layer have in common: their sizes, their live states, and a run over tokens.
#
# Legend: T tokens, R rows (one token each of as many requests), N hidden size, H value heads, J key heads (each
# serves H / J value heads side by side), K key size, V value size, C = 2 J K + H V channels of the convolution, W
# taps less one, S slots.


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
