"""Plans in the simulator: what the formula says of an idle fleet comes true, and what it does not say shows."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import msgspec
import pytest

from isthmus.lab.planner.answer import PlanAnswer
from isthmus.lab.planner.fleet import fleet_of
from isthmus.lab.planner.search import answer
from isthmus.lab.planner.trials import FRACTIONS, WARM_UP, Trials
from isthmus.lab.sim.spread import spread
from tests.lab.planner.fleets import config, demand

LENGTHS = [400 * index for index in range(1, 41)]
SETTINGS = config(remote=2, prefill=2, decode=2, gbps=10.0, slo={"ttft_ms": 3000, "tbt_ms": 60})
DEMAND = demand(LENGTHS, output_tokens=40)


@pytest.fixture(scope="module")
def found() -> PlanAnswer:
    asked = answer(SETTINGS, fleet_of(SETTINGS), DEMAND, top=1)
    naive = [plan for plan in asked.baselines if plan.name == "naive"]
    asked = msgspec.structs.replace(asked, baselines=naive)
    return Trials(SETTINGS, Path(), DEMAND, num_requests=60, goodput=0.9).of(asked, None)


def test_every_plan_at_every_fraction_under_both_arrivals(found: PlanAnswer) -> None:
    assert found.simulated is not None
    keys = [(trial.plan, trial.arrivals, trial.fraction) for trial in found.simulated.trials]
    plans = {plan.name: plan for plan, _ in found.distinct()}
    assert keys == list(product(plans, ("Poisson", "bursts"), FRACTIONS))
    for trial in found.simulated.trials:
        assert trial.ttft is not None and trial.queue is not None and trial.prefill is not None
        assert trial.ttft.mean == pytest.approx(trial.queue.mean + trial.prefill.mean)
        share = plans[trial.plan].exact.share
        assert trial.offloaded == pytest.approx(share, abs=0.12) and (trial.egress_gbps > 0) == (share > 0)
    naive = [trial for trial in found.simulated.trials if trial.plan == "naive"]
    assert naive and all(trial.offloaded == 1.0 for trial in naive)


def test_an_idle_fleet_takes_what_the_formula_says() -> None:
    """At a hundredth of the rate nothing waits: TTFT is prefill alone."""
    asked = answer(SETTINGS, fleet_of(SETTINGS), DEMAND, top=1)
    trials = Trials(SETTINGS, Path(), DEMAND, num_requests=160, goodput=0.9)
    for plan, _ in asked.distinct():
        records = trials.simulate(plan, "home", "Poisson", 0.01 * plan.exact.rate).records
        ttft = spread([each.first_token_ns - each.arrival_ns for each in records])
        assert ttft is not None and ttft.mean == pytest.approx(plan.service.mean_s, rel=0.02)


def test_the_sustained_rate_lies_between_what_was_good_and_what_was_not(found: PlanAnswer) -> None:
    assert found.simulated is not None and len(found.simulated.sustained) == 2 * len(found.distinct())
    for each in found.simulated.sustained:
        of_plan = [
            trial for trial in found.simulated.trials if trial.plan == each.plan and trial.goodput >= 0.9
        ]
        good = [trial.rate for trial in of_plan if trial.arrivals == each.arrivals]
        assert each.rate >= max(good, default=0.0)
        assert each.rate == 0.0 or each.optimism == pytest.approx(each.formula / each.rate)
    assert found.simulated.best == "plan 1"  # the only one asked for


def test_without_limits_nothing_is_called_sustained() -> None:
    settings = config(slo={})
    asked = answer(settings, fleet_of(settings), DEMAND, top=1)
    asked = msgspec.structs.replace(asked, baselines=[], paper=asked.plans[0])
    heard: list[tuple[int, int]] = []
    found = Trials(settings, Path(), DEMAND, num_requests=20, goodput=0.9).of(
        asked, lambda done, total: heard.append((done, total))
    )
    assert found.simulated is not None and found.simulated.sustained == []
    assert any("slo.ttft_ms" in note for note in found.notes)
    assert heard == [(1, 2), (2, 2)] and 0 < WARM_UP < 1


def test_what_is_encoded_crosses_in_fewer_bytes() -> None:
    moved = {}
    plan = answer(config(gbps=0.1), fleet_of(config(gbps=0.1)), DEMAND, top=1).plans[0]
    for codec in ("none", "int8"):
        settings = config(gbps=0.1, network={"compression": codec})
        trials = Trials(settings, Path(), DEMAND, num_requests=20, goodput=0.9)
        found = trials.simulate(plan, "home", "Poisson", plan.exact.rate)
        moved[codec] = sum(link.bytes_moved for link in found.links if link.kind == "cluster")
    assert 0 < moved["int8"] < moved["none"]
