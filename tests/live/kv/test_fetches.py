"""Cached blocks between nodes: what arrives is right, what was taken is given back, and what must not be believed is
not. `here` wants, `there` gives; a liar takes the place of either."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.blocks import seal, state_names
from isthmus.core.node import events
from isthmus.core.node.letters import FetchDone, FetchRequest
from isthmus.core.types import RequestId, Tier
from isthmus.live.kv.cache import LOADERS, PrefixMissing
from isthmus.live.kv.fetches import host_id
from isthmus.live.kv.loans import GIVE_BLOCKS, MAX_PULLS
from isthmus.live.peers import wire
from isthmus.live.peers.messages import FetchedSlices, FetchServed, LentBlocks, Pull
from isthmus.live.store import Arena, ArenaHandle, Shape
from tests.live.kv.world import (
    BLOCKS,
    KEY,
    LAYOUT,
    NAMES,
    NETWORKS,
    OTHER,
    THIRD,
    HarmfulNetwork,
    Liar,
    World,
    layer_of,
    played,
    sealed,
    until,
)

SIZE, LAYERS, WIDTH = LAYOUT.block_size, LAYOUT.num_layers, LAYOUT.slice_bytes
LAST = LAYERS - 1
SHAPE = Shape(LAYERS, WIDTH)
ZERO, SEALS = bytes(WIDTH), (b"x" * 16,)
CANARY = b"\xa5" * LAYOUT.block_bytes


def only_right(world: World, stop: int) -> list[int]:
    """Which of the first blocks `here` has; none of them has a wrong byte."""
    chain = world.here.chain(stop)
    assert all(got in (None, sent) for got, sent in zip(chain, BLOCKS, strict=False)), "a wrong byte"
    return [at for at, got in enumerate(chain) if got is not None]


# What arrives.


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize(("codec", "shares"), [("none", False), ("zstd", False), ("none", True)])
@played(slots=200)
async def test_blocks_arrive_as_they_are_and_a_load_reads_them_as_they_come(
    world: World, codec: str, shares: bool, network: object
) -> None:
    here, there, count = world.node(shares=shares, slots=200), world.there, 2 * GIVE_BLOCKS + 3
    await world.join(here, there)
    here.put(0, 1)
    there.put(0, count)
    here.fetch(count, 1, codec)
    here.do(events.LoadBlocks(KEY, NAMES[:5], (0, 1, 2, 3, 4), 20, arriving=True))
    load = here.mover.load_of(KEY)
    assert load is not None
    await asyncio.to_thread(load.wait, LAST, 5)
    assert [here.block(at) for at in range(5)] == BLOCKS[:5]
    assert await here.fetch_ended() == events.BlocksFetched(KEY, count)
    await until(lambda: here.chain(count) == BLOCKS[:count])
    assert events.Progress(KEY, fetched=True) in here.facts
    await there.heard(FetchDone)
    gauges = here.mover.gauges()
    ways = {True: "kv_bytes_borrowed_total", False: "kv_bytes_fetched_total"}
    moved = (count - 1) * LAYOUT.block_bytes
    assert (gauges[ways[shares]], gauges[ways[not shares]]) == (moved, 0)
    assert there.mover.gauges()["kv_bytes_given_total"] == (0 if shares else moved)


@pytest.mark.parametrize("missing", [0, 1, 4])
@played()
async def test_what_the_source_has_not_ends_the_prefix(world: World, missing: int) -> None:
    there = world.there
    there.put(0, 6)
    if missing != 1:
        there.store.drop([NAMES[missing]])
    else:
        there.decides = lambda fact: False
        there.do(events.Give(KEY, OTHER, NAMES[:6], 0, 6, 0))
        there.store.drop([NAMES[1]])
    assert await world.here.fetched(6) == missing
    assert only_right(world, 6) == list(range(missing))
    there.do(events.EndGive(KEY, OTHER))


@played()
async def test_a_block_that_came_from_elsewhere_meanwhile_is_not_kept_twice(world: World) -> None:
    world.there.put(0, 6)
    world.here.put(0, 2)
    assert await world.here.fetched(6) == 6
    assert world.here.store.stat().memory.num_blocks == 6


@played(disk=True)
async def test_blocks_on_the_disk_of_the_source(world: World) -> None:
    """`here` has the disk, so it gives."""
    world.here.put(0, 6)
    world.here.store.flush()
    world.here.store.demote(NAMES[1:4])
    world.here.store.flush()
    assert world.here.store.tier(NAMES[2]) is Tier.DISK
    assert await world.there.fetched(6) == 6
    assert world.there.chain(6) == BLOCKS[:6]


@pytest.mark.parametrize("shares", [False, True], ids=["bytes", "lent"])
@played()
async def test_it_goes_on_as_room_comes(world: World, shares: bool) -> None:
    """Three slots are free; three more when the first three blocks are offered."""
    here = world.node(slots=6, shares=shares)
    await world.join(here, world.there)
    world.there.put(0, 8)
    others = [bytes([9, number]) * 8 for number in range(3)]
    for name in others:
        here.store.put(name, None, BLOCKS[20])

    def make_way(fact: events.Event) -> bool:
        if isinstance(fact, events.BlocksFetched) and not fact.ended:
            here.do(events.DropBlocks(tuple(others)))
        return True

    here.decides = make_way
    assert await here.fetched(8) == 6
    assert [fact.stop for fact in here.of(events.BlocksFetched) if not fact.ended] == [3, 6]
    assert here.chain(8) == [*BLOCKS[:6], None, None]


@pytest.mark.parametrize("shares", [False, True])
@played()
async def test_without_any_room_nothing_is_fetched(world: World, shares: bool) -> None:
    here = world.node(slots=2, shares=shares)
    await world.join(here, world.there)
    world.there.put(0, 4)
    here.leave_room(0)
    assert await here.fetched(4) == 0


@played()
async def test_many_fetches_at_once_over_one_session(world: World) -> None:
    world.there.put(0, 20)
    keys = [RequestId(f"f{number}") for number in range(3)]
    for key in keys:
        world.here.fetch(20, key=key)
    assert [(await world.here.fetch_ended(key)).stop for key in keys] == [20] * 3
    assert world.here.chain(20) == BLOCKS[:20] and world.here.store.stat().memory.num_blocks == 20


@played()
async def test_nodes_whose_loads_all_wait_for_each_other_still_answer(world: World) -> None:
    """Every loader of the source waits for blocks that nobody gives."""
    here, there = world.here, world.there
    there.put(0, 4)
    here.decides = lambda fact: not isinstance(fact, events.LetterReceived)
    keys = [RequestId(f"w{number}") for number in range(LOADERS)]
    for key in keys:
        there.do(events.Fetch(key, OTHER, NAMES[8:9], 0))
        there.do(events.LoadBlocks(key, NAMES[8:9], (0,), SIZE, arriving=True))
    assert await here.fetched(4) == 4
    for key in keys:
        there.do(events.ReleaseResources(key))


@played()
async def test_a_load_reads_only_what_its_fetch_has_of_its_prefix(world: World) -> None:
    """The prefix in use ends with a state where the fetch goes on with the prompt."""
    here = world.here
    (state,) = state_names(NAMES[1], 1)
    here.put(0, 2)
    assert here.store.put(state, NAMES[1], BLOCKS[7])
    world.there.put(0, 4)
    here.fetch(4, 2)
    here.do(events.LoadBlocks(KEY, (*NAMES[:2], state), (0, 1, 5), 2 * SIZE, arriving=True, told=True))
    assert await here.told(events.Loaded) == events.Loaded(KEY, 3)
    assert [here.block(at) for at in (0, 1, 5)] == [*BLOCKS[:2], BLOCKS[7]]
    await here.fetch_ended()


# Ends in mid-way.


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@played(slots=220)
async def test_the_source_leaves_in_midway(world: World, network: object) -> None:
    world.leaves = True
    world.there.put(0, 200)
    world.here.at_message = lambda: world.there.session.abort("killed")  # type: ignore[union-attr]
    assert await world.here.fetched(200) < 200
    only_right(world, 200)


@pytest.mark.parametrize("when", ["before it is reached", "before it was answered", "under way"])
@played(alone=True, slots=8)
async def test_a_fetch_that_is_ended_says_so_and_is_written_by_nothing(world: World, when: str) -> None:
    here = world.here
    if when == "before it is reached":
        there = world.node()
        there.put(0, 4)
        here.addresses[OTHER] = await there.listen()
        here.do(events.Fetch(KEY, OTHER, NAMES[:4], 0), events.EndFetch(KEY))
        assert (await here.fetch_ended()).stop == 0
        await world.quiet()
        assert not here.placed
        return
    liar = await world.liar()
    here.fetch(4)
    await liar.hears(Pull)
    if when == "under way":
        await world.under_way(liar, *given_of(0, 0, 4))
    here.do(events.EndFetch(KEY))
    assert (await here.fetch_ended()).stop == 0
    slots = here.store.reserve(8)
    assert len(slots) == 8
    for slot in slots:
        here.arena.slot(slot)[:] = CANARY
    world.network.thaw()
    liar.say(*given_of(1, 0, 4))
    await world.quiet()
    assert all(here.arena.slot(slot) == CANARY for slot in slots) and not here.of(events.Gone)
    here.store.give_back(slots)


# What must not be believed: a liar gives.


def given_of(
    layer: int, first: int, stop: int, codec: str = "none", at: int = 0
) -> tuple[FetchedSlices, bytes]:
    """These blocks of the chain in one layer, as an honest node gives them to who asked for those from `at` on."""
    parts = [memoryview(layer_of(data, layer)) for data in BLOCKS[first:stop]]
    payload, seals = wire.pack(codec, LAYOUT, parts, len(parts) * SIZE, lambda: list(map(seal, parts)))
    return FetchedSlices(KEY, layer, first - at, seals), b"".join(payload)


def give(liar: Liar, first: int, stop: int, layers: Sequence[int] = range(LAYERS)) -> None:
    """All that was asked for."""
    for layer in layers:
        liar.say(*given_of(layer, first, stop, at=first))
    liar.say(FetchServed(KEY, stop - first), priority=2)


async def asked(world: World, stop: int = 4, room: int = 3, codec: str = "none", **how: Any) -> Liar:
    """`here` asked a liar for blocks, and has room for some of them."""
    liar = await world.liar(**how)
    world.here.leave_room(room)
    world.here.fetch(stop, codec=codec)
    await liar.hears(Pull)
    world.leaves = True
    return liar


LIES: dict[str, Callable[[Liar], object]] = {
    "again": lambda liar: liar.say(*given_of(0, 0, 1)),
    "before the start": lambda liar: liar.say(FetchedSlices(KEY, 0, -1, SEALS), ZERO),
    "more than there is room for": lambda liar: liar.say(*given_of(0, 1, 4)),
    "past the end": lambda liar: liar.say(FetchedSlices(KEY, 0, 3, SEALS), ZERO),
    "no layer of the model": lambda liar: liar.say(FetchedSlices(KEY, LAYERS, 1, SEALS), ZERO),
    "a negative layer": lambda liar: liar.say(FetchedSlices(KEY, -1, 1, SEALS), ZERO),
    "nothing sealed": lambda liar: liar.say(FetchedSlices(KEY, 0, 1, ()), ZERO),
    "a block unsealed": lambda liar: liar.say(FetchedSlices(KEY, 0, 1, SEALS), ZERO, ZERO),
    "too many bytes": lambda liar: liar.say(FetchedSlices(KEY, 0, 1, SEALS), ZERO, b"1"),
    "too few bytes": lambda liar: liar.say(FetchedSlices(KEY, 0, 1, SEALS), ZERO[1:]),
}


@pytest.mark.parametrize("lie", LIES)
@played(alone=True)
async def test_what_must_not_come_next_ends_the_session(world: World, lie: str) -> None:
    """The first of four blocks is there in layer 0, and room for three."""
    liar = await asked(world)
    liar.say(*given_of(0, 0, 1))
    await world.quiet()
    arena = bytes(world.here.arena.memory)
    LIES[lie](liar)
    await world.quiet()
    assert "are not what must come next" in world.here.of(events.Gone)[0].reason
    assert (await world.here.fetch_ended()).stop == 0 and bytes(world.here.arena.memory) == arena


HANDLE = ArenaHandle("/proc/self/fd/0", b"n" * 16, 4, SHAPE)
VAIN: dict[str, Callable[[Liar], object]] = {
    "wrong seals": lambda liar: liar.say(FetchedSlices(KEY, 0, 0, SEALS), ZERO),
    "no payload": lambda liar: liar.say(FetchedSlices(KEY, 0, 0, SEALS)),
    "a gap": lambda liar: (liar.say(*given_of(0, 1, 3)), give(liar, 0, 3, (1, 2))),
    "the end of what did not come": lambda liar: liar.say(FetchServed(KEY, 3)),
    "the end of more than there was room for": lambda liar: liar.say(FetchServed(KEY, 99)),
}


@pytest.mark.parametrize("lie", VAIN)
@played(alone=True)
async def test_lies_end_the_fetch_and_leave_nothing(world: World, lie: str) -> None:
    liar = await asked(world)
    VAIN[lie](liar)
    assert (await world.here.fetch_ended()).stop == 0
    assert world.here.store.stat().memory.num_blocks == 0 and not world.here.of(events.Gone)
    assert world.here.mismatches == (lie[:7] != "the end")


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, LAST), st.integers(1, 3)), max_size=20))
@played(alone=True)
async def test_whatever_the_order_of_layers_only_whole_blocks_are_kept(
    world: World, order: list[tuple[int, int]]
) -> None:
    liar, landed = await asked(world, 8, 8), [0] * LAYERS
    for layer, count in order:
        stop = min(8, landed[layer] + count)
        if stop > landed[layer]:
            liar.say(*given_of(layer, landed[layer], stop))
            landed[layer] = stop
    liar.say(FetchServed(KEY, min(landed)), priority=2)
    assert (await world.here.fetch_ended()).stop == min(landed)
    assert world.here.chain(8) == [*BLOCKS[: min(landed)], *[None] * (8 - min(landed))]


@pytest.mark.parametrize("same_peer", [True, False])
@played(alone=True)
async def test_of_a_fetch_only_the_session_is_heard_that_was_asked(world: World, same_peer: bool) -> None:
    liar = await asked(world, sessions=2 if same_peer else 1)
    stranger, over = (liar, 1) if same_peer else (await world.liar(THIRD), 0)
    await world.under_way(liar, *given_of(0, 0, 3))
    for lie in (FetchedSlices(KEY, 0, 0, SEALS), FetchServed(KEY, 3), loan_of(world)):
        stranger.say(lie, over=over)
    await world.quiet()
    assert not world.here.of(events.BlocksFetched) and not world.here.of(events.Gone)
    assert not world.here.mismatches and not world.here.mover.gauges()["kv_bytes_fetched_total"]
    stranger.say(*given_of(1, 0, 3), over=over)
    await world.quiet()
    gone = world.here.of(events.Gone)
    assert "came over a session that nobody asked" in gone[0].reason and gone[0].peer == stranger.name
    if not same_peer:
        world.network.thaw()
        give(liar, 0, 3, (1, 2))
        assert (await world.here.fetch_ended()).stop == 3
    world.network.thaw()
    await world.here.fetch_ended()


@played(alone=True)
async def test_two_frames_under_way_never_share_a_place_and_one_given_up_may_come_again(world: World) -> None:
    liar = await asked(world)
    await world.under_way(liar, *given_of(0, 0, 3))
    head, payload = given_of(0, 1, 3)
    liar.say(replace(head, seals=SEALS * 2), payload)
    world.network.thaw()
    await world.quiet()
    assert "are not what must come next" in world.here.of(events.Gone)[0].reason
    await world.here.fetch_ended()


@played(alone=True, network=lambda: HarmfulNetwork(piece=0))
async def test_nothing_is_taken_of_a_fetch_that_is_over(world: World) -> None:
    liar = await asked(world)
    for link in world.network.links:
        link.freeze()
    world.here.at_message = lambda: world.here.do(events.EndFetch(KEY))
    liar.say(FetchServed(KEY, 0))
    liar.say(*given_of(0, 0, 1))
    world.network.thaw()
    await world.quiet()
    assert "are not what must come next" in liar.reasons[0]


@played(alone=True)
async def test_a_source_that_gives_up_in_the_midst_ends_the_fetch(world: World) -> None:
    liar = await asked(world)
    (await world.under_way(liar, *given_of(0, 0, 3))).cancel()
    assert (await world.here.fetch_ended()).stop == 0 and not world.here.mismatches


@played()
async def test_what_nobody_asked_for_is_read_past(world: World) -> None:
    liar = await world.liar(THIRD)
    for answer in (FetchServed(KEY, 3), loan_of(world), FetchDone(KEY)):
        liar.say(answer)
    liar.say(*given_of(0, 0, 1))
    await world.quiet()
    world.there.put(0, 4)
    assert await world.here.fetched(4) == 4 and not liar.reasons


@played(alone=True)
async def test_what_no_fetch_brought_is_lost(world: World) -> None:
    world.here.do(events.AdoptBlocks(KEY, NAMES[:2]))
    assert await world.here.told(events.BlocksLost) == events.BlocksLost(NAMES[:2])


# Loans: blocks that are copied from where they lie.


def loan_of(world: World, slots: Sequence[int] = (0, 1, 2, 3), **changes: Any) -> LentBlocks:
    return LentBlocks(KEY, HANDLE, tuple(slots), tuple([(b"s",) * LAYERS for _ in slots]), **changes)


async def lending(world: World, harm: Callable[[Arena], None] = bool, **changes: Any) -> tuple[Liar, Arena]:  # type: ignore[assignment]
    """`here` was lent four blocks of a liar's arena."""
    liar, arena = await world.liar(), Arena(SHAPE, 4)
    for slot in range(4):
        arena.slot(slot)[:] = BLOCKS[slot]
    harm(arena)
    world.here.fetch(4)
    pull = await liar.hears(Pull)
    assert pull == Pull(KEY, 0, 4, host_id()) and arena.handle is not None
    seals = tuple([sealed([layer_of(data, layer) for layer in range(LAYERS)]) for data in BLOCKS[:4]])
    liar.say(replace(LentBlocks(KEY, arena.handle, (0, 1, 2, 3), seals), **changes))
    return liar, arena


