"""Calls packing.c through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from isthmus.live.engine.compiled import library
from isthmus.live.engine.packing import PLANES, Bytes, Grid

_SOURCES = [Path(__file__).parent / name for name in ("packing.c", "body.h")]
_FLAGS = (
    # No contraction: a * b + c is rounded twice, as numpy does.
    "-O2 -ftree-vectorize -march=native -mprefer-vector-width=512 -fno-math-errno -fno-trapping-math "
    "-ffp-contract=off -fPIC -shared -fvisibility=hidden"
).split()
_SUFFIXES = {"float32": "_f32", "bfloat16": "_bf16", "float16": "_f16"}


def load() -> NativePacking | None:
    """The compiled form, built when needed; None (with one warning) where it cannot be built."""
    functions = library(_SOURCES, _FLAGS, "KV for slow links is encoded by numpy, at a tenth of the speed")
    return None if functions is None else NativePacking(functions)


class NativePacking:
    """See `Packing`."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        for suffix in _SUFFIXES.values():
            for name, result in (("pack", None), ("unpack", ctypes.c_int)):
                function = getattr(functions, name + suffix)
                function.argtypes, function.restype = (pointer, pointer, number, number, number), result
        for width, planes in PLANES.items():
            for name in ("split", "join"):
                function = getattr(functions, f"{name}_{8 * width}")
                function.argtypes, function.restype = (pointer, *(pointer for _ in planes), number), None
        self._functions = functions

    def pack(self, grid: Grid, raw: Bytes, packed: Bytes) -> None:
        function = getattr(self._functions, "pack" + _SUFFIXES[grid.dtype])
        function(_address(raw), _address(packed), grid.num_tokens, grid.block_size, grid.channels)

    def unpack(self, grid: Grid, packed: Bytes, raw: Bytes) -> bool:
        function = getattr(self._functions, "unpack" + _SUFFIXES[grid.dtype])
        return bool(function(_address(packed), _address(raw), grid.num_tokens, grid.block_size, grid.channels))

    def split(self, width: int, raw: Bytes, planes: Sequence[Bytes]) -> None:
        self._reorder(f"split_{8 * width}", width, raw, planes)

    def join(self, width: int, planes: Sequence[Bytes], raw: Bytes) -> None:
        self._reorder(f"join_{8 * width}", width, raw, planes)

    def _reorder(self, name: str, width: int, raw: Bytes, planes: Sequence[Bytes]) -> None:
        getattr(self._functions, name)(_address(raw), *map(_address, planes), len(raw) // width)


def _address(data: Bytes) -> int:
    return int(data.ctypes.data)
