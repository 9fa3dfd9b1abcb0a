"""Prompts of equal blocks, and what of both worlds is compared."""

from __future__ import annotations

import pytest

from benchmarks import accuracy
from benchmarks.accuracy import BLOCK_SIZE, NUM_IDLE, NUM_WARM, Plan, Times, compare
from isthmus.core.cost import Curve
from isthmus.lab.sim.workloads import Request

CURVE = Curve(2048, 4, prefill_token_s=1e-4, prefill_fixed_s=2e-3, decode_fixed_s=2e-3, origin="made up")
PLAN = Plan(None, requests=12, rate=20.0, prompt="60", output="6", prefixes=2, prefix_tokens=32)


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