@pytest.mark.parametrize(("at", "layer"), [(0, 0), (2, 1), (3, LAST)])
@played(alone=True, shares=True, slots=4)
async def test_a_lent_block_that_is_not_what_its_seals_say_is_not_used(
    world: World, at: int, layer: int
) -> None:
    """Its owner has reused the slot."""

    def harm(arena: Arena) -> None:
        arena.slice(at, layer)[5] ^= 1

    world.here.decides = lambda fact: True
    _, arena = await lending(world, harm)
    world.here.do(events.LoadBlocks(KEY, NAMES[:4], (0, 1, 2, 3), 16, arriving=True))
    load = world.here.mover.load_of(KEY)
    assert load is not None
    stop = (await world.here.fetch_ended()).stop
    await asyncio.to_thread(load.over.wait)
    with pytest.raises(PrefixMissing) as raised:
        load.wait(LAST, 4)
    assert raised.value.num_blocks == stop <= at and world.here.mismatches == 1
    assert only_right(world, 4) == list(range(stop))
    arena.close()


@played(alone=True, shares=True, slots=6)
async def test_a_loan_that_is_ended_is_copied_no_further(world: World) -> None:
    here, loop, ended, layers = world.here, asyncio.get_running_loop(), threading.Event(), set[int]()

    def before(what: str, layer: Any) -> None:
        layers.add(layer)
        if layer == 1 and not ended.is_set():
            loop.call_soon_threadsafe(lambda: (here.do(events.EndFetch(KEY)), ended.set()))
            assert ended.wait(60)

    here.arena.before = before
    _, arena = await lending(world)
    assert (await here.fetch_ended()).stop == 0
    assert layers == {0, 1} and not here.of(events.BlocksLost)
    arena.close()


