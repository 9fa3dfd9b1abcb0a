"""The whole answer and what-if analyses: baselines on equal terms, cheapest fleets against all, sweeps."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.lab.planner.answer import PlanAnswer
from isthmus.lab.planner.fleet import fleet_of
from isthmus.lab.planner.search import answer, cost_of_nodes, needs, what_if
from isthmus.lab.planner.solve import FleetShape, Method, Solver
from tests.lab.planner.fleets import FAST, SLOW, config, demand, fleet

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


PRICED = {
    "home": {"cost": SLOW, "roles": {"prefill": 2, "decode": 2}, "price": 1.0},
    "remote": {"cost": FAST, "roles": {"prefill": 2}, "price": 2.5},
}


@settings(max_examples=15)
@given(st.lists(st.integers(100, 20_000), min_size=1, max_size=8), st.floats(1.0, 12.0), st.floats(0.02, 5.0))
def test_no_cheaper_fleet_bears_the_rate(lengths: list[int], rate: float, gbps: float) -> None:
    links = [{"between": ["remote", "home"], "gbps": gbps}]
    solver = Solver(fleet(clusters=PRICED, links=links), demand(lengths))
    found = needs(solver, rate)
    shape = FleetShape(found.prefill + found.decode, tuple(found.remote.values()), solver.shape.egress)
    threshold = math.inf if found.threshold is None else float(found.threshold)
    borne = solver.at(shape, threshold, found.prefill, Method.EXACT).rate
    assert borne >= rate * (1 - 1e-9) and found.cost == cost_of_nodes(solver.fleet, shape)
    for home, remote in itertools.product(range(1, shape.home + 2), range(3)):
        other = FleetShape(home, (remote,), solver.shape.egress)
        if cost_of_nodes(solver.fleet, other) < found.cost - 1e-9:
            assert solver.best(other, Method.EXACT).rate < rate


def test_without_the_link_the_home_bears_all() -> None:
    solver = Solver(fleet(), demand([500, 8000]))
    best = solver.best(solver.shape, Method.EXACT)
    failure = what_if(solver, best, ()).link_failure
    alone = Solver(fleet(remote=0), demand([500, 8000]))
    assert failure is not None and failure.needed.remote == {"remote": 0}
    assert failure.resplit == pytest.approx(alone.best(alone.shape, Method.EXACT).rate)
    assert failure.as_planned == alone.at(alone.shape, math.inf, best.num_prefill, Method.EXACT).rate
    bigger = FleetShape(failure.needed.prefill + failure.needed.decode, (), ())
    assert alone.best(bigger, Method.EXACT).rate >= best.rate
    smaller = FleetShape(bigger.home - 1, (), ())
    assert alone.best(smaller, Method.EXACT).rate < best.rate


def test_more_bandwidth_is_never_worse_and_fewer_bits_never_either() -> None:
    solver = Solver(fleet(), demand([500, 2000, 8000, 20_000]))
    points = what_if(solver, solver.best(solver.shape, Method.EXACT), (0.01, 0.1, 1.0, 10.0)).bandwidth
    assert [point.gbps for point in points] == [0.01, 0.1, 1.0, 10.0]
    assert all(one.rate <= other.rate for one, other in itertools.pairwise(points))
    assert all(point.int8 >= point.rate and point.egress_gbps <= point.gbps * (1 + 1e-9) for point in points)
    assert any(point.int8 > point.rate for point in points)


def test_the_best_threshold_and_split_are_in_the_sweeps() -> None:
    solver = Solver(fleet(), demand([500, 2000, 8000, 20_000]))
    best = solver.best(solver.shape, Method.EXACT)
    found = what_if(solver, best, ())
    assert max(point.rate for point in found.threshold) == best.rate
    assert max(point.rate for point in found.split) == best.rate
    for point in found.threshold:
        limits = [each for each in (point.remote, point.local, point.decode) if each is not None]
        assert point.rate == pytest.approx(min(limits))
        assert point.link is None or point.remote is None or point.remote <= point.link * (1 + 1e-9)
    assert found.twice.rate == 2 * best.rate
