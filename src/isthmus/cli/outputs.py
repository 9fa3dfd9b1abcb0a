"""Files that a verb writes at its end: refused before the work, when they cannot be written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from isthmus.core.errors import ConfigError
from isthmus.sheet import Sheet


def check_writable(option: str, file: Path | None) -> None:
    """Raises ConfigError for a file that will not be writable. Touches nothing."""
    if file is None:
        return
    if file.is_dir():
        raise ConfigError(f"{option} {file}: is a folder; name a file")
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {file}: no folder {file.parent}; make it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{option} {file}: cannot be written: permission denied")


def write_bytes(file: Path, content: bytes) -> None:
    """Raises ConfigError if the file cannot be written after all."""
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None


def write_json(file: Path | None, value: Any) -> None:
    """Nothing without a file. Raises ConfigError as `write_bytes` does."""
    if file is not None:
        write_bytes(file, (json.dumps(value, indent=1) + "\n").encode())


# Sheets on the terminal. In a file or a pipe they are plain Markdown.


def show(*sheets: Sheet, file: IO[str] | None = None) -> None:
    """Print sheets one below the other; `file`: in place of standard output."""
    from rich.console import Console

    console = Console(file=file)
    if console.is_terminal:
        for sheet in sheets:
            console.print(sheet.terminal(), "")
    else:
        print("\n".join(sheet.markdown() for sheet in sheets), file=file)
