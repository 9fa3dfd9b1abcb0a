"""Copies and aligned buffers.

numpy copies without the interpreter lock, so that other threads compute and read meanwhile; assigning to a
slice of a memoryview holds it.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096

Buffer = memoryview | bytes | bytearray | mmap.mmap


def copy_bytes(into: memoryview, data: Buffer) -> None:
    """Copies `data` to `into`, contiguous bytes of the same length."""
    np.copyto(_bytes_of(into), _bytes_of(data))


def address(view: Buffer) -> int:
    """Where in memory the view starts."""
    interface: dict[str, Any] = _bytes_of(view).__array_interface__
    start: int = interface["data"][0]
    return start


def aligned_buffer(size: int) -> memoryview:
    """Fresh zeroed memory that starts at a page, as O_DIRECT wants it."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def round_up(size: int, align: int) -> int:
    return -(-size // align) * align


def _bytes_of(view: Buffer) -> NDArray[np.uint8]:
    return np.frombuffer(view, np.uint8)
