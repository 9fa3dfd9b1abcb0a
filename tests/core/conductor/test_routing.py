from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from msgspec.structs import replace

from isthmus.core.blocks import state_names
from isthmus.core.conductor import FetchOrder, Hold, LinkRule, LinkState, Refuse, Route, Rules
from isthmus.core.conductor.routing import guarded
from isthmus.core.cost import Curve
from isthmus.core.types import NodeId, RequestId, Role

from .cluster import BLOCK_SIZE, CURVE, MS, Cluster
from .test_conductor import play
from .views import arrival

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
GBPS = 10**9 // 8
LINKS = (LinkRule("far", "near", GBPS), LinkRule("near", "far", GBPS))
FAST = Curve(kv_token_bytes=250, num_layers=1, prefill_token_s=0.4e-3)
"""A remote prefill node: 2.5 times as fast."""
HYBRID = Curve(kv_token_bytes=250, num_layers=1, prefill_token_s=1e-3, decode_fixed_s=1e-2, state_bytes=2500)
STATE_BLOCKS = 3
NAMES = tuple(range(1, 11))


def two(
    rules: Rules | None = None, near: str = "pd", far: str = "p", state_blocks: int = 0, **rule: object
) -> Cluster:
    """Nodes near-p1, ... and far-p1, ..., by the letters of their roles."""
    values = {"threshold": 20, "links": LINKS, "policy": "least_loaded", **rule}
    some = Cluster(rules or Rules(**values), step_ns=0)  # type: ignore[arg-type]
    roles = {"p": P, "d": D, "m": M}
    for cluster, letters in (("near", near), ("far", far)):
        for at, letter in enumerate(letters):
            cost = CURVE if cluster == "near" else FAST
            if state_blocks:
                cost = HYBRID
            name = f"{cluster}-{letter}{1 + letters[:at].count(letter)}"
            some.join(name, roles[letter], cost=cost, cluster=cluster, state_blocks=state_blocks)
    return some


def down(*pairs: tuple[str, str]) -> list[LinkState]:
    return [LinkState(*pair, up=False) for pair in pairs or (("far", "near"), ("near", "far"))]


def up() -> list[LinkState]:
    return [LinkState("far", "near", up=True), LinkState("near", "far", up=True)]


def test_what_cannot_be_handed_over_is_computed_where_it_is_decoded() -> None:
    some = two(near="pdm")
    for name in ("one", "other"):
        (route,) = some.on(replace(arrival(500, request=name), whole=True))
        assert isinstance(route, Route) and (route.prefill, route.decode) == ("near-m1", "near-m1")
    some.drain()
    (refusal,) = two().conductor.on(replace(arrival(500), whole=True), 0)
    assert isinstance(refusal, Refuse) and refusal.code == "unavailable"


# The paper's rule.


def published(l_total: int, l_prfaas: int, l_pd: int, t: int, mode: str) -> tuple[str, bool]:
    """The paper's rule (arXiv 2604.15039), transcribed: (cluster that computes, whether a cached prefix crosses)."""
    if mode == "scarce":
        return ("PD-P" if l_total - l_pd <= t else "PrfaaS"), False
    l_prefix = max(l_prfaas, l_pd)
    compute = "PD-P" if l_total - l_prefix <= t else "PrfaaS"
    holds = {"PD-P": l_pd, "PrfaaS": l_prfaas}[compute]
    return compute, holds != l_prefix  # a tie is held by both


def test_the_guard_weighs_what_both_cost() -> None:
    assert guarded(True, 16.0, 12.0) and not guarded(True, 8.0, 9.0)
    assert guarded(True, 8.0, 8.0) and not guarded(False, 8.0, 8.0)  # a tie goes where the threshold says
    assert not guarded(False, 8.0, 5.0)  # short, and not much slower at home
    assert guarded(False, 11.0, 5.0) and not guarded(False, 10.0, 5.0)
    assert guarded(True, float("inf"), 5.0)  # no node at home can take it


def test_long_prompts_go_far_and_come_home_to_decode() -> None:
    some = two()
    assert some.route("at", 20) == ("near-p1", "near-d1")
    assert some.route("above", 21) == ("far-p1", "near-d1")
    assert some.route("one", 500, 1) == ("far-p1", "far-p1")  # nothing is left to decode
    some.drain()


