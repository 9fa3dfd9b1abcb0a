"""`isthmus bench policies`: every placement policy in every cell of a sweep, ours against the best other one.

A cell is a trace, a cluster size, a replay speed and a link speed. The best other policy is chosen afresh in
each, so ours has to match whichever rule happens to suit that cell. Where placement alone cannot keep up, the
cell is run again with refusal at arrival: every policy in order of arrival, ours in promise order with a reserve
as well.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from statistics import fmean
from typing import Any

import msgspec
from msgspec.structs import astuple

from isthmus.bench.policy_cells import OURS, POLICIES, Cell, Figures, Task, common_of
from isthmus.bench.study import Outcome, table
from isthmus.core.errors import ConfigError
from isthmus.sheet import Sheet
from isthmus.workers import Pool, Progress, Work

GB = 1_000_000_000
EQUAL_GOODPUT = 0.01
"""Outcomes with goodput this close to the highest count as equal in it."""


class Sweep(msgspec.Struct, frozen=True):
    """All cells to run. `links` in GB/s; `decode`: decode nodes, None: as many as prefill nodes; `ssd` in bytes;
    `shared`: whether hand-overs share the links of fetches or have a rail of their own, a sweep for each value."""

    sources: tuple[str, ...]
    nodes: tuple[int, ...] = (8, 16)
    speeds: tuple[float, ...] = (1.0, 1.5, 2.0, 2.5, 3.0)
    links: tuple[float, ...] = (1.3, 3.0, 12.0, 50.0)
    seeds: tuple[int, ...] = (1,)
    policies: tuple[str, ...] = tuple(POLICIES)
    shared: tuple[bool, ...] = (False,)
    config: str | None = None
    decode: int | None = None
    ssd: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in self.policies:
            if name not in POLICIES:
                raise ConfigError(f"--policies: {name!r} is not known; known: {', '.join(POLICIES)}")
        if OURS not in self.policies or len(set(self.policies)) < 2:
            raise ConfigError(f"--policies: name {OURS} and at least one other to compare it with")
        for option in ("nodes", "speeds", "links", "seeds"):
            values = getattr(self, option)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"--{option}: give at least one value, and each once")
        if min(self.nodes) < 1 or min(self.links) <= 0:
            raise ConfigError("--nodes and --links: values must be above 0")
        if self.decode is not None and self.decode < 1:
            raise ConfigError("--decode: at least 1 node must decode")

    def tasks(self) -> list[Task]:
        """One for each cluster, speed and seed; all links of it are one worker's, as not all policies use them."""
        return [
            Task(
                source,
                nodes,
                self.decode or nodes,
                speed,
                seed,
                tuple(int(link * GB) for link in self.links),
                self.policies,
                shared,
                self.config,
                self.ssd,
                self.limit,
            )
            for shared, source, nodes, speed, seed in itertools.product(
                self.shared, self.sources, self.nodes, self.speeds, self.seeds
            )
        ]


class Verdict(msgspec.Struct, frozen=True):
    """Ours in one cell. `best`: the other policy with the lowest mean TTFT; `ratio`: our mean TTFT over its.

    `goodput_difference`: our goodput less its, as a share of all requests; `goodput_to_highest`: less the
    highest of all others. In overload without refusal the latter is often that of a policy which spoils some
    nodes and so spares the rest, at a far higher TTFT.
    """

    best: str
    ratio: float
    goodput_difference: float
    goodput_to_highest: float


# Running.


def run(sweep: Sweep, pool: Pool, report: Progress | None = None) -> list[Cell]:
    """All cells, averaged over the seeds, in the order of the sweep. `report` hears of tasks.

    Raises ConfigError for a trace or configuration that is wrong.
    """
    tasks = sweep.tasks()
    shared = {
        source: msgspec.msgpack.encode(common_of(next(task for task in tasks if task.source == source)))
        for source in dict.fromkeys(sweep.sources)
    }
    works = [Work(shared[task.source], msgspec.msgpack.encode(task)) for task in tasks]
    answers = pool.run("isthmus.bench.policy_cells", works, report)
    return _averaged(cell for found in answers for cell in msgspec.msgpack.decode(found, type=list[Cell]))


def _averaged(cells: Iterable[Cell]) -> list[Cell]:
    """Cells that differ only in their seed become one, of the first seed, with the means of their figures."""
    groups: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        key = (cell.shared, cell.source, cell.nodes, cell.decode, cell.speed, cell.link)
        groups[key].append(cell)
    return [
        msgspec.structs.replace(
            group[0],
            alone=_means([cell.alone for cell in group]),
            overload=_means([cell.overload for cell in group]),
        )
        for group in groups.values()
    ]


def _means(outcomes: list[dict[str, Figures]]) -> dict[str, Figures]:
    """Of the names that all have: a cell that only some seeds overload is not in overload."""
    names = [name for name in outcomes[0] if all(name in each for each in outcomes)]
    figures = {name: zip(*[astuple(each[name]) for each in outcomes], strict=True) for name in names}
    return {name: Figures(*map(fmean, values)) for name, values in figures.items()}  # type: ignore[arg-type]


# Comparing.


def alone(cell: Cell) -> Verdict:
    """Our placement against the best other one."""
    others = {name: outcome for name, outcome in cell.alone.items() if name != OURS}
    return _verdict(cell.alone[OURS], others)


