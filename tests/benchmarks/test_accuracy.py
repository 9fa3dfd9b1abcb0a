"""Prompts of equal blocks, and what of both worlds is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks import accuracy
from benchmarks.accuracy import BLOCK_SIZE, NUM_IDLE, NUM_WARM, Times, compare
from isthmus.core.cost import Curve, to_mapping
from isthmus.lab.sim.workloads import Request
from tests.benchmarks.conftest import Study


def test_equal_blocks_are_equal_tokens() -> None:
    one, two = Request(0, 40, 5, (1, 2, 3)), Request(0, 37, 5, (1, 2, 9))
    first, second = accuracy.prompt_of(one, "a"), accuracy.prompt_of(two, "a")
    assert (len(first), len(second)) == (40, 37)
    assert first[: 2 * BLOCK_SIZE] == second[: 2 * BLOCK_SIZE]
    assert first[2 * BLOCK_SIZE :][:5] != second[2 * BLOCK_SIZE :][:5]
    assert first != accuracy.prompt_of(one, "b")
    assert max(first) < 256


def test_only_what_comes_after_the_idle_requests_is_compared() -> None:
    warm, idle = [Times(9.0, 9.0, 9.0)] * NUM_WARM, [Times(0.06, 0.012, 0.02)] * NUM_IDLE
    model_idle = [Times(0.05, 0.01, 0.01)] * NUM_IDLE
    live = [*warm, *idle, Times(0.1, 0.02, 0.04), Times(0.3, 0.02, 0.04)]
    simulated = [*warm, *model_idle, Times(0.1, 0.018, 0.03), Times(0.28, 0.018, 0.03)]
    found = compare(live, simulated)
    assert found["overhead_first_ms"] == pytest.approx(10)
    assert found["overhead_gap_ms"] == pytest.approx(2)
    rows = {(row["quantity"], row["figure"]): row for row in found["rows"]}
    ttft, tpot, tbt = (rows[name, "mean"] for name in ("TTFT", "TPOT", "TBT (longest tenth)"))
    assert (ttft["live_ms"], rows["TTFT", "P90"]["live_ms"]) == (pytest.approx(200), pytest.approx(300))
    assert ttft["error_percent"] == pytest.approx(-5)
    assert ttft["corrected_ms"] == pytest.approx(200)
    assert tpot["corrected_error_percent"] == pytest.approx(0)
    assert tbt["corrected_error_percent"] == pytest.approx(-20)


def test_emulated_engines_are_near_the_simulator(tmp_path: Path, study: Study) -> None:
    """A live cluster for a second; how near is not judged here, where the machine is as busy as it is."""
    curve = Curve(2048, 4, prefill_token_s=1e-5, prefill_fixed_s=2e-3, decode_fixed_s=2e-3, origin="made up")
    (tmp_path / "curve.yaml").write_text(yaml.safe_dump(to_mapping(curve)))
    options = ("--emulated", "--requests", 10, "--rate", 20, "--cost", tmp_path / "curve.yaml")
    found, shown = study("accuracy", *options)
    assert (found["requests"], found["curve"], len(found["rows"])) == (10, "made up", 6)
    assert all(row["live_ms"] > 0 and row["simulated_ms"] > 0 for row in found["rows"])
    assert "overhead of an idle request" in shown
