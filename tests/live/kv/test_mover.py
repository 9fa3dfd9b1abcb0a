"""Actions in, bytes moved, facts out: a mover alone, and two of them with a session between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from isthmus.core.blocks import state_names
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.node.extent import Extent
from isthmus.core.node.letters import Enough, Granted, Landed, Vacate, Want
from isthmus.core.scheduler import Preempted, Saved
from isthmus.core.types import BlockName, RequestId, Span, Tier
from isthmus.live.engine.emulated import EmulatedMemory
from isthmus.live.kv import cache as cache_module
from isthmus.live.kv.mover import KVMover
from isthmus.live.messenger import MemoryNetwork, Network
from isthmus.live.peers.messages import Given, Slices
from isthmus.live.store import Log, Shape
from tests.live.cluster.fault_peers import (
    LAYOUT,
    OTHER,
    Fault,
    Harm,
    HarmfulNetwork,
    Side,
    join,
    kv_block,
    put_chain,
    store_of,
)

SIZE, LAST, WIDTH = LAYOUT.block_size, LAYOUT.num_layers - 1, LAYOUT.slice_bytes
KEY = RequestId("a#1")
NAMES: tuple[BlockName, ...] = tuple([bytes([number]) * 16 for number in range(8)])
BLOCKS = [kv_block(LAYOUT, number) for number in range(8)]
EXTENT = Extent(SIZE, 0, 10, 12, 10)
THEIRS, OURS = (5, 3, 1), (2, 6, 0)
WAIT_S = 60


class Kit:
    """Two sides, `here` and `there`, which opened the session between them if there is one."""

    def __init__(self, folder: Path) -> None:
        log = Log(folder / "log", Shape(LAYOUT.num_layers, WIDTH), 1 << 20, b"test")
        self.here = Side(store_of(LAYOUT, 64, log), LAYOUT, 8)
        self.there = Side(store_of(LAYOUT, 16), LAYOUT, 8)
        for at, number in enumerate(THEIRS):
            write(self.there, number, BLOCKS[at])

    async def told(self, side: Side, kind: type, count: int = 1) -> Any:
        """The last fact of this kind, once there are so many."""
        async with asyncio.timeout(WAIT_S):
            while len(found := [fact for fact in side.facts if isinstance(fact, kind)]) < count:
                await asyncio.sleep(0.001)
        return found[-1]

    async def heard(self, side: Side, kind: type) -> None:
        """A letter of this kind."""
        await self.until(lambda: bool(side.heard(kind)))

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                await asyncio.sleep(0.001)


def write(side: Side, number: int, data: bytes) -> None:
    for layer in range(LAYOUT.num_layers):
        side.memory.fill(layer, [number], memoryview(data), [layer * WIDTH])


def read(side: Side, number: int, num_tokens: int = SIZE) -> list[bytes]:
    first = number * SIZE
    return [bytes(side.memory.export(at, first, first + num_tokens)) for at in range(LAYOUT.num_layers)]


def stored(side: Side, name: BlockName) -> bytes | None:
    into = memoryview(bytearray(LAYOUT.block_bytes))
    return bytes(into) if side.store.get(name, into) else None


Work = Callable[[Kit], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Runs a test with a session; afterwards nothing may be pinned, reserved or unhandled."""

    def main(work: Work, network: Network | None = None) -> None:
        kit, faults = Kit(tmp_path), list[Any]()

        async def whole() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
            server = await join(network or MemoryNetwork(), kit.there, kit.here)
            await work(kit)
            server.close()
            for side in (kit.here, kit.there):
                side.mover.do(events.Release(KEY))
                await side.mover.close()
                if side.session is not None:
                    side.session.close()
            await kit.until(lambda: not (kit.here._tasks or kit.there._tasks))
            for side in (kit.here, kit.there):
                stat = side.store.stat
                await kit.until(lambda stat=stat: (stat().num_pinned, stat().num_reserved) == (0, 0))
                side.store.check()

        try:
            asyncio.run(whole())
        finally:
            for side in (kit.here, kit.there):
                side.close()
        assert faults == []

    return main


# Hand-overs: computed there, decoded here.


def compute(side: Side) -> None:
    for layer in range(LAYOUT.num_layers):
        side.mover.kv_ready(KEY, Span(layer, layer + 1), Span(0, 10), THEIRS)


def is_whole(kit: Kit) -> bool:
    return all(
        read(kit.here, number, count) == read(kit.there, other, count)
        for number, other, count in zip(OURS, THEIRS, (4, 4, 2), strict=True)
    )


