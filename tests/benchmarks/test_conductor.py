"""What the decision benchmark feeds the conductor, on a small cluster."""

from __future__ import annotations

import pytest

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
