"""The tensors of a GGUF file, widened one by one as they are taken, and digested as they lie in the file.

`_packed` gives a tensor's rows as stored, in the engine's order; `widened` makes numbers of them, and `GROUPED` what
stays quantised in memory.

Legend: N rows, G groups of 32 numbers in a row, B bytes, S blocks of 256 numbers in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import blake3
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from isthmus.core.errors import ModelError
from isthmus.core.models.quantisation import Awq, Block, Compressed, Gptq, Quantisation, Scaled
from isthmus.live.engine.tiles import GROUP, Tiled, grouped
from isthmus.model_files import GgufFile
from isthmus.model_files.gguf import tensor_name

_BITS = torch.arange(8, dtype=torch.uint8)
_AT_ONCE_GGUF = 1 << 17
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
    step = max(1, len(stored) * _AT_ONCE_GGUF // max(1, len(numbers)))  # _AT_ONCE is a number of whole blocks
    for at, start in enumerate(range(0, len(stored), step)):
        piece = dequantize(stored[start : start + step][None], kind).reshape(-1)
        numbers[at * _AT_ONCE_GGUF : (at + 1) * _AT_ONCE_GGUF] = torch.from_numpy(
            np.require(piece, requirements="W")
        )
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


# Matrices that lie quantised in safetensors files: which tensors make one up, and what numbers they say.
#
# Of a matrix `X.weight` `[N, K]`, with G groups of columns and words of 32 bits, the lowest first:
#
# fp8                 X.weight [N, K], X.weight_scale_inv or X.weight_scale: one, [N, 1], or one a block
# compressed-tensors  the same, also of int8, perhaps with X.weight_zero_point of the scales' shape; or
# X.weight_packed, words along K, X.weight_shape, X.weight_scale [N, G], and perhaps
# X.weight_zero_point [N, G], words along N; of both perhaps X.weight_g_idx [K], the group of
# each column
# gptq                X.qweight [K, N], words along K; X.qzeros [G, N], words along N; X.scales [G, N]; X.g_idx [K]
# awq                 X.qweight [K, N], X.qzeros [G, N], words along N in an order of their own; X.scales [G, N]
#
# Read from the sources of compressed-tensors, AutoGPTQ, AutoAWQ and transformers. They widen in the type of the scales;
# here numbers are computed in float32, as those of GGUF files are, and rounded once.


LEAST_HALF = 2.0**-14
"""Smaller numbers lose bits in float16."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WORDS = (torch.int32,)
_INDICES = (torch.int32, torch.int64)
_AT_ONCE_QUANTISED = 1 << 18
"""Numbers that are widened at a time, so that those on the way stay in a core's cache."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word, counted by 4 bits from the lowest, each of its 8 rows stands."""


