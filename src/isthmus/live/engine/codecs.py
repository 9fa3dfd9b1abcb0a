"""Codecs for KV on slow links: one layer of a run of tokens, encoded in one message.

    none   the bytes themselves
    zstd   lossless: the exponents, which alone are regular, entropy-coded; sign and mantissa as they are
    int8   8 bits a number: each channel (K and V, heads, head_dim) of each block has its own base and scale

Zstandard over whole KV finds less and takes longer: with the exponents alone in front of it, few matches to look
for (`_SEARCH`) and its Huffman stage doing the work, bfloat16 shrinks to 2/3 at about 1 GB/s on one core.

int8 of a block depends on that block alone, so whoever encodes it gets the same bytes, and each block of a message
can be sealed by itself (`encoded_blocks`). It costs 2 bytes a channel of a block beside the numbers. For a channel
whose numbers lie in [low, high]

    |x - x'| <= scale / 2,   scale <= 17/16 * max((high - low) / 247, |low| / 1016)

before x' is rounded to the layout's dtype; only where that is less than 2^-15 of the block's largest scale is it
raised to about so much. A channel with NaN or infinity in it comes back as NaN. What was decoded and is encoded
again loses next to nothing: the error does not grow from node to node.

Encoding and decoding let go of the interpreter lock; any thread may do it. Loads no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import zstandard

from isthmus.core.blocks import KVLayout
from isthmus.core.errors import ProtocolError
from isthmus.live.engine import packing
from isthmus.live.engine.packing import DTYPE_BYTES, PLANES, Bytes, Grid

NONE, ZSTD, INT8 = "none", "zstd", "int8"
CODECS = (NONE, ZSTD, INT8)
EXACT = (NONE, ZSTD)
"""Decoding gives back the bytes that were encoded; KV of another codec needs a layout that names it."""

Data = memoryview | bytes | bytearray

_SEARCH = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=18, target_length=0
)


class _Local(threading.local):
    """A thread's own contexts: they must not be shared, and are worth keeping."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_SEARCH)
        self.decompressor = zstandard.ZstdDecompressor()


_local = _Local()


def encode(codec: str, layout: KVLayout, parts: Sequence[memoryview], num_tokens: int) -> Data:
    """One layer's KV of `num_tokens` tokens from a block's first on; `parts` together are those bytes in order.

    Every part is whole blocks, but for the last one's end.
    """
    assert sum(map(len, parts)) == num_tokens * layout.token_bytes, "the parts are not these tokens"
    if codec == NONE:
        return parts[0] if len(parts) == 1 else b"".join(parts)
    if codec == INT8:
        return _quantised(layout, parts, num_tokens)
    if codec == ZSTD:
        return _compressed(layout, parts, num_tokens)
    raise ProtocolError(f"unknown KV codec {codec!r}; known: {', '.join(CODECS)}")


def decode(codec: str, layout: KVLayout, data: Data, targets: Sequence[memoryview], num_tokens: int) -> None:
    """Decodes into writable `targets`, which are cut at block borders, not necessarily where the parts were.

    Raises ProtocolError for what `encode` cannot have written; the targets may be overwritten in part then. It is
    no digest: bytes that were changed on the way can be well-formed, so compare seals.
    """
    assert sum(map(len, targets)) == num_tokens * layout.token_bytes, "the targets are not these tokens"
    if codec == NONE:
        _copy(data, targets)
    elif codec == INT8:
        _dequantise(layout, data, targets, num_tokens)
    elif codec == ZSTD:
        _decompress(layout, data, targets, num_tokens)
    else:
        raise ProtocolError(f"unknown KV codec {codec!r}; known: {', '.join(CODECS)}")


def encoded_bytes(codec: str, layout: KVLayout, num_tokens: int) -> int:
    """Bytes of one layer of so many tokens, encoded: exactly, but for zstd the most it can take."""
    if codec == INT8:
        return _grid(layout, num_tokens).packed_bytes
    raw = num_tokens * layout.token_bytes
    if codec == ZSTD:
        count = raw // DTYPE_BYTES[layout.dtype]
        return raw + (count >> 8) + 128  # zstd's own bound, and its headers
    return raw


def encoded_blocks(codec: str, layout: KVLayout, data: Data, num_tokens: int) -> list[memoryview]:
    """Encoded bytes of each block, for codecs that keep blocks apart: none and int8."""
    assert codec in (NONE, INT8), f"{codec} does not keep blocks apart"
    starts = range(0, num_tokens, layout.block_size)
    edges = [encoded_bytes(codec, layout, start) for start in starts]
    view = memoryview(data)
    return [view[first:stop] for first, stop in pairwise([*edges, encoded_bytes(codec, layout, num_tokens)])]


