"""The long path's benchmark with a short path: every row, verified by the seals."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks import wan
from benchmarks.wan import Plan, as_json, run, table

KIB = 1024


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wan, "PIECE_BYTES", 64 * KIB)
    plan = Plan(
        (1.0,), (2,), delay_ms=1.0, jitter_ms=0.5, stall_s=0.02, window=256 * KIB, seconds=0.004, rounds=1
    )
    lines: list[str] = []
    result = run(plan, lines.append)
    assert [(row.rate_gbps, row.connections, row.stalled) for row in result.rows] == [
        (1.0, 2, False),
        (1.0, 2, True),
    ]
    for row in result.rows:
        assert row.gbps > 0 and row.share_of_rate == row.gbps / row.rate_gbps and row.delay_ms == 1.0
    assert result.ceiling_gbps > 0 and len(lines) == 3 and lines[-1].endswith("over 2, one stalled")
    found = as_json(result)
    assert list(found[0]) == ["rate_gbps", "delay_ms", "connections", "stalled", "gbps", "share_of_rate"]
    assert json.loads(json.dumps(found)) == found
    console = Console(file=io.StringIO(), width=150, record=True)
    console.print(table(result))
    assert "1 for 0.02 s" in console.export_text()
