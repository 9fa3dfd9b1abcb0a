"""Calls of the operating system that the store makes, in one place, so that tests can make them fail."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence

from isthmus.live.store.arena import Buffer


class Files:
    """File system and clock. Each method raises OSError."""

    def open_folder(self, path: str) -> int:
        """Makes the folder if missing, and opens it. A link in its place is not followed; links on the way to it are
        the operator's."""
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", path)
        os.makedirs(path, mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return _checked(fd, path, stat.S_ISDIR)

    def names(self, folder: int) -> list[str]:
        return sorted(os.listdir(folder))

    def open(self, folder: int, name: str, *, direct: bool) -> int:
        """Opens for reading and writing, creates if missing. `direct` goes past the page cache. Fails for a link, and
        for anything but a plain file of this user, with no second name."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        fd = _checked(os.open(name, flags, 0o600, dir_fd=folder), name, stat.S_ISREG)
        if not direct:  # what lies behind a block is seldom wanted next
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def lock(self, fd: int) -> bool:
        """Locks the file. False: another process, or another store of this one, has it."""
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
        """Makes the file `size` bytes long and reserves the room where the file system can."""
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(fd, size)

    def remove(self, folder: int, name: str) -> None:
        os.unlink(name, dir_fd=folder)

    def read(self, fd: int, into: Sequence[Buffer], offset: int) -> int:
        """Reads into memory. Returns the number of bytes, fewer than asked for at the end of the file."""
        return os.preadv(fd, into, offset)

    def write(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, pieces, offset)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def wait(self, changed: threading.Condition, timeout_s: float | None) -> None:
        """Waits until notified, or for `timeout_s`."""
        changed.wait(timeout_s)

    def sync_folder(self, folder: int) -> None:
        """Makes the creation of files in a folder durable."""
        os.fsync(folder)

    def now(self) -> float:
        """Returns seconds of a monotonic clock."""
        return time.monotonic()


def _checked(fd: int, name: str, is_kind: Callable[[int], bool]) -> int:
    """Returns the descriptor. Closes it and raises OSError unless it is this user's and has no second name."""
    found = os.fstat(fd)
    is_ours = found.st_uid == os.geteuid()
    has_one_name = found.st_nlink == 1 or is_kind is stat.S_ISDIR
    if is_kind(found.st_mode) and is_ours and has_one_name:
        return fd
    os.close(fd)
    owner = "" if is_ours else f" (of user {found.st_uid})"
    raise OSError(errno.EPERM, f"is nothing of this user's alone{owner}", name)