def _grid(layout: KVLayout, num_tokens: int) -> Grid:
    return Grid(
        layout.dtype, num_tokens, layout.block_size, layout.vectors * layout.num_kv_heads * layout.head_dim
    )


def _array(data: Data) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _check_size(codec: str, data: Data, expected: int) -> None:
    if len(data) != expected:
        raise ProtocolError(f"KV encoded as {codec} has {len(data)} bytes; {expected} were expected")


def _copy(data: Data, targets: Sequence[memoryview]) -> None:
    _check_size(NONE, data, sum(map(len, targets)))
    view, at = memoryview(data), 0
    for target in targets:
        target[:] = view[at : at + len(target)]
        at += len(target)


# --- int8


def _quantised(layout: KVLayout, parts: Sequence[memoryview], num_tokens: int) -> Data:
    packed = np.empty(_grid(layout, num_tokens).packed_bytes, np.uint8)
    for grid, raw, at in _grids(layout, parts):
        packing.select().pack(grid, raw, packed[at : at + grid.packed_bytes])
    return packed.data


def _dequantise(layout: KVLayout, data: Data, targets: Sequence[memoryview], num_tokens: int) -> None:
    _check_size(INT8, data, _grid(layout, num_tokens).packed_bytes)
    packed = _array(data)
    for grid, raw, at in _grids(layout, targets):
        if not packing.select().unpack(grid, packed[at : at + grid.packed_bytes], raw):
            raise ProtocolError("KV encoded as int8 holds a base or scale that no encoder writes")


def _grids(layout: KVLayout, parts: Sequence[memoryview]) -> Iterator[tuple[Grid, Bytes, int]]:
    """Each part with where its packed bytes start."""
    at = 0
    for index, part in enumerate(parts):
        num_tokens, left = divmod(len(part), layout.token_bytes)
        whole = index == len(parts) - 1 or num_tokens % layout.block_size == 0
        assert whole and not left, "a part that ends inside a block"
        grid = _grid(layout, num_tokens)
        yield grid, _array(part), at
        at += grid.packed_bytes


# --- zstd: [planes of sign and mantissa, the plane of exponents as one zstd frame]


def _compressed(layout: KVLayout, parts: Sequence[memoryview], num_tokens: int) -> Data:
    width, count = DTYPE_BYTES[layout.dtype], sum(map(len, parts)) // DTYPE_BYTES[layout.dtype]
    planes = _planes(np.empty(count * width, np.uint8), width, count)
    for part, pieces in _cut(parts, planes, width):
        packing.select().split(width, part, pieces)
    frame = _local.compressor.compress(planes[-1].data)
    return b"".join((*(plane.data for plane in planes[:-1]), frame))


def _decompress(layout: KVLayout, data: Data, targets: Sequence[memoryview], num_tokens: int) -> None:
    width, count = DTYPE_BYTES[layout.dtype], sum(map(len, targets)) // DTYPE_BYTES[layout.dtype]
    stored = count * (width - 1)
    exponents = _exponents(memoryview(data)[stored:], count)
    planes = [*_planes(_array(data)[:stored], width, count)[:-1], _array(exponents)]
    for target, pieces in _cut(targets, planes, width):
        packing.select().join(width, pieces, target)


def _exponents(frame: memoryview, count: int) -> bytes:
    """Decompresses a frame that must hold `count` bytes; it cannot make us allocate more."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size != count:
            raise ProtocolError(f"KV encoded as zstd holds {size} numbers; {count} were expected")
        return _local.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"KV encoded as zstd cannot be read: {error}") from None


def _planes(data: Bytes, width: int, count: int) -> list[Bytes]:
    edges = [0]
    for size in PLANES[width]:
        edges.append(edges[-1] + size * count)
    return [data[first:stop] for first, stop in pairwise(edges)]


def _cut(
    parts: Sequence[memoryview], planes: Sequence[Bytes], width: int
) -> Iterator[tuple[Bytes, list[Bytes]]]:
    """Each part with its stretch of every plane."""
    first = 0
    for part in parts:
        stop = first + len(part) // width
        sizes = zip(planes, PLANES[width], strict=True)
        yield _array(part), [plane[first * size : stop * size] for plane, size in sizes]
        first = stop
