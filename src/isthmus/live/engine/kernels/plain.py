"""The engine's operations in torch alone: the reference, and the path on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from isthmus.live.engine.attention import Part, merge, partial
from isthmus.live.engine.interface import runs_of
from isthmus.live.engine.linear import advance_rule, convolve, convolve_step, step_rule
from isthmus.live.engine.rope import rotate
from isthmus.live.engine.tiles import Weight

_L = TypeVar("_L")
_H = TypeVar("_H")
MASKED_ROWS = 256
"""So many queries at a time have a mask of their own."""
MAX_PARTS = 8
"""More pieces of KV than this are gathered into one: each part costs a call."""


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (scaled.to(x.dtype).float() * weight).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _heads_of(qkv_TC: Tensor, state_HKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of length 1 / sqrt(K) and keys of length 1, `[T, J, K]`, and values `[T, H, V]`."""
    num_heads, key_dim, value_dim = state_HKV.shape
    keys = (qkv_TC.shape[1] - num_heads * value_dim) // 2
    q, k, v = qkv_TC.split((keys, keys, num_heads * value_dim), dim=1)
    q, k = (_unit(x.unflatten(1, (-1, key_dim))) for x in (q, k))
    return q * key_dim**-0.5, k, v.unflatten(1, (-1, value_dim))


class _Products(Protocol):
    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor: ...

    def silu_mul(self, gate_up_T2N: Tensor) -> Tensor: ...


def each_expert(
    kernels: _Products, x_PN: Tensor, counts: Sequence[int], gate_up_E2IN: Tensor, down_ENI: Tensor
) -> Tensor:
    """`Kernels.expert_mlps` by two products for each expert that has rows."""
    out, at = torch.empty_like(x_PN), 0
    for expert, count in enumerate(counts):
        if count:
            inner = kernels.silu_mul(kernels.linear(x_PN[at : at + count], gate_up_E2IN[expert], None))
            out[at : at + count] = kernels.linear(inner, down_ENI[expert], None)
            at += count
    return out


def attend_parts(
    q_THD: Tensor,
    kv_S2KD: Tensor,
    blocks: Sequence[int],
    start: int,
    block_size: int,
    window: int,
    scale: float,
) -> Part:
    """What `Kernels.attend_chunk` gives, by parts, and its weight: one for each run of slots before the chunk, merged
    with its own."""
    stop = start + len(q_THD)

    def pieces(first: int, last: int) -> list[Tensor]:
        found = [kv_S2KD[low:high] for low, high in runs_of(blocks, block_size, first, last)]
        return found if len(found) <= MAX_PARTS else [torch.cat(found)]

    def joined(first: int, last: int) -> Tensor:
        found = pieces(first, last)
        return found[0] if len(found) == 1 else torch.cat(found)

    if window and stop > window:
        low = max(0, start - window + 1)
        return partial(q_THD, joined(low, stop), scale=scale, causal_from=start - low, window=window)
    parts = [partial(q_THD, piece, scale=scale) for piece in pieces(0, start)]
    parts.append(partial(q_THD, joined(start, stop), scale=scale, causal_from=0))
    return merge(parts)


