"""What would be: cheapest fleets against trying them all, sweeps against the solver."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.lab.planner.search import cost_of_nodes, needs, what_if
from isthmus.lab.planner.solve import FleetShape, Method, Solver
from tests.lab.planner.fleets import FAST, SLOW, demand, fleet

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


def test_one_cluster_has_nothing_to_say_of_links() -> None:
    solver = Solver(fleet(remote=0, prefill=3, decode=3), demand([1000]))
    found = what_if(solver, solver.best(solver.shape, Method.EXACT), ())
    assert (found.bandwidth, found.threshold, found.link_failure) == ([], [], None)
    assert len(found.split) == 6 and found.twice.remote == {}
