"""Published tables: name, set-up, and the measurement that gives our figure for each published one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat, zip_longest
from typing import Any

import msgspec

from isthmus.lab.papers.lab import Lab, Trace
from isthmus.sheet import Cell as SheetCell
from isthmus.sheet import Sheet, numbers, texts

NO_FIGURE = "nothing to compute it from"
"""Reason for a missing figure of ours if the trace is there."""

Figure = float | None


class PaperCell(msgspec.Struct, frozen=True):
    """One published figure and ours."""

    row: str
    column: str
    published: Figure
    ours: Figure = None
    reason: str = ""
    """Why a figure is missing; else the table's `unpublished`, or `NO_FIGURE`."""
    inferred: bool = False
    """Ours depends on an input inferred from results of the paper, so agreement is no independent test."""


Measure = Callable[[Lab], Iterable[PaperCell]]


class Table(msgspec.Struct, frozen=True):
    name: str
    title: str
    source: str
    """Where it is published."""
    setup: str
    """The simulated or computed set-up, and the choices that the paper leaves open."""
    measure: Measure
    traces: tuple[Trace, ...]
    unpublished: str
    """Reason for a missing published figure."""

    def rows(self, lab: Lab) -> Iterator[dict[str, Any]]:
        """One mapping for each cell: table, row, column, published, ours; where they apply, reason and inferred."""
        for cell in self.measure(lab):
            row = {"table": self.name, **msgspec.to_builtins(cell), "reason": self._reason(cell)}
            yield {key: value for key, value in row.items() if key not in ("reason", "inferred") or value}

    def _reason(self, cell: PaperCell) -> str:
        missing = NO_FIGURE if cell.ours is None else self.unpublished if cell.published is None else ""
        return cell.reason or missing


def table(
    name: str, title: str, source: str, setup: str, traces: Iterable[Trace] = (), unpublished: str = ""
) -> Callable[[Measure], Table]:
    """Decorates the function that measures a table's cells."""
    return lambda measure: Table(name, title, source, setup, measure, tuple(traces), unpublished)


def cells(
    row: str, ours: Mapping[str, Figure], *published: Figure, inferred: bool = False
) -> Iterator[PaperCell]:
    """Our figures of a row by column, beside the published ones in the same order; None or left out: unpublished."""
    for (column, figure), known in zip_longest(ours.items(), published):
        yield PaperCell(row, column, known, figure, inferred=inferred)


def on_traces(
    lab: Lab,
    columns: Sequence[str],
    published: Mapping[Trace, Mapping[str, Sequence[Figure]]],
    measure: Callable[[Trace, str], Sequence[Figure]],
) -> Iterator[PaperCell]:
    """Cells of tables with rows for each trace. `measure` gives our figures of a trace and row, in the order of
    `columns`; for a missing trace the cells have the reason instead."""
    for trace, rows in published.items():
        for name, figures in rows.items():
            has_trace = lab.has(trace)
            ours = measure(trace, name) if has_trace else repeat(None)
            reason = "" if has_trace else lab.absence(trace)
            for column, figure, value in zip(columns, figures, ours, strict=False):
                yield PaperCell(f"{trace}, {name}", column, figure, value, reason)


def comparison_sheets(rows: Iterable[Mapping[str, Any]]) -> list[Sheet]:
    """Published figures, ours and the difference, one sheet for each `table` of the rows, in their order.

    A row is one of `Table.rows`. A figure may be None, then `reason`, if the row has one, stands in its place. A row
    with a true `inferred` has a star. The difference is relative to the published figure, absolute where that is 0.
    """
    columns = (*texts("", ""), *numbers("published", "ours", "difference"))
    found: dict[str, list[tuple[SheetCell, ...]]] = {}
    before: tuple[str, str] | None = None
    for row in rows:
        name, published, ours, reason = row["table"], row["published"], row["ours"], row.get("reason")
        here = (name, row["row"])
        cells = (
            "" if here == before else row["row"],
            f"{row['column']}*" if row.get("inferred") else row["column"],
            reason if published is None and ours is not None else published,
            reason if ours is None else ours,
            _difference(published, ours),
        )
        found.setdefault(name, []).append(cells)
        before = here
    return [Sheet(name, columns, cells) for name, cells in found.items()]


def _difference(published: float | None, ours: float | None) -> str | None:
    if published is None or ours is None:
        return None
    if published == 0:
        return f"{ours - published:+.4g}"
    return f"{100 * (ours - published) / abs(published):+.1f} %"
