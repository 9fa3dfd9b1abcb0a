"""A store and KV memory, without an engine: loads layer by layer, saves, and what is wanted meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.blocks import seal
from isthmus.core.node import events
from isthmus.core.types import BlockName, NodeId, RequestId, Span, Tier
from isthmus.live.engine import codecs
from isthmus.live.engine.emulated import EmulatedMemory
from isthmus.live.engine.interface import KVBytes
from isthmus.live.engine.kv import KVMemory
from isthmus.live.kv import cache
from isthmus.live.kv.cache import EngineCache, Loading, PrefixMissing, Staging, chains_of
from isthmus.live.kv.fetches import Fetching
from isthmus.live.peers import wire
from isthmus.live.peers.messages import Given
from isthmus.live.store import Log, Shape, Store
from tests.live.cluster.fault_peers import LAYOUT, kv_block, put_chain, store_of

SHAPE = Shape(LAYOUT.num_layers, LAYOUT.slice_bytes)
NAMES = [bytes([number]) * 16 for number in range(10)]
BLOCKS = [kv_block(LAYOUT, number) for number in range(10)]
NUM_BLOCKS = 16
LAST = LAYOUT.num_layers - 1
WAIT_S = 60


class Kit:
    """A cache; `lost`: what it was told is gone."""

    def __init__(self, memory: KVBytes, store: Store) -> None:
        self.memory, self.store = memory, store
        self.lost: list[BlockName] = []
        self.cache = EngineCache(memory, store, self.lost.extend)

    def block(self, number: int) -> bytes:
        size = LAYOUT.block_size
        parts = [self.memory.export(at, number * size, (number + 1) * size) for at in range(LAYOUT.num_layers)]
        return b"".join(map(bytes, parts))

    def write(self, number: int, data: bytes) -> None:
        size = LAYOUT.slice_bytes
        for layer in range(LAYOUT.num_layers):
            self.memory.fill(layer, [number], memoryview(data), [layer * size])

    def stored(self, name: BlockName) -> bytes | None:
        into = memoryview(bytearray(LAYOUT.block_bytes))
        return bytes(into) if self.store.get(name, into) else None

    def put_on_disk(self, count: int) -> None:
        """The first blocks, in no slot."""
        put_chain(self.store, NAMES[:count], BLOCKS[:count])
        self.store.flush()
        self.store.demote(NAMES[:count])

    def close(self) -> None:
        self.check()
        self.cache.close()
        self.store.close()

    def settle(self) -> None:
        """What was asked for so far about keeping is done, and what is being read is here or given back."""
        self.cache.kept().result(WAIT_S)
        reading = [coming for _, coming in list(self.cache._reading.values())]  # also what is saved meanwhile
        wait([*self.cache._coming.values(), *reading], WAIT_S)
        self.cache.kept().result(WAIT_S)

    def save(
        self,
        names: Sequence[BlockName],
        blocks: Sequence[int],
        staged: Sequence[Staging] = (),
        num_sunk: int = 0,
    ) -> list[Any]:
        """Which of them found no room."""
        done, missing = threading.Event(), list[Any]()

        def saved(lost: Sequence[BlockName]) -> None:
            missing.extend(lost)
            done.set()

        self.cache.save(names, [None, *names[:-1]], blocks, num_sunk, staged, saved)
        assert done.wait(WAIT_S)
        self.settle()
        return missing

    def check(self) -> None:
        """Nothing is pinned, reserved, or in a slot nobody knows of."""
        self.settle()
        assert self.store.flush(WAIT_S)
        self.store.check()
        stat = self.store.stat()
        assert (stat.num_pinned, stat.num_reserved) == (0, 0)
        assert stat.memory.used_bytes == stat.memory.num_blocks * LAYOUT.block_bytes
        assert not self.cache._coming, "somebody would wait for what is there already"


def memory_of(kind: str) -> KVBytes:
    if kind == "emulated":
        return EmulatedMemory(LAYOUT, NUM_BLOCKS)
    return KVMemory(LAYOUT, NUM_BLOCKS, torch.device("cpu"))


@pytest.fixture(params=["emulated", "engine"])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kit]:
    log = Log(tmp_path / "log", SHAPE, 1 << 20, b"test")
    made = Kit(memory_of(request.param), store_of(LAYOUT, 10, log))
    yield made
    made.close()


def over(load: Loading) -> None:
    assert load.over.wait(WAIT_S), "a load does not end"


def loaded(load: Loading, num_blocks: int) -> None:
    """All layers of its first blocks are there, and nothing more comes."""
    load.wait(LAST, num_blocks)
    over(load)


def ends_after(load: Loading, num_blocks: int) -> None:
    """Only so many of its blocks are there, and nothing more comes."""
    with pytest.raises(PrefixMissing) as raised:
        load.wait(LAST, len(load.names))
    assert raised.value.num_blocks == num_blocks
    loaded(load, num_blocks)


class Gate:
    """Calls of a method that wait until they are let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: object, name: str) -> None:
        self.began, self._open, self._call = threading.Event(), threading.Event(), getattr(target, name)
        monkeypatch.setattr(target, name, self._wait)
        self.go_on = self._open.set

    def _wait(self, *arguments: Any) -> Any:
        self.began.set()
        assert self._open.wait(WAIT_S)
        return self._call(*arguments)


