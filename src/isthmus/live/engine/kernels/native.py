"""Calls kernels.c through ctypes. torch must be imported before the library is loaded: both then share torch's OpenMP
run time, and its thread count, which our own helpers (pool.h) go by, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from isthmus.config import cache_dir
from isthmus.live.engine.attention import Part
from isthmus.live.engine.compiled import library, machine_name
from isthmus.live.engine.kernels import Scope
from isthmus.live.engine.kernels.plain import attend_positions, each_expert
from isthmus.live.engine.products import Products, described
from isthmus.live.engine.tiles import TILES, Tiled, Weight

LANES = 16
SKINNY_ROWS = 48
GROUPED_ROWS = 16
"""Up to so many rows the skinny kernel, and that of whole numbers, are taken for products that were not timed."""

_HEADERS = ("pool.h", "body.h", "pairs.h", "chunk.h", "groups.h", "tiles.h")
_SOURCES = [Path(__file__).parent / name for name in ("kernels.c", *_HEADERS)]
_FLAGS = (
    # Not -ffast-math: it would set flush-to-zero for the whole process and divide by estimates.
    "-O3 -march=native -mprefer-vector-width=512 -fno-math-errno -fno-trapping-math "
    "-fopenmp -fPIC -shared -fvisibility=hidden"
).split()
_SUFFIXES = {torch.float32: "_f32", torch.bfloat16: "_bf16"}
_L = TypeVar("_L")
_H = TypeVar("_H")


_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "add_rms_norm": (_P, _P, _P, _P, _I, _I, _F),
    "silu_mul": (_P, _P, _I, _I),
    "copy_slices": (_P, _P, _P, _P, _I, _I),
    "add_part": (_P,) * 5 + (_I,) * 6,
    "attend_chunk_bf16": (_P,) * 5 + (_I,) * 6 + (_F,),
    "linear_tiles": (_P,) * 4 + (_I,) * 4,
    "linear_groups": (_P,) * 4 + (_I,) * 4,
    "delta_run": (_P,) * 7 + (_I,) * 8,
    "delta_step": (_P,) * 8 + (_I,) * 10,
}
_STORED_ARGUMENTS = {
    "linear": (_P, _P, _P, _P, _I, _I, _I),
    "expert_mlps": (_P, _P, _P, _P, _P, _I, _I, _I),
    "rope_store": (_P, _P, _P, _P, _P, _P, _F, _P, _P, _I, _I, _I, _I),
    "attend_paged": (_P, _P, _P, _I, _P, _P, _P, _I, _I, _I, _I, _I, _I, _I, _F),
}


def load() -> NativeKernels | None:
    """The compiled kernels, built when needed; None (with one warning) where they cannot be built."""
    functions = library(_SOURCES, _FLAGS, "the engine uses slower torch kernels")
    return None if functions is None else NativeKernels(functions)


def _dense(*tensors: Tensor | None) -> list[int | None]:
    """Addresses of dense tensors; None, a null pointer, for None."""
    found: list[int | None] = []
    for tensor in tensors:
        assert tensor is None or tensor.is_contiguous(), "native kernels take dense tensors"
        found.append(None if tensor is None else tensor.data_ptr())
    return found


class NativeKernels:
    """See `Kernels` for the contract of each method. CPU tensors, dense, float32 activations, int32 indices.

    Weights and KV stay as stored, float32 or bfloat16, and are widened on the way into registers.
    """

    name = "native"
    takes_groups = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[tuple[str, torch.dtype | None], ctypes._NamedFuncPointer] = {}
        for name, arguments in _ARGUMENTS.items():
            self._declare(library, name, None, arguments)
        for name, arguments in _STORED_ARGUMENTS.items():
            for dtype in _SUFFIXES:
                self._declare(library, name, dtype, arguments)
        self.products = Products(
            {
                torch.bfloat16: {
                    "native": self._skinny,
                    "torch bfloat16": _narrow_product,
                    "torch float32": _wide_product,
                },
                torch.float32: {"native": self._skinny, "torch float32": _wide_product},
                TILES: {"native tiles": self._tiled},
                "4 bits": {"native quantised": self._grouped, "native widened": self._tiled},
                "8 bits": {"native quantised": self._grouped, "native widened": self._tiled},
            },
            {
                torch.bfloat16: (TILES,),
                "4 bits": (TILES, torch.bfloat16),
                "8 bits": (TILES, torch.bfloat16),
            },
            ("torch bfloat16",),
            self._untimed,
            cache_dir() / "products.json",
            f"{machine_name()}, kernels {Path(library._name).stem}",
        )

    def _declare(
        self, library: ctypes.CDLL, name: str, dtype: torch.dtype | None, arguments: tuple[type, ...]
    ) -> None:
        function = getattr(library, name + (_SUFFIXES[dtype] if dtype else ""))
        function.argtypes, function.restype = arguments, None
        self._functions[name, dtype] = function

    def activation_dtype(self, stored: torch.dtype) -> torch.dtype:
        return torch.float32

    def linear(self, x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None) -> Tensor:
        assert x_TK.dtype == torch.float32, "native kernels take float32 activations"
        return self.products(x_TK, weight_NK, bias_N)

    def prepare(self, layers: list[_L], head: _H) -> _H:
        return self.products.prepare(layers, head)

    def described(self) -> tuple[str, ...]:
        return tuple(described(shape, names) for shape, names in self.products.names.items())

    def _untimed(self, x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None) -> Tensor:
        if isinstance(weight_NK, Tiled):
            few = weight_NK.bits < 16 and len(x_TK) <= GROUPED_ROWS
            return (self._grouped if few else self._tiled)(x_TK, weight_NK, bias_N)
        product = self._skinny if len(x_TK) <= SKINNY_ROWS else _wide_product
        return product(x_TK, weight_NK, bias_N)

    def _skinny(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """Weights are widened on the way into registers."""
        return self._product(self._functions["linear", weight_NK.dtype], x_TK, weight_NK, bias_N)

    def _tiled(self, x_TK: Tensor, weight_NK: Tiled, bias_N: Tensor | None) -> Tensor:
        """x, and weights that are quantised, are rounded to bfloat16, the sums are not."""
        return self._product(self._functions["linear_tiles", None], x_TK, weight_NK, bias_N, weight_NK.bits)

    def _grouped(self, x_TK: Tensor, weight_NK: Tiled, bias_N: Tensor | None) -> Tensor:
        """x is rounded to 15 bits, with a factor for each 32 numbers; the sums are not."""
        return self._product(self._functions["linear_groups", None], x_TK, weight_NK, bias_N, weight_NK.bits)

    @staticmethod
    def _product(function: Any, x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None, *more: int) -> Tensor:
        (rows, width), size = x_TK.shape, weight_NK.shape[0]
        numbers = weight_NK.tiles if isinstance(weight_NK, Tiled) else weight_NK
        out = torch.empty(rows, size)
        function(*_dense(x_TK, numbers, bias_N, out), rows, width, size, *more)
        return out

    def add_rms_norm(self, x_TN: Tensor, delta_TN: Tensor | None, weight_N: Tensor, eps: float) -> Tensor:
        assert x_TN.dtype == torch.float32, "native kernels take float32 activations"
        out = torch.empty_like(x_TN)
        rows, width = x_TN.shape
        self._functions["add_rms_norm", None](*_dense(x_TN, delta_TN, weight_N, out), rows, width, eps)
        return out

    def silu_mul(self, gate_up_T2N: Tensor) -> Tensor:
        rows, width = gate_up_T2N.shape[0], gate_up_T2N.shape[1] // 2
        out = torch.empty(rows, width)
        self._functions["silu_mul", None](*_dense(gate_up_T2N, out), rows, width)
        return out

    def expert_mlps(
        self, x_PN: Tensor, counts: Sequence[int], gate_up_E2IN: Tensor, down_ENI: Tensor
    ) -> Tensor:
        if max(counts) > SKINNY_ROWS:
            return each_expert(self, x_PN, counts, gate_up_E2IN, down_ENI)
        assert sum(counts) == len(x_PN) and x_PN.is_contiguous(), "each row has its expert"
        out, numbers = torch.empty_like(x_PN), np.asarray(counts, np.int64)
        self._functions["expert_mlps", down_ENI.dtype](
            x_PN.data_ptr(), numbers.ctypes.data, *_dense(gate_up_E2IN, down_ENI, out), *down_ENI.shape
        )
        return out

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
        q = torch.empty(qkv.shape[0], num_heads, head_dim)
        inputs = _dense(qkv, positions_T, slots_T, cos_sin, q_norm_D, k_norm_D)
        sizes = (len(qkv), num_heads, num_kv_heads, head_dim)
        self._functions["rope_store", kv_S2KD.dtype](*inputs, eps, *_dense(q, kv_S2KD), *sizes)
        return q

    def attend_paged(
        self,
        q_RHD: Tensor,
        kv_SVKD: Tensor,
        tables_RB: Tensor,
        lens_R: Tensor,
        scope: Scope,
    ) -> tuple[Tensor, Tensor]:
        rows, num_heads, head_dim = q_RHD.shape
        out = torch.empty_like(q_RHD)
        lse = torch.empty(rows, num_heads)
        num_vectors, num_kv_heads = kv_SVKD.shape[1:3]
        sizes = (rows, num_heads, num_kv_heads, head_dim, num_vectors, scope.block_size, scope.window)
        self._functions["attend_paged", kv_SVKD.dtype](
            *_dense(q_RHD, kv_SVKD, tables_RB),
            tables_RB.shape[1],
            *_dense(lens_R, out, lse),
            *sizes,
            scope.scale,
        )
        return out, lse

    def add_part(self, out_THD: Tensor, lse_TH: Tensor, rows: Tensor | slice, heads: slice, part: Part) -> None:
        assert out_THD.dtype == torch.float32, "native kernels take float32 activations"
        out_RJD, lse_RJ = part
        num_rows, num_heads, head_dim = out_RJD.shape
        named, start = (rows, 0) if isinstance(rows, Tensor) else (None, rows.start)
        sizes = (num_rows, out_THD.shape[1], num_heads, heads.start, head_dim)
        self._functions["add_part", None](*_dense(out_THD, lse_TH, out_RJD, lse_RJ, named), start, *sizes)

    def attend_chunk(
        self,
        q_THD: Tensor,
        kv_S2KD: Tensor,
        blocks: Sequence[int],
        positions_T: np.ndarray,
        scope: Scope,
    ) -> Tensor:
        num_tokens, num_heads, head_dim = q_THD.shape
        if kv_S2KD.dtype != torch.bfloat16 or head_dim % LANES:
            return attend_positions(q_THD, kv_S2KD, blocks, positions_T, scope)
        assert positions_T.dtype == np.int32 and len(positions_T) == num_tokens
        out, table = torch.empty_like(q_THD), np.asarray(blocks, np.int32)
        sizes = (num_tokens, num_heads, kv_S2KD.shape[2], head_dim, scope.block_size, scope.window)
        indices = (table.ctypes.data, out.data_ptr(), positions_T.ctypes.data)
        self._functions["attend_chunk_bf16", None](*_dense(q_THD, kv_S2KD), *indices, *sizes, scope.scale)
        return out

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
        rows, heads, decays = decay_RH1.shape
        key_dim, value_dim = states_SHKV.shape[2:]
        out = torch.empty(rows, heads, value_dim)
        # Dense copies must live until the call returns.
        decay, beta = decay_RH1.contiguous(), beta_RH.contiguous()
        assert qkv_RC.stride(1) == 1 and windows_SWC[0].is_contiguous() and states_SHKV[0].is_contiguous()
        keys = (qkv_RC.shape[1] - heads * value_dim) // (2 * key_dim)
        strides = (qkv_RC.stride(0), windows_SWC.stride(0), states_SHKV.stride(0))
        sizes = (rows, heads, keys, key_dim, value_dim, windows_SWC.shape[1], decays)
        live = (windows_SWC.data_ptr(), states_SHKV.data_ptr())
        self._functions["delta_step", None](
            qkv_RC.data_ptr(), *_dense(decay, beta), *live, *_dense(slots_R, taps_WC, out), *strides, *sizes
        )
        return out

    def delta_run(
        self,
        qkv_TC: Tensor,
        decay_TH1: Tensor,
        beta_TH: Tensor,
        window_WC: Tensor,
        state_HKV: Tensor,
        taps_WC: Tensor,
    ) -> Tensor:
        tokens, heads, decays = decay_TH1.shape
        key_dim, value_dim = state_HKV.shape[1:]
        out = torch.empty(tokens, heads, value_dim)
        decay, beta = decay_TH1.contiguous(), beta_TH.contiguous()
        assert qkv_TC.stride(1) == 1, "a token's channels are dense"
        keys = (qkv_TC.shape[1] - heads * value_dim) // (2 * key_dim)
        sizes = (qkv_TC.stride(0), tokens, heads, keys, key_dim, value_dim, window_WC.shape[0], decays)
        arrays = _dense(decay, beta, window_WC, state_HKV, taps_WC, out)
        self._functions["delta_run", None](qkv_TC.data_ptr(), *arrays, *sizes)
        return out

    def copy_slices(
        self, target: np.ndarray, targets: np.ndarray, source: np.ndarray, sources: np.ndarray, size: int
    ) -> None:
        addresses = [array.ctypes.data for array in (target, targets, source, sources)]
        self._functions["copy_slices", None](*addresses, len(targets), size)


def _wide_product(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """torch's in float32: the weights are widened each time."""
    return torch.nn.functional.linear(x_TK, weight_NK.float(), bias_N)


def _narrow_product(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """torch's in the type of the weights, summed in float32."""
    out = torch.nn.functional.linear(x_TK.to(weight_NK.dtype), weight_NK).float()
    return out if bias_N is None else out.add_(bias_N)


if __name__ == "__main__":  # `make install` builds the kernels, so that the first start is as quick as the next
    load()
