from __future__ import annotations

from random import Random

import pytest

from isthmus.core.conductor import Abort, Action, Route, Rules
from isthmus.core.conductor.admission import KEPT_NS, to_replace, to_shorten, to_thin, waiting_below
from isthmus.core.conductor.view import View
from isthmus.core.types import NodeId, RequestId, Role

from .cluster import Cluster
from .views import MS, accept, arrival, view_of

P, D = Role.PREFILL, Role.DECODE


def queued(*priorities: int, work_ms: float = 10) -> View:
    """One prefill node's queue, one request a ms, named by their order."""
    view = view_of(P, D)
    for at, priority in enumerate(priorities):
        request = arrival(10, request=str(at), priority=priority)
        accept(view, request, view.prefills[0], view.decodes[0], work_ms, at * MS)
    return view


def names(found: list) -> str:  # type: ignore[type-arg]
    return "".join(request.arrived.request for request in found)


def test_lower_priorities_go_first_and_of_one_the_newest() -> None:
    view = queued(0, 0, 1, -5, 0, 2, 1)
    assert names(waiting_below(view, view.prefills, arrival(10, priority=2))) == "341" + "62"
    assert names(waiting_below(view, view.prefills, arrival(10, priority=1))) == "341"
    assert names(waiting_below(view, view.prefills, arrival(10, priority=0))) == "3"
    assert names(waiting_below(view, view.prefills, arrival(10, priority=-5))) == ""


def test_who_is_in_service_or_got_a_token_stays() -> None:
    view = queued(0, 0, 0)
    view.requests[RequestId("1")].answering = 1  # a second attempt
    assert names(waiting_below(view, view.prefills, arrival(10, priority=9))) == "2"
    view.first_token(view.requests[RequestId("0")], 0)
    assert names(waiting_below(view, view.prefills, arrival(10, priority=9))) == "2"
    view.unassign(view.requests[RequestId("1")], 0)
    assert names(waiting_below(view, view.prefills, arrival(10, priority=9))) == ""


def test_few_are_turned_away_for_a_queue_that_is_shorter() -> None:
    """Of one priority the most work goes first, but from a batch to come the newest."""
    view = view_of(P, D)
    node = view.prefills[0]
    for at, (priority, work_ms) in enumerate([(0, 90), (0, 10), (0, 40), (-1, 5), (0, 40), (0, 20)]):
        accept(view, arrival(10, request=str(at), priority=priority), node, view.decodes[0], work_ms, at * MS)
    asks = arrival(10, priority=1)
    assert names(to_shorten(view, node, asks, 45 * MS)) == "34"
    assert names(to_shorten(view, node, asks, 46 * MS)) == "342"
    assert names(to_replace(view, asks)) == "3"
    assert names(to_replace(view, arrival(10, priority=0))) == "3"
    assert names(to_replace(view, arrival(10, priority=-1))) == ""
    view.unassign(view.requests[RequestId("3")], 0)
    assert names(to_replace(view, asks)) == "4"
    assert names(to_thin(view, asks, 3, 10**12)) == "542"


def test_just_enough_are_turned_away_to_shorten_a_queue() -> None:
    view = queued(0, 0, 0, 0)
    node = view.prefills[0]
    asks = arrival(10, priority=1)
    assert names(to_shorten(view, node, asks, 1)) == "3"
    assert names(to_shorten(view, node, asks, 10 * MS)) == "3"
    assert names(to_shorten(view, node, asks, 10 * MS + 1)) == "32"
    assert names(to_shorten(view, node, asks, 30 * MS)) == "321"
    assert names(to_shorten(view, node, asks, 30 * MS + 1)) == ""  # all of them would be in vain


def test_just_enough_are_turned_away_to_thin_a_batch_to_come() -> None:
    view = queued(0, 0, 0, 0)
    asks = arrival(10, priority=1)
    assert names(to_thin(view, asks, 2, 10**12)) == "32"
    assert names(to_thin(view, asks, 3, 10**12)) == "321"
    assert names(to_thin(view, asks, 4, 10**12)) == ""
    assert names(to_thin(view, asks, 1, 30 * MS)) == "2"  # the last one comes later, it is not in the way
    assert names(to_thin(view, asks, 3, 30 * MS)) == ""


# The whole way.


def full(rules: Rules) -> Cluster:
    some = Cluster(rules, step_ns=0)
    some.join("p1", P, 10_000)
    some.join("d1", D, 10_000)
    return some


def ends(actions: list[Action]) -> list[tuple[str, str]]:
    return [(type(action).__name__, action.request) for action in actions if not isinstance(action, Abort)]  # type: ignore[union-attr]


def test_at_the_limit_of_requests_the_lowest_priority_makes_room() -> None:
    some = full(Rules(max_requests=3))
    for name, priority in (("a", 0), ("b", 1), ("c", 0)):
        some.arrives(name, priority=priority)
    assert ends(some.arrives("d", priority=0)) == [("Refuse", "d")]
    assert ends(some.arrives("e", priority=1)) == [("Refuse", "c"), ("Route", "e")]
    assert ends(some.arrives("f", priority=2)) == [("Refuse", "e"), ("Route", "f")]
    assert ends(some.arrives("g", priority=2)) == [("Refuse", "b"), ("Route", "g")]
    assert ends(some.arrives("h", priority=2)) == [("Refuse", "h")]  # a is in service
    some.drain()