# Loads.


def test_a_prefix_is_loaded_from_both_tiers_layer_by_layer(kit: Kit) -> None:
    put_chain(kit.store, NAMES[:6], BLOCKS[:6])
    kit.store.flush()
    kit.store.demote([NAMES[1], NAMES[4]])
    order = [9, 3, 4, 8, 1, 0]
    load = kit.cache.load(NAMES[:6], order)
    for layer in range(LAYOUT.num_layers):
        load.wait(layer, 6)
        width = LAYOUT.slice_bytes
        for at, number in enumerate(order):
            assert kit.block(number)[layer * width : (layer + 1) * width] == BLOCKS[at][layer * width :][:width]
    over(load)
    assert [kit.block(number) for number in order] == BLOCKS[:6]


@pytest.mark.parametrize("missing", [0, 2, 5])
def test_a_block_that_is_nowhere_shortens_the_prefix(kit: Kit, missing: int) -> None:
    put_chain(kit.store, NAMES[:6], BLOCKS[:6])
    kit.store.drop([NAMES[missing]])
    load = kit.cache.load(NAMES[:6], range(6))
    ends_after(load, missing)
    assert kit.lost == [NAMES[missing]]
    assert [kit.block(at) for at in range(missing)] == BLOCKS[:missing]


def test_a_block_damaged_on_disk_shortens_the_prefix(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.put_on_disk(6)
    read = kit.store.read
    monkeypatch.setattr(kit.store, "read", lambda name, *more: name != NAMES[3] and read(name, *more))
    load = kit.cache.load(NAMES[:6], range(6))
    ends_after(load, 3)
    assert [kit.block(at) for at in range(3)] == BLOCKS[:3]


def test_large_slices_are_read_a_few_layers_at_a_time(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit.cache, "_read_layers", 2)  # of 3
    kit.put_on_disk(4)
    load = kit.cache.load(NAMES[:4], range(4))
    loaded(load, 4)
    assert [kit.block(at) for at in range(4)] == BLOCKS[:4]


def test_a_block_dropped_while_it_is_loaded_is_loaded(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot is pinned, so that nothing else gets it."""
    put_chain(kit.store, NAMES[:3], BLOCKS[:3])
    gate = Gate(monkeypatch, kit.memory, "fill")
    load = kit.cache.load(NAMES[:3], range(3))
    assert gate.began.wait(WAIT_S)
    kit.store.drop(NAMES[:3])
    put_chain(kit.store, NAMES[3:], BLOCKS[3:])  # wants every slot that is left
    gate.go_on()
    over(load)
    assert [kit.block(at) for at in range(3)] == BLOCKS[:3]


def test_a_fault_in_a_load_means_that_the_prompt_is_computed(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    put_chain(kit.store, NAMES[:3], BLOCKS[:3])

    def broken(*arguments: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(kit.memory, "fill", broken)
    load = kit.cache.load(NAMES[:3], range(3))
    ends_after(load, 0)


def test_cancel_waits_for_the_loader(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    put_chain(kit.store, NAMES[:3], BLOCKS[:3])
    fill, written = kit.memory.fill, []
    monkeypatch.setattr(kit.memory, "fill", lambda layer, *more: (fill(layer, *more), written.append(layer)))
    gate = Gate(monkeypatch, kit.memory, "fill")
    load = kit.cache.load(NAMES[:3], range(3))
    assert gate.began.wait(WAIT_S)
    cancelled = threading.Thread(target=load.cancel)
    cancelled.start()
    while not load.cancelled:
        time.sleep(0.001)
    assert not load.over.is_set()
    gate.go_on()
    cancelled.join(WAIT_S)
    assert load.over.is_set() and written == [0], "it went on after the layer under way"


# Blocks on their way.


def fetch_of(kit: Kit, start: int, stop: int) -> Fetching:
    order = events.Fetch(RequestId("f"), NodeId("there"), tuple(NAMES[:stop]), start)
    fetch = Fetching(order, kit.cache)
    assert fetch.make_room() == stop - start
    fetch.hold()
    return fetch


def end(kit: Kit, fetch: Fetching) -> list[bytes]:
    """Adopts what came of it, and lets go of it. What could not be adopted."""
    lost: list[bytes] = []
    fetch.end()
    came = fetch.names[fetch.start : fetch.start + fetch.num_whole]
    if came:
        kit.cache.adopt(came, fetch.adopt, lost.extend)
    kit.cache.kept().result(WAIT_S)
    fetch.release()
    return lost


def arrive(fetch: Fetching, layer: int, first: int, stop: int) -> None:
    """Blocks `[first, stop)` of the fetch, in one layer."""
    width = LAYOUT.slice_bytes
    data = [BLOCKS[fetch.start + at][layer * width : (layer + 1) * width] for at in range(first, stop)]
    given = Given(fetch.key, layer, first, tuple(map(seal, data)))
    targets = fetch.place(None, given, width * len(data))  # type: ignore[arg-type]
    assert targets is not None
    for target, part in zip(targets, data, strict=True):
        target[:] = part
    assert fetch.receive(given)


def test_a_load_takes_layers_as_they_arrive(kit: Kit) -> None:
    put_chain(kit.store, NAMES[:2], BLOCKS[:2])
    fetch = fetch_of(kit, 2, 5)
    load = kit.cache.load(NAMES[:5], range(5), fetch)
    for layer in range(LAYOUT.num_layers):
        arrive(fetch, layer, 0, 2)
        assert not load._layers > layer
        arrive(fetch, layer, 2, 3)
        load.wait(layer, 5)
    over(load)
    assert [kit.block(at) for at in range(5)] == BLOCKS[:5]
    assert end(kit, fetch) == []
    assert [kit.stored(name) for name in NAMES[:5]] == BLOCKS[:5]


def test_a_fetch_that_ends_early_shortens_the_prefix(kit: Kit) -> None:
    fetch = fetch_of(kit, 0, 4)
    load = kit.cache.load(NAMES[:4], range(4), fetch)
    for layer in range(LAYOUT.num_layers):
        arrive(fetch, layer, 0, 3 - layer)
    fetch.end()
    ends_after(load, 1)
    assert end(kit, fetch) == []
    assert kit.stored(NAMES[0]) == BLOCKS[0] and kit.stored(NAMES[1]) is None


def test_a_load_that_is_cancelled_waits_for_no_other_node(kit: Kit) -> None:
    fetch = fetch_of(kit, 0, 4)
    load = kit.cache.load(NAMES[:4], range(4), fetch)
    load.cancel()
    assert load.over.is_set()
    arrive(fetch, 0, 0, 4)  # still the fetch's own slots
    fetch.end()
    fetch.release()


def whole(kit: Kit, start: int, stop: int) -> Fetching:
    """A fetch of which all came."""
    fetch = fetch_of(kit, start, stop)
    for layer in range(LAYOUT.num_layers):
        arrive(fetch, layer, 0, stop - start)
    fetch.end()
    fetch.release()
    return fetch


def test_what_came_is_adopted_after_all_that_was_decided_before_and_a_load_waits_for_it(kit: Kit) -> None:
    put_chain(kit.store, NAMES[:2], BLOCKS[:2])
    fetch, go_on, lost = whole(kit, 1, 3), threading.Event(), list[BlockName]()
    kit.cache._keep(go_on.wait)
    kit.cache.drop(NAMES[1:2])
    kit.cache.adopt(NAMES[1:3], fetch.adopt, lost.extend)
    load = kit.cache.load(NAMES[:3], range(3))
    assert not load.over.wait(0.01)
    go_on.set()
    loaded(load, 3)
    assert end(kit, fetch) == lost == []
    assert [kit.stored(name) for name in NAMES[:3]] == [kit.block(at) for at in range(3)] == BLOCKS[:3]


def test_a_load_of_what_is_still_coming_can_be_cancelled_at_once(kit: Kit) -> None:
    """Whoever cancels it may not wait for a disk: it is the event loop, under the node's lock."""
    go_on = threading.Event()
    kit.cache._keep(go_on.wait)
    kit.write(0, BLOCKS[0])
    kit.cache.save(NAMES[:1], [None], [0], 0, (), lambda lost: None)
    load = kit.cache.load(NAMES[:1], [1])
    load.cancel()
    assert load.over.is_set() and not go_on.is_set()
    go_on.set()


def test_what_follows_a_block_that_is_gone_is_not_adopted_nor_what_was_adopted_and_left(kit: Kit) -> None:
    put_chain(kit.store, NAMES[:1], BLOCKS[:1])
    fetch, lost = whole(kit, 1, 4), list[BlockName]()
    kit.cache.adopt(NAMES[1:3], fetch.adopt, lost.extend)
    kit.settle()
    assert lost == [] and kit.stored(NAMES[2]) == BLOCKS[2]
    kit.cache.drop(NAMES[2:3])
    kit.cache.adopt(NAMES[2:4], fetch.adopt, lost.extend)
    kit.cache.adopt(NAMES[3:4], fetch.adopt, lost.extend)
    kit.settle()
    assert lost == [*NAMES[2:4], NAMES[3]]
    fetch.release()
    assert not fetch.hold(), "its slots are given back"


def test_a_block_that_the_store_has_from_elsewhere_is_not_there_twice(kit: Kit) -> None:
    put_chain(kit.store, NAMES[:2], BLOCKS[:2])
    fetch = whole(kit, 0, 3)
    assert end(kit, fetch) == []
    assert kit.store.stat().memory.num_blocks == 3


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=30))
def test_whatever_the_order_of_layers_only_whole_blocks_are_kept(order: list[tuple[int, int]]) -> None:
    kit = Kit(EmulatedMemory(LAYOUT, 1), store_of(LAYOUT, 10))
    fetch = fetch_of(kit, 0, 8)
    landed = [0] * LAYOUT.num_layers
    for layer, count in order:
        stop = min(8, landed[layer] + count)
        if stop > landed[layer]:
            arrive(fetch, layer, landed[layer], stop)
            landed[layer] = stop
    assert end(kit, fetch) == []
    fetch.release()
    assert fetch.num_whole == min(landed)
    expected = [*BLOCKS[: min(landed)], *[None] * (8 - min(landed))]
    assert [kit.stored(name) for name in NAMES[:8]] == expected
    kit.close()


