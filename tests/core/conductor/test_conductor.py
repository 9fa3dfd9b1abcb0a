from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from types import FunctionType, MethodType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.conductor import (
    Abort,
    Action,
    Dismiss,
    Event,
    Fail,
    Hold,
    HoldExpired,
    NodeDrains,
    NodeJoined,
    NodeLeft,
    NodeStays,
    Paths,
    Refuse,
    RequestArrived,
    RequestEnded,
    RequestFailed,
    RoleChanged,
    Route,
    Rules,
)
from isthmus.core.conductor.conductor import MAX_LOSSES
from isthmus.core.conductor.policies import POLICIES
from isthmus.core.types import BlockName, NodeId, RequestId, Role, Tier

from .cluster import MS, Cluster

NAMES: list[BlockName] = [bytes([index]) for index in range(10)]


def cluster(*nodes: str, rules: Rules | None = None, capacity_tokens: int = 1000, step_ns: int = 0) -> Cluster:
    """Nodes named after their role: `p…` prefills, `d…` decodes, `m…` does both. Time stands still by default."""
    made = Cluster(rules, step_ns=step_ns)
    for node in nodes:
        made.join(node, {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[node[0]], capacity_tokens)
    return made


# Where requests go.


def test_prefill_goes_where_the_queue_is_shortest_and_decode_where_iterations_are() -> None:
    """Ties go to the node that joined first."""
    some = cluster("p2", "p1", "d2", "d1")
    (route,) = some.arrives("a", 100, 5)
    assert route == Route(RequestId("a"), 1, NodeId("p2"), NodeId("d2"), work_ns=100 * MS)
    assert some.route("b", 30, 300) == ("p1", "d1")
    assert some.route("c", 10, 10) == ("p1", "d1")  # p1 has 30 ms waiting, d1 holds 30 tokens
    some.now += 100 * MS
    some.first_token("a")
    assert some.route("d", 10, 10) == ("p2", "d2")


def test_decode_prefers_the_node_with_room_for_the_prompt() -> None:
    some = cluster("p1", "d1")
    some.join("d2", Role.DECODE, 5000)
    for request in "abcd":
        assert some.route(request, 300, 5)[1] == ("d1" if request in "ac" else "d2")
    some.cancel("b")
    found = [
        some.route(request, num_tokens, 5)[1] for request, num_tokens in (("e", 900), ("f", 400), ("g", 10))
    ]
    assert found == ["d2", "d1", "d2"]  # 1,500 tokens fit into neither's first choice but d2


def test_what_a_queued_request_will_leave_behind_counts_until_it_is_withdrawn() -> None:
    some = cluster("p1", "d1")
    for request, work_ms in (("a", 40), ("b", 1), ("c", 40)):
        some.route(request, 40, names=NAMES)
        assert some.routes[RequestId(request)].work_ns == work_ms * MS
        if request == "b":
            some.cancel("a")


def fetching() -> Cluster:
    """Its node p2 fetches for request a from p1, which is busy."""
    some = cluster("p1", "d1", rules=Rules(policy="mooncake"))
    some.store("p1", *NAMES)
    some.route("busy", 200, 1)
    some.join("p2", Role.PREFILL)
    route = some.routed("a", 41, names=NAMES)
    assert (route.prefill, route.num_cached) == ("p2", 10)
    assert route.fetch is not None and (route.fetch.start, route.fetch.stop) == (0, 10)
    assert route.fetch.source == "p1" and route.work_ns == 10 * MS  # the fetch; 1 ms to compute
    assert route.fetch.until_ns == pytest.approx(some.now + 10 * MS, rel=1e-3)
    return some


def test_links_are_busy_until_a_fetch_is_over() -> None:
    some = fetching()
    p1, p2 = (some.conductor.view.nodes[NodeId(name)] for name in ("p1", "p2"))
    assert list(p1.link_out.copies) == list(p2.link_in.copies) != []
    some.fetch_finished("a")
    some.fetch_finished("a")
    assert not p1.link_out.copies and not p2.link_in.copies
    some.now += 10 * MS
    some.first_token("a")
    ratio = some.conductor.view.clusters[""].calibration.ratio
    assert ratio == 1.0, "a prefill that waits for KV says nothing about speed"
    some.drain()


def test_a_fetch_from_a_node_that_leaves_is_off_and_its_request_stays() -> None:
    some = fetching()
    actions = some.leave("p1")
    assert [action.request for action in actions if isinstance(action, Abort | Route)] == ["busy", "busy"]
    assert not some.conductor.view.nodes[NodeId("p2")].link_in.copies
    some.drain()


def test_over_the_limit_a_request_is_refused_for_now() -> None:
    some = cluster("m1", rules=Rules(max_requests=2, retry_after_ms=700), capacity_tokens=100)
    assert some.refusal("long", 90, 11).code == "too_long"
    some.route("a", 90, 10)
    some.route("b")
    refusal = some.refusal("c")
    assert (refusal.code, refusal.retry_after_ms) == ("overloaded", 700)
    assert "limits.max_requests" in refusal.reason
    some.end("a")
    some.route("d")


# What goes wrong.


def test_when_no_node_is_left_a_request_waits_and_then_fails_with_the_reason() -> None:
    some = cluster("m1")
    some.route("a")
    assert some.leave("m1") == [Abort(RequestId("a"), 1, ()), Hold(RequestId("a"), 1, "node m1 is gone")]
    assert some.fail("a", 1) == []
    assert some.expire("a") == [Fail(RequestId("a"), "node m1 is gone (attempt 1 of 4)")]
    some.drain()


def test_requests_on_hold_go_on_when_a_node_joins_and_their_old_limit_is_void() -> None:
    some = cluster("p1", "d1")
    some.route("a")
    some.route("b")
    some.leave("d1")
    some.cancel("b")
    expired = HoldExpired(RequestId("a"), 1)
    some.join("d2", Role.DECODE)
    route = some.routes[RequestId("a")]
    assert (route.attempt, route.prefill, route.decode) == (2, "p1", "d2")
    assert some.on(expired) == []
    some.drain()


WAITS = Rules(wait_ms=500, retry_after_ms=700)


@pytest.mark.parametrize(("there", "missing"), [("p1", Role.DECODE), ("d1", Role.PREFILL)])
def test_a_new_request_waits_for_a_node_of_a_kind_that_is_away(there: str, missing: Role) -> None:
    some = cluster(there, rules=WAITS)
    assert some.arrives("a") == [Hold(RequestId("a"), 0, "no node can serve this now", 500)]
    assert some.arrives("b") == [Hold(RequestId("b"), 0, "no node can serve this now", 500)]
    some.join("new", missing)
    assert [some.routes[RequestId(name)].attempt for name in "ab"] == [1, 1]
    assert some.on(HoldExpired(RequestId("a"), 0)) == []
    some.drain()


def test_after_waiting_for_a_node_in_vain_a_request_is_refused_for_now() -> None:
    some = cluster("p1", rules=WAITS)
    some.arrives("a")
    assert some.expire("a") == [Refuse(RequestId("a"), "unavailable", "no node can serve this now", 700)]
    some.arrives("b", 100)
    some.join("d1", Role.DECODE, 60)
    assert not some.routes
    (refusal,) = some.expire("b")
    assert isinstance(refusal, Refuse) and refusal.code == "too_long"
    assert some.refusal("c", 10**6).code == "too_long"


def test_admission_counts_the_time_that_a_request_waited_for_a_node() -> None:
    for waited_ms, is_refused in ((10, False), (95, True)):
        some = Cluster(Rules(wait_ms=500, admission="early", ttft_ms=100), step_ns=0)
        some.arrives("a", 10)  # 10 ms to compute
        some.now += waited_ms * MS
        some.join("m1", Role.MIXED)
        assert (some.ended.get(RequestId("a")) == "refused") == is_refused
        some.drain()


def test_a_fault_of_the_request_itself_is_not_tried_again() -> None:
    some = cluster("m1", "m2", rules=Rules(max_attempts=3))
    some.route("a")
    abort, fail = some.on(RequestFailed(RequestId("a"), 1, "no token may come", final=True))
    assert isinstance(abort, Abort) and abort.attempt == 1
    assert fail == Fail(RequestId("a"), "no token may come", final=True)
    assert some.on(RequestFailed(RequestId("a"), 1, "no token may come", final=True)) == []
    some.drain()


@pytest.mark.parametrize("num_deaths", [7, MAX_LOSSES])
def test_deaths_of_nodes_use_up_no_attempts_until_they_are_too_many(num_deaths: int) -> None:
    """One that brings every node down has to end."""
    some = cluster("m1", rules=Rules(max_attempts=3))
    some.route("a")
    for death in range(1, num_deaths + 1):
        assert [type(action) for action in some.leave(f"m{death}")] == [Abort, Hold]
        some.join(f"m{death + 1}", Role.MIXED)
    for attempt in (num_deaths + 1, num_deaths + 2):
        assert [type(action) for action in some.fail("a", attempt)] == [Abort, Route]
    last = num_deaths + 3
    if num_deaths < MAX_LOSSES:
        assert some.fail("a", last)[1:] == [Fail(RequestId("a"), "it broke (attempt 10 of 10)")]
    else:
        reason = f"node m{num_deaths + 1} is gone (attempt 13 of 13)"
        assert some.leave(f"m{num_deaths + 1}")[1:] == [Fail(RequestId("a"), reason)]
    some.drain()


def test_a_queue_is_as_long_as_what_is_left_of_what_waits() -> None:
    some = cluster("p1", "d1")
    node = some.conductor.view.nodes[NodeId("p1")]
    for request in "abcde":
        some.route(request, 10)
    assert node.free_ns == some.now + 50 * MS
    some.now += 25 * MS
    some.first_token("a")  # late
    assert node.free_ns == some.now + 40 * MS
    some.now += 1 * MS
    some.first_token("b")  # early
    assert node.free_ns == some.now + node.work_ns
    some.now += int(node.work_ns * 8 / 30)
    before = node.free_ns
    some.cancel("d")  # it waits: c goes on
    assert node.free_ns == before - node.work_ns // 2
    some.cancel("c")  # it is in service
    assert node.free_ns == some.now + node.work_ns


def test_a_withdrawn_request_says_nothing_about_speed() -> None:
    """Neither the time it took so far nor its estimate counts, on a mixed node either."""
    for kind in (("p1", "d1"), ("m1",)):
        some = cluster(*kind)
        some.route("a", 100)
        some.route("b", 10)
        some.now += 50 * MS
        some.cancel("a")
        some.now += 10 * MS
        some.first_token("b")
        assert some.conductor.view.clusters[""].calibration.ratio == pytest.approx(1.0)


def test_estimates_follow_what_prefills_took() -> None:
    some = cluster("p1", "d1")
    for at in range(20):
        some.route(f"r{at}", 10)
        some.now += 30 * MS
        some.first_token(f"r{at}")
    some.route("last", 10)
    assert some.conductor.view.nodes[NodeId("p1")].work_ns == pytest.approx(30 * MS)


def test_a_node_that_is_to_leave_finishes_gets_nothing_new_and_is_dismissed_once() -> None:
    some = cluster("m1", "m2")
    assert some.route("a", 10)[0] == "m1" and some.drains("m1") == []
    assert [some.route(f"r{number}", 10)[0] for number in range(3)] == ["m2"] * 3
    assert some.first_token("a") == []
    assert some.end("a") == [Abort(RequestId("a"), 1, (NodeId("m1"),)), Dismiss(NodeId("m1"))]
    assert some.end("r0") == [Abort(RequestId("r0"), 1, (NodeId("m2"),))]
    some.leave("m1")
    assert some.drains("m2") == []
    assert some.refusal("s").code == "unavailable", "the last one drains"
    some.stays("m2")
    assert some.route("t", 10)[0] == "m2"
    some.drain()
    assert some.drains("m2") == [Dismiss(NodeId("m2"))], "nothing ran there"
    some.stays("m2")
    assert some.route("u", 10)[0] == "m2", "it had not left yet"
    some.drain()


def test_a_request_on_hold_goes_on_when_a_node_stays() -> None:
    some = cluster("m1", "m2")
    assert some.route("a", 10)[0] == "m1"
    some.drains("m2")
    assert [type(action) for action in some.leave("m1")] == [Abort, Hold]
    some.stays("m2")
    assert some.routes[RequestId("a")].prefill == "m2"
    some.drain()


# What holds whatever happens.


EVENTS = [
    *["arrive"] * 7, *["first"] * 4, *["whole"] * 3, "end", "end", "cancel", "fail", "late", "fetched", "fetched",
    "store", "demote", "evict", "join", "leave", "drain", "stay", "expire", "pass",
]  # fmt: skip


def play(some: Cluster, random: Random, num_events: int, start: int = 0) -> None:
    """Random events, late and unknown ones among them. `start`: the number of the first."""
    clusters = sorted({joined.cluster for joined in some.joined.values()}) or [""]
    states = max([joined.state_blocks for joined in some.joined.values()], default=0)
    for counter in range(start, start + num_events):
        living = list(some.routes.values())
        route = random.choice(living) if living else None
        node = random.choice(list(some.joined)) if some.joined else ""
        match random.choice(EVENTS):
            case "arrive":
                arrive(some, random, f"r{counter}")
            case "first" if route and route.request not in some.held:
                some.first_token(route.request, route.attempt)
            case "whole" if route and route.request not in some.held:
                some.finish_prefill(route.request, route.attempt)
            case "fetched" if route:
                some.fetch_finished(route.request, route.attempt)
            case "end" if route:
                some.end(route.request, random.randint(1, 50))
            case "cancel" if route or some.waiting:
                some.cancel(random.choice(sorted(some.waiting)) if some.waiting else route.request)
            case "fail" if route:
                some.fail(route.request, route.attempt)
            case "expire" if some.held or some.waiting:
                some.expire(random.choice(sorted(some.held | some.waiting)))
            case "late":
                request = f"r{random.randint(0, counter)}"
                attempt = some.routes[RequestId(request)].attempt if request in some.routes else 9
                assert some.fail(request, attempt - 1) == []
                assert some.first_token(request, attempt - 1) == []
                some.finish_prefill(request, attempt - 1)
                some.store("nobody", *NAMES[:2])
                some.evict("nobody", NAMES[0])
                nobody = NodeId("nobody")
                assert some.on(NodeLeft(nobody)) == some.on(RoleChanged(nobody, Role.DECODE)) == []
                assert some.on(NodeDrains(nobody)) == some.on(NodeStays(nobody)) == []
            case "store" if node:
                some.store(node, *NAMES[: random.randrange(10)])
            case "demote" if node:
                some.store(node, *NAMES[: random.randrange(10)], tier=Tier.DISK)
            case "evict" if node:
                some.evict(node, *random.sample(NAMES, 5))
            case "join" if len(some.joined) < 6:
                name = f"n{counter % 8}" if f"n{counter % 8}" not in some.joined else f"n{counter}"
                role, capacity = random.choice(list(Role)), random.choice([60, 100, 1000])
                cluster = random.choice(clusters) if clusters[1:] else clusters[0]
                some.join(name, role, capacity, cluster=cluster, state_blocks=states)
            case "leave" if node:
                some.leave(node)
            case "drain" if node:
                some.drains(node)
            case "stay" if some.draining:
                some.stays(random.choice(list(some.draining)))
            case "pass":
                some.now += random.randint(0, 100) * MS


def arrive(some: Cluster, random: Random, request: str) -> None:
    start, count = random.choice([0, 0, 0, 3]), random.randrange(8)
    own = random.random() < 0.2
    some.arrives(
        request,
        4 * count + random.randint(1, 40),
        random.randint(1, 60),
        names=NAMES[start : start + count],
        priority=random.choice([0, 0, 0, -1, 1, 2]),
        ttft_ms=random.randint(1, 200) if own else None,
        tbt_ms=random.randint(10, 40) if own else None,
    )


RULES = [
    Rules(policy=policy, admission=admission, max_requests=12, ttft_ms=120, tbt_ms=30)
    for policy, admission in zip(
        POLICIES, ["none", "baseline", "early", "predictive", "survival", "survival", "survival"], strict=True
    )
] + [
    Rules(policy="isthmus"),
    Rules(policy="isthmus", admission="early", wait_ms=2000, max_requests=12, ttft_ms=120),
    Rules(policy="mooncake", max_requests=12, reserve=0.1, admission="baseline"),
]


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 3), st.integers(1, 12))
def test_every_request_ends_in_exactly_one_way(
    seed: int, num_events: int, max_attempts: int, max_requests: int
) -> None:
    """The cluster judges every action (see there); loads are zero when nothing is left."""
    wait_ms = seed % 2 * 500
    rules = Rules(policy="isthmus", max_attempts=max_attempts, max_requests=max_requests, wait_ms=wait_ms)
    some = cluster("p1", "d1", "m1", rules=rules, step_ns=MS)
    play(some, Random(seed), num_events)
    assert len(some.routes) + len(some.waiting) <= max_requests
    some.drain()
    assert set(some.ended) == set(some.arrived)


