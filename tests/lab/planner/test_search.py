"""The whole answer: baselines on equal terms, residuals, unloaded TTFT."""

from __future__ import annotations

import math

import pytest

from isthmus.lab.planner.answer import PlanAnswer
from isthmus.lab.planner.fleet import fleet_of
from isthmus.lab.planner.search import answer
from tests.lab.planner.fleets import FAST, SLOW, config, demand

LENGTHS = [300, 900, 2500, 7000, 20_000]


def answered(**changed: object) -> PlanAnswer:
    settings = config(**changed)  # type: ignore[arg-type]
    return answer(settings, fleet_of(settings), demand(LENGTHS))


def test_plans_are_splits_in_order_and_baselines_have_as_many_nodes() -> None:
    found = answered()
    assert [plan.name for plan in found.plans] == ["plan 1", "plan 2", "plan 3"]
    rates = [plan.exact.rate for plan in found.plans]
    assert rates == sorted(rates, reverse=True) and len({plan.prefill for plan in found.plans}) == 3
    assert {plan.name for plan in found.baselines} == {"as configured", "homogeneous", "naive"}
    assert all(plan.nodes == 6 for plan in [*found.plans, *found.baselines])
    naive = next(plan for plan in found.baselines if plan.name == "naive")
    assert (naive.threshold, naive.prefill, naive.exact.share) == (0, 0, 1.0)
    homogeneous = next(plan for plan in found.baselines if plan.name == "homogeneous")
    assert homogeneous.threshold is None and homogeneous.remote == {} and homogeneous.cost is None
    clusters = {
        "home": {"cost": SLOW, "roles": {"prefill": 2, "decode": 2}, "price": 1.0},
        "remote": {"cost": FAST, "roles": {"prefill": 2}, "price": 2.5},
    }
    equal = next(plan for plan in answered(clusters=clusters).baselines if plan.name == "equal cost")
    assert equal.nodes == 9 and equal.cost == 9.0


def test_residuals_are_those_of_the_equations() -> None:
    found = answered().plans[0].exact
    one, other = found.remote / found.share, found.local / (1 - found.share)
    assert found.threshold_residual == pytest.approx((one - other) / min(one, other))
    both = found.remote + found.local
    assert found.split_residual == pytest.approx((found.decode - both) / min(found.decode, both))
    assert found.rate == pytest.approx(min(one, other, found.decode))


def test_unloaded_ttft_is_prefill_alone() -> None:
    naive = next(plan for plan in answered().baselines if plan.name == "naive")
    times = [0.1 + 1e-5 * length for length in LENGTHS]
    assert naive.service.mean_s == pytest.approx(math.fsum(times) / 5)
    assert naive.service.p90_s == pytest.approx(max(times))
    assert naive.service.local_mean_s is None and naive.service.remote_mean_s == naive.service.mean_s
    assert naive.service.wire_s == pytest.approx((10**6 + 2000 * math.fsum(LENGTHS) / 5) / 1.25e8)


def test_the_configured_threshold_is_reckoned() -> None:
    found = answered(offload={"threshold": 1000, "control": "none"})
    configured = next(plan for plan in found.baselines if plan.name == "as configured")
    assert (configured.threshold, configured.prefill, configured.exact.share) == (1000, 2, pytest.approx(0.6))


def test_same_plans_are_listed_once() -> None:
    found = answered()
    listed = found.distinct()
    keys = [(plan.threshold, tuple(plan.remote.items()), plan.prefill, plan.decode) for plan, _ in listed]
    assert len(set(keys)) == len(keys)
    assert {name for _, names in listed for name in names.split(", ")} == {
        plan.name for plan in [*found.plans, found.paper, *found.baselines]
    }
