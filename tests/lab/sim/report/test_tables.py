from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from isthmus.cli.tables import comparison_tables, show, summary_tables
from isthmus.lab.sim.summary import summarize
from tests.lab.sim.report.results import replayed, result


def shown(*tables: Any) -> list[list[str]]:
    """The cells of every line that `show` writes to a file."""
    file = io.StringIO()
    show(*tables, file=file)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in file.getvalue().splitlines()]


def test_a_summary_in_a_file_is_plain_markdown() -> None:
    summary = summarize(replayed(400))
    lines = shown(*summary_tables(summary))
    assert ["conversation_trace.jsonl, speed 1.4: isthmus, admission baseline, order promise"] in lines
    assert ["", "mean", "P50", "P90", "P99"] in lines
    assert summary.ttft_s is not None
    spread = (summary.ttft_s.mean, summary.ttft_s.p50, summary.ttft_s.p90, summary.ttft_s.p99)
    assert ["TTFT (s)", *(f"{value:,.3f}" for value in spread)] in lines
    assert {"requests", "decode", "prefill", "network", "spine"} <= {line[0] for line in lines}
    assert not any("\x1b" in cell for line in lines for cell in line)


def test_an_empty_simulation_has_a_table_too() -> None:
    lines = shown(*summary_tables(summarize(result([], nodes=[], end_ns=0))))
    assert ["TBT (ms)", "–", "–", "–", "–"] in lines


def test_a_summary_fits_one_screen() -> None:
    console = Console(file=io.StringIO(), width=110, force_terminal=True)
    with console.capture() as capture:
        for table in summary_tables(summarize(replayed(400))):
            console.print(table, "")
    assert len(capture.get().splitlines()) <= 48


@pytest.mark.parametrize(
    ("published", "ours", "cells"),
    [
        (50.0, 52.5, ["50", "52.5", "+5.0 %"]),
        (4183, 3000, ["4,183", "3,000", "-28.3 %"]),
        (0, 0.25, ["0", "0.25", "+0.25"]),
        (7.0, None, ["7", "no [trace] here", "–"]),
        (None, 7.0, ["no [trace] here", "7", "–"]),
        (None, None, ["–", "no [trace] here", "–"]),
    ],
)
def test_a_comparison_gives_the_difference_or_the_reason(published: Any, ours: Any, cells: list[str]) -> None:
    row = {"table": "6.2", "row": "8P8D", "column": "TTFT", "published": published, "ours": ours}
    reason = {} if None not in (published, ours) else {"reason": "no [trace] here"}
    assert ["8P8D", "TTFT", *cells] in shown(*comparison_tables([row | reason]))


def test_each_published_table_is_one_table_and_row_names_are_not_repeated() -> None:
    rows = [
        {"table": table, "row": "a", "column": column, "published": 1, "ours": 1}
        for table in ("6.2", "6.3")
        for column in ("x", "y")
    ]
    assert len(comparison_tables(rows)) == 2
    lines = shown(*comparison_tables(rows))
    assert lines.count(["a", "x", "1", "1", "+0.0 %"]) == lines.count(["", "y", "1", "1", "+0.0 %"]) == 2