@pytest.mark.parametrize("mode", ["scarce", "abundant"])
@pytest.mark.parametrize("control", [False, True])
def test_any_caches_and_lengths_are_routed_as_published(mode: str, control: bool) -> None:
    """Against a transcription, with caches of random depth; and a prefix that must cross is fetched. The guard of
    `control` may compute elsewhere: then the prefix crosses to there."""
    random, seen = Random(7), Counter[object]()
    for _ in range(300):
        some = two(threshold=random.randint(0, 40), cache_mode=mode, control=control)
        home, there = random.randint(0, 10), random.choice([0, 5, 10])
        some.store("near-p1", *NAMES[:home])
        some.store("far-p1", *NAMES[:there])
        total = random.randint(1, 60)
        names = NAMES[: total // BLOCK_SIZE]
        cached = [min(blocks, len(names)) * BLOCK_SIZE for blocks in (home, there)]
        l_pd, l_prfaas = (min(tokens, total - 1) for tokens in cached)  # the last token is computed
        t = some.rules.threshold
        assert t is not None
        compute, crosses = published(total, l_prfaas, l_pd, t, mode)
        route = some.routed("r", total, names=names)
        if control:
            compute = {"near-p1": "PD-P", "far-p1": "PrfaaS"}[route.prefill]
            own, other = (l_pd, l_prfaas) if compute == "PD-P" else (l_prfaas, l_pd)
            crosses = mode == "abundant" and own < other
        assert route.prefill == {"PD-P": "near-p1", "PrfaaS": "far-p1"}[compute]
        assert (route.fetch is not None) == crosses
        seen[compute, crosses] += 1
        some.drain()
    assert min(seen.values()) > 10 and len(seen) == (2 if mode == "scarce" else 4 - control)


def test_of_several_clusters_the_soonest_over_a_link_that_is_trusted_is_taken() -> None:
    """It need not be the one that joined first."""
    ends = ("far", "off", "out")
    links = tuple([rule for end in ends for rule in (LinkRule(end, "near", GBPS), LinkRule("near", end, GBPS))])
    some = two(links=links, control=True)
    some.join("off-p1", P, cost=FAST, cluster="off")
    some.join("out-p1", P, cost=FAST, cluster="out")

    def measured(*trusted: str) -> None:
        some.now += 10**9
        some.links_measured(*[LinkState(end, "near", up=end in trusted) for end in ends])
        some.now += 10**12  # no queue is left

    taken = [some.routed(f"r{number}", 100).prefill for number in range(6)]
    assert sorted(taken[:3]) == sorted(taken[3:]) == ["far-p1", "off-p1", "out-p1"], "the shortest queue first"
    for least in ("far", "out"):
        measured(least)
        assert some.routed(f"only {least}", 100).prefill == f"{least}-p1"
        measured(*ends)
        measured(*ends)
    some.drain()


@pytest.mark.parametrize("cache_blocks", [8, 0])
def test_only_what_the_home_lacks_crosses(cache_blocks: int) -> None:
    """Nothing is recalled to a node without a cache: what it reuses lies in its engine's memory."""
    some = two(near="pp")
    some.join("near-d1", D, cluster="near", cache_blocks=cache_blocks)
    some.store("near-d1", *NAMES[:3])
    some.store("near-p2", *NAMES[:6])
    route = some.routed("r", 50, names=NAMES)
    assert (route.prefill, route.decode) == ("far-p1", "near-d1")
    if not cache_blocks:
        assert route.handover_start == 0 and route.recall is None
        return
    assert route.handover_start == 6 and route.recall == FetchOrder(NodeId("near-p2"), 3, 6)
    assert some.conductor.view.links["far", "near"].owed == (50 - 24) * CURVE.kv_token_bytes
    some.first_token("r")
    some.finish_prefill("r")
    assert some.conductor.view.links["far", "near"].owed == 0
    some.store("near-d1", *NAMES)
    route = some.routed("again", 61, names=NAMES)
    assert route.handover_start == 10 and route.recall == FetchOrder(NodeId("near-d1"), 0, 10)
    some.drain()


# Home.


def test_home_is_where_the_prefix_is_then_where_steps_are_short() -> None:
    links = (*LINKS, LinkRule("far", "east", GBPS), LinkRule("east", "far", GBPS))
    some = two(links=links)
    some.join("east-p1", P, cluster="east")
    some.join("east-d1", D, cluster="east")
    assert some.route("a") == ("near-p1", "near-d1")  # both idle: the first that joined
    assert some.route("b") == ("east-p1", "east-d1")
    some.store("near-p1", *NAMES[:2])
    assert some.route("c", 9, names=NAMES[:2]) == ("near-p1", "near-d1")
    assert some.route("d", 100)[0] == "far-p1"
    some.drain()


def test_a_home_of_mixed_nodes_decodes_what_comes_from_afar() -> None:
    some = two(near="m", far="p")
    assert some.route("short", 10) == ("near-m1", "near-m1")
    assert some.route("long", 100) == ("far-p1", "near-m1")
    some.drain()


def test_a_cluster_without_decode_is_never_home_and_one_without_prefill_can_be() -> None:
    naive = two(near="dd", far="pp", threshold=0)
    assert naive.route("a", 5) == ("far-p1", "near-d1")
    assert naive.route("b", 500) == ("far-p2", "near-d2")
    (held, *_) = [a for a in naive.links_measured(*down()) if isinstance(a, Hold)]
    assert held.request == "a"
    assert isinstance(naive.arrives("c", 5)[0], Refuse)
    routes = [action for action in naive.links_measured(*up()) if isinstance(action, Route)]
    assert [(route.request, route.prefill) for route in routes] == [("a", "far-p1"), ("b", "far-p2")]
    naive.drain()
    alone = Cluster(Rules(links=LINKS))
    alone.join("far-p1", P, cluster="far")
    assert alone.refusal("r").code == "unavailable"


# When something is down.


def test_what_is_down_leads_to_a_local_attempt_and_new_ones_stay() -> None:
    some = two(far="pp")
    assert some.route("r", 500) == ("far-p1", "near-d1")
    _, route = some.fail("r", 1)
    assert isinstance(route, Route) and (route.prefill, route.attempt) == ("near-p1", 2)
    assert some.route("next", 500)[0] == "far-p1"
    _, route = some.leave("far-p1")
    assert isinstance(route, Route) and route.prefill == "near-p1"
    assert some.route("third", 500)[0] == "far-p2"
    (route,) = [action for action in some.links_measured(*down()) if isinstance(action, Route)]
    assert (route.request, route.prefill, route.attempt) == ("third", "near-p1", 2)
    assert some.route("fourth", 500)[0] == "near-p1"
    some.links_measured(*up())
    assert some.route("fifth", 500)[0] == "far-p2"
    some.leave("far-p2")
    assert some.route("last", 500)[0] == "near-p1"
    some.drain()


def test_a_cluster_too_small_is_passed_over() -> None:
    some = two(near="d", far="p")
    some.join("near-p1", P, capacity_tokens=100, cost=CURVE, cluster="near")
    assert some.route("short", 10)[0] == "near-p1"
    some.conductor._router.threshold = None
    assert some.route("long", 500)[0] == "far-p1"  # nobody at home can take it
    some.drain()


# Fetches.


def test_a_fetch_over_the_link_takes_the_links_time() -> None:
    slow = (LinkRule("far", "near", 1000, 8 * MS), LinkRule("near", "far", 1000, 8 * MS))
    for links in (slow, LINKS):
        some = two(Rules(policy="isthmus", threshold=30, links=links, cache_mode="abundant"))
        some.store("far-p1", *NAMES)
        route = some.routed("r", 41, names=NAMES)
        assert route.prefill == "near-p1"
        quick = FetchOrder(NodeId("far-p1"), 0, 9, some.now + 9 * MS)
        assert route.fetch == (None if links is slow else quick)  # a block in 1 s, or computed in 4 ms
        assert bool(some.conductor.view.links["far", "near"].copies) == (links is LINKS)
        some.fetch_finished("r")
        assert not some.conductor.view.links["far", "near"].copies
        some.drain()


# Hybrid models.


def test_a_prefix_counts_up_to_the_last_snapshot() -> None:
    some = two(Rules(policy="least_loaded"), near="pd", far="", state_blocks=STATE_BLOCKS)
    some.store("near-p1", *NAMES)
    found = []
    for state, num_tokens in ((None, 41), (3, 41), (9, 41), (None, 40)):  # the last has no token behind it
        if state is not None:
            some.store("near-p1", *state_names(NAMES[state], STATE_BLOCKS))
        found.append(some.routed(f"r{len(found)}", num_tokens, names=NAMES).num_cached)
        some.cancel(f"r{len(found) - 1}")
    assert found == [0, 4, 10, 4]
    some.drain()


def test_a_waiting_prompt_will_leave_its_blocks_and_one_snapshot() -> None:
    some = two(Rules(policy="least_loaded"), near="pd", far="", state_blocks=STATE_BLOCKS)
    assert some.routed("first", 29, names=NAMES[:7]).num_cached == 0
    assert some.routed("goes on", 41, names=NAMES).num_cached == 7
    assert some.routed("branches", 41, names=(*NAMES[:6], 98, 99)).num_cached == 0
    some.drain()


def test_a_fetch_brings_the_state() -> None:
    rules = Rules(policy="mooncake")
    some = two(rules, near="ppd", far="", state_blocks=STATE_BLOCKS)
    some.store("near-p1", *NAMES)
    some.store("near-p1", *state_names(NAMES[9], STATE_BLOCKS))
    some.conductor.view.nodes[NodeId("near-p1")].free_ns = 10**9
    route = some.routed("r", 41, names=NAMES)
    assert route.prefill == "near-p2" and route.fetch is not None and route.fetch.stop == 10
    request = some.conductor.view.requests[RequestId("r")]
    assert [copy.num_bytes for copy in request.copies] == [10 * 1000 + 2500]
    some.drain()


def test_a_hand_over_between_clusters_takes_the_whole_state_and_the_blocks_home_lacks() -> None:
    some = two(state_blocks=STATE_BLOCKS)
    some.store("near-d1", *NAMES[:6])  # without a snapshot: of no use to compute on, but it need not cross
    route = some.routed("r", 50, names=NAMES)
    assert route.prefill == "far-p1" and route.handover_start == 6
    assert some.conductor.view.links["far", "near"].owed == (50 - 24) * 250 + 2500
    some.drain()


# Whatever happens.


def test_histories_of_two_clusters_hold_too() -> None:
    """The cluster judges every action; half of the histories are of a hybrid model."""
    seen: Counter[str] = Counter()
    for seed in range(24):
        random = Random(seed)
        rules = Rules(
            policy=["isthmus", "mooncake", "least_loaded", "isthmus"][seed % 4],
            threshold=random.choice([None, 0, 10, 30]),
            links=LINKS,
            cache_mode=["scarce", "abundant", "auto"][seed % 3],
            control=seed % 2 == 0,
            max_requests=12,
            convert=True,
        )
        states = STATE_BLOCKS if seed % 8 < 4 else 0
        some = two(rules, near="ppd", far="pp", state_blocks=states)
        some.step_ns = MS
        for start in range(0, 250, 10):
            play(some, random, 10, start)
            some.now += random.choice([0, 0, 2000, 6000]) * MS
            conversion, near = some.conductor._conversion, some.conductor.view.clusters["near"]
            if conversion._node is None and random.random() < 0.3:
                conversion._begin(conversion._spare(near, random.choice([P, D])))
            for node in list(some.converting):
                some.convert(node)
                seen["converted"] += 1
            fallen = random.random() < 0.2
            some.links_measured(
                *(down() if fallen else up()[:1]), LinkState("far", "near", not fallen, 10**6, 10**7, 10**5)
            )
            for node, role in (("near-p1", P), ("near-d1", D), ("far-p1", P)):
                if NodeId(node) not in some.joined:
                    some.join(node, role, cluster=node.split("-")[0], state_blocks=states)
        some.drain()
        assert set(some.ended) == set(some.arrived)
        for action in [action for _, _, actions in some.log for action in actions]:
            seen[type(action).__name__] += 1
            if isinstance(action, Route):
                seen["far"] += action.prefill.split("-")[0] != action.decode.split("-")[0]
                seen["recall"] += action.recall is not None
                seen["fetch"] += action.fetch is not None
    wanted = ("far", "Route", "recall", "fetch", "ThresholdSet", "Hold", "converted")
    assert min(seen[name] for name in wanted) > 10, seen


def test_decode_nodes_that_take_the_same_time_are_filled_evenly_and_not_beyond_their_places() -> None:
    flat = Curve(kv_token_bytes=250, num_layers=1, prefill_token_s=1e-3, decode_fixed_s=0.025)
    some = Cluster(Rules())
    some.join("p1", P, cost=flat)
    some.join("d1", D, 10_000, cost=flat, max_sequences=2)
    some.join("d2", D, 10_000, cost=flat, max_sequences=4)
    found = [some.route(f"r{number}")[1] for number in range(8)]
    assert found == ["d1", "d2", "d1", "d2", "d2", "d2", "d1", "d1"]  # full: the emptiest again
    some.drain()
