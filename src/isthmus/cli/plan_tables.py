"""A plan on the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text

from isthmus.lab.planner.answer import Answer
from isthmus.lab.planner.sheets import Sheet, analytic, simulated


def answer_tables(answer: Answer) -> list[Table]:
    """The question, the plans, and what would be if."""
    return _tables(analytic(answer))


def simulated_tables(answer: Answer) -> list[Table]:
    return [] if answer.simulated is None else _tables(simulated(answer.simulated))


def _tables(sheets: Iterable[Sheet]) -> list[Table]:
    return [_table(sheet) for sheet in sheets]


def _table(sheet: Sheet) -> Table:
    table = Table(
        title=Text(sheet.title, style="bold"),
        title_justify="left",
        caption=sheet.caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_header=any(sheet.head),
    )
    for index, name in enumerate(sheet.head):
        table.add_column(name, justify="left" if index < sheet.text_columns else "right")
    for row in sheet.rows:
        table.add_row(*map(Text, row))
    return table