# Saves.


def test_blocks_are_saved_with_what_was_staged(kit: Kit) -> None:
    for number in range(4):
        kit.write(number, BLOCKS[number])
    staging = kit.cache.stage(NAMES[1:3], [1, 2])
    for layer in range(LAYOUT.num_layers):
        kit.cache.save_layer(staging, layer)
    kit.settle()
    assert kit.stored(NAMES[1]) is None, "nobody sees it before it is committed"
    kit.write(1, BLOCKS[9])  # the engine goes on: what was staged counts
    assert kit.save(NAMES[:4], range(4), [staging]) == []
    assert [kit.stored(name) for name in NAMES[:4]] == BLOCKS[:4]


def test_what_was_staged_in_part_is_copied_anew(kit: Kit) -> None:
    for number in range(2):
        kit.write(number, BLOCKS[number])
    staging = kit.cache.stage(NAMES[:2], [0, 1])
    kit.cache.save_layer(staging, 0)
    assert kit.save(NAMES[:2], range(2), [staging]) == []
    assert [kit.stored(name) for name in NAMES[:2]] == BLOCKS[:2]


def test_what_was_staged_and_is_not_wanted_is_given_back(kit: Kit) -> None:
    staging = kit.cache.stage(NAMES[:3], [0, 1, 2])
    for layer in range(LAYOUT.num_layers):
        kit.cache.save_layer(staging, layer)
    other = kit.cache.stage(NAMES[3:5], [3, 4])
    kit.write(0, BLOCKS[0])
    assert kit.save(NAMES[:1], [0], [staging]) == []
    kit.cache.unstage(other)


