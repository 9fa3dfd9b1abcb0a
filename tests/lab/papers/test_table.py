from __future__ import annotations

from typing import Any

import pytest

from isthmus.lab.papers.table import comparison_sheets


@pytest.mark.parametrize(
    ("published", "ours", "cells"),
    [
        (50.0, 52.5, (50.0, 52.5, "+5.0 %")),
        (4183, 3000, (4183, 3000, "-28.3 %")),
        (0, 0.25, (0, 0.25, "+0.25")),
        (7.0, None, (7.0, "no [trace] here", None)),
        (None, 7.0, ("no [trace] here", 7.0, None)),
        (None, None, (None, "no [trace] here", None)),
    ],
)
def test_a_comparison_gives_the_difference_or_the_reason(
    published: float | None, ours: float | None, cells: tuple[Any, ...]
) -> None:
    row = {"table": "6.2", "row": "8P8D", "column": "TTFT", "published": published, "ours": ours}
    reason = {} if None not in (published, ours) else {"reason": "no [trace] here"}
    (sheet,) = comparison_sheets([row | reason])
    assert sheet.title == "6.2" and list(sheet.rows) == [("8P8D", "TTFT", *cells)]


def test_each_published_table_is_one_sheet_and_row_names_are_not_repeated() -> None:
    rows = [
        {"table": table, "row": "a", "column": column, "published": 1, "ours": 1, "inferred": column == "y"}
        for table in ("6.2", "6.3")
        for column in ("x", "y")
    ]
    sheets = comparison_sheets(rows)
    assert [sheet.title for sheet in sheets] == ["6.2", "6.3"]
    for sheet in sheets:
        assert [row[:2] for row in sheet.rows] == [("a", "x"), ("", "y*")]
