from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.conductor import (
    Abort,
    BlocksEvicted,
    BlocksStored,
    Fail,
    Hold,
    HoldExpired,
    NodeLeft,
    PrefillFinished,
    Refuse,
    RequestCancelled,
    RequestEnded,
    RequestFailed,
    Route,
    Rules,
)
from isthmus.types import BlockName, NodeId, RequestId, Role

from .cluster import Cluster

NAMES = [bytes([index]) for index in range(10)]


def cluster(*nodes: str, rules: Rules | None = None, capacity_tokens: int = 1000) -> Cluster:
    """Nodes named after their role: `p…` prefills, `d…` decodes, `m…` does both."""
    made = Cluster(rules)
    for node in nodes:
        made.join(node, {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[node[0]], capacity_tokens)
    return made


# Where requests go.


def test_one_prefill_and_one_decode_node_take_everything() -> None:
    some = cluster("p1", "d1")
    assert some.arrive("a") == Route(RequestId("a"), 1, NodeId("p1"), NodeId("d1"))
    assert some.loads() == {"p1": (8, 0), "d1": (0, 18)}


def test_prefill_goes_where_the_fewest_tokens_wait_and_decode_where_the_fewest_are_held() -> None:
    some = cluster("p1", "p2", "d1", "d2")
    assert some.route("a", 100, 5) == ("p1", "d1")
    assert some.route("b", 30, 300) == ("p2", "d2")
    assert some.route("c", 10, 10) == ("p2", "d1")  # p2 has 30 waiting, d1 holds 105
    some.finish_prefill("a")
    assert some.route("d", 10, 10) == ("p1", "d1")
    assert some.loads() == {"p1": (10, 0), "p2": (40, 0), "d1": (0, 145), "d2": (0, 330)}


def test_ties_go_to_the_node_that_joined_first() -> None:
    assert cluster("p2", "p1", "d2", "d1").route("a") == ("p2", "d2")


def test_a_mixed_node_keeps_what_it_prefills() -> None:
    some = cluster("m1", "m2")
    assert [some.route(name) for name in "abc"] == [("m1", "m1"), ("m2", "m2"), ("m1", "m1")]
    assert some.loads() == {"m1": (16, 36), "m2": (8, 18)}


def test_mixed_nodes_stand_beside_separate_ones() -> None:
    some = cluster("p1", "d1", "m1")
    assert some.route("a") == ("p1", "d1")
    assert some.route("b") == ("m1", "m1")


def test_without_a_decode_node_prefill_nodes_are_no_use() -> None:
    assert cluster("p1", "m1").route("a") == ("m1", "m1")
    assert cluster("p1").refusal("a").code == "unavailable"


def test_one_token_needs_no_decode_node() -> None:
    some = cluster("p1", "d1")
    assert some.route("a", 8, 1) == ("p1", "p1")
    assert some.route("b", 8, 2) == ("p1", "d1")


def test_a_cached_prefix_attracts_a_request_until_the_queue_costs_more() -> None:
    some = cluster("p1", "p2", "d1")
    some.store("p2", *NAMES[:5])
    assert some.route("a", 30, 1, names=NAMES[:7]) == ("p2", "p2")
    assert some.loads()["p2"] == (10, 31)  # 20 tokens are cached
    assert some.route("b", 30, 1, names=NAMES[:7]) == ("p2", "p2")
    assert some.route("c", 30, 1, names=NAMES[:7]) == ("p1", "p1")  # 20 wait and 10 are left: a tie


def test_only_an_unbroken_prefix_counts_as_cached() -> None:
    some = cluster("p1", "p2", "d1")
    some.store("p2", *NAMES[1:5])
    assert some.route("a", 30, 5, names=NAMES[:7]) == ("p1", "d1")


def test_one_token_at_least_is_booked_as_work() -> None:
    some = cluster("p1", "d1")
    some.store("p1", *NAMES[:2])
    some.route("a", 8, 5, names=NAMES[:2])
    assert some.loads()["p1"] == (4, 0)


def test_evicted_blocks_attract_nothing() -> None:
    some = cluster("p1", "p2", "d1")
    some.store("p2", *NAMES[:5])
    some.on(BlocksEvicted(NodeId("p2"), (NAMES[0],)))
    assert some.route("a", 30, 5, names=NAMES[:7]) == ("p1", "d1")


def test_a_request_goes_only_where_it_fits() -> None:
    some = cluster("p1", "d1", capacity_tokens=50)
    some.join("p2", Role.PREFILL, 500)
    some.join("d2", Role.DECODE, 500)
    assert some.route("a", 60, 100) == ("p2", "d2")
    assert some.route("b", 20, 30) == ("p1", "d1")
    assert some.route("c", 40, 10) == ("p1", "d1")


# Whom it refuses.


def test_over_the_limit_a_request_is_refused_for_now() -> None:
    some = cluster("m1", rules=Rules(max_requests=2, retry_after_ms=700))
    some.route("a")
    some.route("b")
    refusal = some.refusal("c")
    assert (refusal.code, refusal.retry_after_ms) == ("overloaded", 700)
    assert "limits.max_requests" in refusal.reason
    some.end("a")
    some.route("d")


def test_an_empty_cluster_refuses_for_now() -> None:
    refusal = Cluster(Rules(retry_after_ms=700)).refusal("a", 10**9)
    assert (refusal.code, refusal.retry_after_ms) == ("unavailable", 700)


def test_a_cluster_without_one_of_the_parts_refuses_for_now() -> None:
    assert cluster("p1").refusal("a", 8, 5000).code == "unavailable"
    assert cluster("d1").refusal("a").code == "unavailable"


@pytest.mark.parametrize(("prefill", "decode", "num_tokens"), [(100, 100, 95), (5000, 100, 95), (90, 5000, 95)])
def test_what_no_node_can_ever_hold_is_too_long(prefill: int, decode: int, num_tokens: int) -> None:
    some = Cluster()
    some.join("p1", Role.PREFILL, prefill)
    some.join("d1", Role.DECODE, decode)
    refusal = some.refusal("a", num_tokens, 10)
    assert (refusal.code, refusal.retry_after_ms) == ("too_long", 0)
    assert str(min(prefill, decode)) in refusal.reason
    some.drain()


def test_the_longest_request_that_fits_is_taken() -> None:
    some = cluster("p1", "d1", capacity_tokens=100)
    assert some.route("a", 90, 10) == ("p1", "d1")
    assert some.refusal("b", 90, 11).code == "too_long"


# What goes wrong.


def test_when_its_decode_node_dies_a_request_is_routed_anew() -> None:
    some = cluster("p1", "d1", "d2")
    some.route("a")
    some.finish_prefill("a")
    a = RequestId("a")
    assert some.leave("d1") == [Abort(a, 1, (NodeId("p1"),)), Route(a, 2, NodeId("p1"), NodeId("d2"))]
    assert some.loads() == {"p1": (8, 0), "d2": (0, 18)}


def test_when_its_prefill_node_dies_only_what_still_prefills_moves() -> None:
    some = cluster("p1", "p2", "d1")
    assert some.route("a")[0] == "p1"
    some.finish_prefill("a")
    assert some.route("b")[0] == "p1"
    b = RequestId("b")
    assert some.leave("p1") == [Abort(b, 1, (NodeId("d1"),)), Route(b, 2, NodeId("p2"), NodeId("d1"))]
    assert some.end("a") == [Abort(RequestId("a"), 1, (NodeId("d1"),))]


def test_when_no_node_is_left_a_request_waits_and_then_fails_with_the_reason() -> None:
    some = cluster("m1")
    some.route("a")
    assert some.leave("m1") == [Hold(RequestId("a"), 1, "node m1 is gone")]
    assert some.fail("a", 1) == []
    assert some.expire("a") == [Fail(RequestId("a"), "node m1 is gone (attempt 1 of 3)")]
    some.drain()


def test_requests_on_hold_go_on_when_a_node_joins_and_their_old_limit_is_void() -> None:
    some = cluster("p1", "d1")
    some.route("a")
    some.route("b")
    some.leave("d1")
    some.cancel("b")
    expired = HoldExpired(RequestId("a"), 1)
    some.join("d2", Role.DECODE)
    assert some.routes[RequestId("a")] == Route(RequestId("a"), 2, NodeId("p1"), NodeId("d2"))
    assert some.on(expired) == []
    some.drain()


def test_after_its_last_attempt_a_request_fails() -> None:
    some = cluster("m1", "m2", rules=Rules(max_attempts=3))
    some.route("a")
    for attempt in (1, 2):
        assert [type(action) for action in some.fail("a", attempt)] == [Abort, Route]
    abort, fail = some.fail("a", 3)
    assert isinstance(abort, Abort) and abort.attempt == 3
    assert fail == Fail(RequestId("a"), "it broke (attempt 3 of 3)")
    some.drain()


def test_what_comes_late_from_an_earlier_attempt_is_void() -> None:
    some = cluster("m1", "m2")
    some.route("a")
    some.fail("a", 1)
    before = some.loads()
    assert some.fail("a", 1) == []
    some.finish_prefill("a", 1)
    assert some.loads() == before
    some.finish_prefill("a", 2)
    assert some.loads() != before


@pytest.mark.parametrize("how", ["end", "cancel"])
def test_an_end_is_told_to_every_node_that_took_part(how: str) -> None:
    some = cluster("p1", "d1")
    some.route("a")
    some.finish_prefill("a")
    assert getattr(some, how)("a") == [Abort(RequestId("a"), 1, (NodeId("p1"), NodeId("d1")))]
    assert getattr(some, how)("a") == []
    some.drain()


@pytest.mark.parametrize(
    "event",
    [
        NodeLeft(NodeId("x")),
        BlocksStored(NodeId("x"), (NAMES[0],)),
        BlocksEvicted(NodeId("x"), (NAMES[0],)),
        PrefillFinished(RequestId("x"), 1),
        RequestFailed(RequestId("x"), 1, ""),
        RequestEnded(RequestId("x")),
        RequestCancelled(RequestId("x")),
    ],
)
def test_news_of_strangers_changes_nothing(event: object) -> None:
    some = cluster("p1", "d1")
    some.route("a")
    before = some.loads()
    assert some.on(event) == []  # type: ignore[arg-type]
    assert some.loads() == before


def test_the_same_prefill_news_twice_counts_once() -> None:
    some = cluster("p1", "d1")
    some.route("a")
    some.route("b")
    some.finish_prefill("a")
    some.finish_prefill("a")
    assert some.loads()["p1"] == (8, 0)


def test_a_node_that_comes_back_starts_empty() -> None:
    some = cluster("p1", "p2", "d1")
    some.store("p1", *NAMES[:5])
    some.leave("p1")
    some.join("p1", Role.PREFILL)
    assert some.route("a", 30, 5, names=NAMES[:5]) == ("p2", "d1")


# What holds whatever happens.


def play(some: Cluster, random: Random, num_events: int) -> None:
    """Random events, late and unknown ones among them."""
    for counter in range(num_events):
        living = list(some.routes.values())
        route = random.choice(living) if living else None
        match random.choice(
            ["arrive"] * 6
            + ["first"] * 3
            + ["end", "end", "cancel", "fail", "late", "store", "evict"]
            + ["join", "leave", "expire"]
        ):
            case "arrive":
                start, count = random.randrange(3), random.randrange(7)
                names = NAMES[start : start + count]
                num_tokens = 4 * count + random.randint(1, 40)
                some.arrive(f"r{counter}", num_tokens, random.randint(1, 60), names)
            case "first" if route:
                some.finish_prefill(route.request, route.attempt)
            case "end" if route:
                some.end(route.request)
            case "cancel" if route:
                some.cancel(route.request)
            case "fail" if route:
                some.fail(route.request, route.attempt)
            case "expire" if some.held:
                some.expire(random.choice(sorted(some.held)))
            case "late":
                request = f"r{random.randint(0, counter)}"
                attempt = some.routes[RequestId(request)].attempt if request in some.routes else 9
                assert some.fail(request, attempt - 1) == []
                some.finish_prefill(request, attempt - 1)
            case "store" if some.roles:
                some.store(random.choice(list(some.roles)), *random.sample(NAMES, 5))
            case "evict" if some.roles:
                node = random.choice(list(some.roles))
                some.on(BlocksEvicted(node, tuple(random.sample(NAMES, 5))))
            case "join" if len(some.roles) < 6:
                role = random.choice(list(Role))
                some.join(
                    f"n{counter % 8}" if f"n{counter % 8}" not in some.roles else f"n{counter}",
                    role,
                    random.choice([60, 100, 1000]),
                )
            case "leave" if some.roles:
                some.leave(random.choice(list(some.roles)))


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 3), st.integers(1, 12))
def test_every_request_ends_in_exactly_one_way(
    seed: int, num_events: int, max_attempts: int, max_requests: int
) -> None:
    """The cluster judges every action (see there); loads are zero when nothing is left."""
    some = cluster("p1", "d1", "m1", rules=Rules(max_attempts=max_attempts, max_requests=max_requests))
    play(some, Random(seed), num_events)
    assert len(some.routes) <= max_requests
    some.drain()
    arrived = {event.request for event, _ in some.log if type(event).__name__ == "RequestArrived"}
    assert set(some.ended) == arrived


def test_long_histories_hold_too() -> None:
    seen: Counter[str] = Counter()
    for seed in range(30):
        some = cluster("p1", "d1", "m1", rules=Rules(max_requests=12))
        play(some, Random(seed), 200)
        some.drain()
        seen.update(some.ended.values())
        seen.update(action.code for _, actions in some.log for action in actions if isinstance(action, Refuse))
    assert set(seen) == {"ended", "cancelled", "failed", "refused", "overloaded", "unavailable", "too_long"}
    assert min(seen.values()) >= 20, seen  # the histories are not hollow


def test_the_same_events_give_the_same_actions_byte_for_byte() -> None:
    for seed in range(20):
        logs = []
        for _ in range(2):
            some = cluster("p1", "d1", "m1")
            play(some, Random(seed), 100)
            logs.append(some.encoded_log())
        assert logs[0] == logs[1]


def test_the_clock_decides_nothing() -> None:
    some = cluster("p1", "d1", "m1")
    play(some, Random(7), 200)
    again = Cluster().conductor
    assert [tuple(again.on(event, 10**18 - at)) for at, (event, _) in enumerate(some.log)] == [
        actions for _, actions in some.log
    ]