@pytest.mark.parametrize("granted_last", [False, True])
def test_kv_is_handed_over(run: Callable[..., None], granted_last: bool) -> None:
    async def work(kit: Kit) -> None:
        here, there = kit.here, kit.there
        there.send(KEY, EXTENT)
        if not granted_last:
            here.expect(KEY, EXTENT, OURS)
            await kit.heard(there, Granted)
        await asyncio.to_thread(compute, there)  # as a worker does
        there.mover.first_token(KEY, 77)
        there.do(events.Finish(KEY))
        if granted_last:
            await asyncio.sleep(0.01)
            assert not here.mover.gauges()["kv_bytes_in_total"]
            here.expect(KEY, EXTENT, OURS)
        await kit.heard(there, Landed)
        assert is_whole(kit)
        assert here.tokens == {KEY: 77}
        assert [type(fact) for fact in here.facts].count(events.Received) == 1
        assert events.Moved(KEY) in here.facts
        there.do(events.Release(KEY))
        moved = 10 * LAYOUT.num_layers * LAYOUT.token_bytes
        totals = [
            side.mover.gauges()[f"kv_bytes_{way}_total"] for side in (here, there) for way in ("in", "out")
        ]
        assert totals == [moved, 0, 0, moved], "they outlive their attempt"

    run(work)


@pytest.mark.parametrize("from_thread", [False, True])
def test_what_is_released_before_it_began_takes_nothing(run: Callable[..., None], from_thread: bool) -> None:
    """Actions of another thread are not overtaken by those of the event loop."""

    async def work(kit: Kit) -> None:
        kit.there.send(KEY, EXTENT)
        grant = events.Receive(KEY, OTHER, EXTENT, OURS)
        if from_thread:
            thread = threading.Thread(target=kit.here.mover.do, args=(grant,))
            thread.start()
            thread.join()
        else:
            kit.here.mover.do(grant)
        kit.here.mover.do(events.Release(KEY))
        kit.there.mover.send(KEY)
        compute(kit.there)
        await asyncio.sleep(0.01)
        assert read(kit.here, OURS[0]) == [bytes(WIDTH)] * LAYOUT.num_layers

    run(work)


def test_a_release_in_the_middle_of_a_frame(run: Callable[..., None]) -> None:
    """What still comes of it is written nowhere."""

    async def work(kit: Kit) -> None:
        here, handovers = kit.here, kit.here.mover._receiver
        place, num_placed = handovers.place, 0

        def placed(*arguments: Any) -> Any:
            nonlocal num_placed
            num_placed += 1
            if num_placed == 2:
                asyncio.get_running_loop().call_soon(end)
            return place(*arguments)

        def end() -> None:
            here.give_up(KEY, "cancelled")
            for number in OURS:
                write(here, number, BLOCKS[7])

        handovers.place = placed  # type: ignore[method-assign]
        here.expect(KEY, EXTENT, OURS)
        kit.there.send(KEY, EXTENT)
        compute(kit.there)
        await kit.until(lambda: bool(here.failed))
        await asyncio.sleep(0.02)
        assert [b"".join(read(here, number)) for number in OURS] == [BLOCKS[7]] * 3
        assert not here.reasons

    run(work, network=HarmfulNetwork(Harm(Fault.CANCEL, 10_000, Random(1))))


def test_a_damaged_slice_ends_it(run: Callable[..., None]) -> None:
    async def work(kit: Kit) -> None:
        here, there = kit.here, kit.there
        here.expect(KEY, EXTENT, OURS)
        assert there.session is not None
        there.session.send(Slices(KEY, 1, 0, SIZE, (b"x" * 16,)), memoryview(bytes(WIDTH)))
        there.session.send(Slices(KEY, 2, 0, SIZE, (b"x" * 16,)), memoryview(bytes(WIDTH)))  # is read past
        broken = await kit.told(here, events.Broken)
        assert broken == events.Broken(KEY, "a KV block of layer 1 came damaged (seal mismatch)")
        await asyncio.sleep(0.01)
        assert [type(fact) for fact in here.facts].count(events.Broken) == 1
        assert here.mover.gauges()["seal_mismatches_total"] == 1
        assert not here.reasons

    run(work)


