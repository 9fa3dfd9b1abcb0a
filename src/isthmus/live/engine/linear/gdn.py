"""Gated DeltaNet as in Qwen3-Next: the state of a head decays by one factor a token.

Source of the formulas: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024),
section 3; the gates are those of the published model. Legend: see `layer`; P rows of the fused projection, G = H / J.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.core.models import Delta
from isthmus.live.engine.kernels import Kernels
from isthmus.live.engine.linear.layer import Inputs


@dataclass(frozen=True)
class GatedDeltaNet:
    """Weights of one layer. Matrices as stored `[out, in]`, the rest float32.

    `project_PN`: rows of queries, keys, values, gates z, then b and a (`projection`); `rate_H`: -exp(A_log).
    """

    heads: Delta
    project_PN: Tensor
    conv_KC: Tensor
    rate_H: Tensor
    dt_bias_H: Tensor
    norm_V: Tensor
    output_NM: Tensor
    eps: float

    def gate(self, gate_THV: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate_THV)


def projection(qkvz: Tensor, ba: Tensor, heads: Delta) -> Tensor:
    """`project_PN` from the two matrices of the published format, whose rows go key head by key head: in_proj_qkvz
    with q, k, G values and G gates of each, in_proj_ba with G b and G a of each."""
    group = heads.num_values // heads.num_keys
    wide = group * heads.value_dim
    parts = qkvz.unflatten(0, (heads.num_keys, -1)).split((heads.key_dim, heads.key_dim, wide, wide), dim=1)
    gates = ba.unflatten(0, (heads.num_keys, -1)).split((group, group), dim=1)
    return torch.cat([part.flatten(0, 1) for part in (*parts, *gates)])


def inputs(layer: GatedDeltaNet, x_TN: Tensor, kernels: Kernels) -> Inputs:
    """Projects the tokens of a batch."""
    heads = layer.heads
    values = heads.num_values * heads.value_dim
    projected = kernels.linear(x_TN, layer.project_PN, None)
    qkv, z, b, a = projected.split((heads.channels, values, heads.num_values, heads.num_values), dim=-1)
    decay_TH = layer.rate_H * torch.nn.functional.softplus(a.float() + layer.dt_bias_H)
    gate_THV = z.unflatten(-1, (heads.num_values, heads.value_dim))
    return Inputs(qkv, decay_TH[..., None], b.float().sigmoid(), gate_THV)
