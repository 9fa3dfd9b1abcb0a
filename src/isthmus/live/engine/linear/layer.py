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

from isthmus.core.models import Delta
from isthmus.live.engine.kernels import Kernels


class Recurrent(Protocol):
    """What a layer of either kind offers. Weights named here are float32, but for `output_NM`, which is as stored."""

    @property
    def heads(self) -> Delta: ...

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
    def of(live_SX: Tensor, heads: Delta) -> State:
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