def test_a_lost_session_is_told_once_to_either_side(run: Callable[..., None]) -> None:
    """And whatever comes of what is done for that, is done."""

    async def work(kit: Kit) -> None:
        here, there = kit.here, kit.there
        here.expect(KEY, EXTENT, OURS)
        there.send(KEY, EXTENT)
        await kit.heard(there, Granted)
        there.want(events.Fetch(KEY, OTHER, NAMES[:2], 0))
        await kit.heard(here, Want)
        assert there.session is not None
        there.session.abort("killed")
        assert await kit.told(there, events.Gone) == events.Gone(OTHER, "killed")
        assert await kit.told(there, events.FetchEnded) == events.FetchEnded(KEY, 0)
        await kit.told(here, events.Gone)
        await asyncio.sleep(0.01)
        for side in (here, there):
            assert side.failed and [type(fact) for fact in side.facts].count(events.Gone) == 1

    run(work)


@pytest.mark.parametrize("is_known", [False, True])
def test_of_a_node_that_cannot_be_reached_all_that_needs_it_ends(
    run: Callable[..., None], is_known: bool
) -> None:
    async def work(kit: Kit) -> None:
        there = kit.there
        assert there.session is not None
        there.session.close()
        await kit.told(there, events.Gone)
        there.addresses.clear()
        if is_known:
            there.addresses[OTHER] = "127.0.0.1:9"
        for action in (
            events.Tell(OTHER, Vacate(KEY)),
            events.Offer(KEY, OTHER, EXTENT),
            events.Fetch(KEY, OTHER, NAMES[:2], 0),
        ):
            before = len([fact for fact in there.facts if isinstance(fact, events.Gone)])
            there.do(action)
            assert "cannot be reached" in (await kit.told(there, events.Gone, before + 1)).reason
        assert await kit.told(there, events.FetchEnded) == events.FetchEnded(KEY, 0)
        await kit.until(lambda: not there._tasks)

    run(work)


# Cached blocks of another node: they are there, wanted here.


@pytest.fixture
def fetching() -> events.Fetch:
    return events.Fetch(KEY, OTHER, NAMES[:6], 1)


@pytest.mark.parametrize("shares", [False, True], ids=["given", "lent"])
def test_blocks_are_fetched_and_a_load_reads_them_as_they_come(
    run: Callable[..., None], shares: bool, fetching: events.Fetch
) -> None:
    async def work(kit: Kit) -> None:
        here, there = kit.there, kit.here  # who opened the session asks
        here.mover.fetcher._shares = shares
        put_chain(here.store, NAMES[:1], BLOCKS[:1])
        put_chain(there.store, NAMES[:6], BLOCKS[:6])
        here.want(fetching)
        here.mover.do(events.Load(KEY, NAMES[:5], (0, 1, 2, 3, 4), 20, arriving=True))
        load = here.mover.load_of(KEY)
        assert load is not None
        await asyncio.to_thread(load.wait, LAST, 5)
        assert [b"".join(read(here, at)) for at in range(5)] == BLOCKS[:5]
        assert await kit.told(here, events.FetchEnded) == events.FetchEnded(KEY, 6)
        await kit.until(lambda: [stored(here, name) for name in NAMES[:6]] == BLOCKS[:6])  # adopted in a thread
        assert events.Moved(KEY, fetched=True) in here.facts
        await kit.heard(there, Enough)
        here.mover.loaded(KEY)
        assert here.mover.load_of(KEY) is None
        name = "kv_bytes_borrowed_total" if shares else "kv_bytes_fetched_total"
        assert here.mover.gauges()[name] == 5 * LAYOUT.block_bytes

    run(work)


@pytest.mark.parametrize("begun", [False, True])
def test_a_fetch_that_is_ended_says_so(run: Callable[..., None], begun: bool) -> None:
    async def work(kit: Kit) -> None:
        kit.here.mover._told = kit.here.facts.append  # decides nothing
        kit.there.want(events.Fetch(KEY, OTHER, NAMES[:3], 0))
        if begun:
            await kit.heard(kit.here, Want)
        kit.there.mover.do(events.EndFetch(KEY))
        assert await kit.told(kit.there, events.FetchEnded) == events.FetchEnded(KEY, 0)

    run(work)


# The cache.