FALSE_LOANS: dict[str, Callable[[LentBlocks], LentBlocks]] = {
    "slots without seals": lambda lent: replace(lent, seals=lent.seals[1:]),
    "a layer without a seal": lambda lent: replace(lent, seals=(*lent.seals[1:], lent.seals[0][1:])),
    "a slot of nowhere": lambda lent: replace(lent, slots=(-1, *lent.slots[1:])),
    "a slot that the arena has not": lambda lent: replace(lent, slots=(*lent.slots[1:], 4)),
    "more than was wanted": lambda lent: replace(lent, slots=lent.slots * 2, seals=lent.seals * 2),
    "another shape": lambda lent: replace(lent, arena=replace(lent.arena, shape=Shape(3, WIDTH + 8))),
    "what was to be sent": lambda lent: lent,
}


@pytest.mark.parametrize("lie", FALSE_LOANS)
@played(alone=True)
async def test_a_loan_is_what_was_asked_for_in_every_way(world: World, lie: str) -> None:
    here = world.node(shares=lie != "what was to be sent")
    world.here, world.address, world.leaves = here, await here.listen(), True
    liar, arena = await world.liar(), Arena(SHAPE, 4)
    here.fetch(4)
    await liar.hears(Pull)
    assert arena.handle is not None
    liar.say(FALSE_LOANS[lie](replace(loan_of(world), arena=arena.handle)))
    assert (await here.fetch_ended()).stop == 0
    assert "is not what was asked for" in here.of(events.Gone)[0].reason and not here.mismatches
    arena.close()


