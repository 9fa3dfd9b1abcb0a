"""The tensors of a GGUF file, widened one by one as they are taken, and digested as they lie in the file.

`_packed` gives a tensor's rows as stored, in the engine's order; `widened` makes numbers of them, and `GROUPED` what
stays quantised in memory.

Legend: N rows, G groups of 32 numbers in a row, B bytes, S blocks of 256 numbers in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import blake3
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from isthmus.core.errors import ModelError
from isthmus.live.engine.tiles import Tiled, grouped
from isthmus.model_files import GgufFile
from isthmus.model_files.gguf import tensor_name

_BITS = torch.arange(8, dtype=torch.uint8)
_AT_ONCE = 1 << 17
"""Numbers that are widened at a time: as many as stay in a core's cache, in float32."""


class Packed(NamedTuple):
    """Rows of bytes as stored, blocks of `kind` side by side; `shape` of the numbers that they hold."""

    kind: str
    rows: NDArray[np.uint8]
    shape: tuple[int, ...]


class GgufTensors:
    """Taken by the names of a Hugging Face model. `head_dim`: of queries and keys."""

    def __init__(self, file: GgufFile, head_dim: int) -> None:
        self.digest = blake3.blake3()
        self._file, self._head_dim = file, head_dim
        self._weights, self._taken = file.weights, set[str]()
        self._data = {path: _mapped(path) for path in {info.path for info in self._weights.values()}}

    def has(self, name: str) -> bool:
        return tensor_name(name) in self._weights

    def take(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Digested on the way, and only that on the device "meta"."""
        packed = self._packed(name, shape)
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return widened(packed, dtype).to(device)

    def grouped(self, name: str, shape: tuple[int, ...]) -> Tiled | None:
        """Digested if it was not taken before; None for types that have no such form."""
        packed = self._packed(name, shape)
        make = GROUPED.get(packed.kind)
        return None if make is None or len(shape) != 2 else make(torch.from_numpy(packed.rows))

    def unties(self) -> bool:
        """The file's description says as much as its tensors."""
        return False

    def finish(self) -> str:
        left = sorted(self._weights.keys() - self._taken)
        if left:
            names = ", ".join(left[:3])
            raise ModelError(f"{self._file.path}: {len(left)} tensors are not of this architecture: {names}")
        return self.digest.hexdigest(length=16)

    def _packed(self, name: str, shape: tuple[int, ...]) -> Packed:
        own = tensor_name(name)
        info = self._weights.get(own)
        if info is None:
            raise ModelError(f"{self._file.path}: the weights have no tensor {own!r}")
        if info.shape != shape:
            raise ModelError(f"{self._file.path}: {own} has shape {info.shape}, the metadata says {shape}")
        stored = self._data[info.path][info.start : info.start + info.num_bytes]
        if own not in self._taken:
            self._taken.add(own)
            self.digest.update(f"{own} {info.kind.name}".encode())
            self.digest.update(stored.data)
        rows = stored.reshape(shape[0] if info.kind.numbers == 1 or len(shape) > 1 else 1, -1)
        if self._file.interleaved and own.split(".")[-2] in ("attn_q", "attn_k"):
            rows = _halves(rows, self._head_dim)
        return Packed(info.kind.name, rows, shape)


def _mapped(path: Path) -> NDArray[np.uint8]:
    """A plain array: each slice of numpy's class of mapped ones costs more."""
    return np.asarray(np.memmap(path, np.uint8, "c"))  # not "r": torch takes no array that cannot be written


def _halves(rows: NDArray[np.uint8], head_dim: int) -> NDArray[np.uint8]:
    """Of each head the first rows of all pairs, then the second ones."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def widened(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Its numbers, each computed in float32 as the gguf library does, then rounded to `dtype`."""
    kind, stored = GGMLQuantizationType[packed.kind], packed.rows.reshape(-1)
    found = torch.empty(packed.shape, dtype=dtype)
    numbers = found.view(-1)
    step = max(1, len(stored) * _AT_ONCE // max(1, len(numbers)))  # _AT_ONCE is a number of whole blocks
    for at, start in enumerate(range(0, len(stored), step)):
        piece = dequantize(stored[start : start + step][None], kind).reshape(-1)
        numbers[at * _AT_ONCE : (at + 1) * _AT_ONCE] = torch.from_numpy(np.require(piece, requirements="W"))
    return found


def _q4_0(rows_NB: Tensor) -> Tiled | None:
    blocks_NGB = rows_NB.unflatten(1, (-1, 18))
    d_NG = _halves_of(blocks_NGB[:, :, :2])
    return _finite(blocks_NGB[:, :, 2:], torch.stack((d_NG, -8 * d_NG)), 4)


def _q4_1(rows_NB: Tensor) -> Tiled | None:
    blocks_NGB = rows_NB.unflatten(1, (-1, 20))
    factors = torch.stack((_halves_of(blocks_NGB[:, :, :2]), _halves_of(blocks_NGB[:, :, 2:4])))
    return _finite(blocks_NGB[:, :, 4:], factors, 4)


def _q8_0(rows_NB: Tensor) -> Tiled | None:
    """Their numbers have a sign."""
    blocks_NGB = rows_NB.unflatten(1, (-1, 34))
    d_NG = _halves_of(blocks_NGB[:, :, :2])
    factors = torch.stack((d_NG, -128 * d_NG))
    return _finite(blocks_NGB[:, :, 2:] ^ 128, factors, 8)


def _q5_0(rows_NB: Tensor) -> Tiled | None:
    blocks_NGB = rows_NB.unflatten(1, (-1, 22))
    d_NG = _halves_of(blocks_NGB[:, :, :2])
    return _finite(_fives(blocks_NGB[:, :, 2:]), torch.stack((d_NG, -16 * d_NG)), 8)


def _q5_1(rows_NB: Tensor) -> Tiled | None:
    blocks_NGB = rows_NB.unflatten(1, (-1, 24))
    factors = torch.stack((_halves_of(blocks_NGB[:, :, :2]), _halves_of(blocks_NGB[:, :, 2:4])))
    return _finite(_fives(blocks_NGB[:, :, 4:]), factors, 8)


def _fives(blocks_NGB: Tensor) -> Tensor:
    """Numbers of 5 bits in bytes: 32 fifth bits, then 16 low halves and 16 high ones."""
    fifths = (blocks_NGB[:, :, :4, None] >> _BITS & 1).flatten(2)
    numbers = blocks_NGB[:, :, 4:]
    return torch.cat((numbers & 15, numbers >> 4), 2) | fifths << 4


def _q4_k(rows_NB: Tensor) -> Tiled | None:
    """Groups lie in pairs: low halves of 32 bytes, then high ones."""
    blocks_NSB = rows_NB.unflatten(1, (-1, 144))
    pairs = blocks_NSB[:, :, 16:].unflatten(2, (4, 1, 32))
    numbers = torch.cat((pairs & 15, pairs >> 4), 3).flatten(1, 3)
    return _finite(numbers[..., :16] | numbers[..., 16:] << 4, _factors_of(blocks_NSB), 4)


def _q5_k(rows_NB: Tensor) -> Tiled | None:
    """The same, and a byte of fifth bits for each place in a group."""
    blocks_NSB = rows_NB.unflatten(1, (-1, 176))
    pairs = blocks_NSB[:, :, 48:].unflatten(2, (4, 1, 32))
    fifths = blocks_NSB[:, :, 16:48].unflatten(2, (1, 1, 32)) >> _BITS.view(4, 2, 1) & 1
    numbers = torch.cat((pairs & 15, pairs >> 4), 3) | fifths << 4
    return _finite(numbers.flatten(1, 3), _factors_of(blocks_NSB), 8)


def _factors_of(blocks_NSB: Tensor) -> Tensor:
    """Eight groups a block, with factors and offsets of 6 bits, times those of the block; the products are rounded to
    float16 here, as fine as the block's own."""
    first, second, third = blocks_NSB[:, :, 4:16].unflatten(2, (3, 4)).unbind(2)
    d = torch.cat((first & 63, third & 15 | first >> 6 << 4), 2)
    m = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 2)
    whole = _halves_of(blocks_NSB[:, :, :4].unflatten(2, (2, 2))).float()
    return torch.stack((whole[..., 0, None] * d, -whole[..., 1, None] * m)).flatten(2).half()


def _finite(quads_NGQ: Tensor, factors_2NG: Tensor, bits: int) -> Tiled | None:
    """None where an offset is too large for float16."""
    return grouped(quads_NGQ, factors_2NG, bits) if factors_2NG.isfinite().all() else None


def _halves_of(bytes_B2: Tensor) -> Tensor:
    """Pairs of bytes as float16."""
    return bytes_B2.contiguous().view(torch.float16).squeeze(-1)


GROUPED: dict[str, Callable[[Tensor], Tiled | None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
"""From the bytes of rows `[N, B]`; None if the offsets are too large for float16."""