@pytest.mark.parametrize("num_tokens", [10, 10_000])
def test_nobody_makes_room_for_a_request_that_is_refused_all_the_same(num_tokens: int) -> None:
    """The limit of requests is reached; the new one is too late, or too long, whoever goes."""
    some = full(Rules(max_requests=3, admission="baseline", ttft_ms=100))
    for name in "abc":
        some.arrives(name, 10)
    actions = some.arrives("d", num_tokens, priority=5, ttft_ms=11)
    assert ends(actions) == [("Refuse", "d")]
    assert len(some.routes) == 3


def test_a_higher_priority_is_refused_last_when_the_queue_is_too_long() -> None:
    some = full(Rules(admission="baseline", ttft_ms=100))
    for name in "abcde":
        assert ends(some.arrives(name, 20)) == [("Route", name)]
    assert ends(some.arrives("f", 20)) == [("Refuse", "f")]
    assert ends(some.arrives("g", 20, priority=1)) == [("Refuse", "e"), ("Route", "g")]
    assert ends(some.arrives("h", 60, priority=2)) == [
        ("Refuse", "d"), ("Refuse", "c"), ("Refuse", "b"), ("Route", "h")
    ]  # fmt: skip
    assert ends(some.arrives("i", 60, priority=2)) == [("Refuse", "i")]
    some.drain()


def test_priority_zero_goes_before_what_is_below_it() -> None:
    some = full(Rules(admission="baseline", ttft_ms=30))
    for name in "abc":
        some.arrives(name, 10, priority=-1)
    assert ends(some.arrives("d", 10)) == [("Refuse", "c"), ("Route", "d")]


def test_early_admission_turns_nobody_away_for_decode_that_it_does_not_count() -> None:
    some = full(Rules(admission="early", tbt_ms=12))
    for name in "ab":
        some.arrives(name, 10)
        some.first_token(name)
    some.conductor.view.requests[RequestId("a")].answering = 1
    for name in "cd":
        some.arrives(name, 10, tbt_ms=1000)
    assert ends(some.arrives("e", 10, priority=1)) == [("Refuse", "e")]


def test_a_thinner_batch_makes_room_where_the_queue_counts() -> None:
    some = full(Rules(admission="predictive", admission_parameters=(("decode_s", 60.0),), tbt_ms=15))
    for name in "abcd":
        assert ends(some.arrives(name, 10)) == [("Route", name)]
    assert ends(some.arrives("e", 10)) == [("Refuse", "e")]
    assert ends(some.arrives("f", 10, priority=1)) == [("Refuse", "d"), ("Route", "f")]
    some.drain()


@pytest.mark.parametrize("tenants", [False, True])
def test_random_bursts_shed_rightly(tenants: bool) -> None:
    """The judge in `Cluster` sees who is turned away, for whom, and that it was not in vain."""
    shed = 0
    for seed in range(20):
        random = Random(seed)
        some = Cluster(
            Rules(admission=random.choice(["baseline", "predictive"]), ttft_ms=200, max_requests=10), step_ns=MS
        )
        for node, role in (("p1", P), ("p2", P), ("d1", D)):
            some.join(node, role)
        for at in range(60):
            priority, tenant = random.choice([-1, 0, 0, 1, 2]), {}
            if tenants:
                tenant = {"tenant": random.choice(["acme", "acme", "acme", "globex"]), "weight": 1.0}
            actions = some.arrives(f"r{at}", random.randint(5, 60), priority=priority, **tenant)
            last = actions[-1]
            shed += isinstance(last, Route) and len(actions) > 1
            if random.random() < 0.3 and some.prefilling:
                route = next(iter(some.prefilling.values()))
                some.now = max(some.now, some.conductor.view.nodes[NodeId(route.prefill)].service_ns)
                some.first_token(route.request, route.attempt)
            if random.random() < 0.2 and some.routes:
                some.end(random.choice(list(some.routes)))
        some.drain()
    assert shed >= 30


# Tenants.


def shared(*tenants: tuple[str, float], priority: int = 0) -> View:
    """One prefill node's queue, one request a ms, named by their order."""
    view = view_of(P, D)
    for at, (tenant, weight) in enumerate(tenants):
        request = arrival(10, request=str(at), priority=priority, tenant=tenant, weight=weight)
        accept(view, request, view.prefills[0], view.decodes[0], 10, at * MS)
    return view


def test_a_tenant_below_its_share_takes_the_place_of_the_one_most_above() -> None:
    view = shared(*[("acme", 1.0)] * 4, *[("globex", 1.0)] * 2, ("third", 1.0))
    assert names(to_replace(view, arrival(10, tenant="third", weight=1.0))) == "3"
    assert names(to_replace(view, arrival(10, tenant="globex", weight=1.0))) == "3"
    assert names(to_replace(view, arrival(10, tenant="acme", weight=1.0))) == ""
    assert names(to_replace(view, arrival(10))) == "", "who has no share has no claim"


