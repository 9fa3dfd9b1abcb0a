"""The validation's own parts."""

from __future__ import annotations

import pytest

from benchmarks import cost
from benchmarks.cost_requests import simulated
from benchmarks.cost_tables import Finding, Kernel, fit_roofline, roofline_s
from isthmus.core.cost import ENGINES
from isthmus.lab.sim.workloads import Request


def test_a_roofline_is_found_again() -> None:
    truth = (12e-6, 0.8, 0.6)
    points = [(read, flop) for read in (1e-5, 1e-4, 1e-3) for flop in (1e-6, 1e-4, 1e-2)]
    kernels = [Kernel(read, flop, roofline_s(Kernel(read, flop, 1.0), truth)) for read, flop in points]
    assert fit_roofline(kernels) == pytest.approx(truth, rel=1e-3)


def test_requests_of_a_simulated_node_are_in_seconds_from_the_first() -> None:
    alone, beside = (
        simulated(ENGINES["vllm"], [Request(0, 500, 20), *more])
        for more in ([], [Request(5_000_000, 2000, 20)])
    )
    [(arrival_s, first_s, last_s)] = alone
    assert arrival_s == 0 < first_s < last_s < 2
    assert beside[0][2] > last_s and beside[1][0] == 0.005, "a prompt delays the decodes beside it"


def test_a_missed_target_is_named() -> None:
    table = "silicon TPOT, Llama-3.1-70B fp8"
    rows = [
        Finding(table, case, "held out", 9, error, 0.0)
        for case, error in (("H200 other half", 5.0), ("x", 99.0))
    ]
    assert cost.missed(rows) == ["H200 other half: 5.0 % is above 4 %"]
