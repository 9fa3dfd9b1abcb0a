"""A node's cached blocks: into the engine layer by layer, from there to the store, and between its tiers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.blocks import KVLayout
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.scheduler import Preempted, Saved
from isthmus.core.types import BlockName, RequestId, Tier
from isthmus.live.kv.cache import AHEAD, LOADERS, Loading, PrefixMissing, chains_of
from isthmus.live.kv.mover import KVMover
from isthmus.live.peers.messages import FetchedSlices, Pull
from tests.live.kv.test_fetches import asked, give, given_of
from tests.live.kv.world import BLOCKS, KEY, LAYOUT, NAMES, OTHER, Node, World, layer_of, played, until

SIZE, LAST, WIDTH = LAYOUT.block_size, LAYOUT.num_layers - 1, LAYOUT.slice_bytes
NEXT = RequestId("b#1")

Test = Callable[..., Coroutine[Any, Any, None]]


def cached(test: Test | None = None, **how: Any) -> Any:
    """In a world of one node with a disk, of whose slots five may hold what is read ahead."""
    how = {"slots": 5 * AHEAD, "alone": True, "disk": True} | how
    return played(**how)(test) if test is not None else played(**how)


class Gate:
    """Holds up what is about to be done (`fill` or `save` of memory, `read` of the store) until it may go on; `done`:
    what was begun."""

    def __init__(self, what: str, fails: BaseException | None = None) -> None:
        self.began, self.done, self._open, self._what = threading.Event(), list[Any](), threading.Event(), what
        self.go_on, self._fails = self._open.set, fails

    def __call__(self, what: str, which: Any) -> None:
        if what != self._what:
            return
        self.done.append(which)
        self.began.set()
        assert self._open.wait(60)
        if self._fails is not None:
            raise self._fails

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.began.wait, 60)


def opened(what: str, fails: BaseException | None = None) -> Gate:
    gate = Gate(what, fails)
    gate.go_on()
    return gate


async def settled(node: Node) -> None:
    """All that was decided so far is done, and what was being read ahead is here or given back."""
    await asyncio.wrap_future(node.cache.kept())
    pinned = await asyncio.to_thread(node.cache.pin, NAMES[:10])
    node.store.unpin([each for each in pinned if each is not None])
    await asyncio.wrap_future(node.cache.kept())


def load(
    node: Node, stop: int, blocks: Sequence[int] | None = None, key: RequestId = KEY, **how: Any
) -> Loading:
    node.do(events.LoadBlocks(key, NAMES[:stop], tuple(blocks or range(stop)), SIZE * stop, **how))
    found = node.mover.load_of(key)
    assert found is not None
    return found


async def loaded(load: Loading, num_blocks: int) -> None:
    """All layers of its first blocks are there, and nothing more comes."""
    if num_blocks < len(load.names):
        with pytest.raises(PrefixMissing) as raised:
            await asyncio.to_thread(load.wait, LAST, len(load.names))
        assert raised.value.num_blocks == num_blocks
    await asyncio.to_thread(load.wait, LAST, num_blocks)
    assert await asyncio.to_thread(load.over.wait, 60)


def blocks(node: Node, numbers: Sequence[int]) -> list[bytes]:
    return [node.block(number) for number in numbers]


def tiers(node: Node, stop: int) -> list[Tier | None]:
    return [node.store.tier(name) for name in NAMES[:stop]]


def compute(node: Node, start: int, stop: int) -> None:
    """The engine has these blocks, under their own numbers."""
    for number in range(start, stop):
        node.write(number, BLOCKS[number])


def save(node: Node, start: int, stop: int, num_sunk: int = 0, key: RequestId = KEY) -> None:
    head = NAMES[start - 1] if start else None
    node.do(events.SaveBlocks(key, NAMES[start:stop], head, tuple(range(start, stop)), num_sunk))


async def saved(node: Node, start: int, stop: int, num_sunk: int = 0) -> list[BlockName]:
    """Saves them. Which found no room."""
    before, lost = len(node.of(Saved)), len(node.of(events.BlocksLost))
    save(node, start, stop, num_sunk)
    await node.told(Saved, before + 1)
    await settled(node)
    return [name for fact in node.of(events.BlocksLost)[lost:] for name in fact.names]


# Any order of decisions.

ACTS = st.tuples(
    st.sampled_from(["save", "drop", "demote", "promote", "load", "read", "stage"]),
    st.integers(0, 5),
    st.integers(1, 3),
)


@settings(max_examples=60)
@given(st.lists(ACTS, max_size=25))
@cached
async def test_whatever_is_decided_the_store_has_it_and_loads_read_it(
    world: World, acts: list[tuple[str, int, int]]
) -> None:
    """Actions follow each other at once; only loads are awaited."""
    node, have, number = world.here, dict[int, Tier](), 0
    compute(node, 0, 9)
    for act, first, count in acts:
        span = range(first, min(6, first + count))
        here = [at for at in span if at in have]
        names = tuple([NAMES[at] for at in here])
        if act == "save" and all(at in have for at in range(first)):
            save(node, span.start, span.stop)
            have |= dict.fromkeys(span, Tier.MEMORY)
        elif act == "stage":
            staging = node.mover.stage(KEY, NAMES[first : span.stop], list(span))
            for layer in range(count if staging is not None else 0):
                node.mover.save_layer(staging, layer)
        elif act == "drop":
            node.do(events.DropBlocks(NAMES[first:6]))
            have = {at: tier for at, tier in have.items() if at < first}
        elif act in ("demote", "promote"):
            node.do(events.Demote(names) if act == "demote" else events.Promote(names))
            have |= dict.fromkeys(here, Tier.DISK if act == "demote" else Tier.MEMORY)
        elif act in ("load", "read") and 0 in have:
            stop, key, number = max(have) + 1, RequestId(f"l{number}"), number + 1
            if act == "read":
                node.do(events.Read(key, NAMES[:stop]))
            target = range(9, 9 + stop)
            for at in target:
                node.write(at, bytes(LAYOUT.block_bytes))
            node.do(events.LoadBlocks(key, NAMES[:stop], tuple(target), SIZE * stop, told=True))
            assert await node.told(events.Loaded, number) == events.Loaded(key, stop)
            assert blocks(node, target) == BLOCKS[:stop]
    node.do(Preempted(KEY))
    await settled(node)
    assert tiers(node, 6) == [have.get(at) for at in range(6)]
    assert node.chain(6) == [BLOCKS[at] if at in have else None for at in range(6)]
    assert not node.of(events.BlocksLost)


# Loads.


@cached
async def test_a_prefix_is_loaded_from_both_tiers_layer_by_layer(world: World) -> None:
    node, order = world.here, [9, 3, 4, 8, 1, 0]
    node.put(0, 6)
    node.store.flush()
    node.store.demote([NAMES[1], NAMES[4]])
    begun = load(node, 6, order)
    for layer in range(LAST + 1):
        await asyncio.to_thread(begun.wait, layer, 6)
        assert [layer_of(each, layer) for each in blocks(node, order)] == [
            layer_of(b, layer) for b in BLOCKS[:6]
        ]
    await loaded(begun, 6)


LARGE = KVLayout(dtype="bfloat16", block_size=16, num_layers=3, num_kv_heads=16, head_dim=64)


@cached(layout=LARGE, slots=4, blocks=4)
async def test_large_slices_are_read_a_few_layers_at_a_time(world: World) -> None:
    world.here.put_on_disk(0, 3)
    await loaded(load(world.here, 3), 3)
    assert blocks(world.here, range(3)) == world.here.chain(3)


@pytest.mark.parametrize("missing", [0, 2, 5])
@cached
async def test_a_block_that_is_nowhere_shortens_the_prefix(world: World, missing: int) -> None:
    world.here.put(0, 6)
    world.here.store.drop([NAMES[missing]])
    await loaded(load(world.here, 6), missing)
    assert await world.here.told(events.BlocksLost) == events.BlocksLost((NAMES[missing],))
    assert blocks(world.here, range(missing)) == BLOCKS[:missing]


def damage(world: World, number: int, layer: int = 1) -> None:
    """A byte of this block on disk is another."""
    assert world.folder is not None
    for path in [path for path in world.folder.parent.rglob("*") if path.is_file()]:
        data = path.read_bytes()
        if (at := data.find(layer_of(BLOCKS[number], layer))) >= 0:
            with Path(path).open("r+b") as file:
                file.seek(at + 5)
                file.write(bytes([data[at + 5] ^ 4]))
            return
    raise AssertionError("it is not on disk")


@pytest.mark.parametrize("layer", range(LAST + 1))
@pytest.mark.parametrize("ahead", [False, True])
@cached
async def test_a_block_damaged_on_disk_shortens_the_prefix(world: World, layer: int, ahead: bool) -> None:
    world.here.put_on_disk(0, 5)
    damage(world, 3, layer)
    if ahead:
        world.here.do(events.Read(KEY, NAMES[:5]))
    await loaded(load(world.here, 5), 3)
    assert blocks(world.here, range(3)) == BLOCKS[:3]
    assert world.here.block(3) != BLOCKS[3]


@cached(slots=10)
async def test_a_block_dropped_while_it_is_loaded_is_loaded(world: World) -> None:
    node, gate = world.here, Gate("fill")
    node.put(0, 3)
    node.memory.before = gate
    begun = load(node, 3)
    await gate.reached()
    node.store.drop(NAMES[:3])
    node.put(3, 10)  # wants every slot that is left
    gate.go_on()
    await loaded(begun, 3)
    assert blocks(node, range(3)) == BLOCKS[:3]


@cached
async def test_a_fault_in_a_load_means_that_the_prompt_is_computed(world: World) -> None:
    world.here.put(0, 3)
    world.here.memory.before = opened("fill", RuntimeError("the device is gone"))
    await loaded(load(world.here, 3), 0)


@pytest.mark.parametrize(
    "ends", [events.ReleaseResources(KEY), Preempted(KEY), events.Shorten(KEY, 0)], ids=repr
)
@cached
async def test_nothing_is_loaded_after_the_end(world: World, ends: Any) -> None:
    node, gate = world.here, Gate("fill")
    node.put(0, 3)
    node.memory.before = gate
    begun = load(node, 3, told=True)
    await gate.reached()
    ended = asyncio.create_task(asyncio.to_thread(node.do, ends))
    await until(lambda: begun.cancelled)
    assert not begun.over.is_set() and not ended.done()
    gate.go_on()
    await ended
    assert begun.over.is_set() and gate.done == [0], "it went on after the layer under way"
    assert node.mover.load_of(KEY) is None
    await world.quiet()
    assert not node.of(events.Loaded)


@cached
async def test_a_load_that_is_cancelled_before_a_thread_has_begun_it_is_over_at_once(world: World) -> None:
    node, gate = world.here, Gate("fill")
    node.put(0, 2)
    node.memory.before = gate
    others = [RequestId(f"w{at}") for at in range(LOADERS)]
    begun = [load(node, 1, [at], key) for at, key in enumerate(others, 0) if at < 15]
    begun += [load(node, 1, [15], key) for key in others[15:]]
    late = load(node, 2, [0, 1])
    node.do(Preempted(KEY))
    assert late.over.is_set()
    gate.go_on()
    for each in begun:
        await loaded(each, 1)


@cached
async def test_a_load_is_told_where_that_was_asked_for(world: World) -> None:
    node = world.here
    node.put(0, 2)
    node.do(events.LoadBlocks(KEY, NAMES[:3], (0, 1, 2), 12, told=True))
    assert await node.told(events.Loaded) == events.Loaded(KEY, 2)
    assert node.mover.load_of(KEY) is None, "a run would be told once more what is missing"
    begun = load(node, 2, key=NEXT)
    await loaded(begun, 2)
    assert node.mover.load_of(NEXT) is begun
    node.mover.loaded(NEXT)
    assert node.mover.load_of(NEXT) is None and len(node.of(events.Loaded)) == 1


@cached
async def test_blocks_of_the_engine_that_are_being_written_are_known(world: World) -> None:
    node, gate = world.here, Gate("fill")
    node.put(0, 2)
    node.memory.before = gate
    begun = load(node, 2, [4, 5])
    assert node.mover.is_loading({5, 9}) and not node.mover.is_loading({9})
    gate.go_on()
    await loaded(begun, 2)
    assert not node.mover.is_loading({5})


# Loads of what comes from another node.


@played(alone=True)
async def test_a_load_takes_layers_as_they_arrive(world: World) -> None:
    node = world.here
    node.put(0, 2)
    liar = await world.liar()
    node.fetch(5, 2)
    await world.quiet()
    begun = load(node, 5, arriving=True)
    for layer in range(LAST + 1):
        head, payload = given_of(layer, 2, 5, at=2)
        liar.say(FetchedSlices(KEY, layer, 0, head.seals[:2]), payload[: 2 * WIDTH])
        await world.quiet()
        assert layer_of(node.block(4), layer) != layer_of(BLOCKS[4], layer)
        liar.say(FetchedSlices(KEY, layer, 2, head.seals[2:]), payload[2 * WIDTH :])
        await asyncio.to_thread(begun.wait, layer, 5)
    await loaded(begun, 5)
    assert blocks(node, range(5)) == BLOCKS[:5]
    node.do(events.EndFetch(KEY))
    await node.fetch_ended()


@pytest.mark.parametrize("how", ["ends early", "lacks what is before it", "is not waited for"])
@played(alone=True)
async def test_a_fetch_that_brings_less_shortens_the_prefix(world: World, how: str) -> None:
    node = world.here
    node.put(0, 2)
    node.decides = lambda fact: not isinstance(fact, events.BlocksFetched)
    liar = await world.liar()
    node.fetch(6, 2)
    if how == "lacks what is before it":
        node.store.drop(NAMES[1:2])
    await world.quiet()
    begun = load(node, 6, arriving=True)
    if how == "is not waited for":
        node.do(Preempted(KEY))
        assert begun.over.is_set()
    for layer in range(LAST + 1):
        liar.say(*given_of(layer, 2, 5 - layer, at=2))
    await world.quiet()
    node.do(events.EndFetch(KEY))
    if how != "is not waited for":
        stop = 3 if how == "ends early" else 1
        await loaded(begun, stop)
        assert blocks(node, range(stop)) == BLOCKS[:stop] and not any(node.block(stop + 1))
    await node.fetch_ended()


@played(alone=True)
async def test_what_came_is_adopted_after_all_that_was_decided_before_and_a_load_waits_for_it(
    world: World,
) -> None:
    node, gate, begun = world.here, Gate("save"), list[Loading]()

    def adopt(fact: events.Event) -> bool:
        if isinstance(fact, events.BlocksFetched):
            node.do(events.DropBlocks(NAMES[1:2]), events.AdoptBlocks(KEY, NAMES[1:3]))
            begun.append(load(node, 3))
        return False

    node.decides = adopt
    node.put(0, 2)
    node.memory.before = gate
    save(node, 7, 8, key=NEXT)
    await gate.reached()
    liar = await world.liar()
    node.fetch(3, 1)
    await liar.hears(Pull)
    give(liar, 1, 3)
    await until(lambda: begun)
    await world.quiet()
    assert not begun[0].over.is_set()
    gate.go_on()
    await loaded(begun[0], 3)
    assert node.chain(3) == blocks(node, range(3)) == BLOCKS[:3]
    assert [fact.names for fact in node.of(events.BlocksLost)] == [NAMES[7:8]], "it followed nothing"


@played(alone=True)
async def test_what_follows_a_block_that_is_gone_is_not_adopted_nor_what_was_adopted_and_left(
    world: World,
) -> None:
    node = world.here

    def adopt(fact: events.Event) -> bool:
        if isinstance(fact, events.BlocksFetched):
            node.do(events.AdoptBlocks(KEY, NAMES[:3]), events.DropBlocks(NAMES[2:3]))
            node.do(events.AdoptBlocks(KEY, NAMES[2:4]), events.AdoptBlocks(KEY, NAMES[3:4]))
        return False

    node.decides = adopt
    give(await asked(world, 4, 4), 0, 4)
    await node.fetch_ended()
    await world.quiet()
    assert [fact.names for fact in node.of(events.BlocksLost)] == [NAMES[2:4], NAMES[3:4]]
    assert node.chain(4) == [*BLOCKS[:2], None, None]


# Saves.


@cached
async def test_blocks_are_saved_with_what_was_staged_and_nothing_of_it_is_left(world: World) -> None:
    node = world.here
    compute(node, 0, 6)
    node.put(0, 1)
    staging = node.mover.stage(KEY, NAMES[:3], (0, 1, 2))
    assert staging is not None
    assert (list(staging.names), list(staging.blocks)) == ([NAMES[1], NAMES[2]], [1, 2]), "not what it has"
    in_part = node.mover.stage(KEY, NAMES[3:5], (3, 4))
    for layer in range(LAST + 1):
        node.mover.save_layer(staging, layer)
    node.mover.save_layer(in_part, 0)  # type: ignore[arg-type]
    await settled(node)
    assert node.chain(3)[1:] == [None, None], "nobody sees it before it is committed"
    node.write(1, BLOCKS[9])  # the engine goes on: what was staged counts
    assert await saved(node, 1, 4) == []
    assert node.chain(5) == [*BLOCKS[:4], None]
    assert node.mover.stage(KEY, NAMES[:2], (0, 1)) is None


@pytest.mark.parametrize("ends", [events.ReleaseResources(KEY), Preempted(KEY)], ids=repr)
@cached
async def test_what_was_staged_for_nothing_is_given_back(world: World, ends: Any) -> None:
    assert world.here.mover.stage(KEY, NAMES[:3], (0, 1, 2)) is not None
    assert world.here.held() == (0, 3)
    world.here.do(ends)
    await world.here.idle()


@cached(slots=10, max_staged=3)
async def test_what_is_being_computed_takes_so_many_slots_and_gives_them_back(world: World) -> None:
    node = world.here
    for _ in range(2):
        assert len(node.mover.stage(KEY, NAMES[:5], range(5)).slots) == 3  # type: ignore[union-attr]
        assert not node.mover.stage(NEXT, NAMES[5:7], (5, 6)).slots  # type: ignore[union-attr]
        node.do(Preempted(KEY), Preempted(NEXT))
        await node.idle()


@cached(slots=10)
async def test_without_room_the_tail_is_not_kept(world: World) -> None:
    node = world.here
    compute(node, 0, 4)
    node.leave_room(2)
    assert await saved(node, 0, 4) == list(NAMES[2:4])
    assert node.chain(4) == [*BLOCKS[:2], None, None]
    assert not node.mover.stage(KEY, NAMES[3:4], (3,)).slots  # type: ignore[union-attr]
    node.mover.lost_bytes([NAMES[0]])
    assert await node.told(events.BlocksLost, 2) == events.BlocksLost(NAMES[:1])


@cached
async def test_what_is_evicted_while_it_is_saved_does_not_come_back_and_what_is_saved_can_be_loaded(
    world: World,
) -> None:
    node, gate = world.here, Gate("save")
    compute(node, 0, 2)
    node.memory.before = gate
    save(node, 0, 2)
    begun, late = load(node, 1, [5]), load(node, 1, [6], NEXT)
    node.do(events.DropBlocks(NAMES[1:2]), Preempted(NEXT))
    assert late.over.is_set() and not begun.over.is_set(), "who cancels it may not wait for a disk"
    gate.go_on()
    await loaded(begun, 1)
    await settled(node)
    assert tiers(node, 2) == [Tier.MEMORY, None] and node.block(5) == BLOCKS[0] and not any(node.block(6))


@pytest.mark.parametrize("staged", [True, False])
@cached
async def test_a_fault_in_a_save_keeps_nothing_and_no_slot(world: World, staged: bool) -> None:
    node = world.here
    compute(node, 0, 3)
    node.memory.before = opened("save", RuntimeError("the device is gone"))
    staging = node.mover.stage(KEY, NAMES[:2], (0, 1))
    node.mover.save_layer(staging, 0)  # type: ignore[arg-type]
    if not staged:
        node.do(Preempted(KEY))
    assert await saved(node, 0, 3) == list(NAMES[:3])


@pytest.mark.parametrize(("staged", "fails"), [(0, False), (2, False), (0, True)])
@cached(slots=3)
async def test_what_is_for_the_disk_alone_passes_through_few_slots(
    world: World, staged: int, fails: bool
) -> None:
    node, calls = world.here, list[int]()
    compute(node, 0, 9)

    def before(what: str, layer: Any) -> None:
        calls.append(layer)
        if fails and what == "save" and len(calls) > 2 * (LAST + 1):
            raise RuntimeError("the device is gone")

    node.memory.before = before
    early = node.mover.stage(KEY, NAMES[:staged], range(staged))
    for layer in range(LAST + 1 if early is not None else 0):
        node.mover.save_layer(early, layer)  # type: ignore[arg-type]
    assert await saved(node, 0, 9, num_sunk=9 if fails else 7) == list(NAMES[6:9] if fails else ())
    if not fails:
        assert tiers(node, 9) == [Tier.MEMORY] * 2 + [Tier.DISK] * 7
        assert node.chain(9) == BLOCKS[:9]


@cached
async def test_what_follows_a_block_that_is_gone_is_not_saved(world: World) -> None:
    node = world.here
    compute(node, 0, 3)
    node.put(0, 1)
    node.do(events.DropBlocks(NAMES[:1]))
    assert await saved(node, 1, 3) == list(NAMES[1:3])
    assert node.chain(3) == [None] * 3


@cached
async def test_a_node_that_ends_has_done_what_was_under_way(world: World) -> None:
    node, gate = world.here, Gate("save")
    compute(node, 0, 1)
    node.memory.before = gate
    save(node, 0, 1)
    await gate.reached()
    closing = asyncio.create_task(asyncio.to_thread(node.cache.close))
    await asyncio.sleep(0.01)
    assert not closing.done() and not node.store.contains(NAMES[0])
    gate.go_on()
    await closing
    assert node.stored(NAMES[0]) == BLOCKS[0]


@cached
async def test_a_fault_in_what_was_decided_is_no_secret(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.here.store.before = opened("drop", RuntimeError("the disk is gone"))
    world.here.do(events.DropBlocks(NAMES[:1]))
    await settled(world.here)
    assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records] == ["the disk is gone"]


# Blocks read from disk before their load.


def on_disk(node: Node, count: int = 6) -> Gate:
    """So many blocks are on disk; what is read of them since."""
    node.put_on_disk(0, count)
    node.store.before = opened("read")
    return node.store.before


@cached
async def test_what_was_read_ahead_is_read_once_and_goes_back(world: World) -> None:
    node = world.here
    reads = on_disk(node)
    node.do(events.Read(KEY, NAMES[:4]), events.Read(NEXT, NAMES[:3]), events.Promote(NAMES[1:2]))
    begun = load(node, 4)  # waits for what is being read
    await loaded(begun, 4)
    assert blocks(node, range(4)) == BLOCKS[:4]
    await settled(node)
    assert tiers(node, 4) == [Tier.MEMORY] * 3 + [Tier.DISK]
    node.do(events.ReleaseResources(NEXT))
    await settled(node)
    assert tiers(node, 6) == [Tier.DISK, Tier.MEMORY, *[Tier.DISK] * 4]
    assert node.store.stat().memory.num_blocks == 1
    assert sorted(reads.done) == list(NAMES[:4])


@cached
async def test_no_more_is_read_ahead_than_there_is_room_to_spare(world: World) -> None:
    node = world.here
    on_disk(node)
    node.do(events.Read(KEY, NAMES[:4]), events.Read(NEXT, NAMES[3:6]))  # one is there, and one more fits
    await loaded(load(node, 6, key=RequestId("c#1")), 6)
    await settled(node)
    assert blocks(node, range(6)) == BLOCKS[:6] and node.store.stat().memory.num_blocks == 5
    node.do(events.ReleaseResources(KEY), events.ReleaseResources(NEXT))
    await settled(node)
    assert node.store.stat().memory.num_blocks == 0


@pytest.mark.parametrize(
    "then",
    [events.DropBlocks(NAMES[:4]), events.Demote(NAMES[:4]), events.ReleaseResources(KEY)],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.parametrize("read", [False, True])
@cached
async def test_what_nobody_wants_any_more_is_not_kept(world: World, then: Any, read: bool) -> None:
    node, gate = world.here, Gate("read")
    on_disk(node, 4)
    node.store.before = gate
    node.do(events.Read(KEY, NAMES[:4]))
    if read:
        gate.go_on()
        await settled(node)
    node.do(then)
    gate.go_on()
    await settled(node)
    assert node.store.stat().memory.num_blocks == 0
    assert tiers(node, 4) == [None if isinstance(then, events.DropBlocks) else Tier.DISK] * 4


@pytest.mark.parametrize("dropped", [False, True])
@cached
async def test_what_is_saved_after_it_was_read_ahead_is_not_taken_back(world: World, dropped: bool) -> None:
    node = world.here
    on_disk(node)
    compute(node, 0, 1)
    node.do(events.Read(NEXT, NAMES[:1]))
    if dropped:
        node.do(events.DropBlocks(NAMES[:1]))
    assert await saved(node, 0, 1) == []
    node.do(events.ReleaseResources(NEXT))
    await settled(node)
    assert tiers(node, 1) == [Tier.MEMORY]


@cached
async def test_what_is_lost_while_it_is_read_ahead_does_not_come_back(world: World) -> None:
    node, gate = world.here, Gate("give what was read")
    on_disk(node)
    node.store.before = gate
    node.do(events.Read(KEY, NAMES[5:6]))
    await gate.reached()
    node.store.drop(NAMES[5:6])
    gate.go_on()
    await settled(node)
    assert not node.store.contains(NAMES[5])


@pytest.mark.parametrize("was_saved", [False, True])
@cached
async def test_what_is_being_read_is_waited_for_whoever_else_wants_it(world: World, was_saved: bool) -> None:
    node, gate = world.here, Gate("read")
    compute(node, 0, 2)
    if was_saved:
        assert await saved(node, 0, 2) == []
        node.store.flush()
        node.do(events.Demote(NAMES[:2]))
    else:
        node.put_on_disk(0, 2)
    node.store.before = gate
    node.do(events.Read(KEY, NAMES[:2]), events.Read(NEXT, NAMES[:2]))
    await gate.reached()
    begun = load(node, 2, [7, 8], RequestId("c#1"))
    await world.quiet()
    assert not begun.over.is_set()
    gate.go_on()
    await loaded(begun, 2)
    assert blocks(node, (7, 8)) == BLOCKS[:2] and sorted(gate.done) == list(NAMES[:2]), "it was read once more"
    node.do(events.ReleaseResources(KEY), events.ReleaseResources(NEXT))
    await settled(node)


# What is left.


@played(alone=True)
async def test_what_is_cancelled_is_over_first_however_often(world: World) -> None:
    """A lease must be whole before it is released."""
    began, go_on = threading.Event(), threading.Event()
    task = asyncio.create_task(world.here.cache.serve(lambda: (began.set(), go_on.wait(60))))
    assert await asyncio.to_thread(began.wait, 60)
    for _ in range(2):
        task.cancel()
        await world.quiet()
        assert not task.done()
    go_on.set()
    await asyncio.wait([task])
    assert task.cancelled()


@played(alone=True)
async def test_without_a_cache(world: World) -> None:
    node, facts = world.here, list[events.Event]()
    mover = KVMover(
        memory=node.memory, first_layer=0, cache=None, peers=node.peers, tell=facts.append,
        spawn=asyncio.create_task, shares_memory=False, received=lambda key, token: None,
        attends=lambda layer, asked, q, parts: q, answer_s=30.0,
    )  # fmt: skip
    mover.open(asyncio.get_running_loop())
    for action in (events.Fetch(KEY, OTHER, NAMES[:2], 1), events.EndFetch(KEY), events.ReleaseResources(KEY)):
        mover.do(action)
    await world.quiet()
    assert facts == [events.BlocksFetched(KEY, 1)]
    assert not {"kv_bytes_fetched_total", "kv_bytes_given_total"} & set(mover.gauges())
    session: Any = object()
    with pytest.raises(ProtocolError, match="blocks came to a node without a cache"):
        mover.on_peer(session, OTHER, FetchedSlices(KEY, 0, 0, (b"",)))
    await mover.close()


def test_chains_end_where_no_block_follows() -> None:
    found = [(b"a", None), (b"b", b"a"), (b"c", b"b"), (b"d", b"b"), (b"x", None)]
    assert chains_of(found) == ((b"a", b"b", b"c"), (b"a", b"b", b"d"), (b"x",))
    assert chains_of([]) == ()