@played(alone=True, shares=True)
async def test_an_arena_that_cannot_be_mapped_is_asked_for_its_bytes(world: World) -> None:
    """As that of another container of the same host."""
    liar = await world.liar()
    world.here.fetch(4)
    await liar.hears(Pull)
    liar.say(loan_of(world))
    assert await liar.hears(Pull, 2) == Pull(KEY, 0, 4)
    give(liar, 0, 4)
    assert (await world.here.fetch_ended()).stop == 4 and only_right(world, 4) == [0, 1, 2, 3]
    world.here.fetch(6, 4, key=RequestId("b#1"))
    assert await liar.hears(Pull, 3) == Pull(RequestId("b#1"), 4, 2)
    world.leaves = True


# The side that gives: a liar asks.

COUNT = 6


async def wanting(world: World, pull: Pull | None = None, count: int = COUNT, **how: Any) -> Liar:
    """A liar wants blocks, and asks for them if it says so."""
    liar = await world.liar(**how)
    world.here.put(0, count)
    liar.say(FetchRequest(KEY, NAMES[:count], 0))
    if pull is not None:
        liar.say(pull)
    await world.quiet()
    return liar


@played(alone=True)
async def test_what_is_given_is_what_was_asked_for_in_one_form(world: World) -> None:
    liar = await wanting(world, Pull(KEY, 1, 3))
    assert await liar.hears(FetchServed) == FetchServed(KEY, 3)
    for layer in range(LAYERS):
        parts = [layer_of(data, layer) for data in BLOCKS[1:4]]
        assert liar.heard[layer] == (FetchedSlices(KEY, layer, 0, sealed(parts)), b"".join(parts))
    await world.here.idle()
    assert world.here.mover.gauges()["kv_bytes_given_total"] == 3 * LAYOUT.block_bytes
    liar.say(Pull(KEY, 5, 9))
    await liar.hears(FetchServed, 2)
    assert liar.of(FetchServed) == [FetchServed(KEY, 3), FetchServed(KEY, 1)]


