"""What a published table is here: its name, what is known of its set-up, and how our figures are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from isthmus.lab.papers.lab import Lab, Trace
from isthmus.sheet import Cell as SheetCell
from isthmus.sheet import Sheet, numbers, texts


class PaperCell(msgspec.Struct, frozen=True):
    """One published figure and ours. `reason`: why one of them is None.

    `inferred`: ours hangs on an input that was inferred from results of the paper, so agreement is no independent test.
    """

    row: str
    column: str
    published: float | None
    ours: float | None = None
    reason: str = ""
    inferred: bool = False


class Table(msgspec.Struct, frozen=True):
    """`source`: where it is published; `setup`: what we ran, and what the paper leaves open."""

    name: str
    title: str
    source: str
    setup: str
    measure: Callable[[Lab], Iterable[PaperCell]]
    traces: tuple[Trace, ...] = ()

    def rows(self, lab: Lab) -> Iterator[dict[str, Any]]:
        """One mapping for each cell: table, row, column, published, ours; where they apply, reason and inferred."""
        for cell in self.measure(lab):
            row = {"table": self.name, **msgspec.to_builtins(cell)}
            yield {key: value for key, value in row.items() if key not in _OPTIONAL or value}


_OPTIONAL = ("reason", "inferred")


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


Figures = Mapping[str, float | None]
"""Column -> figure."""

NO_FIGURE = "nothing to compute it from"
"""Why one of ours is None where the trace is there."""


def compare(row: str, published: Figures, ours: Figures, *, unpublished: str = "") -> Iterator[PaperCell]:
    """A row of published figures beside ours, which has the same columns. `unpublished`: why one may be None."""
    for column, figure in published.items():
        reason = NO_FIGURE if ours[column] is None else unpublished if figure is None else ""
        yield PaperCell(row, column, figure, ours[column], reason)


def on_trace(
    lab: Lab,
    trace: Trace,
    published: Mapping[str, Figures],
    measure: Callable[[Trace, str], Figures],
    *,
    unpublished: str = "",
) -> Iterator[PaperCell]:
    """The rows of one trace, each measured by its name; without the trace, the reason in place of our figures."""
    for row, figures in published.items():
        name = f"{trace}, {row}"
        if lab.has(trace):
            yield from compare(name, figures, measure(trace, row), unpublished=unpublished)
        else:
            yield from (
                PaperCell(name, column, figure, None, lab.absence(trace)) for column, figure in figures.items()
            )
