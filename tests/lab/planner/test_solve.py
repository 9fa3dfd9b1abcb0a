"""The solver against every threshold and split reckoned one by one from the equations."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import ConfigError
from isthmus.lab.planner.fleet import Fleet, step_s
from isthmus.lab.planner.search import what_if
from isthmus.lab.planner.solve import FleetShape, Method, Solver, decode_batch
from tests.lab.planner.fleets import FAST, SLOW, demand, fleet

LENGTHS = st.lists(st.integers(1, 20_000), min_size=1, max_size=30)


def remote_s(tokens: float) -> float:
    return FAST["prefill_fixed_s"] + FAST["prefill_token_s"] * tokens


def local_s(tokens: float) -> float:
    return SLOW["prefill_fixed_s"] + SLOW["prefill_token_s"] * tokens


def by_hand(found: Fleet, lengths: list[int], threshold: float, prefill: int, decode_rate: float) -> float:
    """Equations (3) to (6) with means over the classes."""
    above = [length for length in lengths if length > threshold]
    below = [length for length in lengths if length <= threshold]
    rates = [(found.home.nodes - prefill) * decode_rate]
    if above:
        kv_bytes = fmean(10**6 + 2000 * length for length in above)
        stage = sum(
            min(each.nodes / fmean(map(remote_s, above)), each.egress / kv_bytes) for each in found.remotes
        )
        rates.append(stage * len(lengths) / len(above))
    if below:
        rates.append(prefill / fmean(map(local_s, below)) * len(lengths) / len(below))
    return min(rates)


@settings(max_examples=20)
@given(LENGTHS, st.integers(1, 4), st.integers(2, 5), st.floats(0.01, 10.0))
def test_no_threshold_and_split_is_better(lengths: list[int], remote: int, home: int, gbps: float) -> None:
    found = fleet(remote=remote, prefill=1, decode=home - 1, gbps=gbps)
    solver = Solver(found, demand(lengths))
    best = solver.best(solver.shape, Method.EXACT)
    decode = solver.batch.size / (solver.batch.step_s * 100)
    every = [
        by_hand(found, lengths, threshold, prefill, decode)
        for threshold in solver.thresholds
        for prefill in range(home)
    ]
    assert best.rate == pytest.approx(max(every), rel=1e-6)
    again = by_hand(found, lengths, best.classes.threshold, best.num_prefill, decode)
    assert best.rate == pytest.approx(again, rel=1e-6)


def test_several_remote_clusters_each_with_its_own_link() -> None:
    """The second has twice the nodes and a link that bears next to nothing."""
    clusters = {
        "home": {"cost": SLOW, "roles": {"prefill": 1, "decode": 3}},
        "near": {"cost": FAST, "roles": {"prefill": 1}},
        "far": {"cost": FAST, "roles": {"prefill": 2}},
    }
    links = [{"between": ["near", "home"], "gbps": 10}, {"between": ["far", "home"], "gbps": 0.01}]
    found = fleet(clusters=clusters, links=links)
    lengths = [1000, 5000, 20_000]
    solver = Solver(found, demand(lengths))
    decode = solver.batch.size / (solver.batch.step_s * 100)
    for threshold in (0.0, 4000.0, math.inf):
        rate = solver.at(solver.shape, threshold, 1, Method.EXACT).rate
        assert rate == pytest.approx(by_hand(found, lengths, threshold, 1, decode), rel=1e-6)


def test_without_remote_clusters_nothing_is_offloaded() -> None:
    solver = Solver(fleet(remote=0, prefill=2, decode=3), demand([2000, 4000]))
    assert solver.thresholds == (math.inf,)
    what = what_if(solver, solver.best(solver.shape, Method.EXACT), ())
    assert (what.bandwidth, what.threshold, what.link_failure) == ([], [], None)
    found = solver.solve(solver.shape, Method.EXACT)
    assert len(found) == 5 and all(each.classes.share == 0 for each in found)
    assert [each.rate for each in found] == sorted((each.rate for each in found), reverse=True)


def test_of_equal_rates_the_threshold_with_most_room_in_prefill() -> None:
    """Decode binds at many thresholds; at the chosen one neither prefill stage is close to its limit."""
    solver = Solver(
        fleet(remote=4, prefill=3, decode=1, gbps=10), demand([500 * each for each in range(1, 41)], 4000)
    )
    best = solver.best_threshold(solver.shape, 3, Method.EXACT)
    assert best.binds == "decode"
    room = min(best.remote / best.classes.share, best.local / (1 - best.classes.share))
    for each in solver.over_thresholds(solver.shape, 3, Method.EXACT):
        share = each.classes.share
        assert room >= min(
            each.remote / share if share else math.inf, each.local / (1 - share) if share < 1 else math.inf
        )


def test_a_prompt_pays_for_every_chunk() -> None:
    engine = {"kv_memory": "10GB", "token_budget": 1000}
    solver = Solver(fleet(engine=engine), demand([2500]))
    assert solver.service_s(solver.fleet.home.prefill)(2500) == pytest.approx(3 * 0.05 + 2500 * 5e-5)


@settings(max_examples=60)
@given(st.floats(1, 40_000), st.integers(12, 200), st.integers(1, 64))
def test_the_largest_batch_inside_limit_and_memory(context: float, tbt_ms: int, most: int) -> None:
    roles = {"prefill": 1, "decode": {"count": 1, "max_sequences": most}}
    found = fleet(clusters={"home": {"cost": SLOW, "roles": roles}}, remote=0, engine={"kv_memory": "500MB"})
    batch = decode_batch(found.home.decode, context, tbt_ms)

    def fits(size: int) -> bool:
        memory = found.home.decode.kv_blocks * 512 * 2000
        return size <= most and size * 2000 * context <= memory

    assert fits(batch.size) and batch.step_s <= tbt_ms / 1000
    assert not fits(batch.size + 1) or step_s(found.home.decode, batch.size + 1, context) > tbt_ms / 1000
    assert batch.binds in ("slo.tbt_ms", "max_sequences", "kv_memory")


def test_a_step_without_limits_or_room_for_one_sequence_is_a_mistake() -> None:
    decode = fleet().home.decode
    for node, context, tbt_ms, says in (
        (decode, 100, 10, "slo.tbt_ms"),
        (decode, 10**7, None, "engine.kv_memory"),
        (fleet().remotes[0].prefill, 100, None, "nothing of decode"),
    ):
        with pytest.raises(ConfigError, match=says):
            decode_batch(node, context, tbt_ms)


def test_eight_bit_kv_leaves_the_state_as_it_is() -> None:
    plain, encoded = (Solver(fleet(), demand([1000]), codec).kv_bytes(1000) for codec in ("none", "int8"))
    assert plain == 10**6 + 2_000_000
    assert encoded == pytest.approx(10**6 + 2_000_000 * (512 + 2) / 1024)
    assert Solver(fleet(network={"compression": "int8"}), demand([1000])).codec == "int8"


def test_nodes_that_cannot_change_their_role_do_not() -> None:
    roles = {"prefill": {"count": 2, "hardware": "h200"}, "decode": {"count": 1, "hardware": "h20"}}
    found = fleet(remote=0, clusters={"home": {"cost": SLOW, "roles": roles}})
    solver = Solver(found, demand([1000]))
    assert list(solver.splits(solver.shape)) == [2]
    assert list(solver.splits(FleetShape(4, (), ()))) == [0, 1, 2, 3]