def overload(cell: Cell) -> Verdict | None:
    """Ours in promise order against the best other policy in order of arrival; None if not in overload.

    The best has the lowest mean TTFT of those whose goodput equals the highest.
    """
    if not cell.overload:
        return None
    others = {name: outcome for name, outcome in cell.overload.items() if not name.startswith(OURS)}
    highest = max(outcome.goodput for outcome in others.values())
    equal = {name: each for name, each in others.items() if each.goodput >= highest - EQUAL_GOODPUT}
    return _verdict(cell.overload[f"{OURS}, promise"], equal)


def _verdict(ours: Figures, others: dict[str, Figures]) -> Verdict:
    best = min(others, key=lambda name: others[name].ttft_s_mean)
    highest = max(outcome.goodput for outcome in others.values())
    ratio = ours.ttft_s_mean / others[best].ttft_s_mean
    return Verdict(best, ratio, ours.goodput - others[best].goodput, ours.goodput - highest)


class Total(msgspec.Struct, frozen=True):
    """All verdicts of one kind: mean and greatest ratio of mean TTFT, and the least goodput differences."""

    cells: int
    mean_ratio: float
    worst_ratio: float
    worst_goodput_difference: float
    worst_goodput_to_highest: float


def total(verdicts: list[Verdict]) -> Total | None:
    if not verdicts:
        return None
    ratios = [verdict.ratio for verdict in verdicts]
    return Total(
        len(verdicts),
        sum(ratios) / len(ratios),
        max(ratios),
        min(verdict.goodput_difference for verdict in verdicts),
        min(verdict.goodput_to_highest for verdict in verdicts),
    )


# Showing.


def outcome(sweep: Sweep, cells: list[Cell]) -> Outcome:
    """Placement alone, then refusal and order in overload, for each trace and kind of links; and how it is judged."""
    shown = []
    for shared, source in itertools.product(sweep.shared, sweep.sources):
        here = [cell for cell in cells if cell.source == source and cell.shared is shared]
        links = "hand-over on the same links" if shared else "hand-over on a rail of its own"
        rows = [(cell, cell.alone, alone(cell)) for cell in here]
        shown.append(_table(f"Placement alone: {source}, {links}", "ratio to best", rows))
        met = [(cell, cell.overload, verdict) for cell in here if (verdict := overload(cell)) is not None]
        if met:
            shown.append(_table(f"With refusal, in overload: {source}, {links}", "promise ÷ best FCFS", met))
    return Outcome(shown, as_json(sweep, cells), summary_lines(cells))


_Judged = tuple[Cell, dict[str, Figures], Verdict]


def _table(title: str, ratio: str, rows: list[_Judged]) -> Sheet:
    columns: dict[str, Callable[[_Judged], str]] = {"nodes, GB/s, speed": lambda row: _name(row[0])}
    for name in rows[0][1]:
        columns[name] = partial(_figures_of, name)
    columns[ratio] = lambda row: f"{row[2].ratio:.3f} ({row[2].best})"
    columns["goodput − its"] = lambda row: f"{row[2].goodput_difference:+.4f}"
    columns["− highest"] = lambda row: f"{row[2].goodput_to_highest:+.4f}"
    return table(title, columns, rows)


def _name(cell: Cell) -> str:
    return f"{cell.nodes}, {cell.link / GB:g}, {cell.speed:g} ×"


def _figures_of(policy: str, row: _Judged) -> str:
    """Mean TTFT / P99 / hit rate / goodput, as in the research notes."""
    found = row[1][policy]
    return f"{found.ttft_s_mean:.3g} / {found.ttft_s_p99:.3g} / {found.hit_rate:.3f} / {found.goodput:.4f}"


def summary_lines(cells: list[Cell]) -> list[str]:
    """The last lines of the report: how it is judged."""
    lines = []
    for shared in sorted({cell.shared for cell in cells}):
        here = [cell for cell in cells if cell.shared is shared]
        links = "shared links" if shared else "hand-over on its own rail"
        placed = total([alone(cell) for cell in here])
        assert placed is not None
        lines.append(f"placement alone, {links}: {_total_line(placed)}")
        ordered = total([verdict for cell in here if (verdict := overload(cell)) is not None])
        if ordered is not None:
            lines.append(f"refusal and promise order in overload, {links}: {_total_line(ordered)}")
    return lines


def _total_line(found: Total) -> str:
    to_its, to_highest = 100 * found.worst_goodput_difference, 100 * found.worst_goodput_to_highest
    return (
        f"mean TTFT over the best other policy, {found.cells} cells: {found.mean_ratio:.3f} on average, "
        f"{found.worst_ratio:.3f} in the worst; goodput at worst {to_its:+.2f} points to its, "
        f"{to_highest:+.2f} to the highest"
    )


def as_json(sweep: Sweep, cells: list[Cell]) -> dict[str, Any]:
    """Stable: the sweep as given, each cell with its verdicts, and the totals."""
    rows = []
    for cell in cells:
        row = msgspec.to_builtins(cell)
        row["link_bytes_per_s"] = row.pop("link")
        row["verdict_alone"] = msgspec.to_builtins(alone(cell))
        row["verdict_overload"] = msgspec.to_builtins(overload(cell))
        rows.append(row)
    totals = {
        "alone": msgspec.to_builtins(total([alone(cell) for cell in cells])),
        "overload": msgspec.to_builtins(total([v for cell in cells if (v := overload(cell)) is not None])),
    }
    return {"sweep": msgspec.to_builtins(sweep), "cells": rows, "totals": totals}
