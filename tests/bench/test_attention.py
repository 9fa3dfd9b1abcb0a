"""The benchmark of attention elsewhere on small cases: every side computes the same sums, and bytes are counted."""

from __future__ import annotations

import pytest
import torch

from isthmus.bench import BenchError, attention
from isthmus.bench.attention import Plan, run

SMALL = Plan(("smollm2-135m",), (3,), (64, 256, 512), (2,), layers=2, rounds=1)


@pytest.fixture(autouse=True)
def no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SAMPLE_S", 0)
    monkeypatch.setattr(attention, "MOST_TOKENS", 768)


def test_rows_have_times_and_bytes() -> None:
    lines: list[str] = []
    found = run(SMALL, lines.append)
    cases = [(row["holders"], row["batch"], row["context"]) for row in found.json]
    assert cases == [(2, 3, 64), (2, 3, 256)], "without those that are too large"
    for row in found.json:
        assert min(row[side] for side in ("home", "local", "live", "bare", "echo")) > 0
        assert row["payload"] == 9 * 64 * 4 + 9 * 65 * 4  # whatever the context
        assert row["payload"] < row["wire"] < row["payload"] + 400
        assert row["added"] == row["live"] - row["home"]
    assert len(lines) == len(found.json)
    assert lines[0].startswith("model smollm2-135m, batch 3, context 64, holders 2, ")
    assert "added / least" in [column.name for column in found.tables[0].columns]


def test_other_sums_are_found_out() -> None:
    sums = [torch.ones(2, 3)]
    attention._verify(1e-5, sums, [sums[0] + 1e-6])
    with pytest.raises(BenchError, match=r"a difference of 0\.5"):
        attention._verify(1e-5, sums, [sums[0] + 0.5])
    with pytest.raises(BenchError, match="nan"):
        attention._verify(1e-5, sums, [sums[0] * float("nan")])
