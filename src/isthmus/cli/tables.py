"""Sheets on the terminal. In a file or a pipe they are plain Markdown."""

from __future__ import annotations

from typing import IO

from isthmus.sheet import Sheet


def show(*sheets: Sheet, file: IO[str] | None = None) -> None:
    """Print sheets one below the other; `file`: in place of standard output."""
    from rich.console import Console

    console = Console(file=file)
    if console.is_terminal:
        for sheet in sheets:
            console.print(sheet.terminal(), "")
    else:
        print("\n".join(sheet.markdown() for sheet in sheets), file=file)