@pytest.mark.parametrize(
    ("pull", "why"),
    [
        (Pull(KEY, 0, 4, codec="rot13"), "cannot be given"),
        (Pull(KEY, 0, -1), "cannot be given"),
        (Pull(KEY, -1, 4), "cannot be given"),
        (Pull(KEY, 5, 4), ""),
        (Pull(KEY, 0, 0), ""),
    ],
    ids=["unknown codec", "negative room", "before the start", "behind the end", "no room"],
)
@pytest.mark.parametrize("names", [4, 0])
@played(alone=True)
async def test_a_strange_pull_costs_the_source_nothing(world: World, names: int, pull: Pull, why: str) -> None:
    liar = await wanting(world, pull, names)
    if why:
        await until(lambda: liar.reasons)
        assert why in liar.reasons[0]
    else:
        assert await liar.hears(FetchServed) == FetchServed(KEY, 0) and not liar.of(FetchedSlices)


@played(alone=True, disk=True)
async def test_one_pull_at_a_time(world: World) -> None:
    here, go_on = world.here, threading.Event()
    here.put_on_disk(0, COUNT)
    here.store.before = lambda what, name: go_on.wait(60)
    liar = await world.liar()
    liar.say(FetchRequest(KEY, NAMES[:COUNT], 0))
    for _ in range(2):
        liar.say(Pull(KEY, 0, 3))
    await until(lambda: liar.reasons)
    go_on.set()
    assert "a second Pull" in liar.reasons[0]


