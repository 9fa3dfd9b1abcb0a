"""A table as data: built once, shown on a terminal, in Markdown, as JSON and in HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from rich.table import Table

Cell = str | int | float | None
"""A text, a number in the unit of its column, or nothing."""

NOTHING = "–"
"""Stands where a cell is None."""

_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Column(NamedTuple):
    """`form`: the format specification of its numbers, empty for about four digits; `left`: aligned as text is."""

    name: str = ""
    unit: str = ""
    form: str = ""
    left: bool = False

    @property
    def head(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def write(self, cell: Cell) -> str:
        if cell is None:
            return NOTHING
        if isinstance(cell, str):
            return cell
        return format(cell, self.form) if self.form else written(cell)


def texts(*names: str) -> tuple[Column, ...]:
    """Columns of texts."""
    return tuple(Column(name, left=True) for name in names)


def numbers(*names: str, unit: str = "", form: str = "") -> tuple[Column, ...]:
    """Columns of numbers in one unit."""
    return tuple(Column(name, unit, form) for name in names)


Source = str | Callable[[Any], Cell]
"""A cell's source: the row's field or key of this name, or a function of the row."""


class Sheet(msgspec.Struct, frozen=True):
    """A row has a cell for each column; `notes`: how to read the table, below it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    @staticmethod
    def of(
        title: str, columns: Sequence[tuple[Column, Source]], rows: Iterable[Any], notes: Sequence[str] = ()
    ) -> Sheet:
        """A sheet of objects or mappings."""
        cells = [[_cell(row, source) for _, source in columns] for row in rows]
        return Sheet(title, [column for column, _ in columns], cells, notes)

    def as_json(self) -> dict[str, Any]:
        """`title`, `columns` (each `name`, `unit`, `align`), `rows` (a list of cells each), `notes`. Stable."""
        columns = [
            {"name": each.name, "unit": each.unit, "align": "left" if each.left else "right"}
            for each in self.columns
        ]
        return {
            "title": self.title,
            "columns": columns,
            "rows": list(map(list, self.rows)),
            "notes": list(self.notes),
        }

    def terminal(self) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(self.title, style="bold") if self.title else None,
            title_justify="left",
            caption=Text("\n".join(self.notes)) if self.notes else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            show_header=self._has_head(),
        )
        for column in self.columns:
            table.add_column(Text(column.head), justify="left" if column.left else "right")
        for row in self._written():
            table.add_row(*map(Text, row))
        return table

    def markdown(self) -> str:
        """Title, table and notes, with an empty line between; columns are padded, so that it reads well as it is."""
        lines = [[column.head for column in self.columns], *self._written()]
        lines = [[" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines]
        widths = [max(3, *map(len, cells)) for cells in zip(*lines, strict=True)]

        def padded(line: Sequence[str]) -> str:
            cells = zip(line, widths, self.columns, strict=True)
            return " | ".join(cell.ljust(width) if at.left else cell.rjust(width) for cell, width, at in cells)

        rule = "|".join(
            f" {'-' * width} " if at.left else f" {'-' * (width - 1)}: "
            for width, at in zip(widths, self.columns, strict=True)
        )
        table = "\n".join(
            [f"| {padded(lines[0])} |", f"|{rule}|", *(f"| {padded(line)} |" for line in lines[1:])]
        )
        return "\n\n".join(filter(None, [self.title, table, "\n".join(self.notes)])) + "\n"

    def html(self) -> str:
        """The table alone, as an element; the first cell of each row is its name."""
        kinds = [' class="left"' if column.left else "" for column in self.columns]

        def cells(row: Sequence[str]) -> str:
            name, *others = (escaped(cell) for cell in row)
            data = (f"<td{kind}>{cell}</td>" for cell, kind in zip(others, kinds[1:], strict=True))
            return f'<th scope="row">{name}</th>{"".join(data)}'

        heads = (
            f'<th scope="col"{kind}>{escaped(column.head)}</th>'
            for column, kind in zip(self.columns, kinds, strict=True)
        )
        head = f"<thead><tr>{''.join(heads)}</tr></thead>" if self._has_head() else ""
        body = "".join(f"<tr>{cells(row)}</tr>" for row in self._written())
        return f"<table>{head}<tbody>{body}</tbody></table>"

    def _has_head(self) -> bool:
        return any(column.name for column in self.columns)

    def _written(self) -> list[list[str]]:
        return [
            [column.write(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows
        ]


def _cell(row: Any, source: Source) -> Cell:
    if callable(source):
        return source(row)
    found: Cell = row.get(source) if isinstance(row, Mapping) else getattr(row, source)
    return found


def written(value: float) -> str:
    """A number with about four digits, and all digits of a whole one: `1,234,567`, `0.01235`, `12,346`."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def escaped(text: object, *, quote: bool = True) -> str:
    """Text that is safe between tags, with `quote` in attributes too, without characters that no document may hold."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", str(text)), quote)
