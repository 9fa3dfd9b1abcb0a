"""The comparison's own parts, and one real cluster against the simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from isthmus.benchmarks import accuracy
from isthmus.benchmarks.accuracy import BLOCK_SIZE, NUM_IDLE, NUM_WARM, Plan, Times, compare
from isthmus.cli.models import demo_folder
from isthmus.cost import Curve, to_mapping
from isthmus.sim.workloads import Request

CURVE = Curve(2048, 4, prefill_token_s=1e-4, prefill_fixed_s=2e-3, decode_fixed_s=2e-3, origin="made up")
PLAN = Plan(demo_folder(), requests=12, rate=20.0, prompt="60", output="6", prefixes=2, prefix_tokens=32)


def test_equal_blocks_are_equal_tokens() -> None:
    one, two = Request(0, 40, 5, (1, 2, 3)), Request(0, 37, 5, (1, 2, 9))
    first, second = accuracy.prompt_of(one, "a"), accuracy.prompt_of(two, "a")
    assert (len(first), len(second)) == (40, 37)
    assert first[: 2 * BLOCK_SIZE] == second[: 2 * BLOCK_SIZE]
    assert first[2 * BLOCK_SIZE :][:5] != second[2 * BLOCK_SIZE :][:5]
    assert first != accuracy.prompt_of(one, "b")
    assert max(first) < 256


def test_times_of_a_stream() -> None:
    found = accuracy.times_of(10.0, [10.5, 10.6, 10.9], 3)
    assert found == Times(pytest.approx(0.5), pytest.approx(0.2), pytest.approx(0.3))


def test_tokens_of_one_event_have_no_gap_between_them() -> None:
    found = accuracy.times_of(0.0, [1.0, 1.2], 5)
    assert found == Times(1.0, pytest.approx(0.05), pytest.approx(0.2))


def test_only_what_comes_after_the_idle_requests_is_compared() -> None:
    warm, idle = [Times(9.0, 9.0, 9.0)] * NUM_WARM, [Times(0.06, 0.012, 0.02)] * NUM_IDLE
    model_idle = [Times(0.05, 0.01, 0.01)] * NUM_IDLE
    live = [*warm, *idle, Times(0.1, 0.02, 0.04), Times(0.3, 0.02, 0.04)]
    simulated = [*warm, *model_idle, Times(0.1, 0.018, 0.03), Times(0.28, 0.018, 0.03)]
    found = compare(PLAN, live, simulated)
    assert found.requests == 2
    assert found.overhead_first_ms == pytest.approx(10)
    assert found.overhead_gap_ms == pytest.approx(2)
    ttft, tbt, tpot = found.rows
    assert (ttft.live.mean_ms, ttft.live.p90_ms) == (pytest.approx(200), pytest.approx(300))
    assert ttft.error_mean_percent == pytest.approx(-5)
    assert ttft.corrected.mean_ms == pytest.approx(200)
    assert tpot.corrected_error_mean_percent == pytest.approx(0)
    assert tbt.corrected_error_mean_percent == pytest.approx(-20)


def test_a_live_cluster_is_measured_and_replayed(tmp_path: Path) -> None:
    curve = tmp_path / "curve.yaml"
    curve.write_text(yaml.safe_dump(to_mapping(CURVE)))
    said: list[str] = []
    found = accuracy.run(
        Plan(demo_folder(), 12, 20.0, "60", "6", prefixes=2, prefix_tokens=32, cost=curve), said.append
    )
    assert len(said) == 2
    assert (found.requests, found.curve, found.curve_error) == (12, "made up", None)
    assert found.core_wait is None or found.core_wait >= 0
    assert [row.quantity for row in found.rows] == list(accuracy.QUANTITIES)
    ttft, _, tpot = found.rows
    assert ttft.simulated.mean_ms > 8, "60 new tokens alone take 8 ms by the curve"
    assert tpot.simulated.mean_ms == pytest.approx(2.0, rel=0.5)
    assert min(row.live.mean_ms for row in found.rows) > 0
    assert accuracy.table(found).row_count == 6
    json.dumps(accuracy.summary_lines(found))
