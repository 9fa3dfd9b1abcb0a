from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.conductor import Convert, Rules
from isthmus.core.types import NS_PER_S, NodeId, Role
from isthmus.lab.sim.records import Result

from .case_study import both_ways, prompts, study, thresholds
from .cluster import Cluster
from .test_routing import two

S = NS_PER_S
P, D = Role.PREFILL, Role.DECODE


def rules(**more: object) -> Rules:
    values = {
        "policy": "isthmus",
        "convert": True,
        "control": True,
        "cool_down_s": 60.0,
        "max_requests": 10_000,
    }
    return Rules(**{**values, **more})  # type: ignore[arg-type]


def turned(result: Result, until_s: float) -> list[tuple[float, Role]]:
    """(seconds, new role) of each node that changed it."""
    found = [(each.at_ns / S, each.role) for each in result.conversions]
    return [each for each in found if each[0] <= until_s]


def test_too_little_decode_gets_more_and_stays_so() -> None:
    """6/2 bears 1.56 requests a second; 2.4 come: two nodes turn, and no more."""
    result = study(rules(links=both_ways(100)), prompts(2.4, 600), 6, 2)
    (first, one), (second, other) = turned(result, 600)
    assert one is other is D and second - first >= 60
    last = thresholds(result, 600)[-1][1]
    assert last is not None and last > 19_400  # four prefill nodes at home: more stays


def test_too_little_prefill_gets_more_without_another_cluster() -> None:
    assert [role for _, role in turned(study(rules(), prompts(1.9, 900), 6, 6, 0), 900)] == [P, P, P]


def test_a_good_split_or_a_low_load_is_left_alone() -> None:
    for num_prefill, num_decode, rate in ((3, 5, 2.6), (7, 1, 0.3), (1, 7, 0.5)):
        result = study(rules(links=both_ways(100)), prompts(rate, 300), num_prefill, num_decode)
        assert not turned(result, 300)


@settings(max_examples=6)
@given(
    st.lists(st.sampled_from([0.2, 0.6, 1.0, 1.4, 1.8]), min_size=3, max_size=3),
    st.integers(0, 10),
    st.integers(1, 3),
)
def test_random_loads_turn_nodes_no_faster_than_the_cool_down_and_settle(
    loads: list[float], seed: int, num_prefill: int
) -> None:
    """Half of the case study's nodes. Each load lasts for 100 s, the last one goes on."""
    load = prompts(lambda at: loads[min(2, int(at / 100))], 500, seed)
    result = study(rules(links=both_ways(100), cool_down_s=30.0), load, num_prefill, 4 - num_prefill, 2)
    times = [at for at, _ in turned(result, 500)]
    assert all(later - at >= 30 for at, later in itertools.pairwise(times))
    assert len([at for at in times if at > 350]) <= 1
    roles = [role for _, role in turned(result, 500)]
    assert 1 <= num_prefill + roles.count(P) - roles.count(D) <= 3


# Draining.


def turning(name: str, *, near: str = "ppd", far: str = "p", policy: str = "least_loaded") -> Cluster:
    """Two clusters in which one node drains."""
    some = two(near=near, far=far, convert=True, policy=policy)
    some.links_measured()  # the first threshold
    some.conductor._conversion._begin(some.conductor.view.nodes[NodeId(name)])
    return some


def test_a_draining_node_finishes_and_gets_nothing_new() -> None:
    some = two(near="ppd", convert=True, cool_down_s=10.0)
    some.links_measured()
    assert some.route("a", 10)[0] == "near-p1" and some.route("b", 10)[0] == "near-p2"
    conversion, node = some.conductor._conversion, some.conductor.view.nodes[NodeId("near-p2")]
    conversion._begin(node)
    for number in range(4):
        assert some.route(f"r{number}", 10)[0] == "near-p1"
    assert not some.links_measured()
    some.first_token("b")
    assert not some.links_measured()  # its KV is still to go
    some.finish_prefill("b")
    assert some.links_measured() == [Convert(NodeId("near-p2"), D)]
    assert not some.links_measured()  # asked once
    assert some.route("s", 10)[0] == "near-p1"
    some.convert("near-p2")
    assert node.role is D and not node.draining
    assert "near-p2" in {some.route(f"t{number}", 10)[1] for number in range(8)}
    some.drain()


def test_a_node_that_is_asked_for_its_cache_sends_it_first() -> None:
    some = turning("near-p2", policy="mooncake")
    some.store("near-p2", *range(1, 11))
    (route,) = some.arrives("r", 41, names=tuple(range(1, 11)))
    assert route.prefill == "near-p1" and route.fetch.source == "near-p2"  # type: ignore[union-attr]
    assert not some.links_measured()
    some.fetch_finished("r")
    assert some.links_measured() == [Convert(NodeId("near-p2"), D)]
    some.drain()


def test_who_leaves_while_draining_is_forgotten() -> None:
    some = turning("near-p2")
    some.leave("near-p2")
    assert not some.links_measured()
    some.join("near-p2", P, cluster="near")
    assert some.conductor.view.nodes[NodeId("near-p2")].draining is False
    some.drain()


def test_the_last_of_its_role_stays_what_it_is() -> None:
    some = turning("near-p2")
    some.leave("near-p1")
    assert some.route("r", 10) == ("near-p2", "near-d1")
    assert not some.links_measured()
    some.drain()


def test_a_node_that_turned_when_nothing_else_was_left_turns_back() -> None:
    some = turning("near-p2", far="")
    assert some.links_measured() == [Convert(NodeId("near-p2"), D)]
    some.leave("near-p1")
    some.convert("near-p2")
    assert some.links_measured() == [Convert(NodeId("near-p2"), P)]
    some.convert("near-p2")
    assert some.route("r", 10) == ("near-p2", "near-d1")
    some.drain()
