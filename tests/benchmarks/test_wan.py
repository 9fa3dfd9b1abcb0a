"""The long path's benchmark with a short path: every row, verified by the seals."""

from __future__ import annotations

import pytest

from benchmarks import wan
from tests.benchmarks.conftest import Study

KIB = 1024


def test_rows(monkeypatch: pytest.MonkeyPatch, study: Study) -> None:
    monkeypatch.setattr(wan, "PIECE_BYTES", 64 * KIB)
    path = ("--delay-ms", 1, "--jitter-ms", 0.5, "--stall-s", 0.02, "--window", "256KiB", "--seconds", 0.004)
    rows, shown = study("wan", "--rates", 1, "--connections", 2, *path, "--rounds", 1)
    assert [(row["rate_gbps"], row["connections"], row["stalled"]) for row in rows] == [
        (1, 2, False),
        (1, 2, True),
    ]
    for row in rows:
        assert row["gbps"] > 0 and row["share_of_rate"] == row["gbps"] / row["rate_gbps"]
        assert row["delay_ms"] == 1.0
    assert "1 for 0.02 s" in shown
