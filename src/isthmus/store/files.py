"""The only place where the store touches the file system and the clock, so that tests can make either fail."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Sequence

from isthmus.store.memory import Buffer


class Files:
    """Calls of the operating system. Each raises OSError."""

    def make_folder(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)

    def names(self, folder: str) -> list[str]:
        return sorted(os.listdir(folder))

    def open(self, path: str, *, direct: bool) -> int:
        """Opens for reading and writing, creates if missing. `direct` goes past the page cache."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        fd = os.open(path, flags, 0o600)
        if not direct:  # what lies behind a block is seldom wanted next
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def lock(self, fd: int) -> bool:
        """False: another process, or another store of this one, has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        """Makes the file `size` bytes long and reserves the room, as far as the file system can."""
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(fd, size)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def read(self, fd: int, into: Sequence[Buffer], offset: int) -> int:
        """Bytes read, fewer than asked for at the end of the file."""
        return os.preadv(fd, into, offset)

    def write(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, pieces, offset)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def wait(self, changed: threading.Condition, timeout_s: float | None) -> None:
        """Sleeps until notified, or for so long."""
        changed.wait(timeout_s)

    def sync_folder(self, path: str) -> None:
        """Makes the creation of files in it durable."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.monotonic()