def test_a_load_reads_only_what_its_fetch_has_of_its_prefix(run: Callable[..., None]) -> None:
    """Where the prefix of use ends with a state, the fetch goes on with the prompt's blocks."""

    async def work(kit: Kit) -> None:
        here, there = kit.there, kit.here
        (state,) = state_names(NAMES[1], 1)
        put_chain(here.store, [*NAMES[:2], state], [*BLOCKS[:2], BLOCKS[7]])
        put_chain(there.store, NAMES[:4], BLOCKS[:4])
        here.want(events.Fetch(KEY, OTHER, NAMES[:4], 2))
        here.mover.do(events.Load(KEY, (*NAMES[:2], state), (0, 1, 5), 2 * SIZE, arriving=True, told=True))
        assert await kit.told(here, events.Loaded) == events.Loaded(KEY, 3)
        assert [b"".join(read(here, at)) for at in (0, 1, 5)] == [*BLOCKS[:2], BLOCKS[7]]
        await kit.heard(there, Enough)

    run(work)


def test_what_no_fetch_brought_is_lost(run: Callable[..., None]) -> None:
    """A node may have decided to adopt it when a process took its place."""

    async def work(kit: Kit) -> None:
        kit.here.mover.do(events.Adopt(KEY, NAMES[:2]))
        assert await kit.told(kit.here, events.Lost) == events.Lost(NAMES[:2])

    run(work)


def test_a_short_load_says_so(run: Callable[..., None]) -> None:
    async def work(kit: Kit) -> None:
        put_chain(kit.here.store, NAMES[:2], BLOCKS[:2])
        kit.here.mover.do(events.Load(KEY, NAMES[:3], (0, 1, 2), 12, told=True))
        assert await kit.told(kit.here, events.Loaded) == events.Loaded(KEY, 2)
        assert kit.here.mover.load_of(KEY) is None, "a run would be told once more what is missing"

    run(work)