def test_long_histories_hold_too() -> None:
    seen: Counter[str] = Counter()
    for seed in range(3 * len(RULES)):
        some = cluster("p1", "p2", "d1", "m1", rules=RULES[seed % len(RULES)], step_ns=MS)
        play(some, Random(seed), 300)
        some.drain()
        assert set(some.ended) == set(some.arrived)
        seen.update(some.ended.values())
        for _, _, actions in some.log:
            seen.update(action.code for action in actions if isinstance(action, Refuse))
            seen.update(action.stage for action in actions if isinstance(action, Refuse))
            seen.update("fetch" for action in actions if isinstance(action, Route) and action.fetch)
            seen.update("dismissed" for action in actions if isinstance(action, Dismiss))
            seen.update("shed" for action in actions[:-1] if isinstance(action, Refuse))
    wanted = (
        "ended cancelled failed refused overloaded unavailable too_long prefill decode fetch shed dismissed"
    )
    assert min(seen[name] for name in wanted.split()) >= 15, seen  # the histories are not hollow


def test_the_same_events_give_the_same_actions_whenever_the_clock_begins() -> None:
    """Byte for byte where it begins alike; only differences of times count."""
    for seed, rules in enumerate(RULES):
        logs, kinds = [], []
        for start in (0, 0, 10**15):
            some = cluster("p1", "p2", "d1", rules=rules, step_ns=MS)
            some.now += start
            play(some, Random(seed), 100)
            logs.append(some.encoded_log())
            kinds.append([[type(action) for action in actions] for _, _, actions in some.log])
        assert logs[0] == logs[1] and kinds[1] == kinds[2]