def attend_positions(
    q_THD: Tensor,
    kv_S2KD: Tensor,
    blocks: Sequence[int],
    positions_T: np.ndarray,
    block_size: int,
    window: int,
    scale: float,
) -> Tensor:
    """`Kernels.attend_chunk`: by parts where the tokens follow each other, else some at a time under a mask."""
    start, last = int(positions_T[0]), int(positions_T[-1])
    if last - start + 1 == len(positions_T):
        return attend_parts(q_THD, kv_S2KD, blocks, start, block_size, window, scale)[0]
    device, num_kv_heads = q_THD.device, kv_S2KD.shape[2]
    kv_L2KD = torch.cat([kv_S2KD[low:high] for low, high in runs_of(blocks, block_size, 0, last + 1)])
    k_KLD, v_KLD = kv_L2KD.to(q_THD.dtype).permute(1, 2, 0, 3)
    at_T, keys_L = torch.as_tensor(positions_T, device=device), torch.arange(last + 1, device=device)
    outs = []
    for first in range(0, len(positions_T), MASKED_ROWS):
        at = at_T[first : first + MASKED_ROWS, None]
        stop = int(positions_T[min(first + MASKED_ROWS, len(positions_T)) - 1]) + 1
        seen_TL = keys_L[:stop] <= at
        if window:
            seen_TL &= keys_L[:stop] > at - window
        q_KGTD = q_THD[first : first + MASKED_ROWS].unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        shape = (-1, q_KGTD.shape[1], -1, -1)
        k, v = (each[:, None, :stop].expand(shape) for each in (k_KLD, v_KLD))
        out = torch.nn.functional.scaled_dot_product_attention(q_KGTD, k, v, attn_mask=seen_TL, scale=scale)
        outs.append(out.permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(outs)


class PlainKernels:
    """See `Kernels` for the contract of each method."""

    name = "torch"
    takes_groups = False

    def activation_dtype(self, stored: torch.dtype) -> torch.dtype:
        return stored

    def prepare(self, layers: list[_L], head: _H) -> _H:
        """There is only one product."""
        return head

    def described(self) -> tuple[str, ...]:
        return ()

    def linear(self, x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None) -> Tensor:
        assert isinstance(weight_NK, Tensor), "quantised weights are widened where `takes_groups` is not set"
        return torch.nn.functional.linear(x_TK, weight_NK.to(x_TK.dtype), bias_N)

    def add_rms_norm(self, x_TN: Tensor, delta_TN: Tensor | None, weight_N: Tensor, eps: float) -> Tensor:
        if delta_TN is not None:
            x_TN += delta_TN
        return _rms_norm(x_TN, weight_N, eps)

    def silu_mul(self, gate_up_T2N: Tensor) -> Tensor:
        gate, up = gate_up_T2N.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def expert_mlps(
        self, x_PN: Tensor, counts: Sequence[int], gate_up_E2IN: Tensor, down_ENI: Tensor
    ) -> Tensor:
        return each_expert(self, x_PN, counts, gate_up_E2IN, down_ENI)

    def rope_store(
        self,
        qkv: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        cos_sin: Tensor,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        eps: float,
        kv_S2KD: Tensor,
        num_heads: int,
    ) -> Tensor:
        num_kv_heads, head_dim = kv_S2KD.shape[2:]
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if q_norm_D is not None and k_norm_D is not None:
            q, k = _rms_norm(q, q_norm_D, eps), _rms_norm(k, k_norm_D, eps)
        angles = cos_sin[positions_T]
        kv_S2KD[slots_T, 0] = rotate(k, angles).to(qkv.dtype).to(kv_S2KD.dtype)
        kv_S2KD[slots_T, 1] = v.to(kv_S2KD.dtype)
        return rotate(q, angles).to(qkv.dtype)

    def attend_paged(
        self,
        q_RHD: Tensor,
        kv_SVKD: Tensor,
        tables_RB: Tensor,
        lens_R: Tensor,
        block_size: int,
        window: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        rows, num_heads, head_dim = q_RHD.shape
        num_vectors, num_kv_heads = kv_SVKD.shape[1:3]
        longest = int(lens_R.max())
        offsets_L = torch.arange(longest, device=q_RHD.device)
        slots_RL = tables_RB.long()[:, offsets_L // block_size] * block_size + offsets_L % block_size
        kv_RLVKD = kv_SVKD[slots_RL].float()
        q_RKGD = q_RHD.float().view(rows, num_kv_heads, -1, head_dim) * scale
        scores = torch.einsum("rkgd,rlkd->rkgl", q_RKGD, kv_RLVKD[:, :, 0])
        visible_RL = offsets_L < lens_R[:, None]
        if window:
            visible_RL &= offsets_L >= (lens_R - window)[:, None]
        scores.masked_fill_(~visible_RL[:, None, None], float("-inf"))
        lse = scores.logsumexp(-1)
        # A slot past the end may hold anything, NaN included, and 0 * NaN is NaN.
        values = kv_RLVKD[:, :, num_vectors - 1].masked_fill(~visible_RL[:, :, None, None], 0.0)
        out = torch.einsum("rkgl,rlkd->rkgd", (scores - lse[..., None]).exp(), values)
        return out.reshape(rows, num_heads, head_dim).to(q_RHD.dtype), lse.reshape(rows, num_heads)

    def add_part(self, out_THD: Tensor, lse_TH: Tensor, rows: Tensor | slice, heads: slice, part: Part) -> None:
        at = rows, heads
        out_THD[at], lse_TH[at] = merge(((out_THD[at], lse_TH[at]), part))

    def attend_chunk(
        self,
        q_THD: Tensor,
        kv_S2KD: Tensor,
        blocks: Sequence[int],
        positions_T: np.ndarray,
        block_size: int,
        window: int,
        scale: float,
    ) -> Tensor:
        return attend_positions(q_THD, kv_S2KD, blocks, positions_T, block_size, window, scale)

    def delta_step(
        self,
        qkv_RC: Tensor,
        decay_RH1: Tensor,
        beta_RH: Tensor,
        windows_SWC: Tensor,
        states_SHKV: Tensor,
        slots_R: Tensor,
        taps_WC: Tensor,
    ) -> Tensor:
        mixed_RC = convolve_step(qkv_RC, windows_SWC, slots_R, taps_WC)
        q, k, v = _heads_of(mixed_RC, states_SHKV[0])
        return step_rule(q, k, v, decay_RH1, beta_RH, states_SHKV, slots_R)

    def delta_run(
        self,
        qkv_TC: Tensor,
        decay_TH1: Tensor,
        beta_TH: Tensor,
        window_WC: Tensor,
        state_HKV: Tensor,
        taps_WC: Tensor,
    ) -> Tensor:
        q, k, v = _heads_of(convolve(qkv_TC, window_WC, taps_WC), state_HKV)
        return advance_rule(q, k, v, decay_TH1, beta_TH, state_HKV)

    def copy_slices(
        self, target: np.ndarray, targets: np.ndarray, source: np.ndarray, sources: np.ndarray, size: int
    ) -> None:
        for to, at in zip(targets.tolist(), sources.tolist(), strict=True):
            target[to : to + size] = source[at : at + size]
