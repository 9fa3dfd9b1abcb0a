"""The files under a log: one folder, one lock, segment files of equal records. Knows places and bytes only.

Files here are overwritten and removed, so each that has such a name must be a store's own: the lock file is empty, and
a segment file begins with headers, of any model, from its first moment on.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Sequence

from isthmus.core.errors import StartError
from isthmus.live.store.arena import PAGE_BYTES, Buffer, aligned_buffer
from isthmus.live.store.files import Files
from isthmus.live.store.record import GROUP, RecordFormat, has_records

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

    def read_payload(self, place: int, start: int, into: memoryview) -> int:
        """Reads payload from byte `start` on. Returns the number of bytes: fewer at the end of the file."""
        fd, index = self._locate(place)
        return self._files.read(fd, [into], self._record.payload_offset(index) + start)

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