@played(alone=True)
async def test_what_is_asked_for_before_the_node_decided_waits_for_that(world: World) -> None:
    here, never, both = world.here, RequestId("never#1"), RequestId("b#1")
    here.decides = lambda fact: False
    here.put(0, COUNT)
    liar = await world.liar()
    for key in (never, *[RequestId(f"{at}#1") for at in range(MAX_PULLS - 2)], both, KEY):
        liar.say(Pull(key, 0, COUNT))
    await world.quiet()
    here.do(events.Give(KEY, THIRD, NAMES[:COUNT], 0, COUNT, 0), events.EndGive(both, OTHER))
    for key in (never, both):
        here.do(events.Give(key, OTHER, NAMES[:COUNT], 0, COUNT, 0))
    await world.quiet()
    assert not liar.heard, "they asked for nothing since"
    for stop in (2, 3):
        here.do(events.Give(KEY, OTHER, NAMES[:COUNT], 0, stop, 0))
    await world.quiet()
    liar.say(Pull(KEY, 0, COUNT))
    await world.quiet()
    assert liar.of(FetchServed)[-1] == FetchServed(KEY, 3) and len(liar.of(FetchServed)) <= 2


@pytest.mark.parametrize("how", ["enough", "lost", "closed"])
@played(alone=True, slots=200)
async def test_a_borrower_that_goes_leaves_nothing_pinned_and_no_more_than_two_batches_wait_for_it(
    world: World, how: str
) -> None:
    here, count = world.here, 3 * GIVE_BLOCKS
    liar = await wanting(world, count=count)
    here.at_message = lambda: [link.freeze() for link in world.network.links]
    liar.say(Pull(KEY, 0, count))
    await until(lambda: here.held() == (2 * GIVE_BLOCKS, 0))
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert here.held() == (2 * GIVE_BLOCKS, 0)
    if how == "enough":
        here.do(events.EndGive(KEY, OTHER))
    elif how == "lost":
        here.session.abort("killed")  # type: ignore[union-attr]
    else:
        await here.mover.close()
    await here.idle()
    assert not liar.of(FetchServed)


