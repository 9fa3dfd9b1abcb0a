"""Bit packing for `isthmus.live.engine.codecs`, in two forms that give the same bytes.

`plain` is numpy; `native` is C, compiled on first use. Both let go of the interpreter lock, use one core and load
no torch. `select` picks; nothing else asks which one is in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
"""Dense, and of exactly the size it must have: the C side checks nothing."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PLANES = {4: (2, 1, 1), 2: (1, 1)}
"""Bytes that a number of 4 or 2 bytes has in each plane of `split`."""
HEADER_BYTES, CHANNEL_BYTES = 2, 2
"""Bytes of a packed block beside its numbers: in all, and for each channel."""


class Grid(NamedTuple):
    """Numbers `[num_tokens, channels]`, in blocks of `block_size` tokens; the last may be shorter."""

    dtype: str
    num_tokens: int
    block_size: int
    channels: int

    @property
    def raw_bytes(self) -> int:
        return self.num_tokens * self.channels * DTYPE_BYTES[self.dtype]

    @property
    def packed_bytes(self) -> int:
        num_blocks = -(-self.num_tokens // self.block_size)
        ranges = num_blocks * (HEADER_BYTES + CHANNEL_BYTES * self.channels)
        return ranges + self.num_tokens * self.channels


class BitPacking(Protocol):
    """8 bits per channel of a block, and planes of bytes.

    Packed, a block is [rank of its largest scale (uint16), how many ranks lower each channel's is (uint8),
    granules of each channel (int8), rows of one byte a channel], and a value is (8 * granules + byte) * scale.
    """

    def pack(self, grid: Grid, raw: Bytes, packed: Bytes) -> None:
        """Uses the least scale by which a channel's values fit; granules: its minimum in granules, rounded down.

        A channel that holds NaN or infinity, or spans more than float32 can, is NaN when unpacked.
        """

    def unpack(self, grid: Grid, packed: Bytes, raw: Bytes) -> bool:
        """False when a scale is none that `pack` writes; `raw` may be written in part then."""

    def split(self, width: int, raw: Bytes, planes: Sequence[Bytes]) -> None:
        """Numbers of `width` bytes into `PLANES[width]`, least significant first.

        The sign goes to the lowest bit before, so that the exponent fills the last plane's bytes from the top.
        """

    def join(self, width: int, planes: Sequence[Bytes], raw: Bytes) -> None:
        """The reverse of `split`."""


@cache
def select() -> BitPacking:
    """The compiled form, built when needed; numpy where there is no C compiler."""
    from isthmus.live.engine.packing import native, plain

    return native.load() or plain.PlainPacking()
