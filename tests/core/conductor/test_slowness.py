"""Nodes that tell no cost: each has a speed of its own; one far slower than it was is left, and comes back."""

from __future__ import annotations

import pytest

from isthmus.core.conductor import (
    Abort,
    Conductor,
    FirstToken,
    NodeJoined,
    NodeProbed,
    RequestArrived,
    RequestEnded,
    RequestFailed,
    Route,
    Rules,
    TimePassed,
)
from isthmus.core.conductor.events import Action
from isthmus.core.types import MIXED, NS_PER_MS, NS_PER_S, NodeId, RequestId

TOKENS = 100
TOOK_NS = 20 * NS_PER_MS
"""Of a prompt, before which nothing is queued."""


class Fleet:
    """A conductor of nodes that tell no cost, in virtual time. `slow_ns`: how much longer a node takes."""

    def __init__(self, num_nodes: int = 2) -> None:
        self.conductor, self.now = Conductor(Rules(policy="isthmus")), NS_PER_S
        self.names = [NodeId(f"n{number}") for number in range(num_nodes)]
        self.slow_ns = dict.fromkeys(self.names, 0)
        for name in self.names:
            self.tell(NodeJoined(name, MIXED, 1 << 40, 16, cache_blocks=1000))
        self._num = 0

    def tell(self, event: object) -> list[Action]:
        actions = self.conductor.on(event, self.now)  # type: ignore[arg-type]
        self.conductor.check()
        return actions

    def passes(self, span_ns: int) -> list[Action]:
        self.now += span_ns
        return self.tell(TimePassed())

    def arrive(self, max_tokens: int = 10) -> Route:
        self._num += 1
        (route,) = self.tell(RequestArrived(RequestId(f"r{self._num}"), "", TOKENS, max_tokens, ()))
        assert isinstance(route, Route)
        return route

    def answer(self, route: Route) -> None:
        self.tell(FirstToken(route.request, route.attempt))
        self.tell(RequestEnded(route.request, 1))

    def served(self, num: int) -> list[NodeId]:
        """Requests one after another, each answered as quickly as its node is. Returns their nodes."""
        nodes = []
        for _ in range(num):
            route = self.arrive()
            self.now += TOOK_NS + self.slow_ns[route.prefill]
            self.answer(route)
            nodes.append(route.prefill)
        return nodes


def test_nodes_that_are_alike_are_taken_in_turn() -> None:
    fleet = Fleet()
    nodes = fleet.served(40)
    assert nodes.count(fleet.names[0]) == 20


def test_a_node_that_is_slower_has_a_speed_of_its_own() -> None:
    fleet = Fleet()
    for _ in range(20):  # so many at once that both are used
        routes = [fleet.arrive() for _ in range(6)]
        for took in range(1, 7):
            fleet.now += TOOK_NS
            for name, slower in zip(fleet.names, (5, 1), strict=True):
                own = [route for route in routes if route.prefill == name]
                if own and took % slower == 0:
                    routes.remove(own[0])
                    fleet.answer(own[0])
        for route in routes:
            fleet.now += 5 * TOOK_NS
            fleet.answer(route)
    one, other = (fleet.conductor.view.nodes[name] for name in fleet.names)
    assert one.ratio > 3 * other.ratio
    assert fleet.served(20) == [fleet.names[1]] * 20, "an idle node that is slower is not used"
    assert fleet.conductor.slowness.to_probe() == [one]


