"""The files under a log: one folder, one lock, segment files of equal records. Knows places and bytes only.

Files here are overwritten and removed, so each that has such a name must be a store's own: the lock file is empty, and
a segment file begins with headers, of any model, from its first moment on.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from isthmus.core.errors import ConfigError, StartError
from isthmus.live.store.arena import PAGE_BYTES, Buffer, Shape, address, aligned_buffer, copy_bytes, round_up
from isthmus.live.store.files import Files
from isthmus.live.store.record import GROUP, RecordFormat, RecordHeader, has_records

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
_LOCK_NAME = "lock"
_START_BYTES = 64 << 10
"""Of a segment file: in so many is a header, whatever the size of its records."""
_SEGMENT_NAME = re.compile(r"blocks-([0-9a-f]{16})-(\d{6})")


class Segments:
    """Record places 0 to `num_records`, in files of about 256 MiB that are created one after the other.

    Raises StartError when another store uses the folder, OSError when it cannot be used, or holds what no store made.
    """

    def __init__(
        self, folder: str, record: RecordFormat, num_records: int, files: Files, *, direct: bool
    ) -> None:
        self.folder = folder
        self.num_records = num_records
        self._record = record
        self._files = files
        self._mark = record.fingerprint[:8].hex()
        self._per_segment = max(1, SEGMENT_BYTES // record.group_bytes) * GROUP
        self._fds: list[int] = []
        self._folder_fd: int | None = files.open_folder(folder)
        self._lock_fd: int | None = None
        try:
            self._claim()
            self.direct = direct and record.is_large and self._has_direct()
            self._open()
        except (OSError, StartError):
            self.close()
            raise

    @property
    def num_places(self) -> int:
        """Places that have a file; the rest comes with `grow`."""
        return min(len(self._fds) * self._per_segment, self.num_records)

    @property
    def used_bytes(self) -> int:
        return sum(self._file_bytes(segment) for segment in range(len(self._fds)))

    def groups(self) -> list[range]:
        """The places whose headers lie together."""
        return [range(at, min(at + GROUP, self.num_places)) for at in range(0, self.num_places, GROUP)]

    def grow(self) -> range:
        """Adds a file; returns its places. Raises OSError, and then nothing has changed."""
        assert self._folder_fd is not None
        name, places = self._name(len(self._fds)), self._places(len(self._fds))
        self._check_own(name)
        fd = self._files.open(self._folder_fd, name, direct=self.direct)
        try:
            self._files.allocate(fd, self._file_bytes(len(self._fds)))
            self._begin(fd)
            self._files.sync_folder(self._folder_fd)
        except OSError:
            self._files.close(fd)
            self._files.remove(self._folder_fd, name)
            raise
        self._fds.append(fd)
        return places

    def num_following(self, place: int) -> int:
        """How many records lie together from this one on."""
        return GROUP - place % GROUP

    def read_heads(self, place: int, into: memoryview) -> int:
        """Headers from this record's on; fewer bytes than asked for at the end of the file."""
        fd, index = self._locate(place)
        return self._files.read(fd, [into], self._record.head_offset(index))

    def read_payloads(self, place: int, start: int, into: Sequence[memoryview]) -> int:
        """Payload bytes from this record's byte `start` on; fewer at the end of the file."""
        fd, index = self._locate(place)
        return self._files.read(fd, into, self._record.payload_offset(index) + start)

    def write(self, place: int, payloads: Sequence[Buffer], heads: memoryview) -> None:
        """Writes records that lie together, from this one on: all or OSError."""
        fd, index = self._locate(place)
        self._write(fd, payloads, self._record.payload_offset(index))
        self._write(fd, [heads], self._record.head_offset(index))

    def sync(self, places: Sequence[int]) -> None:
        """Makes what was written to these places durable."""
        for segment in sorted({place // self._per_segment for place in places}):
            self._files.sync(self._fds[segment])

    def close(self) -> None:
        """Idempotent. The files stay, the lock goes."""
        fds, self._fds = self._fds, []
        fds += [fd for fd in (self._lock_fd, self._folder_fd) if fd is not None]
        self._lock_fd = self._folder_fd = None
        for fd in fds:
            self._files.close(fd)

    def _claim(self) -> None:
        """Locks the folder."""
        assert self._folder_fd is not None
        fd = self._lock_fd = self._files.open(self._folder_fd, _LOCK_NAME, direct=False)
        if self._files.size(fd):
            raise _foreign(_LOCK_NAME)
        if not self._files.lock(fd):
            raise StartError(
                f"SSD tier in {self.folder}: another node uses this folder; give each node its own"
            )

    def _begin(self, fd: int) -> None:
        """Headers of nothing, on the disk before any record is: after a power cut the file still shows whose it is."""
        self._write(fd, [self._record.empty_heads(GROUP)], 0)
        self._files.sync(fd)

    def _check_own(self, name: str) -> None:
        """Raises OSError for a file that no store made."""
        assert self._folder_fd is not None
        fd = self._files.open(self._folder_fd, name, direct=False)
        try:
            start = memoryview(bytearray(_START_BYTES))
            if not has_records(start[: self._files.read(fd, [start], 0)]):
                raise _foreign(name)
        finally:
            self._files.close(fd)

    def _has_direct(self) -> bool:
        """Some file systems refuse O_DIRECT when opening, some only when reading."""
        assert self._folder_fd is not None
        try:
            fd = self._files.open(self._folder_fd, _LOCK_NAME, direct=True)
        except OSError:
            return False
        try:
            self._files.read(fd, [aligned_buffer(PAGE_BYTES)], 0)
        except OSError:
            return False
        finally:
            self._files.close(fd)
        return True

    def _open(self) -> None:
        """Takes over the files of an earlier run: as far as model and capacity agree."""
        assert self._folder_fd is not None
        mine, others, limit = set(), [], -(-self.num_records // self._per_segment)
        for name in self._files.names(self._folder_fd):
            if match := _SEGMENT_NAME.fullmatch(name):
                self._check_own(name)
                if match[1] == self._mark and int(match[2]) < limit:
                    mine.add(int(match[2]))
                else:
                    others.append(name)
        if others:
            log.info("SSD tier in %s: removes %d files of another model or size", self.folder, len(others))
        for name in others:
            self._files.remove(self._folder_fd, name)
        while mine and len(self._fds) <= max(mine):
            # A file that is missing in the middle is opened empty.
            segment = len(self._fds)
            self._fds.append(self._files.open(self._folder_fd, self._name(segment), direct=self.direct))
            full = self._file_bytes(segment)
            if self._files.size(self._fds[segment]) > full:
                self._files.truncate(self._fds[segment], full)
            elif not self._files.size(self._fds[segment]):
                self._begin(self._fds[segment])
        self._files.sync_folder(self._folder_fd)

    def _places(self, segment: int) -> range:
        start = segment * self._per_segment
        return range(start, min(start + self._per_segment, self.num_records))

    def _name(self, segment: int) -> str:
        return f"blocks-{self._mark}-{segment:06d}"

    def _file_bytes(self, segment: int) -> int:
        return self._record.file_bytes(len(self._places(segment)))

    def _locate(self, place: int) -> tuple[int, int]:
        segment, index = divmod(place, self._per_segment)
        return self._fds[segment], index

    def _write(self, fd: int, pieces: Sequence[Buffer], offset: int) -> None:
        if self._files.write(fd, pieces, offset) != sum(map(len, pieces)):
            raise OSError(errno.ENOSPC, "the file system took only a part of a record")


def _foreign(name: str) -> OSError:
    return OSError(
        errno.EPERM,
        "is not of a node, and files here are overwritten: move it away, or name another cache.folder",
        name,
    )


# The SSD tier: one record per block, in equal places that are used again.
#
# Files are created when needed and never larger together than the capacity. What is written counts only after
# `sync`. Large records go past the page cache (O_DIRECT): that writes several times faster, and the page cache would
# only hold a second copy of what the arena holds.
#
# Thread-safe. Knows places and bytes; which block is worth keeping is decided elsewhere.


_BOUNCE_BYTES = 2 << 20
_SCAN_THREADS = 4


class Entry(NamedTuple):
    """One block to write: its place, its header, its bytes."""

    place: int
    header: RecordHeader
    payload: memoryview


class Log:
    """The records in `folder`: at most `capacity_bytes` of files, of one model.

    `revision` fingerprints the model and the KV layout; files of another one are removed. `direct=False` keeps to
    the page cache. Raises ConfigError when not one block fits, StartError when the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        shape: Shape,
        capacity_bytes: int,
        revision: bytes,
        *,
        direct: bool = True,
        files: Files | None = None,
    ) -> None:
        self.folder = str(Path(folder))  # a link in its place is one with "/" behind it, too
        self.files = files or Files()
        self.capacity_bytes = capacity_bytes
        self.format = RecordFormat(shape, revision)
        self.num_records = self.format.num_records(capacity_bytes)
        if not self.num_records:
            need = self.format.file_bytes(1)
            raise ConfigError(
                f"SSD tier in {self.folder}: {capacity_bytes} bytes hold no block; one takes {need} bytes"
            )
        try:
            self._segments = Segments(self.folder, self.format, self.num_records, self.files, direct=direct)
        except OSError as error:
            where = "" if error.filename in (None, self.folder) else f" {error.filename}:"
            raise StartError(
                f"SSD tier in {self.folder} cannot be used:{where} {error.strerror or error}"
            ) from error
        self._guard = threading.Lock()
        self._bounce = threading.local()
        self._free = list(range(self._segments.num_places))
        """A heap: the lowest place goes first, so that a prompt's blocks lie together."""
        self._bad: list[int] = []
        """A write failed here: used when nothing else is free."""
        self._num_used = 0

    @property
    def shape(self) -> Shape:
        return self.format.shape

    @property
    def used_bytes(self) -> int:
        """Bytes of the files, free places included."""
        return self._segments.used_bytes

    @property
    def num_free(self) -> int:
        """Places free without `grow`."""
        with self._guard:
            return len(self._free) + len(self._bad)

    @property
    def num_used(self) -> int:
        """Places taken."""
        return self._num_used

    @property
    def can_grow(self) -> bool:
        return self._segments.num_places < self.num_records

    def take(self) -> int | None:
        """A free place; None when there is none without `grow`."""
        with self._guard:
            place = heapq.heappop(self._free) if self._free else self._bad.pop(0) if self._bad else None
            self._num_used += place is not None
            return place

    def free(self, place: int) -> None:
        with self._guard:
            self._num_used -= 1
            heapq.heappush(self._free, place)

    def free_bad(self, place: int) -> None:
        """Frees a place where writing failed: it is used again only when there is no other."""
        with self._guard:
            self._num_used -= 1
            self._bad.append(place)

    def grow(self) -> None:
        """Adds one file. Raises OSError, and then nothing has changed. One thread at a time."""
        places = self._segments.grow()
        with self._guard:
            for place in places:
                heapq.heappush(self._free, place)

    def write(self, entries: Sequence[Entry]) -> None:
        """Writes records; they count after `sync`. Raises OSError, and then none of them counts."""
        size = self.format.header_bytes
        memory = aligned_buffer(size * GROUP)
        for run in self._runs(sorted(entries, key=lambda entry: entry.place)):
            payloads = [piece for entry in run for piece in self._payload_pieces(entry.payload)]
            heads = memory[: size * len(run)]
            heads[:] = b"".join(self.format.encode(entry.header, entry.place) for entry in run)
            self._segments.write(run[0].place, payloads, heads)

    def sync(self, places: Sequence[int]) -> None:
        """What was written to these places survives from now on. Raises OSError, and then none of it counts."""
        self._segments.sync(places)

    def probe(self) -> None:
        """Erases a free record and syncs. Raises OSError when the disk does not take it.

        For the thread that takes places: nobody else may write to this one meanwhile.
        """
        with self._guard:
            place = next(chain(self._free, self._bad), None)
        if place is not None:
            payload = aligned_buffer(self.format.payload_bytes)
            self._segments.write(place, [payload], self.format.empty_heads(1))
            self._segments.sync([place])

    def read(self, place: int, start: int, into: memoryview) -> bool:
        """Payload bytes from `start` on, as many as `into` takes; False: the file is too short. Raises OSError."""
        if not self._segments.direct or self._is_aligned(start, into):
            return self._segments.read_payloads(place, start, [into]) == len(into)
        return all(
            self._read_bounced(place, start + at, into[at : at + _BOUNCE_BYTES])
            for at in range(0, len(into), _BOUNCE_BYTES)
        )

    def read_run(self, place: int, intos: Sequence[memoryview]) -> int:
        """Whole payloads of records that lie one after the other from `place` on, in one call.

        Returns how many of `intos` were filled: fewer at the end of a group or file, none where that would need a
        copy. Raises OSError.
        """
        size = self.format.payload_bytes
        if size != self.shape.block_bytes:
            return 0
        if self._segments.direct and not all(self._is_aligned(0, into) for into in intos):
            return 0
        return self._segments.read_payloads(place, 0, intos[: self._segments.num_following(place)]) // size

    def scan(self) -> list[tuple[int, RecordHeader]]:
        """All whole headers, by place; what cannot be read is left out. To be called before any write."""
        with ThreadPoolExecutor(_SCAN_THREADS, "isthmus-scan") as pool:
            return [found for part in pool.map(self._scan_group, self._segments.groups()) for found in part]

    def occupy(self, places: Iterable[int]) -> None:
        """These places of a scan are in use."""
        used = set(places)
        with self._guard:
            self._free = [place for place in self._free if place not in used]
            self._num_used += len(used)
            heapq.heapify(self._free)

    def close(self) -> None:
        """Idempotent. The files stay."""
        self._segments.close()

    def _runs(self, entries: Sequence[Entry]) -> Iterator[list[Entry]]:
        """Records that lie together, so that one call writes them."""
        run: list[Entry] = []
        for entry in entries:
            if run and (entry.place != run[-1].place + 1 or self._segments.num_following(run[-1].place) == 1):
                yield run
                run = []
            run.append(entry)
        if run:
            yield run

    def _payload_pieces(self, payload: memoryview) -> list[Buffer]:
        size = round_up(len(payload), self.format.align)
        if not self._segments.direct:
            return [payload, bytes(size - len(payload))] if size > len(payload) else [payload]
        if self._is_aligned(0, payload):
            return [payload]
        padded = aligned_buffer(size)
        copy_bytes(padded[: len(payload)], payload)
        return [padded]

    def _is_aligned(self, offset: int, view: memoryview) -> bool:
        align = self.format.align
        return not (offset % align or len(view) % align or address(view) % align)

    def _read_bounced(self, place: int, start: int, into: memoryview) -> bool:
        """Reads through aligned memory of this thread."""
        align = self.format.align
        skip = start % align
        size = round_up(skip + len(into), align)
        if not hasattr(self._bounce, "memory"):
            self._bounce.memory = aligned_buffer(_BOUNCE_BYTES + 2 * align)
        memory: memoryview = self._bounce.memory[:size]
        if self._segments.read_payloads(place, start - skip, [memory]) < skip + len(into):
            return False
        copy_bytes(into, memory[skip : skip + len(into)])
        return True

    def _scan_group(self, places: range) -> list[tuple[int, RecordHeader]]:
        size = self.format.header_bytes
        memory = aligned_buffer(size * len(places))
        try:
            heads = memory[: self._segments.read_heads(places[0], memory)]
        except OSError:
            return []
        headers = [self.format.decode(heads[at * size :], place) for at, place in enumerate(places)]
        return [(place, header) for place, header in zip(places, headers, strict=True) if header is not None]
