"""Kimi Delta Attention as in Kimi-Linear: each channel of a head's state decays by a factor of its own.

Source of the formulas: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025), sections 3
and 4. Legend: see `layer`; here J = H and K = V, and D = K is also the rank of the two low-rank gates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.core.models import Delta
from isthmus.live.engine.kernels import Kernels
from isthmus.live.engine.linear.layer import Inputs


@dataclass(frozen=True)
class KimiDelta:
    """Weights of one layer. Matrices as stored `[out, in]`, the rest float32.

    `project_PN`: rows of queries, keys, values (q_proj, k_proj, v_proj), then of the low-rank forget gate (f_a_proj),
    the low-rank output gate (g_a_proj) and beta (b_proj); `conv_KC` has its channels in the order q, k, v;
    `forget_MD`: f_b_proj, `gate_MD`: g_b_proj; `rate_H`: -exp(A_log); `dt_bias_HK` with one bias a channel.
    """

    heads: Delta
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


def inputs(layer: KimiDelta, x_TN: Tensor, kernels: Kernels) -> Inputs:
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
