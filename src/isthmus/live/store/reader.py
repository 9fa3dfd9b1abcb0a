"""Reads blocks for callers: copies from the arena, checked reads from the log, several at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

from isthmus.core.blocks import seal
from isthmus.live.store.arena import Arena, copy_bytes
from isthmus.live.store.log import Log

_UNIT_BYTES = 4 << 20
"""What one thread does at a time; neighbours in a file are read in one call of up to so many bytes."""
_SPLIT_BYTES = 2 << 20
"""From twice this size on, one block is read in several parts at once."""


class Fault(Enum):
    """Why a record gave no block."""

    DAMAGED = auto()
    UNREADABLE = auto()


class Source(NamedTuple):
    """Layers of one block to bring to `into`: from the arena if `slot` is given, else from `place` in the log."""

    slot: int | None
    place: int | None
    seals: tuple[bytes, ...]
    layers: range
    into: memoryview


Outcome = list[Fault | None]
Unit = list[int]
"""Indices of the sources that one thread brings."""


class Reader:
    """Brings the bytes. Who calls keeps slots pinned meanwhile, and judges faults."""

    def __init__(self, arena: Arena, log: Log | None, pool: ThreadPoolExecutor, threads: int) -> None:
        self._arena = arena
        self._log = log
        self._pool = pool
        self._threads = threads

    def read(self, sources: Sequence[Source]) -> Outcome:
        """What went wrong with each source, None where nothing did."""
        if len(sources) == 1:
            return [self._read_one(sources[0])]
        units = _units(sources)
        faults: Outcome = [None] * len(sources)
        done = self._pool.map(lambda unit: self._read_unit([sources[at] for at in unit]), units)
        for unit, outcome in zip(units, done, strict=True):
            for at, fault in zip(unit, outcome, strict=True):
                faults[at] = fault
        return faults

    def _read_unit(self, sources: Sequence[Source]) -> Outcome:
        outcome: Outcome = []
        for run in _runs(sources):
            if len(run) > 1:
                outcome += self._read_run(run)
            else:
                outcome.append(self._read_part(run[0]))
        return outcome

    def _read_run(self, run: Sequence[Source]) -> Outcome:
        """Whole blocks in neighbouring places: as many in one call as possible, one by one where that fails."""
        assert self._log is not None
        outcome: Outcome = []
        while left := run[len(outcome) :]:
            assert left[0].place is not None
            try:
                num_read = self._log.read_run(left[0].place, [source.into for source in left])
            except OSError:
                num_read = 0
            outcome += [_check(source) for source in left[:num_read]] or [self._read_part(left[0])]
        return outcome

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


def _units(sources: Sequence[Source]) -> list[Unit]:
    """Those of the log by place, so that neighbours come together; then those in the arena."""
    order = sorted(range(len(sources)), key=lambda at: (sources[at].slot is not None, sources[at].place or 0))
    units: list[Unit] = []
    size = 0
    for at in order:
        if not units or size + len(sources[at].into) > _UNIT_BYTES:
            units.append([])
            size = 0
        units[-1].append(at)
        size += len(sources[at].into)
    return units


def _runs(sources: Sequence[Source]) -> Iterator[list[Source]]:
    """Whole blocks in neighbouring places of the log, together; everything else alone."""
    run: list[Source] = []
    for source in sources:
        if run and not (_is_whole(run[-1]) and _is_whole(source) and source.place == (run[-1].place or 0) + 1):
            yield run
            run = []
        run.append(source)
    if run:
        yield run


def _is_whole(source: Source) -> bool:
    return source.slot is None and len(source.layers) == len(source.seals)


def _parts(source: Source, most: int) -> list[Source]:
    """Ranges of layers of one block of the log, to be read at the same time."""
    count = 1 if source.slot is not None else min(most, len(source.layers), len(source.into) // _SPLIT_BYTES)
    if count <= 1:
        return [source]
    size = len(source.into) // len(source.layers)
    cuts = [len(source.layers) * at // count for at in range(count + 1)]
    return [
        source._replace(layers=source.layers[start:stop], into=source.into[start * size : stop * size])
        for start, stop in pairwise(cuts)
    ]
