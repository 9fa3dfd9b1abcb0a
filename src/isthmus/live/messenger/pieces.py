"""Memory in pieces, seen as one range of bytes. No I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

IO_PARTS = 512
"""Pieces that one system call sends or receives; Linux takes 1,024."""

_SCRATCH = memoryview(bytearray(64 << 10))
_ZEROS = memoryview(bytes(64 << 10))


def _repeated(view: memoryview, size: int) -> list[memoryview]:
    whole, rest = divmod(size, len(view))
    return [view] * whole + ([view[:rest]] if rest else [])


def scratch(size: int) -> list[memoryview]:
    """Memory of `size` bytes that nobody reads."""
    return _repeated(_SCRATCH, size)


def zeros(size: int) -> list[memoryview]:
    """`size` bytes that mean nothing."""
    return _repeated(_ZEROS, size)


class Pieces:
    """Contiguous pieces of memory, in order, as one range `[0, size)`. Empty pieces are left out."""

    __slots__ = ("_starts", "size", "views")

    def __init__(self, parts: Iterable[memoryview]) -> None:
        self.views = [part.cast("B") for part in parts if part.nbytes]
        ends = list(accumulate(map(len, self.views)))
        self.size = ends[-1] if ends else 0
        self._starts = [0, *ends[:-1]]

    def cut(self, start: int, length: int) -> list[memoryview]:
        """`[start, start + length)` as pieces; it must lie within the whole."""
        if length == self.size:
            return list(self.views)
        found = []
        at = bisect_right(self._starts, start) - 1
        within = start - self._starts[at]
        while length:
            view = self.views[at][within : within + length]
            found.append(view)
            length -= len(view)
            at, within = at + 1, 0
        return found
