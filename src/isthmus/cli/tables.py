"""Sheets on the terminal. In a file or a pipe they are plain Markdown."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from isthmus.sheet import Sheet

if TYPE_CHECKING:
    from rich.table import Table

_PLAIN_WIDTH = 1000
"""Columns of a file: no cell is ever folded."""


def show(*tables: Sheet | Table, file: IO[str] | None = None) -> None:
    """Print sheets (and the tables that measurements draw) one below the other; `file`: in place of standard output."""
    from rich.console import Console

    console = Console(file=file)
    if console.is_terminal:
        for table in tables:
            console.print(table.terminal() if isinstance(table, Sheet) else table, "")
    else:
        texts = (table.markdown() if isinstance(table, Sheet) else _markdown(table) for table in tables)
        print("\n".join(texts), file=file)


def _markdown(table: Table) -> str:
    from rich import box
    from rich.console import Console

    table.box = box.MARKDOWN
    table.pad_edge = True
    console = Console(width=_PLAIN_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"
