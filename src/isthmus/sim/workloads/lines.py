"""Files of one record a line: reading them, and saying which line is wrong."""

from __future__ import annotations

from pathlib import Path

from isthmus.errors import ConfigError


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file without their ends. Raises ConfigError for one that cannot be read or is empty."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ConfigError(f"{path}: empty; it should hold one request a line")
    return lines


def wrong_line(path: Path, number: int, what: str) -> ConfigError:
    """The error for line `number`, counted from 1."""
    return ConfigError(f"{path}:{number}: {what}")
