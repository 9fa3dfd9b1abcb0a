"""Prompts that are assembled from others' KV, among all that may happen: who was given up is computed as ever, who was
not leaves no name, and every block and pin comes back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.attempts import (
    Assembly,
    Donor,
    FetchOrder,
    HoldingsChanged,
    MemoryEntry,
    MemoryUsed,
    RequestFailed,
)
from isthmus.core.node import Node, events
from isthmus.core.reuse import CACHEBLEND, EPIC, SEMANTIC, pack
from isthmus.core.scheduler import BlockPool, Run, Scheduler, Stepped, TierCache
from isthmus.core.types import NodeId, RequestId, Role

from .assembled import CANNOT, AssembledWorld
from .test_node import D0, P0, P1, Drawn, fetch_of, names_of
from .test_steps import HERE, KEY, PEER
from .world import SIZE, Asked, Place, limits_of, route_of

LAYERS = 3
SEEDS = 3
"""Chains that are asked for; one more is never computed."""


def world_of(
    draw: Drawn, num_blocks: int, tiers: tuple[int, int] | None, state_blocks: int, stages: int
) -> AssembledWorld:
    made = [
        Place(name, num_blocks, tiers, state_blocks, stages if name != D0 else 1, 7) for name in (P0, P1, D0)
    ]
    return AssembledWorld(made, draw)


def donor_of(world: AssembledWorld, draw: Drawn, number: int, here: NodeId) -> Donor:
    """Of a chain that was computed before, as the conductor knows it; from another node, whole or but for what is said
    to be at hand. Sometimes it is gone."""
    source = (P0, P1, D0, here, here)[draw(5)]
    known = [name for name in world.index[source] if isinstance(name, int)]
    heads = sorted({name // 1000 for name in known if 0 <= name < 10**6})
    seed = heads[draw(len(heads))] if heads and draw(8) else draw(SEEDS + 1)
    held = len([name for name in names_of(seed, 20) if name in world.index[source]])
    names = names_of(seed, min(20, held + 1) if not draw(6) else 1 + draw(max(1, held)))
    fetch: FetchOrder | None = None
    if source != here:
        depth = len([name for name in names if name in world.index[here]])
        start = draw(len(names)) if not draw(3) else min(depth, len(names) - 1)
        fetch = fetch_of(source, start, len(names) if draw(6) else start + 1 + draw(len(names) - start))
    return Donor(RequestId(f"donor{number}"), names, draw(len(names)), fetch)


def ask(world: AssembledWorld, draw: Drawn, number: int, most: int) -> None:
    num_tokens = 1 + draw(most)
    names = names_of(draw(SEEDS), num_tokens // SIZE)
    prefill = (P0, P1)[draw(2)]
    decode = (D0, prefill)[draw(2)]
    place, fields = world.places[prefill], dict[str, object]()
    fields["num_cached"] = num_cached = draw(len(names) + 1)
    if names and not draw(3) and place.node.tiers is not None:
        start = draw(len(names))
        fetch = fetch_of(P1 if prefill == P0 else P0, start, start + 1 + draw(len(names) - start))
        fields |= {"fetch": fetch, "num_cached": max(num_cached, fetch.stop)}
    if decode == D0 and world.places[D0].node.tiers is not None and names and not draw(8):
        fields["handover_start"] = depth = 1 + draw(len(names))
        fields["recall"] = fetch_of(D0, 0, depth)
    if draw(4):
        selection = (SEMANTIC, SEMANTIC, CACHEBLEND, EPIC)[draw(4)]
        donors = tuple([donor_of(world, draw, number, prefill) for _ in range(1 + draw(3))])
        packing = pack(selection, num_tokens, LAYERS, SIZE)
        fields["assembly"] = Assembly(selection, donors, (), draw(num_tokens + 1), LAYERS, packing)
    route = route_of(f"r{number}", prefill, decode, **fields)
    alone = decode == prefill and place.stages > 1
    world.ask(Asked(route, num_tokens, 1 if alone else 1 + draw(30), names))


def play(
    seed: int, num_blocks: int, tiers: tuple[int, int] | None, state_blocks: int, stages: int
) -> Counter[str]:
    draw = Drawn(seed)
    world = world_of(draw, num_blocks, tiers, state_blocks, stages)
    for number in range(14):
        ask(world, draw, number, min(80, (num_blocks - 4 * state_blocks) * SIZE - 32))
        for _ in range(draw(24)):
            world.step()
        under_way = [asked for asked in world.asked.values() if not asked.over]
        kind = draw(14)
        if kind == 0 and under_way:
            world.forget(under_way[draw(len(under_way))])
        elif kind == 1 and under_way:
            world.sever(*under_way[draw(len(under_way))].ends)
        elif kind == 2:
            world.die((P0, P1, D0)[draw(3)])
        elif kind < 5 and tiers is not None:
            world.lose((P0, P1, D0)[draw(3)], draw(SEEDS) * 1000 + draw(10))
    world.drain()
    return world.seen


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([22, 28, 60]),
    st.sampled_from([None, (8, 0), (12, 20), (60, 30), (60, 30), (60, 30)]),
    st.sampled_from([0, 0, 0, 0, 2]),
    st.sampled_from([1, 1, 1, 2]),
)
def test_whatever_comes_all_ends_and_nothing_assembled_gets_a_name(
    seed: int, num_blocks: int, tiers: tuple[int, int] | None, state_blocks: int, stages: int
) -> None:
    play(seed, num_blocks, tiers, state_blocks, stages)


def test_the_world_sees_all_that_may_become_of_them() -> None:
    """Else the test above would prove less than it says."""
    seen: Counter[str] = Counter()
    for seed in (*range(100), 1117, 1441):  # somebody needs the memory of one that is packed in the last two
        seen += play(seed, (20, 28, 60)[seed % 3], (60, 30), 0, 1)
    for what in ("assembled", "packed", "handed over", "here", "came", "missing", "failed", "lost", "dropped"):
        assert seen[what], f"{what}: never"
    assert seen["assembled"] + seen["packed"] > seen["missing"] + seen["failed"]


DONOR = tuple(range(100, 108))
PACKING = pack(SEMANTIC, 60, LAYERS, SIZE)


def begin(part: Role, attempt: int = 1) -> events.StartAttempt:
    """A prompt of 60 tokens whose donor is here; computed as ever, it would begin with 16."""
    ends = (HERE, PEER) if part is Role.PREFILL else (HERE, HERE)
    assembly = Assembly(SEMANTIC, (Donor(RequestId("x"), DONOR, 2),), (), 20, LAYERS, PACKING)
    route = route_of("r", *ends, assembly=assembly)
    return events.StartAttempt(RequestId(f"r#{attempt}"), part, route, 60, 90, tuple(range(15)))


def with_donor(**about: int) -> Node:
    made = limits_of(60, 0)
    tiers = TierCache(80)
    tiers.put(DONOR)
    return Node(dict.fromkeys(Role, made), Scheduler(made, tiers, BlockPool(60), node=HERE), **about)


def test_who_distrusts_its_cache_does_not_send_whole_what_is_expected_packed() -> None:
    node = with_donor()
    [run] = [action for action in node.on(begin(Role.MIXED), 1) if isinstance(action, Run)]
    assert run.chunks[0].assembly is not None
    node.on(events.Broken(KEY, "x", distrust=True), 2)
    node.on(Stepped(1), 3)
    actions = node.on(begin(Role.PREFILL, 2), 4)
    assert [each.reason for each in actions if isinstance(each, RequestFailed)] == [f"here: {CANNOT}"]
    [run] = [action for action in node.on(begin(Role.MIXED, 3), 5) if isinstance(action, Run)]
    assert [(piece.assembly, piece.count) for piece in run.chunks] == [(None, 16)]


def test_what_is_packed_is_never_lent_and_nobody_hears_of_what_was_dropped() -> None:
    node = with_donor(report_ns=1)
    node.on(begin(Role.MIXED), 1)
    [used] = [action for action in node.on(Stepped(1), 2) if isinstance(action, MemoryUsed)]
    assert PACKING is not None and used.num_available == 60 - 16 + PACKING.num_dropped
    assert used.entries == (MemoryEntry(RequestId("r"), 1, 16 - PACKING.num_dropped),)
    for order in (
        events.Lend(RequestId("r"), 1, HERE, PEER, 2),
        events.Repay(RequestId("r"), 1, HERE, PEER, 1),
    ):
        told = [each for each in node.on(order, 3) if isinstance(each, HoldingsChanged)]
        assert told == [HoldingsChanged(RequestId("r"), 1, ())]