def test_without_room_the_tail_is_not_kept(kit: Kit) -> None:
    put_chain(kit.store, NAMES[2:], BLOCKS[2:])  # 8 of 10 slots
    for number in range(4):
        kit.write(number, kv_block(LAYOUT, 100 + number))
    names = [bytes([100 + number]) * 16 for number in range(4)]
    assert kit.save(names, range(4)) == names[2:]
    assert [kit.stored(name) is not None for name in names] == [True, True, False, False]
    assert len(kit.cache.stage(NAMES[:2], [0, 1]).slots) == 0


def test_what_is_evicted_while_it_is_saved_does_not_come_back(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, kit.memory, "save")
    done = threading.Event()
    kit.cache.save(NAMES[:2], [None, NAMES[0]], [0, 1], 0, [], lambda lost: done.set())
    kit.cache.drop(NAMES[:2])
    gate.go_on()
    assert done.wait(WAIT_S)
    kit.settle()
    assert [kit.store.tier(name) for name in NAMES[:2]] == [None, None]


def test_what_is_being_saved_can_be_loaded(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler counts on it from the moment it decides."""
    kit.write(0, BLOCKS[0])
    gate = Gate(monkeypatch, kit.memory, "save")
    kit.cache.save(NAMES[:1], [None], [0], 0, [], lambda lost: None)
    load = kit.cache.load(NAMES[:1], [5])
    assert not load.over.is_set()
    gate.go_on()
    loaded(load, 1)
    assert kit.block(5) == BLOCKS[0]


@pytest.mark.parametrize("staged", [True, False])
def test_a_fault_in_a_save_keeps_nothing_and_no_slot(
    kit: Kit, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(kit.memory, "save", broken)
    staging = kit.cache.stage(NAMES[:2], [0, 1])
    kit.cache.save_layer(staging, 0)
    if not staged:
        kit.cache.unstage(staging)
    assert kit.save(NAMES[:3], range(3), [staging] if staged else []) == NAMES[:3]


@pytest.mark.parametrize("staged", [0, 2])
def test_what_is_for_the_disk_alone_passes_through_few_slots(tmp_path: Path, staged: int) -> None:
    store = store_of(LAYOUT, 3, Log(tmp_path / "few", SHAPE, 1 << 20, b"test"))
    kit = Kit(memory_of("emulated"), store)
    for number, data in enumerate(BLOCKS[:9]):
        kit.write(number, data)
    early = [kit.cache.stage(NAMES[:staged], range(staged))] if staged else []
    for staging in early:
        for layer in range(LAYOUT.num_layers):
            kit.cache.save_layer(staging, layer)
    assert kit.save(NAMES[:9], range(9), early, num_sunk=7) == []
    assert [kit.store.tier(name) for name in NAMES[:9]] == [Tier.MEMORY] * 2 + [Tier.DISK] * 7
    assert [kit.stored(name) for name in NAMES[:9]] == BLOCKS[:9]
    kit.close()


def test_a_fault_on_the_way_through_few_slots_loses_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(LAYOUT, 3, Log(tmp_path / "few", SHAPE, 1 << 20, b"test"))
    kit, calls = Kit(memory_of("emulated"), store), list[int]()
    save = kit.memory.save

    def breaks(layer: int, *arguments: Any) -> None:
        calls.append(layer)
        if len(calls) > 2 * LAYOUT.num_layers:
            raise RuntimeError("the device is gone")
        save(layer, *arguments)

    monkeypatch.setattr(kit.memory, "save", breaks)
    assert kit.save(NAMES[:9], range(9), num_sunk=9) == NAMES[6:9]
    kit.close()


def test_what_is_being_computed_takes_so_many_slots_and_gives_them_back(kit: Kit) -> None:
    cache = EngineCache(kit.memory, kit.store, max_staged=3)
    staging = cache.stage(NAMES[:5], range(5))
    assert len(staging.slots) == 3
    assert not cache.stage(NAMES[5:7], [5, 6]).slots
    cache.unstage(staging)
    cache.kept().result(WAIT_S)
    again = cache.stage(NAMES[5:7], [5, 6])
    assert len(again.slots) == 2
    cache.unstage(again)
    cache.kept().result(WAIT_S)
    cache.close()


def test_what_follows_a_block_that_is_gone_is_not_saved(kit: Kit) -> None:
    """Nobody could use it, and it would come back when its node starts again."""
    put_chain(kit.store, NAMES[:1], BLOCKS[:1])
    kit.cache.drop(NAMES[:1])
    kit.write(1, BLOCKS[1])
    kit.write(2, BLOCKS[2])
    done, lost = threading.Event(), list[Any]()
    kit.cache.save(NAMES[1:3], NAMES[:2], [1, 2], 0, (), lambda missing: (lost.extend(missing), done.set())[0])
    assert done.wait(WAIT_S)
    assert lost == NAMES[1:3]
    assert not any(map(kit.store.contains, NAMES[:3]))


# Blocks read from disk before their load.


@pytest.fixture
def on_disk(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> list[BlockName]:
    """Six blocks are on disk; read from there since: by name, as whole blocks or layers."""
    monkeypatch.setattr(cache, "AHEAD", 2)
    kit.put_on_disk(6)
    read, done = kit.store.read, list[BlockName]()

    def noted(name: BlockName, *more: Any) -> bool:
        done.append(name)
        return read(name, *more)

    monkeypatch.setattr(kit.store, "read", noted)
    return done


def test_what_was_read_ahead_is_not_read_again(kit: Kit, on_disk: list[BlockName]) -> None:
    kit.cache.read(NAMES[:4])
    load = kit.cache.load(NAMES[:4], range(4))  # waits for what is being read
    loaded(load, 4)
    assert [kit.block(at) for at in range(4)] == BLOCKS[:4]
    assert sorted(on_disk) == NAMES[:4]
    kit.cache.unread(NAMES[:4])
    kit.settle()
    assert kit.store.stat().memory.num_blocks == 0
    assert [kit.store.tier(name) for name in NAMES[:6]] == [Tier.DISK] * 6


@pytest.mark.parametrize("first", ["read", "asked for"])
def test_what_was_read_ahead_and_is_promoted_stays(kit: Kit, on_disk: list[BlockName], first: str) -> None:
    kit.cache.read(NAMES[:3])
    if first == "read":
        kit.settle()
    kit.cache.promote(NAMES[:2])
    kit.cache.unread(NAMES[:3])
    kit.settle()
    assert [kit.store.tier(name) for name in NAMES[:3]] == [Tier.MEMORY, Tier.MEMORY, Tier.DISK]
    assert kit.store.stat().memory.num_blocks == 2
    assert sorted(on_disk) == NAMES[:3]


def test_no_more_is_read_ahead_than_there_is_room_to_spare(kit: Kit, on_disk: list[BlockName]) -> None:
    kit.cache.read(NAMES[:4])
    kit.cache.read(NAMES[3:6])  # one is there already, and one more fits
    load = kit.cache.load(NAMES[:6], range(6))
    loaded(load, 6)
    assert [kit.block(at) for at in range(6)] == BLOCKS[:6]
    assert kit.store.stat().memory.num_blocks == 5
    kit.cache.unread(NAMES[:6])


@pytest.mark.parametrize("then", ["drop", "demote", "unread"])
def test_what_nobody_wants_any_more_is_not_kept(kit: Kit, on_disk: list[BlockName], then: str) -> None:
    kit.cache.read(NAMES[:4])
    getattr(kit.cache, then)(NAMES[:4])
    kit.settle()
    assert kit.store.stat().memory.num_blocks == 0
    assert [kit.store.tier(name) for name in NAMES[:4]] == [None if then == "drop" else Tier.DISK] * 4


@pytest.mark.parametrize("dropped", [False, True])
def test_what_is_saved_after_it_was_read_ahead_is_not_taken_back(
    kit: Kit, on_disk: list[BlockName], dropped: bool
) -> None:
    kit.cache.read(NAMES[:1])
    if dropped:
        kit.cache.drop(NAMES[:1])
    kit.write(0, BLOCKS[0])
    assert kit.save(NAMES[:1], [0]) == []
    kit.cache.unread(NAMES[:1])
    kit.settle()
    assert kit.store.tier(NAMES[0]) is Tier.MEMORY


def test_what_is_lost_while_it_is_read_ahead_does_not_come_back(
    kit: Kit, on_disk: list[BlockName], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's read of it found damage: its node knows that it is gone."""
    read = kit.store.read

    def lost(name: BlockName, *more: Any) -> bool:
        found = read(name, *more)
        kit.store.drop([name])
        return found

    monkeypatch.setattr(kit.store, "read", lost)
    kit.cache.read(NAMES[5:6])
    kit.settle()
    assert not kit.store.contains(NAMES[5])


def test_a_block_that_cannot_be_read_ahead_shortens_the_prefix(
    kit: Kit, on_disk: list[BlockName], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = kit.store.read
    monkeypatch.setattr(kit.store, "read", lambda name, *more: name != NAMES[2] and read(name, *more))
    kit.cache.read(NAMES[:4])
    load = kit.cache.load(NAMES[:4], range(4))
    ends_after(load, 2)
    kit.cache.unread(NAMES[:4])


# For other nodes.


def test_what_is_cancelled_is_over_first_however_often(kit: Kit) -> None:
    """When a peer goes away and then the process ends: a lease must be whole before it is released."""
    began, go_on = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        assert go_on.wait(WAIT_S)

    async def main() -> None:
        task = asyncio.create_task(kit.cache.serve(work))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(began.wait, WAIT_S)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done()
        go_on.set()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())


# Frames, chains, gauges.


@given(st.sampled_from(codecs.CODECS), st.integers(1, 17), st.data())
def test_a_flipped_bit_is_found_or_changes_nothing(codec: str, num_tokens: int, data: st.DataObject) -> None:
    source = b"".join(BLOCKS)[: num_tokens * LAYOUT.token_bytes]
    size, width = LAYOUT.slice_bytes, len(source)
    parts = [memoryview(source)[at : at + size] for at in range(0, width, size)]
    payload, seals = wire.pack(codec, LAYOUT, parts, num_tokens, lambda: list(map(seal, parts)))
    frame = bytearray(b"".join(payload))
    clean = unpacked(codec, frame, num_tokens, seals)
    assert clean is not None and (clean == source or codec == codecs.INT8)
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    assert unpacked(codec, frame, num_tokens, seals) in (None, clean)


def unpacked(codec: str, frame: bytearray, num_tokens: int, seals: Sequence[bytes]) -> bytes | None:
    """What a receiver takes it for; None: it is damaged."""
    room = memoryview(bytearray(num_tokens * LAYOUT.token_bytes))
    size = LAYOUT.slice_bytes
    targets = [room[at : at + size] for at in range(0, len(room), size)]
    frames, head = wire.Frames(LAYOUT), Given(RequestId("a#1"), 0, 0, tuple(seals))
    buffers = placed(frames, head, codec, num_tokens, len(frame), targets)
    assert buffers is not None
    for buffer in buffers:
        buffer[:], frame = frame[: len(buffer)], frame[len(buffer) :]
    if frames.take(head) is None or (codec in codecs.EXACT and tuple(map(seal, targets)) != tuple(seals)):
        return None
    return bytes(room)


def placed(
    frames: wire.Frames, head: Given, codec: str, num_tokens: int, size: int, targets: list[memoryview]
) -> list[memoryview] | None:
    return frames.place(head, None, codec, Span(0, num_tokens), targets, size)  # type: ignore[arg-type]


def test_two_frames_for_the_same_bytes_are_refused() -> None:
    """Whichever came last would be under the seals of the other. When the first is void, the second may come."""
    frames, size = wire.Frames(LAYOUT), LAYOUT.slice_bytes
    first, second = [Given(RequestId("a#1"), 0, 0, (bytes([number]),)) for number in range(2)]
    targets = [memoryview(bytearray(size))]
    assert placed(frames, first, codecs.NONE, LAYOUT.block_size, size, targets) == targets
    assert placed(frames, second, codecs.NONE, LAYOUT.block_size, size, targets) is None
    frames.void(None, first)  # type: ignore[arg-type]
    assert placed(frames, second, codecs.NONE, LAYOUT.block_size, size, targets) == targets
    assert frames.take(first) is None and frames.take(second) == targets


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_frames_of_a_size_that_cannot_be_are_refused(codec: str) -> None:
    most, head = codecs.encoded_bytes(codec, LAYOUT, 6), Given(RequestId("a#1"), 0, 0, ())
    sizes = [most - 1, most, most + 1]
    fits = [placed(wire.Frames(LAYOUT), head, codec, 6, size, []) is not None for size in sizes]
    assert fits == [codec == codecs.ZSTD, True, False]


def test_chains_end_where_no_block_follows() -> None:
    found = [(b"a", None), (b"b", b"a"), (b"c", b"b"), (b"d", b"b"), (b"x", None)]
    assert chains_of(found) == ((b"a", b"b", b"c"), (b"a", b"b", b"d"), (b"x",))
    assert chains_of([]) == ()


def test_gauges_tell_both_tiers(kit: Kit) -> None:
    put_chain(kit.store, NAMES[:3], BLOCKS[:3])
    kit.store.flush()
    found = kit.store.stat().gauges()
    assert found["cache_memory_blocks"] == found["cache_disk_blocks"] == 3
    assert found["cache_memory_bytes"] == 3 * LAYOUT.block_bytes
    assert found["cache_pinned_blocks"] == found["cache_lost_blocks_total"] == 0


def test_what_is_being_read_is_waited_for_though_somebody_else_wants_it_too(
    kit: Kit, on_disk: list[BlockName], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, kit.store, "read")
    for _ in range(2):
        kit.cache.read(NAMES[:2])
    kit.cache.kept().result(WAIT_S)
    load = kit.cache.load(NAMES[:2], range(2))
    assert not load.over.wait(0.05)
    gate.go_on()
    loaded(load, 2)
    assert sorted(on_disk) == NAMES[:2], "it was read once more"
    for _ in range(2):
        kit.cache.unread(NAMES[:2])


def test_what_two_loads_want_stays_until_both_have_it(kit: Kit, on_disk: list[BlockName]) -> None:
    kit.cache.read(NAMES[:3])
    kit.cache.read(NAMES[:2])
    kit.cache.unread(NAMES[:3])
    kit.settle()
    assert [kit.store.tier(name) for name in NAMES[:3]] == [Tier.MEMORY, Tier.MEMORY, Tier.DISK]
    kit.cache.unread(NAMES[:2])
    kit.settle()
    assert kit.store.stat().memory.num_blocks == 0
    assert sorted(on_disk) == NAMES[:3], "each was read once"


def test_what_was_saved_and_went_to_disk_is_waited_for_when_it_is_read_ahead(
    kit: Kit, on_disk: list[BlockName], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it came once, when it was saved, says nothing of now."""
    kit.write(6, BLOCKS[6])
    assert kit.save(NAMES[6:7], [6]) == []
    kit.store.flush()
    kit.cache.demote(NAMES[6:7])
    gate = Gate(monkeypatch, kit.store, "read")
    kit.cache.read(NAMES[6:7])
    kit.cache.kept().result(WAIT_S)
    load = kit.cache.load(NAMES[6:7], [0])
    gate.go_on()
    loaded(load, 1)
    assert kit.block(0) == BLOCKS[6] and on_disk == NAMES[6:7], "it was read twice"
    kit.cache.unread(NAMES[6:7])


def test_a_cache_that_is_closed_has_done_what_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store is closed next, and its arena unmapped."""
    kit = Kit(memory_of("emulated"), store_of(LAYOUT, 10, Log(tmp_path / "log", SHAPE, 1 << 20, b"test")))
    kit.write(0, BLOCKS[0])
    gate = Gate(monkeypatch, kit.memory, "save")
    kit.cache.save(NAMES[:1], [None], [0], 0, [], lambda lost: None)
    assert gate.began.wait(WAIT_S)
    closing = threading.Thread(target=kit.cache.close)
    closing.start()
    assert closing.is_alive() and not kit.store.contains(NAMES[0])
    gate.go_on()
    closing.join(WAIT_S)
    assert kit.stored(NAMES[0]) == BLOCKS[0]
    kit.store.close()


def test_a_fault_in_what_was_decided_is_no_secret(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    def broken(names: Sequence[BlockName]) -> None:
        raise RuntimeError("the disk is gone")

    kit.cache._keep(broken, NAMES[:1])
    kit.settle()
    assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records] == ["the disk is gone"]


def test_a_load_that_is_cancelled_before_a_thread_has_begun_it_is_over_at_once(kit: Kit) -> None:
    put_chain(kit.store, NAMES[:2], BLOCKS[:2])
    go = threading.Event()
    for _ in range(cache.LOADERS):
        kit.cache._loaders.submit(go.wait, WAIT_S)
    load = kit.cache.load(NAMES[:2], [0, 1])
    load.cancel()
    assert load.over.is_set()
    go.set()
    kit.cache._loaders.submit(bool).result(WAIT_S)
    assert kit.block(0) != BLOCKS[0]


def test_a_prefix_that_ends_before_what_arrives_takes_nothing_of_it(kit: Kit) -> None:
    put_chain(kit.store, NAMES[:3], BLOCKS[:3])
    kit.store.drop(NAMES[1:2])
    fetch = fetch_of(kit, 3, 5)
    load = kit.cache.load(NAMES[:5], range(5), fetch)
    over(load)
    with pytest.raises(PrefixMissing) as raised:
        load.wait(LAST, 5)
    assert raised.value.num_blocks == 1 and kit.lost == NAMES[1:2]
    assert kit.block(0) == BLOCKS[0]
    fetch.end()
    fetch.release()