def test_kv_on_its_way_to_decode_counts_as_use_of_a_link_it_shares() -> None:
    for handover, shared in ((0, True), (10**6, False)):
        some = Cluster(Rules(), paths=Paths(network=10**6, handover=handover), step_ns=0)
        for node, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
            some.join(node, role)
        p1 = some.conductor.view.nodes[NodeId("p1")]
        assert p1.link_out.stretch(some.now) == 1
        some.route("a")
        assert (p1.link_out.stretch(some.now) > 1) == shared
        assert not p1.link_out.copies
        some.drain()


# Refused requests, and events of attempts and nodes that are over, leave no trace.


REMEMBERED = ("_memo", "_stretch", "_stretch_at")
"""What is only there so that it need not be worked out again."""


def everything(root: Any) -> dict[str, object]:
    """Every value that can be reached from an object, by its path; of two ways to one object, the first."""
    seen: set[int] = set()

    def walk(path: str, value: Any) -> Iterator[tuple[str, object]]:
        if isinstance(value, (type, FunctionType, MethodType)) or value is None:
            return
        if isinstance(value, (str, bytes, int, float, frozenset, range)):
            yield path, value
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Random):
            yield path, value.getstate()
        elif isinstance(value, dict):
            yield path, tuple(map(repr, value))
            for key, inner in value.items():
                yield from walk(f"{path}[{key!r}]", inner)
        elif hasattr(value, "__iter__") and not hasattr(value, "__struct_fields__"):
            inner_values = list(value)
            yield path, len(inner_values)
            for at, inner in enumerate(inner_values):
                yield from walk(f"{path}[{at}]", inner)
        else:
            names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            for name in {*names, *getattr(value, "__dict__", ())}.difference(REMEMBERED):
                yield from walk(f"{path}.{name}", getattr(value, name, None))

    return dict(walk("", root))