@played(alone=True)
async def test_what_is_lent_stays_until_who_got_it_has_enough(world: World) -> None:
    here = world.here
    stranger = await world.liar(THIRD)
    liar = await wanting(world, Pull(KEY, 0, COUNT, host_id()))
    lent = await liar.hears(LentBlocks)
    assert [len(seals) for seals in lent.seals] == [LAYERS] * COUNT
    stranger.say(FetchDone(KEY))
    liar.say(FetchDone(RequestId("b#1")))
    await world.quiet()
    stranger.sessions[0].abort("gone")
    await here.told(events.Gone)
    here.store.drop(NAMES[:COUNT])
    taken = here.store.reserve(here.arena.num_slots)
    await world.quiet()
    assert here.held()[0] == COUNT and not liar.of(FetchedSlices) and not set(taken) & set(lent.slots)
    for slot, block in zip(lent.slots, BLOCKS, strict=False):
        assert bytes(here.arena.slot(slot)) == block, "somebody else wrote there"
    liar.say(FetchDone(KEY))
    here.store.give_back(taken)
    await here.idle()


@pytest.mark.parametrize("session", ["lost", "closing"])
@played(alone=True)
async def test_what_is_lent_to_a_node_that_is_lost_comes_back(world: World, session: str) -> None:
    liar = await wanting(world, Pull(KEY, 0, COUNT, host_id()))
    await liar.hears(LentBlocks)
    (liar.sessions[0].abort if session == "lost" else liar.sessions[0].close)("gone")
    await world.here.idle()


@played(alone=True)
async def test_to_another_host_nothing_is_lent(world: World) -> None:
    liar = await wanting(world, Pull(KEY, 0, COUNT, "another"))
    await liar.hears(FetchServed)
    assert not liar.of(LentBlocks) and len(liar.of(FetchedSlices)) == LAYERS
