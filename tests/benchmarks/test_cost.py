"""The validation's own parts; the published tables themselves when ISTHMUS_PROFILES names their folder."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from isthmus.benchmarks import cost, cost_requests, cost_serving
from isthmus.benchmarks.cost_requests import Request, simulate
from isthmus.benchmarks.cost_tables import Finding, Kernel, finding, fit_roofline, halves, roofline_s
from isthmus.cost import Curve, compile_cost
from isthmus.errors import ConfigError

PROFILES = os.environ.get("ISTHMUS_PROFILES")
needs_profiles = pytest.mark.skipif(PROFILES is None, reason="ISTHMUS_PROFILES names no profiles folder")


def test_a_finding_keeps_size_and_sign() -> None:
    found = finding("table", "case", "held out", [0.1, -0.3])
    assert (found.rows, found.mape_percent, found.bias_percent) == (2, pytest.approx(20), pytest.approx(-10))


def test_halves_are_disjoint_and_seeded() -> None:
    first, second = halves(range(11), 3)
    assert sorted(first + second) == list(range(11))
    assert (len(first), len(second)) == (5, 6)
    assert halves(range(11), 3) == (first, second)


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


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profiles folder .* no file .*silicon_e2e_ttft_tpot\.csv"):
        cost.validate(tmp_path)


def test_a_missed_target_is_named() -> None:
    table = "silicon TPOT, Llama-3.1-70B fp8"
    rows = [
        Finding(table, case, "held out", 9, error, 0.0)
        for case, error in (("H200 other half", 5.0), ("x", 99.0))
    ]
    assert cost.missed(rows) == ["H200 other half: 5.0 % is above 4 %"]


@needs_profiles
def test_the_judged_tables_meet_their_targets() -> None:
    assert PROFILES is not None
    found = list(cost_serving.dense_findings(Path(PROFILES)))
    assert cost.missed(found) == []
    assert {row.case: row.rows for row in found}["H200 other half"] == 63


@needs_profiles
def test_every_table_is_reported(tmp_path: Path) -> None:
    assert PROFILES is not None
    lines: list[str] = []
    found = cost.main(Path(PROFILES), tmp_path / "cost.json", lines.append)
    assert len(json.loads((tmp_path / "cost.json").read_text())) == len(found) > 100
    kernels = {row.table for row in found} & {
        "aiconfigurator gemm",
        "vidur mlp",
        "frontier attention",
        "infersim MLA",
    }
    assert len(kernels) == 4
    gemm = [row.mape_percent for row in found if row.table == "aiconfigurator gemm" and "bfloat16" in row.case]
    assert statistics.fmean(gemm) < 10
    assert len(lines) > len(found)
