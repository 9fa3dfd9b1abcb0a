"""The validation's own parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks import cost, cost_requests
from benchmarks.cost_requests import Request, simulate
from benchmarks.cost_tables import Finding, Kernel, fit_roofline, roofline_s
from isthmus.core.cost import Curve, compile_cost


def test_a_roofline_is_found_again() -> None:
    truth = (12e-6, 0.8, 0.6)
    points = [(read, flop) for read in (1e-5, 1e-4, 1e-3) for flop in (1e-6, 1e-4, 1e-2)]
    kernels = [Kernel(read, flop, roofline_s(Kernel(read, flop, 1.0), truth)) for read, flop in points]
    assert fit_roofline(kernels) == pytest.approx(truth, rel=1e-3)


def simulated(requests: Sequence[Request]) -> Sequence[Request]:
    """On an instance whose iterations take 1 ms for each prompt token and 10 ms for decoding."""
    curve = Curve(1024, 2, prefill_token_s=1e-3, decode_fixed_s=10e-3)
    simulate(compile_cost(curve), requests)
    return requests


def test_a_request_alone_takes_its_prompt_and_its_steps() -> None:
    (request,) = simulated([Request(prompt=100, output=5, arrival_s=2.0)])
    assert request.first_s == pytest.approx(2.1)
    assert request.last_s == pytest.approx(2.14)
    assert request.tpot_s == pytest.approx(0.01)


def test_a_later_prompt_rides_with_a_decode() -> None:
    first, second = simulated([Request(100, 5, 0.0), Request(50, 2, 0.05)])
    assert second.first_s == pytest.approx(0.15)
    assert first.last_s == pytest.approx(0.1 + 0.05 + 3 * 0.01)


def test_without_blocks_the_latest_request_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_requests, "_BLOCKS", 10)
    early, late = simulated([Request(64, 60, 0.0), Request(64, 60, 0.0)])
    assert early.last_s < late.last_s
    assert early.sampled == late.sampled == 60
    alone = simulated([Request(64, 60, 0.0)])[0]
    assert late.last_s > 1.5 * alone.last_s


def test_a_missed_target_is_named() -> None:
    table = "silicon TPOT, Llama-3.1-70B fp8"
    rows = [
        Finding(table, case, "held out", 9, error, 0.0)
        for case, error in (("H200 other half", 5.0), ("x", 99.0))
    ]
    assert cost.missed(rows) == ["H200 other half: 5.0 % is above 4 %"]