def test_what_was_read_ahead_is_read_once(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(kit: Kit) -> None:
        here, done = kit.here, list[BlockName]()
        put_chain(here.store, NAMES[:4], BLOCKS[:4])
        here.store.flush()
        here.store.demote(NAMES[:4])
        get = here.store.read
        monkeypatch.setattr(here.store, "read", lambda name, *more: done.append(name) or get(name, *more))
        here.mover.do(events.Read(KEY, NAMES[1:4]))
        here.mover.do(events.Promote(NAMES[1:2]))
        here.mover.do(events.Load(KEY, NAMES[:4], (0, 1, 2, 3), 16))
        load = here.mover.load_of(KEY)
        assert load is not None
        await asyncio.to_thread(load.wait, LAST, 4)
        await asyncio.to_thread(load.over.wait)
        assert [b"".join(read(here, at)) for at in range(4)] == BLOCKS[:4]
        assert sorted(set(done)) == list(NAMES[:4]) and len(done) <= 4
        await kit.until(lambda: here.store.stat().memory.num_blocks == 1)

    monkeypatch.setattr(cache_module, "AHEAD", 2)
    run(work)


def test_what_was_read_ahead_for_an_attempt_that_ends_goes_back(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(kit: Kit) -> None:
        here = kit.here
        put_chain(here.store, NAMES[:3], BLOCKS[:3])
        here.store.flush()
        here.store.demote(NAMES[:3])
        here.mover.do(events.Read(KEY, NAMES[:3]))
        await kit.until(lambda: here.store.stat().memory.num_blocks == 3)
        here.mover.do(events.Release(KEY))
        await kit.until(lambda: here.store.stat().memory.num_blocks == 0)
        assert [here.store.tier(name) for name in NAMES[:3]] == [Tier.DISK] * 3

    monkeypatch.setattr(cache_module, "AHEAD", 2)
    run(work)


@pytest.mark.parametrize("ends", [events.Release(KEY), Preempted(KEY), events.Shorten(KEY, 0)], ids=repr)
def test_nothing_is_loaded_after_the_end(
    run: Callable[..., None], ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(kit: Kit) -> None:
        here, began, go_on = kit.here, threading.Event(), threading.Event()
        put_chain(here.store, NAMES[:3], BLOCKS[:3])
        fill = here.memory.fill

        def slow(*arguments: Any) -> None:
            began.set()
            assert go_on.wait(WAIT_S)
            fill(*arguments)

        monkeypatch.setattr(here.memory, "fill", slow)
        here.mover.do(events.Load(KEY, NAMES[:3], (0, 1, 2), 12, told=True))
        assert await asyncio.to_thread(began.wait, WAIT_S)
        asyncio.get_running_loop().run_in_executor(None, lambda: (threading.Event().wait(0.02), go_on.set()))
        here.mover.do(ends)
        monkeypatch.undo()
        for number in range(3):
            write(here, number, BLOCKS[7])
        await asyncio.sleep(0.02)
        assert [b"".join(read(here, at)) for at in range(3)] == [BLOCKS[7]] * 3
        assert not any(isinstance(fact, events.Loaded) for fact in here.facts)
        assert here.mover.load_of(KEY) is None

    run(work)


def test_blocks_are_saved_staged_ones_too(run: Callable[..., None]) -> None:
    async def work(kit: Kit) -> None:
        here = kit.here
        put_chain(here.store, NAMES[:1], BLOCKS[:1])
        for number in range(4):
            write(here, number, BLOCKS[number])
        staging = here.mover.stage(KEY, NAMES[:3], (0, 1, 2))
        assert staging is not None
        assert (list(staging.names), list(staging.blocks)) == ([NAMES[1], NAMES[2]], [1, 2]), "not what it has"
        for layer in range(LAYOUT.num_layers):
            here.mover.save_layer(staging, layer)
        await asyncio.wrap_future(here.cache.kept())
        write(here, 1, BLOCKS[7])  # what was staged counts
        here.mover.do(events.Save(KEY, NAMES[1:4], NAMES[0], (1, 2, 3)))
        here.mover.do(events.Demote(NAMES[2:3]))
        here.mover.do(events.Drop(NAMES[3:4]))
        assert await kit.told(here, Saved) == Saved(KEY)
        assert [stored(here, name) for name in NAMES[:3]] == BLOCKS[:3]
        await asyncio.wrap_future(here.cache.kept())
        assert [here.store.tier(name) for name in NAMES[1:4]] == [Tier.MEMORY, Tier.DISK, None]
        assert not any(isinstance(fact, events.Lost) for fact in here.facts)
        assert here.mover.stage(KEY, NAMES[:2], (0, 1)) is None

    run(work)


def test_what_finds_no_room_is_lost(run: Callable[..., None]) -> None:
    async def work(kit: Kit) -> None:
        there = kit.there
        taken = there.store.reserve(15)
        there.mover.do(events.Save(KEY, NAMES[:3], None, (5, 3, 1)))
        assert await kit.told(there, events.Lost) == events.Lost(NAMES[1:3])
        assert Saved(KEY) in there.facts
        there.mover.lost_bytes([NAMES[0]])
        assert await kit.told(there, events.Lost, 2) == events.Lost(NAMES[:1])
        there.store.give_back(taken)

    run(work)


@pytest.mark.parametrize("ends", [events.Release(KEY), Preempted(KEY)], ids=repr)
def test_what_was_staged_for_nothing_is_given_back(run: Callable[..., None], ends: Any) -> None:
    async def work(kit: Kit) -> None:
        assert kit.here.mover.stage(KEY, NAMES[:3], (0, 1, 2)) is not None
        assert kit.here.store.stat().num_reserved == 3
        kit.here.mover.do(ends)
        await kit.until(lambda: kit.here.store.stat().num_reserved == 0)

    run(work)


def test_without_a_cache() -> None:
    async def main() -> None:
        facts, kit = list[events.Event](), Side(store_of(LAYOUT, 1), LAYOUT, 1)
        mover = KVMover(
            memory=EmulatedMemory(LAYOUT, 2), first_layer=0, cache=None, peers=kit.peers,
            tell=facts.append, spawn=asyncio.create_task, shares_memory=False, received=lambda key, token: None,
            attends=lambda layer, asked, q, parts: q, answer_s=30.0,
        )  # fmt: skip
        mover.open(asyncio.get_running_loop())
        mover.do(events.Fetch(KEY, OTHER, NAMES[:2], 1))
        mover.do(events.EndFetch(KEY))
        mover.do(events.Release(KEY))
        await asyncio.sleep(0.01)
        assert facts == [events.FetchEnded(KEY, 1)]
        assert not {"kv_bytes_fetched_total", "kv_bytes_given_total"} & set(mover.gauges())
        session: Any = object()
        for said, words in ((Given(KEY, 0, 0, (b"",)), "blocks came to a node without a cache"),):
            with pytest.raises(ProtocolError, match=words):
                mover.on_peer(session, OTHER, said)
        await mover.close()
        kit.close()

    asyncio.run(main())


def test_payloads_come_with_slices_and_given_blocks_only(run: Callable[..., None]) -> None:
    async def work(kit: Kit) -> None:
        session: Any = kit.here.session
        with pytest.raises(ProtocolError, match=r"a Landed from .* carried 7 bytes"):
            kit.here.mover.place(session, Landed(KEY), 7)

    run(work)
