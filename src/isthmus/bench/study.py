"""The skeleton of every study: sides take turns, medians count, and what was found has one form.

A study is its sides, a measured function, columns and a note. `run(plan, report)` measures and answers with an
`Outcome`; the command shows its tables and notes, and writes its JSON. `report` hears of progress, line by line.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from isthmus.sheet import Column, Sheet, Source, written

Report = Callable[[str], None]
Value = TypeVar("Value")
Side = TypeVar("Side", bound=Hashable)
Columns = Mapping[str, Source]
"""Sources of cells by the head of their column."""


def say(line: str) -> None:
    """Progress, as a command reports it: on standard error."""
    print(line, file=sys.stderr, flush=True)


def silent(line: str) -> None:
    """Progress that nobody hears."""


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that it takes."""
    started = clock()
    work()
    return clock() - started


def in_turns(
    sides: Mapping[Side, Callable[[], Value]], rounds: int, *, warm_up: bool = True, budget_s: float = math.inf
) -> dict[Side, list[Value]]:
    """Measures every side once a round, one after another, so that a slow moment of the machine hits all alike.
    `warm_up`: a round before the first, which does not count. After `budget_s` seconds no further round begins."""
    until = time.perf_counter() + budget_s
    found: dict[Side, list[Value]] = {side: [] for side in sides}
    for turn in range(-warm_up, rounds):
        if turn > 0 and time.perf_counter() > until:
            break
        for side, measure in sides.items():
            value = measure()
            if turn >= 0:
                found[side].append(value)
    return found


def medians(found: Mapping[Side, Sequence[float]]) -> dict[Side, float]:
    return {side: statistics.median(values) for side, values in found.items()}


class Spread(msgspec.Struct, frozen=True):
    """A figure over the rounds."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        median, least, most = map(written, (self.median, self.least, self.most))
        return median if least == most else f"{median} ({least} to {most})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Outcome:
    """`tables`: as shown; `notes`: lines below them; `json`: all of it in plain values, for `--json`."""

    tables: Sequence[Sheet]
    json: Any
    notes: Sequence[str] = ()
    is_good: bool = True


def plain(rows: Iterable[Any]) -> list[Any]:
    """Rows as JSON has them."""
    return [msgspec.to_builtins(row, str_keys=True) for row in rows]


def table(title: str, columns: Columns, rows: Iterable[Any]) -> Sheet:
    """The one place where a study's rows become a table: columns of text to the left, of numbers to the right."""
    found = Sheet.of(title, [(Column(head), source) for head, source in columns.items()], rows)
    is_text = [any(isinstance(line[at], str) for line in found.rows) for at in range(len(columns))]
    heads = [Column(head, left=left) for head, left in zip(columns, is_text, strict=True)]
    return msgspec.structs.replace(found, columns=heads)


def said(row: Mapping[str, Any], unit: str = "") -> str:
    """A row as a line of progress."""
    line = ", ".join(f"{name} {Column().write(value)}" for name, value in row.items())
    return f"{line} {unit}".rstrip()


def over(first: str, others: Iterable[str]) -> dict[str, Callable[[Any], float]]:
    """Columns with the figure of one side over that of each other one."""

    def ratio(row: Mapping[str, float], other: str) -> float:
        return row[first] / row[other]

    return {f"/ {other}": partial(ratio, other=other) for other in others}


def percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"
