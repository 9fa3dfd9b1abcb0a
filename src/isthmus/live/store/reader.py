"""Copies blocks from the arena, and reads them from the log against their seals."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

from isthmus.core.blocks import seal
from isthmus.live.store.arena import Arena, copy_bytes
from isthmus.live.store.log import Log

UNIT_BYTES = 4 << 20
"""Bytes of blocks that one thread copies at a time."""
_SPLIT_BYTES = 2 << 20
"""Half the size from which one block is read in several parts at once."""


class Fault(Enum):
    """Why a record gave no block."""

    DAMAGED = auto()
    UNREADABLE = auto()


class Source(NamedTuple):
    """Layers of one block to copy to `into`: from `slot` of the arena if given, else from `place` in the log."""

    slot: int | None
    place: int | None
    seals: tuple[bytes, ...]
    layers: range
    into: memoryview


class Reader:
    """Reads blocks. The caller keeps slots pinned meanwhile, and judges faults."""

    def __init__(self, arena: Arena, log: Log | None, pool: ThreadPoolExecutor, threads: int) -> None:
        self._arena, self._log = arena, log
        self._pool, self._threads = pool, threads

    def read(self, sources: Sequence[Source]) -> list[Fault | None]:
        """Reads all sources, several at a time. Returns each one's fault."""
        if len(sources) == 1:
            return [self._read_one(sources[0])]
        step = max(1, UNIT_BYTES // self._arena.shape.block_bytes)
        units = [sources[at : at + step] for at in range(0, len(sources), step)]
        done = self._pool.map(lambda unit: [self._read_part(source) for source in unit], units)
        return [fault for faults in done for fault in faults]

    def _read_one(self, source: Source) -> Fault | None:
        parts = _parts(source, self._threads)
        if len(parts) == 1:
            return self._read_part(source)
        others = self._pool.map(self._read_part, parts[1:])
        faults = [self._read_part(parts[0]), *others]
        return next((fault for fault in faults if fault is not None), None)

    def _read_part(self, source: Source) -> Fault | None:
        slice_bytes = self._arena.shape.slice_bytes
        start = source.layers.start * slice_bytes
        if source.slot is not None:
            copy_bytes(source.into, self._arena.slot(source.slot)[start : start + len(source.into)])
            return None
        assert self._log is not None and source.place is not None
        try:
            if not self._log.read(source.place, start, source.into):
                return Fault.DAMAGED
        except OSError:
            return Fault.UNREADABLE
        return _check(source)


def _check(source: Source) -> Fault | None:
    size = len(source.into) // len(source.layers)
    for at, layer in enumerate(source.layers):
        if seal(source.into[at * size : (at + 1) * size]) != source.seals[layer]:
            return Fault.DAMAGED
    return None


def _parts(source: Source, most: int) -> list[Source]:
    """Cuts a block of the log into up to `most` ranges of layers, to be read at the same time."""
    count = 1 if source.slot is not None else min(most, len(source.layers), len(source.into) // _SPLIT_BYTES)
    if count <= 1:
        return [source]
    size = len(source.into) // len(source.layers)
    cuts = [len(source.layers) * at // count for at in range(count + 1)]
    return [
        source._replace(layers=source.layers[start:stop], into=source.into[start * size : stop * size])
        for start, stop in pairwise(cuts)
    ]