class Watched(Cluster):
    """Compares all that its conductor knows before and after each event that is to leave no trace."""

    num_refused = num_void = 0

    def on(self, event: Event) -> list[Action]:
        before = everything(self.conductor)
        known = self.conductor.view.requests.get(getattr(event, "request", None))
        lives = known is not None and getattr(event, "attempt", known.attempt) == known.attempt
        node = getattr(event, "node", None)
        strange = (
            node is not None and node not in self.conductor.view.nodes and not isinstance(event, NodeJoined)
        )
        actions = super().on(event)
        refused = isinstance(event, RequestArrived) and [type(action) for action in actions] == [Refuse]
        void = not isinstance(event, RequestArrived) and hasattr(event, "request") and not lives
        if refused or strange or (void and not isinstance(event, RequestEnded)):
            assert everything(self.conductor) == before, f"{event} left a trace"
            self.num_refused += refused
            self.num_void += void or strange
        return actions


@pytest.mark.parametrize(
    "number", range(len(RULES)), ids=[f"{rules.policy}-{rules.admission}" for rules in RULES]
)
def test_what_is_refused_or_void_leaves_no_trace(number: int) -> None:
    some = Watched(replace(RULES[number], max_requests=6), step_ns=MS)
    for node in ("p1", "p2", "d1", "m1"):
        some.join(node, {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[node[0]])
    play(some, Random(number), 150)
    assert some.num_refused >= 3 and some.num_void >= 3, "the history is hollow"
