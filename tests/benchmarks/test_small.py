"""Whole studies in small: a long path, verified by its seals, and what the conductor of a small cluster hears."""

from __future__ import annotations

import pytest

from benchmarks import wan
from tests.benchmarks.conftest import Study


def test_a_simulated_cluster_is_heard_again(study: Study) -> None:
    options = ("--nodes", 6, "--blocks", 20_000, "--prompt-blocks", 100, "--decisions", 300)
    split, mixed = study("conductor", *options)[0]
    assert (split["cluster"], mixed["cluster"]) == ("3 prefill, 3 decode", "6 mixed")
    for found in (split, mixed):
        assert found["decisions"] == 300
        assert found["decisions_per_s"] == pytest.approx(1e6 / found["mean_us"])
        assert found["p50_us"] <= found["p99_us"] <= found["max_us"]
        assert found["indexed_blocks"] > 15_000, "the caches are full"
        assert min(found["queued"], found["copying"], found["fetches"]) > 0
        assert 0.1 < found["matched_share"] < 0.9
        assert found["events"] > 3 * 300


def test_a_long_path_with_a_short_one(monkeypatch: pytest.MonkeyPatch, study: Study) -> None:
    monkeypatch.setattr(wan, "PIECE_BYTES", 64 << 10)
    path = ("--delay-ms", 1, "--jitter-ms", 0.5, "--stall-s", 0.02, "--window", "256KiB", "--seconds", 0.004)
    rows, shown = study("wan", "--rates", 1, "--connections", 2, *path, "--rounds", 1)
    assert [(row["rate_gbps"], row["delay_ms"], row["connections"]) for row in rows] == [(1, 1.0, 2)] * 2
    assert [row["stalled"] for row in rows] == [False, True]
    assert all(row["gbps"] > 0 and row["share_of_rate"] == row["gbps"] / row["rate_gbps"] for row in rows)
    assert "1 for 0.02 s" in shown
