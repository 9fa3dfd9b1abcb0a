"""The operations the network is made of, in two forms with one signature each.

`plain` is torch (any device); `native` is C for the CPU, compiled on first use and kept in a cache folder.
`select` picks; nothing else asks which one is in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from isthmus.live.engine.attention import Part
from isthmus.live.engine.tiles import Weight

_L = TypeVar("_L")
_H = TypeVar("_H")


class Scope(NamedTuple):
    """Which keys an attention sees: the last `window` (0: all) in blocks of `block_size`; `scale`: of the scores."""

    block_size: int
    window: int
    scale: float


class Kernels(Protocol):
    """Legend: T tokens, R rows, H query heads, K key/value heads, D head size, N width."""

    name: str
    takes_groups: bool
    """Whether `linear` takes quantised weights."""

    def activation_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The type activations have when weights and KV are stored as `stored`."""

    def linear(self, x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None) -> Tensor:
        """x @ weight.T + bias `[T, N]`, in the activations' type; here K is the input width."""

    def prepare(self, layers: list[_L], head: _H) -> _H:
        """Chooses the form of all matrices in these nested dataclasses that `linear` will multiply with. Changes the
        layers in place and returns the head."""

    def described(self) -> tuple[str, ...]:
        """Chosen products for each shape of prepared matrices, a line each."""

    def add_rms_norm(self, x_TN: Tensor, delta_TN: Tensor | None, weight_N: Tensor, eps: float) -> Tensor:
        """Adds `delta` into `x` in place, then returns rms_norm(x) * weight (float32 weight)."""

    def silu_mul(self, gate_up_T2N: Tensor) -> Tensor:
        """silu(first half) * second half."""

    def expert_mlps(
        self, x_PN: Tensor, counts: Sequence[int], gate_up_E2IN: Tensor, down_ENI: Tensor
    ) -> Tensor:
        """down(silu(gate) * up) of each row's expert, `[P, N]`: `counts[0]` rows of expert 0 first, then those of
        expert 1, and so on. Here I is the inner width and gate's rows come before up's."""

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
        """Rotates Q and K (after their norms, if any), writes K and V at `slots`, returns Q [T, H, D]."""

    def attend_paged(
        self,
        q_RHD: Tensor,
        kv_SVKD: Tensor,
        tables_RB: Tensor,
        lens_R: Tensor,
        scope: Scope,
    ) -> tuple[Tensor, Tensor]:
        """Row r attends to the `lens[r]` tokens in `tables[r]` that the window leaves.

        V is 2 for keys and values, 1 for one vector that is both.

        Returns (out [R, H, D], lse [R, H], natural log).
        """

    def add_part(self, out_THD: Tensor, lse_TH: Tensor, rows: Tensor | slice, heads: slice, part: Part) -> None:
        """Adds attention over other keys, `part`, to that of these rows and heads, in place and exactly
        (`attention.merge`). All float32; rows are distinct, int64, or a slice with a start."""

    def attend_chunk(
        self,
        q_THD: Tensor,
        kv_S2KD: Tensor,
        blocks: Sequence[int],
        positions_T: np.ndarray,
        scope: Scope,
    ) -> Tensor:
        """Tokens at these positions (int32, ascending, on the host) of the request with these blocks attend to those up
        to their own that the window leaves: `[T, H, D]`. All KV up to the last of them is in place."""

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
        """One token each of R requests through short convolution and gated delta rule (`isthmus.live.engine.linear`):
        `[R, H, V]`, all float32. Their windows and states, at the distinct `slots` (int64), move on.

        Here K and V are sizes of keys and values, C the channels of queries, keys and values. `decay`: logarithms, one
        a head, or one a channel of its keys where each value head has keys of its own; `taps`: one more than a window
        has inputs, the last for the token itself.
        """

    def delta_run(
        self,
        qkv_TC: Tensor,
        decay_TH1: Tensor,
        beta_TH: Tensor,
        window_WC: Tensor,
        state_HKV: Tensor,
        taps_WC: Tensor,
    ) -> Tensor:
        """`delta_step` for T tokens of one request in order, `[T, H, V]`. Cutting a run in two changes only
        rounding."""

    def copy_slices(
        self, target: np.ndarray, targets: np.ndarray, source: np.ndarray, sources: np.ndarray, size: int
    ) -> None:
        """Copies `size` bytes from `source[sources[i]:]` to `target[targets[i]:]` for every i; bytes (uint8) on
        the host, offsets int64 and inside. From any thread, the interpreter lock released."""


def select(device: torch.device) -> Kernels:
    """Native kernels on a CPU with a C compiler, torch otherwise."""
    # Both import what imports this file: the recurrent layers, which are computed in terms of kernels.
    from isthmus.live.engine.kernels import native, plain

    library = native.load() if device.type == "cpu" else None
    return library or plain.PlainKernels()