def test_only_so_many_go_that_nobody_is_left_with_less_than_who_takes_their_place() -> None:
    view = shared(*[("acme", 1.0)] * 5, *[("globex", 1.0)] * 4)
    waiting = waiting_below(view, view.prefills, arrival(10, tenant="third", weight=0.5))
    assert names(waiting) == "4" + "83" + "72"  # down to two of each, which is what the new one counts as


def test_a_weight_counts() -> None:
    view = shared(*[("acme", 2.0)] * 4, *[("globex", 1.0)] * 3)
    assert names(to_replace(view, arrival(10, tenant="third", weight=1.0))) == "6"
    assert names(to_replace(view, arrival(10, tenant="acme", weight=2.0))) == "6"
    assert names(to_replace(view, arrival(10, tenant="globex", weight=1.0))) == ""


@pytest.mark.parametrize("priority", [-5, 0, 9])
def test_a_priority_ranks_requests_of_its_own_tenant_only(priority: int) -> None:
    """Whatever a flood says of itself, and whatever others say."""
    view = shared(*[("acme", 1.0)] * 4, ("third", 1.0), priority=5)
    low = arrival(10, request="low", priority=-1, tenant="third", weight=1.0)
    accept(view, low, view.prefills[0], view.decodes[0], 10, 9 * MS)
    asks = arrival(10, tenant="third", weight=1.0, priority=priority)
    own = {-5: "", 0: "low", 9: "low4"}[priority]
    assert names(waiting_below(view, view.prefills, asks)) == "3" + own
    flood = arrival(10, tenant="acme", weight=1.0, priority=priority)
    assert names(waiting_below(view, view.prefills, flood)) == {-5: "", 0: "", 9: "321"}[priority]


def test_a_tenant_above_its_share_gives_its_lowest_priority_first() -> None:
    view = view_of(P, D)
    for at, priority in enumerate([0, 2, 1, 0, 1]):
        request = arrival(10, request=str(at), priority=priority, tenant="acme", weight=1.0)
        accept(view, request, view.prefills[0], view.decodes[0], 10, at * MS)
    assert names(waiting_below(view, view.prefills, arrival(10, tenant="third", weight=1.0))) == "3421"


def test_at_the_limit_tenants_come_to_equal_numbers() -> None:
    some = full(Rules(max_requests=5))
    for at in range(5):
        some.arrives(f"a{at}", tenant="acme", weight=1.0)
    assert ends(some.arrives("a5", tenant="acme", weight=1.0)) == [("Refuse", "a5")]
    assert ends(some.arrives("b0", tenant="globex", weight=1.0)) == [("Refuse", "a4"), ("Route", "b0")]
    assert ends(some.arrives("b1", tenant="globex", weight=1.0)) == [("Refuse", "a3"), ("Route", "b1")]
    assert ends(some.arrives("b2", tenant="globex", weight=1.0)) == [("Refuse", "b2")]
    assert ends(some.arrives("a6", tenant="acme", weight=1.0)) == [("Refuse", "a6")]
    some.drain()


def test_a_queue_that_is_too_long_is_shortened_by_the_tenant_above_its_share() -> None:
    some = full(Rules(admission="baseline", ttft_ms=100))
    for name in "abcde":
        assert ends(some.arrives(name, 20, tenant="acme", weight=1.0)) == [("Route", name)]
    assert ends(some.arrives("f", 20, tenant="acme", weight=1.0)) == [("Refuse", "f")]
    assert ends(some.arrives("g", 20, tenant="globex", weight=1.0)) == [("Refuse", "e"), ("Route", "g")]
    some.drain()


def test_a_place_that_becomes_free_is_kept_for_who_was_refused_below_its_share() -> None:
    """All of one tenant's have got tokens, so that none can be turned away; and it asks again at once."""
    some = full(Rules(max_requests=3))
    for name in "abc":
        some.arrives(name, tenant="acme", weight=1.0)
        some.first_token(name)
    assert ends(some.arrives("x", tenant="globex", weight=1.0)) == [("Refuse", "x")]
    some.end("a")
    assert ends(some.arrives("d", tenant="acme", weight=1.0)) == [("Refuse", "d")]
    assert ends(some.arrives("y", tenant="globex", weight=1.0)) == [("Route", "y")]
    some.end("b")
    assert ends(some.arrives("e", tenant="acme", weight=1.0)) == [("Route", "e")]
    some.drain()


def test_a_place_is_not_kept_for_long() -> None:
    some = full(Rules(max_requests=2))
    for name in "ab":
        some.arrives(name, tenant="acme", weight=1.0)
        some.first_token(name)
    assert ends(some.arrives("x", tenant="globex", weight=1.0)) == [("Refuse", "x")]
    some.end("a")
    some.now += KEPT_NS
    assert ends(some.arrives("c", tenant="acme", weight=1.0)) == [("Route", "c")]
    some.drain()
