"""Files that only this user may read, from their creation on: what happens to requests is written there."""

from __future__ import annotations

import os
import stat


def private(path: str, flags: int) -> int:
    """An `opener` for `open`. One that others could read before is closed to them. Raises OSError."""
    fd = os.open(path, flags, 0o600)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode) and mode & 0o077:
            os.fchmod(fd, 0o600)
    except OSError:
        os.close(fd)
        raise
    return fd
