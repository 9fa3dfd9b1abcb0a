from __future__ import annotations

import io

from rich.console import Console

from isthmus.lab.sim.sheets import group_sheets, summary_sheets
from isthmus.lab.sim.summary import summarize
from tests.lab.sim.report.results import record, replayed, result


def test_times_of_a_summary() -> None:
    summary = summarize(replayed(400))
    sheets = summary_sheets(summary)
    assert sheets[0].title == "conversation_trace.jsonl, speed 1.4: isthmus, admission baseline, order promise"
    assert summary.ttft_s is not None
    spread = (summary.ttft_s.mean, summary.ttft_s.p50, summary.ttft_s.p90, summary.ttft_s.p99)
    assert ("TTFT (s)", *spread) in sheets[1].rows
    names = {row[0] for sheet in sheets for row in sheet.rows}
    assert {"requests", "decode", "prefill", "network", "spine"} <= names


def test_an_empty_simulation_has_sheets_too() -> None:
    sheets = summary_sheets(summarize(result([], nodes=[], end_ns=0)))
    assert ("TBT (ms)", None, None, None, None) in sheets[1].rows


def test_a_summary_fits_one_screen() -> None:
    console = Console(file=io.StringIO(), width=110, force_terminal=True)
    with console.capture() as capture:
        for sheet in summary_sheets(summarize(replayed(400))):
            console.print(sheet.terminal(), "")
    assert len(capture.get().splitlines()) <= 48


def test_groups_beyond_the_table_are_counted() -> None:
    whole = result([record(index, tenant=f"tenant {index:02}") for index in range(23)])
    (sheet,) = group_sheets(summarize(whole))
    assert [row[0] for row in sheet.rows] == [f"tenant {index:02}" for index in range(20)]
    assert sheet.notes == ["3 more are not shown."]
