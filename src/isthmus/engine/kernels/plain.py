"""The engine's operations in torch alone: the reference, and the path on CUDA."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def _rotate(x_THD: Tensor, cos_sin_TD: Tensor) -> Tensor:
    """Rotary embedding over two halves of each head; computed in float32."""
    cos, sin = cos_sin_TD[:, None].float().chunk(2, dim=-1)
    a, b = x_THD.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (scaled.to(x.dtype).float() * weight).to(x.dtype)


class PlainKernels:
    """See `Kernels` for the contract of each method."""

    name = "torch"

    def activation_dtype(self, stored: torch.dtype) -> torch.dtype:
        return stored

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x_TK, weight_NK.to(x_TK.dtype), bias_N)

    def add_rms_norm(self, x_TN: Tensor, delta_TN: Tensor | None, weight_N: Tensor, eps: float) -> Tensor:
        if delta_TN is not None:
            x_TN += delta_TN
        return _rms_norm(x_TN, weight_N, eps)

    def silu_mul(self, gate_up_T2N: Tensor) -> Tensor:
        gate, up = gate_up_T2N.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

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
        kv_S2KD[slots_T, 0] = _rotate(k, angles).to(qkv.dtype).to(kv_S2KD.dtype)
        kv_S2KD[slots_T, 1] = v.to(kv_S2KD.dtype)
        return _rotate(q, angles).to(qkv.dtype)

    def attend_paged(
        self,
        q_RHD: Tensor,
        kv_S2KD: Tensor,
        tables_RB: Tensor,
        lens_R: Tensor,
        block_size: int,
        window: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        rows, num_heads, head_dim = q_RHD.shape
        num_kv_heads = kv_S2KD.shape[2]
        longest = int(lens_R.max())
        offsets_L = torch.arange(longest, device=q_RHD.device)
        slots_RL = tables_RB.long()[:, offsets_L // block_size] * block_size + offsets_L % block_size
        kv_RL2KD = kv_S2KD[slots_RL].float()
        q_RKGD = q_RHD.float().view(rows, num_kv_heads, -1, head_dim) * scale
        scores = torch.einsum("rkgd,rlkd->rkgl", q_RKGD, kv_RL2KD[:, :, 0])
        visible_RL = offsets_L < lens_R[:, None]
        if window:
            visible_RL &= offsets_L >= (lens_R - window)[:, None]
        scores.masked_fill_(~visible_RL[:, None, None], float("-inf"))
        lse = scores.logsumexp(-1)
        # A slot past the end may hold anything, NaN included, and 0 * NaN is NaN.
        values = kv_RL2KD[:, :, 1].masked_fill(~visible_RL[:, :, None, None], 0.0)
        out = torch.einsum("rkgl,rlkd->rkgd", (scores - lse[..., None]).exp(), values)
        return out.reshape(rows, num_heads, head_dim).to(q_RHD.dtype), lse.reshape(rows, num_heads)

    def copy_slices(
        self, target: np.ndarray, targets: np.ndarray, source: np.ndarray, sources: np.ndarray, size: int
    ) -> None:
        for to, at in zip(targets.tolist(), sources.tolist(), strict=True):
            target[to : to + size] = source[at : at + size]
