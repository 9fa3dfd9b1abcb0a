"""Nodes in a world where everything that may happen next does, in any order: whatever comes, all ends and adds up."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.attempts import Holding, Route
from isthmus.core.node import events
from isthmus.core.types import NOBODY, NodeId, Tenant

from .world import SIZE, Asked, Place, World, fetch_of, route_of

P0, P1, D0 = NodeId("p0"), NodeId("p1"), NodeId("d0")


def names_of(seed: int, count: int) -> tuple[int, ...]:
    """Chains of the same seed share their heads."""
    return tuple([seed * 1000 + at for at in range(count)])


class Drawn:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, below: int) -> int:
        return self._random.randrange(below)


H0, H1, H2 = NodeId("h0"), NodeId("h1"), NodeId("h2")
TENANTS = st.sampled_from(
    [(NOBODY,), (NOBODY,), (Tenant("acme"), Tenant("globex", 2.0), Tenant("third"), NOBODY)]
)


def world_of(
    draw: Drawn, *, dram: int, disk: int, state_blocks: int = 0, stages: int = 1, report_ns: int = 0
) -> World:
    """`stages`: of the nodes that prefill."""
    tiers = (dram, disk) if dram else None
    return World(
        [Place(name, 40, tiers, state_blocks, stages if name != D0 else 1, report_ns) for name in (P0, P1, D0)],
        draw,
    )


def ask(world: World, draw: Drawn, number: int, state_blocks: int) -> None:
    num_tokens = 1 + draw(40)
    names = names_of(draw(3), num_tokens // SIZE)
    prefill = (P0, P1)[draw(2)]
    decode = (D0, prefill)[draw(2)]
    fields: dict[str, object] = {"num_cached": draw(len(names) + 1)}
    if names and draw(2) and world.places[prefill].node.tiers is not None:
        source = P1 if prefill == P0 else P0
        start = draw(len(names))
        fields["fetch"] = fetch_of(source, start, start + 1 + draw(len(names) - start))
    if decode == D0 and world.places[D0].node.tiers is not None and names and not draw(3):
        depth = 1 + draw(len(names))
        own = draw(depth + 1)
        fields["handover_start"] = depth
        fields["recall"] = fetch_of(P0, own, depth) if own < depth else fetch_of(D0, 0, depth)
    route = route_of(f"r{number}", prefill, decode, **fields)
    alone = decode == prefill and world.places[prefill].stages > 1
    world.ask(Asked(route, num_tokens, 1 if alone else 1 + draw(12), names))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([(0, 0), (6, 0), (6, 8), (30, 30)]),
    st.sampled_from([0, 0, 2]),
    st.sampled_from([1, 1, 2]),
    TENANTS,
)
def test_whatever_comes_all_ends_and_adds_up(
    seed: int, tiers: tuple[int, int], state_blocks: int, stages: int, tenants: tuple[Tenant, ...]
) -> None:
    """Tenants may share names here, which no live ones do."""
    draw = Drawn(seed)
    world = world_of(draw, dram=tiers[0], disk=tiers[1], state_blocks=state_blocks, stages=stages)
    world.tenants = tenants
    for number in range(12):
        ask(world, draw, number, state_blocks)
        for _ in range(draw(20)):
            world.step()
        under_way = [asked for asked in world.asked.values() if not asked.over]
        kind = draw(12)
        if kind == 0 and under_way:
            world.forget(under_way[draw(len(under_way))])
        elif kind == 1 and under_way:
            world.sever(*under_way[draw(len(under_way))].ends)
        elif kind == 2 and tiers[0]:
            world.lose((P0, P1, D0)[draw(3)], draw(3) * 1000 + draw(10))
    world.drain()


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([(0, 0), (6, 0), (6, 8), (30, 30)]),
    st.sampled_from([0, 0, 2]),
    st.integers(6, 40),
    TENANTS,
)
def test_kv_lies_with_holders_whatever_comes(
    seed: int, tiers: tuple[int, int], state_blocks: int, num_blocks: int, tenants: tuple[Tenant, ...]
) -> None:
    """Every token that is computed finds all before it once, with its holders in order and at home."""
    draw = Drawn(seed)
    world = world_of(draw, dram=tiers[0], disk=tiers[1], state_blocks=state_blocks, report_ns=7)
    world.tenants = tenants
    for name in (H0, H1, H2):
        world.places[name], world.index[name] = Place(name, num_blocks, None, report_ns=7), {}
    for number in range(10):
        ask_with_holders(world, draw, number, state_blocks)
        for _ in range(draw(24)):
            world.step()
        under_way = [asked for asked in world.asked.values() if not asked.over]
        if not under_way:
            continue
        asked, kind = under_way[draw(len(under_way))], draw(16)
        if kind < 3:
            world.move(asked, (H0, H1, H2, P0, D0)[draw(5)], 1 + draw(4))
        elif kind > 11:
            world.take_back(asked, (H0, H1, H2, P0, D0)[draw(5)], 1 + draw(4))
        elif kind == 3:
            world.forget(asked)
        elif kind == 4:
            world.part(asked, (H0, H1, H2)[draw(3)])
        elif kind == 5:
            world.sever(*asked.ends)
        elif kind == 6:
            for lost in world.die((P0, P1, D0)[draw(3)]):
                ask_again(world, draw, lost)
    world.drain()


def ask_again(world: World, draw: Drawn, lost: Asked) -> None:
    """Its last tokens may be known to nobody; others may have been computed in their place."""
    old, known = lost.route, max(0, lost.generated - draw(4))
    if lost.answer == known:
        return
    prefill = (P0, P1)[draw(2)]
    decode = (D0, prefill)[draw(2)]
    again = Route(
        old.request, old.attempt + 1, prefill, decode, holdings=old.holdings, growth=old.growth,
        taken=old.attempt,
    )  # fmt: skip
    world.ask(Asked(again, lost.num_tokens + known, lost.answer - known, lost.names))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([(0, 0), (6, 8)]), st.sampled_from([0, 0, 2]))
def test_blocks_go_and_come_back_at_any_step(seed: int, tiers: tuple[int, int], state_blocks: int) -> None:
    """Among many that decode: none is lost, had twice, or attended to where it is not; a refusal changes nothing."""
    draw = Drawn(seed)
    world = world_of(draw, dram=tiers[0], disk=tiers[1], state_blocks=state_blocks, report_ns=7)
    for name in (H0, H1):
        world.places[name], world.index[name] = Place(name, 16, None, report_ns=7), {}
    for number in range(60):
        under_way = [asked for asked in world.asked.values() if not asked.over]
        if len(under_way) < 3:
            num_tokens, decode = 1 + draw(60), (D0, P0)[draw(2)]
            route = route_of(f"r{number}", P0, decode)
            asked = Asked(route, num_tokens, 1 + draw(60), names_of(draw(3), num_tokens // SIZE))
            world.ask(asked)
            under_way.append(asked)
        asked = under_way[draw(len(under_way))]
        holdings = world.places[asked.route.decode].spread.get(asked.key, ())
        kind = draw(20)
        if kind < 8:
            world.move(asked, (H0, H1)[draw(2)], 1 + draw(6))
        elif kind < 16 and holdings:
            world.take_back(asked, holdings[-1].holders[0], 1 + draw(6))
        elif kind == 16:
            world.forget(asked)
        elif kind == 17:
            world.part(asked, (H0, H1)[draw(2)])
        for _ in range(draw(12)):
            world.step()
    world.drain()


def ask_with_holders(world: World, draw: Drawn, number: int, state_blocks: int) -> None:
    """Some prompts are longer than the memory of any node."""
    num_tokens = 1 + draw(240 if draw(3) else 40)
    names = names_of(draw(3), num_tokens // SIZE)
    prefill = (P0, P1)[draw(2)]
    decode = (D0, prefill)[draw(2)]
    most, holdings = (num_tokens - 1) // SIZE, []
    least = max(0, -(-(num_tokens + 12) // SIZE) - 24)  # beside what goes there later and states
    for holders in [((H0,), (H1,)), ((H1,),), ((H0, H1),), ((H1, H2),), ((H0,), (H1, H2))][draw(5)]:
        count = min(most, max(least, draw(most + 1)))
        if count:
            holdings.append(Holding(holders, count))
            most, least = most - count, max(0, least - count)
    if least:
        return  # nobody could take it
    fields: dict[str, object] = {"num_cached": draw(len(names) + 1), "holdings": tuple(holdings)}
    if holdings and not most:
        fields["growth"] = holdings[-1].holders
    elif not holdings and draw(2):
        fields["growth"] = (H1, H2)
    world.ask(Asked(route_of(f"r{number}", prefill, decode, **fields), num_tokens, 1 + draw(12), names))


@settings(max_examples=50)
@given(st.integers(0, 1 << 32), st.integers(1, 12))
def test_what_lies_on_the_ssd_at_the_start_is_kept_as_far_as_there_is_room(seed: int, room: int) -> None:
    draw = Drawn(seed)
    world = World([Place(P0, 40, (6, room))], draw)
    place, node = world.places[P0], world.places[P0].node
    chains = tuple([names_of(draw(3), 1 + draw(6)) for _ in range(4)])
    place.disk |= {name for chain in chains for name in chain}
    found = len(place.disk)
    world.tell(place, events.PrefixesRecovered(chains))
    assert node.tiers is not None and len(node.tiers.ssd.held) == min(found, room)
    world.drain()
