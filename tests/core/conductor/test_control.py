"""The controllers on synthetic reports, and on the published case study (arXiv 2604.15039) in the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.conductor import Convert, LinkRule, LinkState, NodeJoined, Rules
from isthmus.core.conductor.capacity import ENOUGH, WINDOW, Capacity
from isthmus.core.conductor.control import (
    DEAD_BAND,
    HOLD_NS,
    LONGEST_RETURN_NS,
    QUIET_NS,
    RETURN_NS,
    SEGMENT_BYTES,
    SOLVE_NS,
    LinkControl,
)
from isthmus.core.conductor.copies import ClusterLink
from isthmus.core.conductor.view import Placement, View
from isthmus.core.cost import Curve, compile_cost
from isthmus.core.cost.offload import Threshold
from isthmus.core.types import NS_PER_S, NodeId, Role
from isthmus.facts import NodeFacts, Rates, Sequences
from isthmus.lab.sim.deployment import FAR, Deployment
from isthmus.lab.sim.faults import Faults, LinkFault, NodeFault
from isthmus.lab.sim.records import RequestStatus, Result
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import Request, Workload

from .cluster import Cluster
from .test_routing import LINKS, down, two, up

BLOCK_SIZE = 64
H200 = Curve(
    kv_token_bytes=17_280,
    num_layers=15,
    state_bytes=182_353_920,
    prefill_token_s=0,
    prefill_points=((1024, 0.44), (8192, 0.72), (32_768, 1.84), (131_072, 7.40)),
    decode_fixed_s=0.025,
)
"""Prefill of the published case study (arXiv 2604.15039, table 5); a token of each sequence in 25 ms."""
H20 = Curve(
    kv_token_bytes=17_280,
    num_layers=15,
    state_bytes=182_353_920,
    prefill_fixed_s=0.46899,
    prefill_token_s=1.300173e-4,
    prefill_pair_s=2.943848e-10,
    decode_fixed_s=0.025,
)
"""As its table 6 implies."""
GBPS = 10**9 // 8
P, D = Role.PREFILL, Role.DECODE
NOTHING = Faults()


def both_ways(gbps: float) -> tuple[LinkRule, ...]:
    rate = int(gbps * GBPS)
    return LinkRule("far", "near", rate, 4_000_000), LinkRule("near", "far", rate, 4_000_000)


def study(
    rules: Rules,
    load: Sequence[tuple[float, int]],
    num_prefill: int = 3,
    num_decode: int = 5,
    num_far: int = 4,
    faults: Faults = NOTHING,
) -> Result:
    """H20 instances at home, and H200 instances that prefill for them. `load`: (second of arrival, tokens) of each."""
    sizes = (("near", P, num_prefill, H20), ("near", D, num_decode, H20), ("far", P, num_far, H200))
    places, rates = Sequences(20, 20, 20), Rates(network=10**11, handover=10**11)
    nodes = [
        NodeFacts(
            NodeId(f"{cluster}-{role}-{number}"), role, cost, 10**7 // BLOCK_SIZE, BLOCK_SIZE, rates=rates,
            cluster=cluster, sequences=places, token_budget=FAR, prompt_batch=1, max_steps=FAR, max_chunks=FAR,
        )
        for cluster, role, count, cost in sizes
        for number in range(count)
    ]  # fmt: skip
    requests = [Request(int(at_s * NS_PER_S), num_tokens, 1024) for at_s, num_tokens in load]
    return Simulation(Deployment(tuple(nodes), rules, faults=faults), Workload("", BLOCK_SIZE, requests)).run()


def thresholds(result: Result, until_s: float) -> list[tuple[float, int | None]]:
    """(seconds, what)."""
    found = [(each.at_ns / NS_PER_S, each.threshold) for each in result.thresholds]
    return [each for each in found if each[0] <= until_s]


def prompts(rate: Callable[[float], float] | float, until_s: float, seed: int = 1) -> list[tuple[float, int]]:
    """Poisson arrivals, lengths log-normal (9.9, 1) on [128, 131072], as in the case study."""
    random, at, found = Random(seed), 0.0, []
    while True:
        at += random.expovariate(rate(at) if callable(rate) else rate)
        if at > until_s:
            return found
        length = 0
        while not 128 <= length <= 131_072:
            length = int(random.lognormvariate(9.9, 1.0))
        found.append((at, length))


S = NS_PER_S
P, D = Role.PREFILL, Role.DECODE
RATE = 10 * GBPS
CASE = Rules(policy="isthmus", links=both_ways(100), max_requests=10_000)


def watch() -> LinkControl:
    return LinkControl(ClusterLink(LinkRule("far", "near", RATE)))


def busy(share: float, queued_s: float = 0.0, *, of_time: float = 1.0, **more: int) -> LinkState:
    """For a second: `share` of the nominal rate, while something was on its way."""
    sent, queued = int(share * RATE * of_time), int(queued_s * RATE)
    return LinkState("far", "near", True, sent, int(of_time * S), queued, **more)


def hear(control: LinkControl, states: Iterable[LinkState], start: int = 0) -> list[float]:
    """One a second; returns what share of its rate the link is believed to carry after each."""
    found = []
    for second, state in enumerate(states, start + 1):
        control.availability(state.up, second * S)
        if state.up:
            control.measured(state, S, second * S)
        found.append(control.link.bytes_per_s / RATE)
    return found


def test_a_drop_is_learned_in_seconds_and_a_return_at_once() -> None:
    control = watch()
    shares = hear(control, [busy(0.5)] * 5 + [busy(0.2, queued_s=2)] * 60 + [busy(1.0)] * 5)
    assert shares[:5] == [1.0] * 5
    assert shares[10] == pytest.approx(0.2, rel=0.15) and shares[64] == pytest.approx(0.2, rel=0.01)
    assert shares[65:] == [1.0] * 5
    for slow_sender in (busy(0.1), busy(0.0, of_time=0.0)):  # less than it carries, and nothing left waiting
        assert hear(watch(), [slow_sender] * 30) == [1.0] * 30


def test_what_lasts_follows_slowly_down_and_at_once_up() -> None:
    control = watch()
    hear(control, [busy(0.2, queued_s=2)] * 20)
    assert 0.7 < control.link.lasting / RATE < 0.8
    hear(control, [busy(0.2, queued_s=2)] * 280, 20)
    assert control.link.lasting / RATE == pytest.approx(0.2, rel=0.05)
    hear(control, [busy(0.9)], 300)
    assert control.link.lasting / RATE == pytest.approx(0.9, rel=0.01)


def test_a_slow_link_is_tried_again_and_ever_later() -> None:
    """Nothing uses it, so nothing is learned: the belief grows by itself; each time that was too early, it waits
    twice as long."""
    control, second, waits = watch(), 0, []
    for _ in range(4):
        hear(control, [busy(0.2, queued_s=2)] * 8, second)
        second += 8
        quiet = 0
        while control.link.bytes_per_s / RATE < 0.25:
            hear(control, [busy(0.0, of_time=0.0)], second + quiet)
            quiet += 1
        second += quiet
        waits.append(quiet)
    first = QUIET_NS // S
    assert waits == sorted(waits) and waits[0] <= 1.7 * first
    assert [round((wait - waits[0]) / first) for wait in waits] == [0, 1, 3, 7]


LEVELS = {
    "bad": (5.0, 0.0),
    "lossy": (0.0, 0.1),
    "between": (0.5, 0.0),
    "between too": (0.0, 0.01),
    "good": (0.1, 0.0),
}
"""Seconds of link time waiting, and the share sent again."""


@given(st.lists(st.tuples(st.sampled_from(list(LEVELS)), st.integers(1, 12)), max_size=12))
def test_congestion_ends_only_after_all_was_below_the_low_marks_for_long(spells: list[tuple[str, int]]) -> None:
    """Between the marks nothing changes: neither does it begin there nor end."""
    control, history, congested = watch(), ["good"], False
    for level, seconds in spells:
        for _ in range(seconds):
            history.append(level)
            queued_s, lost = LEVELS[level]
            state = busy(0.9, queued_s, retransmits=int(lost * 0.9 * RATE / SEGMENT_BYTES))
            hear(control, [state], len(history) - 2)
            if all(one in ("bad", "lossy") for one in history[-2:]):
                congested = True
            elif all(one == "good" for one in history[-QUIET_NS // S :]):
                congested = False
            assert control.congested == congested, history


def test_the_share_in_use_is_that_of_the_last_seconds() -> None:
    control = watch()
    hear(control, [busy(1.0)])
    assert control.share == pytest.approx(0.1)
    hear(control, [busy(1.0)] * 29, 1)
    assert control.share == pytest.approx(1 - 0.9**30)
    hear(control, [busy(0.0, of_time=0.0)] * 10, 30)
    assert control.share == pytest.approx((1 - 0.9**30) * 0.9**10)


def test_a_link_that_flaps_is_used_ever_less() -> None:
    control, used, falls = watch(), [], 0
    for second in range(1, 601):
        is_up = second % 20 < 17
        control.availability(is_up, second * S)
        falls += bool(used) and used[-1] and not control.link.trusted
        used.append(control.link.trusted)
    assert falls <= 4 and sum(used[-300:]) == 0
    for second in range(601, 601 + LONGEST_RETURN_NS // S + 2):
        control.availability(True, second * S)
    assert control.link.trusted


def second(some: Cluster, *states: LinkState) -> None:
    some.now += S
    some.links_measured(*(states or up()))


def test_a_fixed_threshold_is_told_once() -> None:
    some = two(threshold=20, control=True)
    for _ in range(30):
        second(some)
    assert some.thresholds == [(S, 20)]


def test_out_of_reach_is_told_at_once_and_reach_after_a_while() -> None:
    some = two(threshold=20, control=True)
    second(some)
    second(some, *down())
    assert some.thresholds[-1] == (2 * S, None)
    for _ in range(30):
        second(some)
    assert some.thresholds == [(S, 20), (2 * S, None), (3 * S + RETURN_NS, 20)]
    some.leave("far-p1")
    second(some)
    assert some.thresholds[-1][1] is None


def test_without_control_the_link_is_what_it_says() -> None:
    some = two(threshold=20)
    second(some, LinkState("far", "near", True, 10, S, 10**10))
    assert some.conductor.view.links["far", "near"].bytes_per_s == LINKS[0].bytes_per_s
    second(some, *down())
    second(some)
    assert [threshold for _, threshold in some.thresholds] == [20, None, 20]


def test_the_threshold_is_solved_when_enough_prompts_were_seen() -> None:
    """The published case study at 0.7 of its highest rate: 19,400 +- what a sample of 1,000 prompts allows."""
    told = thresholds(study(CASE, prompts(2.2, 600)), 600)
    assert told[0] == (1.0, 0)
    assert 20 < told[1][0] < 45  # 64 prompts
    assert told[-1][1] == pytest.approx(19_400, rel=0.1)
    assert len(told) <= 10


def test_the_threshold_is_solved_again_when_it_is_time_or_the_rate_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved, solve = [], Capacity.threshold

    def counted(capacity: Capacity, num_local: float) -> Threshold:
        solved.append(some.now // S)
        return solve(capacity, num_local)

    monkeypatch.setattr(Capacity, "threshold", counted)
    some = two(threshold=None, control=True)
    for number in range(ENOUGH):
        some.arrives(f"r{number}", 20 + number)
    for _ in range(2 * SOLVE_NS // S + 5):
        second(some)
    every = SOLVE_NS // S
    assert solved == [1, 1 + every, 1 + 2 * every]
    link = some.conductor.view.links["far", "near"]
    link.lasting = link.bytes_per_s = link.nominal // 2
    second(some)
    assert solved[3:] == [some.now // S]


def test_the_threshold_counts_nodes_anew() -> None:
    """Three of six prefill nodes at home join after 200 s."""
    late = Faults(nodes=tuple([NodeFault(f"near-prefill-{number}", 0, 200) for number in (3, 4, 5)]))
    told = thresholds(study(CASE, prompts(2.0, 260), num_prefill=6, faults=late), 260)
    before = [threshold for at, threshold in told if at < 200][-1]
    after = told[-1][1]
    assert before is not None and after is not None and after > 1.3 * before


def offloaded(result: Result, start_s: float, stop_s: float) -> list[bool]:
    """Whether requests that came in this time were prefilled elsewhere."""
    clusters = [node.cluster for node in result.nodes]
    some = [each for each in result.records if start_s * S <= each.arrival_ns < stop_s * S]
    return [clusters[each.prefill] != clusters[each.decode] for each in some]


def test_a_link_at_a_fifth_for_a_minute() -> None:
    """The threshold moves little and comes back; prompts that would wait for the link stay at home meanwhile."""
    good, slow = {}, Faults((LinkFault("far", "near", 200, 260, 0.2),))
    for control in (False, True):
        rules = replace(CASE, links=both_ways(20), threshold=19_400, control=control)
        result = study(rules, prompts(2.0, 400), faults=slow)
        good[control] = sum(each.landed_ns - each.arrival_ns < 15 * S for each in result.records)
        if control:
            told = thresholds(result, 400)
            assert len(told) <= 4 and told[-1][1] == 19_400
            during, after = offloaded(result, 210, 260), offloaded(result, 330, 400)
            assert sum(during) / len(during) < 0.36 and sum(after) / len(after) > 0.4
    assert good[True] > good[False]


def test_a_link_cut_for_a_minute_loses_no_request() -> None:
    rules = replace(CASE, threshold=19_400, control=True)
    result = study(rules, prompts(1.2, 300), faults=Faults((LinkFault("far", "near", 100, 160, 0.0),)))
    assert all(each.status is RequestStatus.COMPLETED for each in result.records)
    assert not any(offloaded(result, 101, 160 + RETURN_NS / S)) and any(offloaded(result, 166, 180))
    assert [threshold for _, threshold in thresholds(result, 420)] == [19_400, None, 19_400]


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_whatever_links_do_the_threshold_changes_seldom(seed: int) -> None:
    """Random reports: bounded changes a minute, and no change within the dead band."""
    random = Random(seed)
    some = two(threshold=None, control=True, cache_mode="auto")
    share = 1.0
    falls = 0
    for number in range(300):
        if random.random() < 0.3:
            some.arrives(f"r{number}", random.randint(1, 200))
        if random.random() < 0.1:
            share = random.choice([0.0, 0.05, 0.3, 1.0])
        rate = LINKS[0].bytes_per_s
        state = LinkState("far", "near", share > 0, int(share * rate), S, random.choice([0, rate, 5 * rate]))
        was_up = some.conductor.view.links["far", "near"].trusted
        second(some, state)
        falls += was_up and not some.conductor.view.links["far", "near"].trusted
    told = some.thresholds
    in_a_minute = max(sum(at <= other < at + 60 * S for other, _ in told) for at, _ in told)
    assert in_a_minute <= 60 * S // HOLD_NS + 1 + 2 * falls
    for (_, old), (_, new) in itertools.pairwise(told):
        assert (old is None) != (new is None) or abs((new or 0) - (old or 0)) > DEAD_BAND * (old or 0)
    assert len(told) <= 300 * S // HOLD_NS


def test_cache_mode_follows_the_use_of_links_with_hysteresis() -> None:
    some = two(threshold=20, control=True, cache_mode="auto")
    router, rate, seen = some.conductor._router, LINKS[0].bytes_per_s, []
    for share in [0.0] * 5 + [0.45] * 60 + [0.9] * 60 + [0.45] * 60 + [0.05] * 60:
        second(some, LinkState("far", "near", True, int(share * rate), int(share * S)))
        seen.append(router.abundant)
    changes = sum(one != other for one, other in itertools.pairwise(seen))
    assert seen[0] and seen[60] and not seen[120] and not seen[180] and seen[-1] and changes == 2


def test_priced_offloading_needs_no_threshold() -> None:
    load = prompts(2.4, 300)
    priced, fixed = (
        study(replace(CASE, **rules), load)
        for rules in ({"control": True, "priced": True}, {"threshold": 19_400})
    )
    assert thresholds(priced, 300) == [(1.0, 0)]
    mean = [fmean([each.first_token_ns - each.arrival_ns for each in run.records]) for run in (priced, fixed)]
    assert mean[0] < 0.95 * mean[1]


# Nodes that change their role.


CONVERTS = replace(CASE, links=(), convert=True, control=True, cool_down_s=60.0)


def turned(result: Result, until_s: float) -> list[tuple[float, Role]]:
    """(seconds, new role) of each node that changed it."""
    found = [(each.at_ns / S, each.role) for each in result.conversions]
    return [each for each in found if each[0] <= until_s]


def test_too_little_of_a_role_gets_more_and_stays_so() -> None:
    """6/2 bears 1.56 requests a second; 2.4 come: two nodes turn, and no more. And without another cluster."""
    result = study(replace(CONVERTS, links=both_ways(100)), prompts(2.4, 600), 6, 2)
    (first, one), (second, other) = turned(result, 600)
    assert one is other is D and second - first >= 60
    last = thresholds(result, 600)[-1][1]
    assert last is not None and last > 19_400  # four prefill nodes at home: more stays
    assert [role for _, role in turned(study(CONVERTS, prompts(1.9, 700), 6, 6, 0), 700)] == [P, P, P]


def test_a_good_split_or_a_low_load_is_left_alone() -> None:
    for num_prefill, num_decode, rate in ((3, 5, 2.6), (7, 1, 0.3), (1, 7, 0.5)):
        result = study(replace(CONVERTS, links=both_ways(100)), prompts(rate, 300), num_prefill, num_decode)
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
    rules = replace(CONVERTS, links=both_ways(100), cool_down_s=30.0)
    result = study(rules, load, num_prefill, 4 - num_prefill, 2)
    times = [at for at, _ in turned(result, 500)]
    assert all(later - at >= 30 for at, later in itertools.pairwise(times))
    assert len([at for at in times if at > 350]) <= 1
    roles = [role for _, role in turned(result, 500)]
    assert 1 <= num_prefill + roles.count(P) - roles.count(D) <= 3


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


def test_the_last_of_its_role_stays_what_it_is_and_who_leaves_while_draining_is_forgotten() -> None:
    some = turning("near-p2")
    some.leave("near-p1")
    assert some.route("r", 10) == ("near-p2", "near-d1")
    assert not some.links_measured()
    some.drain()
    some = turning("near-p2")
    some.leave("near-p2")
    assert not some.links_measured()
    some.join("near-p2", P, cluster="near")
    assert some.conductor.view.nodes[NodeId("near-p2")].draining is False
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


# Capacity.


def deployment(
    prompts: list[int], num_far: int = 4, gbps: float = 100, cost: Curve = H20, **rule: object
) -> tuple[View, Capacity]:
    """Three prefill and five decode nodes at home, and prompts of these lengths, nothing cached."""
    rules = Rules(links=both_ways(gbps), **rule)  # type: ignore[arg-type]
    view = View(rules.links)
    joins = [("near", P, 3, cost), ("near", D, 5, cost), ("far", P, num_far, H200)]
    for cluster, role, count, curve in joins:
        for number in range(count):
            name = NodeId(f"{cluster}-{role}-{number}")
            view.join(NodeJoined(name, role, 10**6, 64, curve, cluster=cluster, max_sequences=20))
    capacity = Capacity(view, rules)
    for length in prompts:
        placement = Placement(view.prefills[0], 0, 0, 1, 1)
        placement.uncached = length
        capacity.add(length, placement)
    view.outputs.add(1024)
    return view, capacity


def test_who_prefills_for_whom() -> None:
    view, capacity = deployment([])
    assert [cluster.name for cluster in capacity.homes] == ["near"]
    assert (len(capacity.remote_nodes), len(capacity.local_nodes)) == (4, 3)
    assert capacity.egress == 100 * GBPS
    view.links["far", "near"].trusted = False
    assert not capacity.remote_nodes and capacity.egress == 0


def test_the_best_threshold_is_where_both_stages_bear_the_same() -> None:
    """Lengths 1,000, 2,000, ... 60,000: equations (3), (4) and (7), written out."""
    lengths = [1000 * number for number in range(1, 61)]
    _, capacity = deployment(lengths)
    tokens = capacity.threshold(3).tokens
    assert tokens is not None

    def rate(threshold: int) -> float:
        far = sum(compile_cost(H200).prefill_ns(n, 0) for n in lengths if n > threshold) / 1e9
        near = sum(compile_cost(H20).prefill_ns(n, 0) for n in lengths if n <= threshold) / 1e9
        return len(lengths) * min(4 / far if far else 1e9, 3 / near if near else 1e9)

    best = max(range(0, 60_000, 1000), key=rate)
    assert tokens == best
    assert capacity.threshold(3).rate == pytest.approx(rate(best), rel=1e-6)


def test_what_a_split_bears() -> None:
    """Decode: 20 places and a token in 25 ms, 1,024 tokens each: 0.78125 requests a second."""
    view, capacity = deployment([20_000] * 100, threshold=0)
    near = view.clusters["near"]
    far_s = 0.72 + (1.84 - 0.72) * (20_000 - 8192) / (32_768 - 8192)
    assert capacity.rate(near, 3) == pytest.approx(min(4 / far_s, 5 * 0.78125), rel=1e-3)
    assert capacity.rate(near, 7) == pytest.approx(0.78125, rel=1e-3)
    view, capacity = deployment([20_000] * 100, num_far=0)
    local_s = H20.prefill_fixed_s + 20_000 * (H20.prefill_token_s + H20.prefill_pair_s * 20_000)
    assert capacity.rate(view.clusters["near"], 3) == pytest.approx(3 / local_s, rel=1e-3)


def test_the_largest_batch_is_what_all_limits_allow() -> None:
    grows = Curve(
        kv_token_bytes=1, num_layers=1, prefill_token_s=1e-4, decode_fixed_s=0.01, decode_sequence_s=0.001
    )
    for rule, batch in (({}, 20), ({"tbt_ms": 25}, 15), ({"tbt_ms": 1}, 1), ({"tbt_ms": 1000}, 20)):
        view, capacity = deployment([1000] * 10, cost=grows, **rule)
        assert capacity.largest_batch(view.decodes[0]) == batch
    view, capacity = deployment([99_488] * 10)  # and 512 tokens of answer: ten fit
    assert capacity.largest_batch(view.decodes[0]) == 10


def test_the_latest_prompts_count() -> None:
    _, capacity = deployment([100] * (ENOUGH - 1))
    assert not capacity.knows_lengths
    _, capacity = deployment([50_000] * 500 + [1000] * WINDOW)
    assert capacity.knows_lengths
    tokens = capacity.threshold(3).tokens
    assert tokens is None or tokens <= 1000


def test_in_one_cluster_what_is_computed_counts() -> None:
    view = View()
    for name, role in (("p", P), ("d", D)):
        view.join(NodeJoined(NodeId(name), role, 10**6, 64, H20))
    capacity = Capacity(view, Rules())
    for cached, uncached in ((0, 1000), (10, 360), (100, 1)):
        capacity.add(1000, Placement(view.prefills[0], cached, cached, 1, 1))
        assert capacity._latest[-1] == (uncached, 1000 - uncached)
