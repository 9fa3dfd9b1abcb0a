"""Builds kernels.c once per machine and calls it through ctypes.

The library is kept in the cache folder under a name that digests source, compiler and CPU, and moved into
place in one step, so processes that start together do not disturb each other. torch must be imported
before the library is loaded: both then share torch's OpenMP run time and its thread count.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from isthmus.config import cache_dir

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_FLAGS = (
    "-O3 -march=native -mprefer-vector-width=512 -ffast-math -fopenmp -fPIC -shared -fvisibility=hidden"
).split()
_SUFFIXES = {
    (torch.float32, torch.float32): "f32_f32",
    (torch.float32, torch.bfloat16): "f32_bf16",
    (torch.bfloat16, torch.bfloat16): "bf16_bf16",
}
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "add_rms_norm": (_P, _P, _P, _P, _I, _I, _F),
    "silu_mul": (_P, _P, _I, _I),
    "rope_store": (_P, _P, _P, _P, _P, _P, _F, _P, _P, _I, _I, _I, _I),
    "attend_paged": (_P, _P, _P, _I, _P, _P, _P, _I, _I, _I, _I, _I, _I, _F),
}


def _cpu_identity() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _library_path(compiler: str) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    sources = b"".join((_HERE / name).read_bytes() for name in ("kernels.c", "body.h"))
    identity = b"\0".join((sources, version, " ".join(_FLAGS).encode(), _cpu_identity().encode()))
    return cache_dir() / "kernels" / f"kernels-{hashlib.sha256(identity).hexdigest()[:20]}.so"


def _build(compiler: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, str(_HERE / "kernels.c"), "-o", temporary, "-lm"]
        subprocess.run(command, check=True, capture_output=True)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def load() -> NativeKernels | None:
    """The compiled kernels, built when needed; None (with one warning) where they cannot be built."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        log.warning("no C compiler found: the engine uses slower torch kernels; install gcc")
        return None
    try:
        path = _library_path(compiler)
        if not path.exists():
            _build(compiler, path)
        return NativeKernels(ctypes.CDLL(str(path)))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", b"") or str(error).encode()
        log.warning("kernels.c could not be built: the engine uses slower torch kernels: %s", detail[-300:])
        return None


def _pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "native kernels take dense tensors"
    return tensor.data_ptr()


class NativeKernels:
    """See `Kernels` for the contract of each method. CPU tensors, dense, int32 indices, float32 norms."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[tuple[str, torch.dtype, torch.dtype], ctypes._NamedFuncPointer] = {}
        for (activation, kv), suffix in _SUFFIXES.items():
            for name, arguments in _ARGUMENTS.items():
                function = getattr(library, f"{name}_{suffix}")
                function.argtypes, function.restype = arguments, None
                self._functions[name, activation, kv] = function

    def add_rms_norm(self, x_TN: Tensor, delta_TN: Tensor | None, weight_N: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x_TN)
        rows, width = x_TN.shape
        self._functions["add_rms_norm", x_TN.dtype, x_TN.dtype](
            _pointer(x_TN), _pointer(delta_TN), _pointer(weight_N), _pointer(out), rows, width, eps
        )
        return out

    def silu_mul(self, gate_up_T2N: Tensor) -> Tensor:
        rows, width = gate_up_T2N.shape[0], gate_up_T2N.shape[1] // 2
        out = gate_up_T2N.new_empty(rows, width)
        self._functions["silu_mul", out.dtype, out.dtype](_pointer(gate_up_T2N), _pointer(out), rows, width)
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
        q = qkv.new_empty(qkv.shape[0], num_heads, head_dim)
        self._functions["rope_store", qkv.dtype, kv_S2KD.dtype](
            _pointer(qkv),
            _pointer(positions_T),
            _pointer(slots_T),
            _pointer(cos_sin),
            _pointer(q_norm_D),
            _pointer(k_norm_D),
            eps,
            _pointer(q),
            _pointer(kv_S2KD),
            qkv.shape[0],
            num_heads,
            num_kv_heads,
            head_dim,
        )
        return q

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
        out = torch.empty_like(q_RHD)
        lse = torch.empty(rows, num_heads, dtype=torch.float32)
        self._functions["attend_paged", q_RHD.dtype, kv_S2KD.dtype](
            _pointer(q_RHD),
            _pointer(kv_S2KD),
            _pointer(tables_RB),
            tables_RB.shape[1],
            _pointer(lens_R),
            _pointer(out),
            _pointer(lse),
            rows,
            num_heads,
            kv_S2KD.shape[2],
            head_dim,
            block_size,
            window,
            scale,
        )
        return out, lse