def test_a_request_that_waits_too_long_goes_to_a_node_that_answers() -> None:
    fleet = Fleet()
    fleet.served(10)
    route = fleet.arrive()
    assert fleet.passes(NS_PER_S // 4) == [], "it is not so late"
    abort, again = fleet.passes(NS_PER_S // 2)
    assert isinstance(abort, Abort) and abort.nodes == (route.prefill,)
    assert isinstance(again, Route) and again.prefill != route.prefill
    fleet.answer(again)
    assert route.prefill not in fleet.served(10), "the node is set aside"


def test_a_node_that_was_set_aside_is_used_when_a_probe_is_quick() -> None:
    fleet = Fleet()
    fleet.served(10)
    late = fleet.arrive().prefill
    _, again = fleet.passes(NS_PER_S)
    assert isinstance(again, Route)
    fleet.answer(again)
    fleet.tell(NodeProbed(late, 256, 4 * NS_PER_S))
    assert late not in fleet.served(10), "a probe that is late changes nothing"
    fleet.tell(NodeProbed(late, 256, 50 * NS_PER_MS))
    assert not fleet.conductor.slowness.to_probe()
    assert late in fleet.served(10)


def test_a_fleet_that_is_slow_everywhere_keeps_its_requests() -> None:
    fleet = Fleet(4)
    fleet.served(20)
    routes = [fleet.arrive() for _ in range(40)]
    for _ in range(40):
        assert fleet.passes(NS_PER_S // 4) == []
    assert {route.prefill for route in routes} == set(fleet.names)


def test_a_node_that_was_late_itself_gets_no_request_of_another() -> None:
    """All are slower at once: one that has just answered looks quick, and has given no token in time."""
    fleet = Fleet()
    fleet.served(20)
    routes = [fleet.arrive() for _ in range(4)]
    first, second = routes[:2]
    assert first.prefill != second.prefill
    fleet.now += NS_PER_S
    fleet.answer(second)
    assert fleet.passes(NS_PER_S // 20) == []


def test_a_request_moves_so_often_and_no_more() -> None:
    """Each time the next server looks quick until it has a request."""
    fleet = Fleet(6)
    fleet.served(30)
    fleet.arrive()
    moves = 0
    for _ in range(60):
        moves += sum([isinstance(action, Route) for action in fleet.passes(NS_PER_S // 4)])
    assert moves == 2


@pytest.mark.parametrize("streams", [True, False])
def test_answers_that_say_nothing_before_their_end_teach_too(streams: bool) -> None:
    """Where streams have taught the time between tokens, and where there are none."""
    fleet = Fleet()
    slow, quick = fleet.names
    step_ns, num_generated = 5 * NS_PER_MS, 4
    if streams:
        for _ in range(20):
            route = fleet.arrive()
            fleet.now += TOOK_NS
            fleet.tell(FirstToken(route.request, route.attempt))
            fleet.now += step_ns * (num_generated - 1)
            fleet.tell(RequestEnded(route.request, num_generated))
    for _ in range(20):
        routes = sorted([fleet.arrive() for _ in range(2)], key=lambda route: route.prefill == slow)
        fleet.now += TOOK_NS
        for route in routes:
            fleet.tell(FirstToken(route.request, route.attempt, presumed=True))
        fleet.now += step_ns * (num_generated - 1)
        for route in routes:
            fleet.now += 5 * TOOK_NS * (route.prefill == slow)
            fleet.tell(FirstToken(route.request, route.attempt))
            fleet.tell(RequestEnded(route.request, num_generated))
    one, other = (fleet.conductor.view.nodes[name] for name in (slow, quick))
    assert one.ratio > 2 * other.ratio
    if streams:
        assert other.ratio == pytest.approx(TOOK_NS / (TOKENS * 100_000), rel=0.05)


def test_a_refusal_teaches_nothing() -> None:
    fleet = Fleet()
    fleet.served(4)
    before = fleet.conductor.view.clusters[""].calibration.ratio
    for _ in range(10):
        route = fleet.arrive()
        fleet.tell(FirstToken(route.request, route.attempt, teaches=False))
        fleet.tell(RequestEnded(route.request, 1))
    assert fleet.conductor.view.clusters[""].calibration.ratio == before


def test_an_answer_of_which_nothing_comes_is_asked_for_elsewhere() -> None:
    fleet = Fleet()
    fleet.served(10)
    route = fleet.arrive(max_tokens=10)
    fleet.now += TOOK_NS
    fleet.tell(FirstToken(route.request, route.attempt, presumed=True))
    assert fleet.passes(NS_PER_S // 4) == []
    _, again = fleet.passes(NS_PER_S)
    assert isinstance(again, Route) and again.prefill != route.prefill
    fleet.tell(FirstToken(again.request, again.attempt, presumed=True))
    fleet.tell(FirstToken(again.request, again.attempt))
    assert fleet.passes(10 * NS_PER_S) == [], "it comes"


def broken_off(fleet: Fleet) -> Route:
    """The second attempt of an answer that broke off at its first server after some tokens."""
    route = fleet.arrive(max_tokens=10_000)
    fleet.now += TOOK_NS
    fleet.tell(FirstToken(route.request, route.attempt))
    fleet.now += NS_PER_S
    _, again = fleet.tell(RequestFailed(route.request, route.attempt, "it broke off"))
    assert isinstance(again, Route) and again.attempt == 2
    return again


def test_an_answer_that_goes_on_is_not_late() -> None:
    """The tokens sent so far are computed with the prompt, and whoever waits behind it waits for these too."""
    fleet = Fleet()
    fleet.served(10)
    again = broken_off(fleet)
    behind = [fleet.arrive() for _ in range(4)]
    for route in behind:
        if route.prefill != again.prefill:
            fleet.now += TOOK_NS
            fleet.answer(route)
    assert any(route.prefill == again.prefill for route in behind)
    for _ in range(20):
        assert not fleet.conductor.slowness.is_any_late(fleet.now)
        assert fleet.passes(NS_PER_S) == []
    assert not any(node.is_aside for node in fleet.conductor.view.nodes.values())


def test_an_answer_that_goes_on_stays_behind_a_prompt_that_is_late() -> None:
    fleet = Fleet()
    fleet.served(10)
    route = fleet.arrive(max_tokens=10_000)
    fleet.now += TOOK_NS
    fleet.tell(FirstToken(route.request, route.attempt))
    ahead = [fleet.arrive(), fleet.arrive()]
    _, again = fleet.tell(RequestFailed(route.request, route.attempt, "it broke off"))
    assert isinstance(again, Route)
    (late,) = [each for each in ahead if each.prefill == again.prefill]
    (quick,) = [each for each in ahead if each.prefill != again.prefill]
    fleet.now += TOOK_NS
    fleet.answer(quick)
    moved = [action.request for action in fleet.passes(NS_PER_S) if isinstance(action, Route)]
    assert moved == [late.request]


@pytest.mark.parametrize("num_generated", [1, 2000])
def test_an_answer_that_goes_on_teaches_nothing(num_generated: int) -> None:
    """Neither its prefill nor its end, whose tokens are those of both attempts."""
    fleet = Fleet()
    for _ in range(10):
        route = fleet.arrive()
        fleet.now += TOOK_NS
        fleet.tell(FirstToken(route.request, route.attempt))
        fleet.now += 9 * 5 * NS_PER_MS
        fleet.tell(RequestEnded(route.request, 10))
    again = broken_off(fleet)
    nodes = fleet.conductor.view.nodes.values()
    before = [(node.ratio, node.tokens.ratio) for node in nodes]
    fleet.now += 5 * NS_PER_S
    fleet.tell(FirstToken(again.request, again.attempt))
    fleet.now += NS_PER_S
    fleet.tell(RequestEnded(again.request, num_generated))
    assert [(node.ratio, node.tokens.ratio) for node in nodes] == before


def test_a_second_attempt_of_which_nothing_had_come_is_late_and_teaches() -> None:
    """A first token that was presumed is none."""
    fleet = Fleet(3)
    fleet.served(12)
    route = fleet.arrive()
    fleet.now += TOOK_NS
    fleet.tell(FirstToken(route.request, route.attempt, presumed=True))
    _, again = fleet.tell(RequestFailed(route.request, route.attempt, "it broke off"))
    assert isinstance(again, Route)
    before = fleet.conductor.view.clusters[""].calibration.ratio
    fleet.now += NS_PER_S
    assert fleet.conductor.slowness.is_any_late(fleet.now)
    fleet.tell(FirstToken(again.request, again.attempt))
    assert fleet.conductor.view.clusters[""].calibration.ratio > before
