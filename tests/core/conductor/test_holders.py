"""Where KV goes for which there is no memory where it is computed."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.conductor import Abort, Action, Fail, Hold, Paths, Refuse, Route, Rules
from isthmus.core.conductor.conductor import MAX_VAIN
from isthmus.core.types import NodeId, RequestId, Role

from .cluster import Cluster

SIZE = 4


class Nodes(Cluster):
    """Each has room for so many tokens, and says what it lends when it is asked."""

    def __init__(self, *roles: tuple[Role, int], rules: Rules | None = None, **about: Any) -> None:
        super().__init__(rules or Rules(policy="round_robin"), Paths())
        self.about = about
        for at, (role, capacity) in enumerate(roles):
            self.add(f"{role.value}-{at}", role, capacity)

    def add(self, name: str, role: Role, capacity: int) -> None:
        self.join(name, role, capacity, cost=None, lends=True, **self.about)

    def ask(self, name: str, num_tokens: int, max_tokens: int = 4) -> list[Action]:
        return self.arrives(name, num_tokens, max_tokens)

    def waits(self, name: str, num_tokens: int, max_tokens: int = 4) -> Hold:
        [hold] = self.ask(name, num_tokens, max_tokens)
        assert isinstance(hold, Hold)
        return hold

    def too_long(self, name: str, num_tokens: int, max_tokens: int = 4) -> str:
        [refuse] = self.ask(name, num_tokens, max_tokens)
        assert isinstance(refuse, Refuse) and refuse.code == "too_long"
        return refuse.reason


def blocks(route: Route) -> list[int]:
    return [holding.num_blocks for holding in route.holdings]


FOUR = [(Role.MIXED, 100)] * 4


def test_what_no_single_node_has_memory_for_goes_to_those_with_most_room() -> None:
    nodes = Nodes(*FOUR)
    assert not nodes.routed("short", 80, 4).holdings  # at mixed-0
    route = nodes.routed("long", 200, 4)
    assert (route.prefill, route.decode) == ("mixed-1", "mixed-1")
    assert [(*holding.holders, holding.num_blocks) for holding in route.holdings] == [
        ("mixed-2", 25),
        ("mixed-3", 8),
    ]
    assert sum(blocks(Nodes(*FOUR).routed("long", 371, 4))) == 75
    Nodes(*FOUR).too_long("longer", 372)


@pytest.mark.parametrize("roles", [FOUR, [(Role.PREFILL, 100)] * 2 + [(Role.DECODE, 100)] * 2])
def test_an_answer_longer_than_its_node_is_refused(roles: list[tuple[Role, int]]) -> None:
    """Though all nodes together have memory for it: they would never have it for the answer."""
    assert "no node has KV memory for an answer of 110 tokens" in Nodes(*roles).too_long("r", 60, 110)
    assert Nodes(*roles).routed("r", 60, 70).holdings


def test_who_finds_no_room_waits_for_it() -> None:
    nodes = Nodes(*FOUR)
    nodes.ask("one", 300)
    nodes.waits("two", 300)
    [again] = nodes.expire("two")
    assert isinstance(again, Hold)
    nodes.end("one")
    assert RequestId("two") in nodes.routes


def test_who_waits_for_room_counts_where_so_many_requests_may_be() -> None:
    """At that limit one of lower priority goes for it, or it does."""
    roles = [(Role.PREFILL, 100), *[(Role.DECODE, 100)] * 3]
    nodes = Nodes(*roles, rules=Rules(policy="round_robin", max_requests=3))
    nodes.ask("one", 250)
    nodes.ask("a", 8)
    nodes.ask("b", 8)
    makes_room = ["Abort", "Refuse", "Hold"]
    for name, expected in (("x", makes_room), ("y", makes_room), ("z", ["Refuse"])):
        actions = nodes.arrives(name, 250, 4, priority=1)
        assert [type(action).__name__ for action in actions] == expected
        assert len(nodes.conductor.view.requests) == 3


def test_a_holder_that_has_no_room_costs_no_attempt_and_is_asked_later_each_time() -> None:
    nodes = Nodes(*FOUR, rules=Rules(policy="round_robin", max_attempts=1))
    nodes.ask("r", 300)
    waits = []
    for attempt in range(1, 6):
        *aborts, hold = nodes.fail("r", attempt, no_room=True)
        assert all(isinstance(abort, Abort) for abort in aborts) and isinstance(hold, Hold)
        waits.append(hold.wait_ms)
        [route] = nodes.expire("r")
        assert isinstance(route, Route) and route.attempt == attempt + 1
    assert waits == [10, 20, 40, 80, 160]


def test_in_the_end_it_fails() -> None:
    """Where nobody else has the memory, waiting is in vain."""
    nodes = Nodes((Role.MIXED, 100), (Role.MIXED, 100))
    nodes.ask("r", 150)
    nodes.fail("r", 1, no_room=True)
    nodes.conductor.view.nodes[NodeId("mixed-1")].lent_blocks = 25  # as the node has it
    nodes.conductor.view.nodes[NodeId("mixed-0")].lent_blocks = 25
    nodes.conductor.check = lambda: None  # type: ignore[method-assign]
    for _ in range(MAX_VAIN):
        [action] = nodes.expire("r")
    assert isinstance(action, Fail)


@pytest.mark.parametrize("roles", [[(Role.MIXED, 100)], [(Role.PREFILL, 100), (Role.DECODE, 60)]])
def test_nodes_of_role_attention_have_every_prompt(roles: list[tuple[Role, int]]) -> None:
    nodes = Nodes(*roles, (Role.ATTENTION, 200), (Role.ATTENTION, 400))
    found = [blocks(nodes.routed(name, length, 4)) for name, length in (("a", 41), ("b", 201), ("c", 3))]
    assert found[0] == [5, 5] and [sum(each) for each in found] == [10, 50, 0]


@pytest.mark.parametrize(("kv_heads", "shared"), [(8, [4]), (6, [3]), (5, [1] * 4), (1, [1] * 4)])
def test_as_many_of_them_share_heads_as_can(kv_heads: int, shared: list[int]) -> None:
    """Those with most room; of which each has as many blocks as its part of the heads takes."""
    nodes = Nodes(
        (Role.MIXED, 400), *[(Role.ATTENTION, size) for size in (100, 40, 120, 80)], kv_heads=kv_heads
    )
    route = nodes.routed("r", 161, 4)
    assert [len(holding.holders) for holding in route.holdings] == shared
    assert sum(blocks(route)) == 40
    if kv_heads == 6:
        assert route.holdings[0].holders == ("attention-4", "attention-1", "attention-3")
        lent = [nodes.conductor.view.nodes[holder].lent_blocks for holder in route.holdings[0].holders]
        assert lent == [14, 14, 14]


def test_what_follows_goes_to_nodes_of_role_attention_if_all_does() -> None:
    """So a home with little memory is enough for any answer, and one that has no room there waits."""
    nodes = Nodes((Role.MIXED, 40), (Role.ATTENTION, 200), (Role.ATTENTION, 200), kv_heads=2)
    route = nodes.routed("a", 3, 300)
    assert not route.holdings and set(route.growth) == {"attention-1", "attention-2"}
    route = nodes.routed("b", 301, 70)
    assert route.growth == route.holdings[0].holders
    nodes.waits("c", 250, 70)
    nodes.too_long("d", 401, 40)
    route = Nodes((Role.MIXED, 400), (Role.ATTENTION, 100), kv_heads=2).routed("a", 200, 20)
    assert route.holdings[0].num_blocks == 25 and not route.growth


def test_while_nodes_of_role_attention_are_full_only_what_fits_at_home_now_goes_there() -> None:
    """It would wait in its home's queue, before others that have room elsewhere. Who came first is first; a few that
    came later may go before it if there is memory for these alone."""
    nodes = Nodes((Role.MIXED, 60), (Role.ATTENTION, 100), kv_heads=2)
    assert nodes.routed("a", 101, 8).holdings[0].num_blocks == 25
    home = nodes.routed("b", 30, 10)
    assert not home.holdings and not home.growth
    first, second, *_ = (nodes.waits(name, 50, 10) for name in "cdefghijk")
    assert (first.wait_ms, second.wait_ms) == (10, 1000)
    [again] = nodes.expire("d")
    assert isinstance(again, Hold) and again.wait_ms == 1000
    routes = [action for action in nodes.end("a") if isinstance(action, Route)]
    assert [route.request for route in routes] == ["c", "d"]
    assert all(route.growth and route.holdings[0].num_blocks == 12 for route in routes)


def test_what_answers_will_add_there_is_counted_as_they_are_in_the_mean() -> None:
    nodes = Nodes((Role.MIXED, 40), (Role.ATTENTION, 100), (Role.ATTENTION, 100), kv_heads=2)
    nodes.ask("short", 3, 30)
    nodes.end("short", 16)
    held = [nodes.conductor.view.nodes[holder] for holder in (NodeId("attention-1"), NodeId("attention-2"))]
    nodes.routed("a", 81, 30)
    assert [node.lent_blocks for node in held] == [10, 10]
    assert [node.expected_blocks for node in held] == [2, 2], "half of four blocks each"
    nodes.waits("b", 109, 30)  # 27 blocks would fit beside 20 of 50, but for the answer of a
    nodes.routed("c", 101, 30)
    for name in "acb":
        nodes.end(name)
    assert [node.expected_blocks for node in held] == [0, 0]


def test_who_is_too_long_for_the_decode_node_alone_waits_while_holders_are_full() -> None:
    """Though the prefill node could take all of it."""
    nodes = Nodes((Role.PREFILL, 200), (Role.DECODE, 60), (Role.ATTENTION, 200), kv_heads=2)
    nodes.routed("a", 190, 8)
    nodes.waits("b", 100, 8)
    assert [action for action in nodes.end("a") if isinstance(action, Route)]


def test_an_answer_that_no_single_node_has_memory_for_stays_at_home() -> None:
    """Where heads cannot be shared."""
    attending = [(Role.ATTENTION, 100), (Role.ATTENTION, 100)]
    route = Nodes((Role.MIXED, 400), *attending).routed("a", 41, 90)
    assert len(route.holdings) == 2 and not route.growth
    route = Nodes((Role.MIXED, 40), *attending).routed("a", 41, 70)
    assert route.growth == route.holdings[-1].holders
    assert not isinstance(Nodes((Role.MIXED, 40), *attending).ask("a", 41, 90)[0], Route)


PAIR = [(Role.ATTENTION, 400), (Role.ATTENTION, 400)]


@pytest.mark.parametrize("roles", [[(Role.MIXED, 100)] * 2, [(Role.PREFILL, 100), *[(Role.DECODE, 100)] * 2]])
def test_the_next_attempt_goes_on_with_what_holders_keep(roles: list[tuple[Role, int]]) -> None:
    nodes = Nodes(*roles, *PAIR, kv_heads=2)
    route = nodes.routed("r", 300, 4, names=range(75))
    assert not route.taken
    nodes.first_token("r", 1)
    *_, again = nodes.leave(route.decode)
    assert isinstance(again, Route) and again.taken == 1 and again.decode != route.decode
    assert (again.holdings, again.growth) == (route.holdings, route.growth)
    nodes.add(route.decode, roles[-1][0], 100)
    *_, third = nodes.leave(again.decode)
    assert isinstance(third, Route) and third.taken == 2
    *_, anew = nodes.leave(third.holdings[0].holders[0])
    assert not isinstance(anew, Route) or not anew.taken, "a part of it is gone"


def test_it_waits_for_a_home_and_then_goes_on_with_what_is_kept() -> None:
    nodes = Nodes((Role.MIXED, 100), *PAIR, kv_heads=2)
    route = nodes.routed("r", 300, 4, names=range(75))
    assert isinstance(nodes.leave(route.prefill)[-1], Hold)
    nodes.add(route.prefill, Role.MIXED, 100)
    assert nodes.routes[RequestId("r")].taken == 1


@pytest.mark.parametrize("num_nodes", [3, 4])
def test_kv_with_mixed_nodes_is_gone_on_with_by_one_that_has_none(num_nodes: int) -> None:
    nodes = Nodes(*[(Role.MIXED, 100)] * num_nodes)
    route = nodes.routed("r", 200, 4, names=range(50))
    *_, again = nodes.leave(route.prefill)
    if num_nodes == 3:
        assert len(route.holdings) == 2 and not (isinstance(again, Route) and again.taken), "nobody is left"
        return
    assert isinstance(again, Route) and again.taken == 1 and again.holdings == route.holdings
    assert again.prefill not in {holder for holding in route.holdings for holder in holding.holders}


@pytest.mark.parametrize("state_blocks", [0, 1])
def test_what_a_home_alone_had_is_computed_anew(state_blocks: int) -> None:
    """A recurrent state; and the scores of a prompt, which has no names, until they are out."""
    nodes = Nodes(*[(Role.MIXED, 100)] * 2, *PAIR, kv_heads=2, state_blocks=state_blocks)
    route = nodes.routed("r", 300, 4)
    *_, again = nodes.leave(route.prefill)
    assert isinstance(again, Route) and not again.taken
    nodes.first_token("r", 2)
    nodes.add(route.prefill, Role.MIXED, 100)
    *_, third = nodes.leave(again.prefill)
    assert isinstance(third, Route) and third.taken == (0 if state_blocks else 2)


@given(st.integers(0, 1 << 32), st.booleans(), st.sampled_from([1, 2, 3]))
def test_whatever_comes_no_memory_is_lent_twice(seed: int, attention: bool, kv_heads: int) -> None:
    draw = Random(seed)
    roles = draw.choice([[Role.MIXED] * 3, [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]])
    some = [(role, draw.choice([60, 100, 200])) for role in [*roles, *[Role.ATTENTION] * (3 * attention)]]
    nodes = Nodes(*some, kv_heads=kv_heads)
    live: list[str] = []
    for at in range(40):
        kind = draw.randrange(5)
        if kind < 2:
            lengths = draw.randrange(1, 400), draw.randrange(1, 20)
            names = range(lengths[0] // SIZE if draw.random() < 0.5 else 0)
            nodes.arrives(f"r{at}", *lengths, names=names)
            live.append(f"r{at}")
        elif kind == 2 and live:
            nodes.end(live.pop(draw.randrange(len(live))))
        elif kind == 3:
            joined = draw.choice(list(nodes.joined.values()))
            nodes.leave(joined.node)
            nodes.add(joined.node, joined.role, joined.capacity_tokens)
        elif routes := [route for route in nodes.routes.values() if route.request not in nodes.held]:
            route = draw.choice(routes)
            nodes.fail(route.request, route.attempt, no_room=True)
    nodes.drain()
    assert all(node.lent_blocks == 0 for node in nodes.conductor.view.nodes.values())
