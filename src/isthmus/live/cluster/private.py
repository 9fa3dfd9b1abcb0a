"""Files that only this user may read, from their creation on: recordings, logs, and a head's secrets."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from isthmus.core.errors import ConfigError

log = logging.getLogger(__name__)

MAX_KEPT = 4096
"""Bytes that are read of a kept file."""


def private(path: str, flags: int) -> int:
    """An `opener` for `open` that makes files mode 600, existing ones too. Raises OSError."""
    fd = os.open(path, flags, 0o600)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode) and mode & 0o077:
            os.fchmod(fd, 0o600)
    except OSError:
        os.close(fd)
        raise
    return fd


def kept(path: Path, make: Callable[[], bytes], of: str = "tls.folder") -> bytes:
    """Returns the content of a private file, which is created with what `make` returns. Raises ConfigError, which names
    the option `of`, also for a file that others can read."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write_once(path, make())
        with path.open("rb") as file:
            state, data = os.fstat(file.fileno()), file.read(MAX_KEPT)
    except OSError as error:
        raise ConfigError(f"{of}: {path}: {error.strerror}") from None
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise ConfigError(f"{of}: {path}: others can read it; chown and chmod 600 it, or remove it")
    return data


def _write_once(path: Path, data: bytes) -> None:
    """Creates a private file atomically, unless another process has created it."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with open(file, "wb") as sink:
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            log.info("%s was made by somebody else meanwhile", path)
    finally:
        draft.unlink()