class Parts(Protocol):
    """Tensors as they lie in files."""

    def has(self, name: str) -> bool: ...

    def kind(self, name: str) -> str:
        """Of a tensor's numbers, as safetensors writes it: "F8_E4M3"."""

    def read(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        """Of one of the types and shapes, and digested. Raises ModelError."""

    def refuse(self, reason: str) -> NoReturn:
        """Raises ModelError."""


@dataclass(frozen=True)
class _Columns:
    """The groups of `width` columns: `size` by `size`, or of each column the one in `group_K`."""

    width: int
    size: int
    group_K: Tensor | None = None

    def spread(self, grid_RG: Tensor) -> Tensor:
        """What there is of each group, for each of its columns."""
        if self.group_K is not None:
            return grid_RG[:, self.group_K]
        return grid_RG[..., None].expand(-1, -1, self.size).flatten(1)[:, : self.width]


@dataclass(frozen=True)
class Stored:
    """A matrix of `(numbers - zeros) * scales`. `numbers`: its rows `[start, stop)`, floats or, of `bits`, whole
    numbers without a sign. `scales`, `zeros`: float32, a row for every `height` rows of the matrix, and a column for
    each group of its columns."""

    shape: Block
    bits: int | None
    numbers: Callable[[int, int], Tensor]
    scales: Tensor
    zeros: Tensor | None
    height: int
    columns: _Columns

    def grouped(self) -> Tiled | None:
        """As it stays quantised in memory; None if it is of floats, its columns are not in whole groups of 32 in their
        order, or float16 cannot hold its scales. Offsets are rounded to float16: of 4 bits by a
        hundredth of a step at most, of 8 by an eighth, and not at all of those that are symmetric."""
        rows, width = self.shape
        size = self.columns.size
        whole = width % GROUP == 0 and (size % GROUP == 0 or size == width)
        if self.bits is None or self.zeros is None or self.columns.group_K is not None or not whole:
            return None
        block, starts = torch.arange(rows) // self.height, torch.arange(0, width, GROUP) // size
        scales, zeros = (grid[block][:, starts] for grid in (self.scales, self.zeros))
        factors = torch.stack((scales, -zeros * scales)).half()
        if not bool(((scales.abs() > LEAST_HALF) & factors.isfinite().all(0)).all()):
            return None
        numbers = self.numbers(0, rows).unflatten(1, (-1, GROUP))
        if self.bits == 4:
            numbers = numbers[..., : GROUP // 2] | numbers[..., GROUP // 2 :] << 4
        return grouped(numbers, factors, self.bits)

    def widened(self, dtype: torch.dtype) -> Tensor:
        rows, width = self.shape
        found = torch.empty(rows, width, dtype=dtype)
        step = max(
            8, _AT_ONCE_QUANTISED // width // 8 * 8
        )  # whole words, also of those that run along the rows
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            block = torch.arange(start, stop) // self.height
            piece = self.numbers(start, stop).float()
            if self.zeros is not None:
                piece -= self.columns.spread(self.zeros[block])
            found[start:stop] = piece.mul_(self.columns.spread(self.scales[block]))
        return found


def packed_name(quantisation: Quantisation, name: str) -> str:
    """The tensor that has the numbers of the matrix `name` where none has its name."""
    module = name.removesuffix(".weight")
    return f"{module}.weight_packed" if isinstance(quantisation, Compressed) else f"{module}.qweight"


def stored(quantisation: Quantisation, parts: Parts, name: str, shape: tuple[int, ...]) -> Stored | None:
    """A matrix as it lies there; None for what is not quantised. Raises ModelError naming a tensor that is missing, or
    not as the format has it."""
    if len(shape) != 2 or not name.endswith(".weight"):
        return None
    size, module = (shape[0], shape[1]), name.removesuffix(".weight")
    match quantisation:
        case Scaled() | Compressed() if parts.has(name):
            return _scaled(quantisation, parts, name, size)
        case Compressed():
            return _packed(quantisation, parts, name, size)
        case Gptq() if not parts.has(name):
            return _gptq(quantisation, parts, module, size)
        case Awq() if not parts.has(name):
            return _awq(quantisation, parts, module, size)
        case _:
            return None


def _scaled(quantisation: Scaled | Compressed, parts: Parts, name: str, shape: Block) -> Stored | None:
    kinds = {"F8_E4M3": torch.float8_e4m3fn}
    if isinstance(quantisation, Compressed):
        kinds["I8"] = torch.int8
    dtype = kinds.get(parts.kind(name))
    if dtype is None:
        return None
    weight = parts.read(name, (dtype,), shape)
    scale, zero = f"{name}_scale", f"{name}_zero_point"
    if isinstance(quantisation, Scaled) and parts.has(f"{name}_scale_inv"):
        scale = f"{name}_scale_inv"
    scales, block = _grid(quantisation, parts, scale, FLOATS, shape)
    bits, zeros = None, None
    if dtype == torch.int8:
        bits, zeros = 8, torch.full_like(scales, 128)  # the numbers come without a sign
        if parts.has(zero) or not _symmetric(quantisation):
            zeros = zeros + _grid(quantisation, parts, zero, (torch.int8,), shape)[0]
    columns = _columns(parts, f"{name}_g_idx", _Columns(shape[1], block[1]), stated=False)
    return Stored(shape, bits, _eights(weight), scales, zeros, block[0], columns)


def _symmetric(quantisation: Scaled | Compressed) -> bool:
    return isinstance(quantisation, Scaled) or quantisation.symmetric


def _grid(
    quantisation: Scaled | Compressed, parts: Parts, name: str, dtypes: tuple[torch.dtype, ...], shape: Block
) -> tuple[Tensor, Block]:
    """Numbers for blocks of a matrix, in float32, and the size of a block: all of it, a row, a part of a row, or what
    config.json says."""
    rows, width = shape
    grids = {(): shape, (1,): shape, (1, 1): shape, (rows,): (1, width), (rows, 1): (1, width)}
    if isinstance(quantisation, Compressed):
        grids |= {(rows, width // size): (1, size) for size in quantisation.groups if width % size == 0}
    if quantisation.block is not None:
        grids.setdefault(tuple(map(_parts, shape, quantisation.block)), quantisation.block)
    found = parts.read(name, dtypes, *grids)
    block = grids[tuple(found.shape)]
    return found.float().view(*map(_parts, shape, block)), block


def _packed(quantisation: Compressed, parts: Parts, name: str, shape: Block) -> Stored:
    rows, width = shape
    words = {_parts(width * bits, 32): bits for bits in quantisation.bits}
    packed = parts.read(f"{name}_packed", _WORDS, *((rows, count) for count in words))
    bits = words[packed.shape[1]]
    if (stated := parts.read(f"{name}_shape", _INDICES, (2,)).tolist()) != list(shape):
        parts.refuse(f"{name}_shape says {stated}, config.json {list(shape)}")
    scales, block = _grid(quantisation, parts, f"{name}_scale", FLOATS, shape)
    zeros = torch.full_like(scales, 1 << bits - 1)  # packed as if they were unsigned, and so are zero points
    if parts.has(f"{name}_zero_point") or not quantisation.symmetric:
        found = parts.read(f"{name}_zero_point", _WORDS, (_parts(rows * bits, 32), scales.shape[1]))
        zeros = _unpacked(found.t(), bits)[:, :rows].t().float()
    columns = _columns(parts, f"{name}_g_idx", _Columns(width, block[1]), stated=False)
    return Stored(shape, bits, _rows_of(packed, bits, width), scales, zeros, block[0], columns)


def _gptq(quantisation: Gptq, parts: Parts, module: str, shape: Block) -> Stored:
    (rows, width), bits = shape, quantisation.bits
    size = quantisation.group_size or width
    groups = _parts(width, size)
    packed = parts.read(f"{module}.qweight", _WORDS, (_parts(width * bits, 32), rows))
    zeros = parts.read(f"{module}.qzeros", _WORDS, (groups, _parts(rows * bits, 32)))
    if quantisation.lowered:
        zeros = zeros + sum(
            1 << at for at in range(0, 32, bits)
        )  # word by word, as they were lowered: with carries
    scales_GN = parts.read(f"{module}.scales", FLOATS, (groups, rows))
    columns = _columns(parts, f"{module}.g_idx", _Columns(width, size), stated=quantisation.ordered)
    if not quantisation.ordered and columns.group_K is not None:
        parts.refuse(f"{module}.g_idx orders columns, config.json says desc_act false")
    zeros_GN = _unpacked(zeros, bits)[:, :rows]
    numbers = _rows_of(packed.t().contiguous(), bits, width)
    return Stored(shape, bits, numbers, scales_GN.t().float(), zeros_GN.t().float(), 1, columns)


def _awq(quantisation: Awq, parts: Parts, module: str, shape: Block) -> Stored:
    rows, width = shape
    columns = _Columns(width, quantisation.group_size or width)
    groups = _parts(width, columns.size)
    packed = parts.read(f"{module}.qweight", _WORDS, (width, _parts(rows, 8))).t().contiguous()
    zeros = parts.read(f"{module}.qzeros", _WORDS, (groups, _parts(rows, 8))).t()
    scales_GN = parts.read(f"{module}.scales", FLOATS, (groups, rows))

    def numbers(start: int, stop: int) -> Tensor:
        return _rows_in(packed[start // 8 : _parts(stop, 8)])[: stop - start]

    return Stored(shape, 4, numbers, scales_GN.t().float(), _rows_in(zeros)[:rows].float(), 1, columns)


def _columns(parts: Parts, name: str, in_turn: _Columns, *, stated: bool) -> _Columns:
    """The groups of columns as `name` says if it is there, and it must be if that is `stated`. compressed-tensors
    leaves -1 everywhere where it orders nothing."""
    if not stated and not parts.has(name):
        return in_turn
    groups_K = parts.read(name, _INDICES, (in_turn.width,)).long()
    follow_K, count = torch.arange(in_turn.width) // in_turn.size, _parts(in_turn.width, in_turn.size)
    if bool((groups_K == -1).all()) or torch.equal(groups_K, follow_K):
        return in_turn
    if not bool(((groups_K >= 0) & (groups_K < count)).all()):
        parts.refuse(f"{name} names groups beside the {count} that there are")
    return replace(in_turn, group_K=groups_K)


def _eights(weight: Tensor) -> Callable[[int, int], Tensor]:
    """Numbers of 8 bits. Floats are looked up: torch's own conversion takes four times as long."""
    if weight.dtype == torch.int8:
        return lambda start, stop: weight[start:stop].view(torch.uint8) ^ 128
    values = torch.arange(256, dtype=torch.uint8).view(weight.dtype).float()
    stored = weight.view(torch.uint8)

    def numbers(start: int, stop: int) -> Tensor:
        return values.index_select(0, stored[start:stop].flatten().int()).view(stop - start, -1)

    return numbers


def _rows_of(packed: Tensor, bits: int, width: int) -> Callable[[int, int], Tensor]:
    return lambda start, stop: _unpacked(packed[start:stop], bits)[:, :width]


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unsigned, along the last dimension."""
    stored = words.contiguous().view(torch.uint8)  # of a little-endian machine, as safetensors has them
    return stored if bits == 8 else torch.stack((stored & 15, stored >> 4), -1).flatten(-2)


def _rows_in(words: Tensor) -> Tensor:
    """Of AWQ's words, which are rows here: 8 rows for each."""
    shifts = 4 * torch.tensor(_AWQ_ORDER, dtype=torch.int32)[:, None]
    return (words[:, None] >> shifts & 15).flatten(0, 1).to(torch.uint8)


def _parts(size: int, part: int) -> int:
    """How many parts cover it."""
    return -(-size // part)
