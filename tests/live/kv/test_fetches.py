"""Blocks between two nodes, over memory and over sockets: what arrives is right, and everything taken is given back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from isthmus.core.blocks import KVLayout, seal
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.node.letters import Enough, Want
from isthmus.core.types import BlockName, NodeId, RequestId, Tier
from isthmus.live.engine import codecs
from isthmus.live.kv import fetches, loans
from isthmus.live.kv.cache import LOADERS, PrefixMissing
from isthmus.live.kv.fetches import Fetching
from isthmus.live.messenger import Network, TcpNetwork
from isthmus.live.peers.messages import Ended, Given, Lent, Pull
from isthmus.live.store import ArenaHandle, Log, PeerArena, Shape, Store
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
from tests.memory_network import MemoryNetwork

SHAPE = Shape(LAYOUT.num_layers, LAYOUT.slice_bytes)
NETWORKS: dict[str, Callable[[], Network]] = {
    "memory": MemoryNetwork,
    "tcp": TcpNetwork,
    "several lanes": lambda: TcpNetwork(connections=3),
}
KEY = RequestId("a#1")
WAIT_S = 60
"""Only so that a bug ends a test."""


def names_of(count: int) -> list[bytes]:
    return [bytes([7, *divmod(number, 256), *[0] * 13]) for number in range(count)]


def contents(count: int) -> list[bytes]:
    return [kv_block(LAYOUT, number) for number in range(count)]


def state(store: Store) -> tuple[int, int, int]:
    """What must be as before: slots in use, pins, reservations."""
    store.check()
    stat = store.stat()
    return stat.memory.used_bytes, stat.num_pinned, stat.num_reserved


class Pair:
    """`source` has `count` blocks of a chain; `target` wants them."""

    def __init__(self, count: int, room: int = 400, *, log: Log | None = None, shares: bool = False) -> None:
        self.names, self.blocks = names_of(count), contents(count)
        self.source = Side(store_of(LAYOUT, count + 8, log), LAYOUT, 8)
        self.target = Side(store_of(LAYOUT, room), LAYOUT, 8 + count, shares_memory=shares)
        put_chain(self.source.store, self.names, self.blocks)

    def fetch(self, codec: str = codecs.NONE, start: int = 0, key: str = KEY) -> Fetching:
        """Release it."""
        order = events.Fetch(RequestId(key), OTHER, tuple(self.names), start, codec=codec)
        fetch = self.target.fetch(order)
        fetch.hold()
        return fetch

    def arrived(self) -> list[bytes | None]:
        """The wanted blocks as they are in the target's store."""
        found: list[bytes | None] = []
        for name in self.names:
            into = memoryview(bytearray(LAYOUT.block_bytes))
            found.append(bytes(into) if self.target.store.get(name, into) else None)
        return found

    async def settled(self, before: tuple[int, int, int]) -> None:
        """The source has all its slots and pins again."""
        async with asyncio.timeout(WAIT_S):
            while state(self.source.store) != before:
                await asyncio.sleep(0.002)


def run(pair: Pair, network: Network, work: Callable[[], Awaitable[None]]) -> None:
    """Runs the work with a session between both; afterwards nothing may be left pinned, reserved, or unhandled."""
    faults: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        before = state(pair.source.store)
        async with session(network, pair), asyncio.timeout(WAIT_S):
            await work()
            await pair.settled(before)
        assert state(pair.target.store)[1:] == (0, 0), "the target keeps pins or reservations"
        num_blocks = pair.target.store.stat().memory.num_blocks
        assert state(pair.target.store)[0] == num_blocks * LAYOUT.block_bytes, "slots nobody knows of"

    try:
        asyncio.run(main())
    finally:
        pair.source.close()
        pair.target.close()
    assert faults == []


@contextlib.asynccontextmanager
async def session(network: Network, pair: Pair) -> AsyncIterator[None]:
    server = await join(network, pair.target, pair.source)
    try:
        yield
    finally:
        server.close()
        for side in (pair.target, pair.source):
            assert side.session is not None
            side.session.close()
        while not (pair.target.reasons and pair.source.reasons):
            await asyncio.sleep(0.001)


@contextlib.contextmanager
def held(fetch: Fetching) -> Iterator[None]:
    try:
        yield
    finally:
        fetch.release()


# What arrives.


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("codec", [codecs.NONE, codecs.ZSTD])
def test_blocks_arrive_as_they_are(network: str, codec: str) -> None:
    """More than are looked up at once."""
    pair = Pair(2 * loans.GIVE_BLOCKS + 3)

    async def work() -> None:
        with held(fetch := pair.fetch(codec)):
            await pair.target.fetching(fetch)
            assert fetch.num_whole == len(pair.names)
            assert pair.target.store.stat().num_pinned == len(pair.names)
        assert pair.arrived() == pair.blocks
        await asyncio.sleep(0)
        assert pair.target.facts[-1] == events.FetchEnded(KEY, len(pair.names))
        assert pair.target.mover.fetcher.bytes_in == len(pair.names) * LAYOUT.block_bytes

    run(pair, NETWORKS[network](), work)


def test_int8_arrives_as_every_encoder_makes_it() -> None:
    pair = Pair(5)

    async def work() -> None:
        with held(fetch := pair.fetch(codecs.INT8)):
            await pair.target.fetching(fetch)
        for got, sent in zip(pair.arrived(), pair.blocks, strict=True):
            expected = bytearray()
            for at in range(0, LAYOUT.block_bytes, LAYOUT.slice_bytes):
                data = codecs.encode("int8", LAYOUT, [memoryview(sent)[at : at + LAYOUT.slice_bytes]], 4)
                decoded = memoryview(bytearray(LAYOUT.slice_bytes))
                codecs.decode("int8", LAYOUT, data, [decoded], 4)
                expected += decoded
            assert got == expected

    run(pair, MemoryNetwork(), work)


@pytest.mark.parametrize("missing", [0, 1, 4])
def test_what_the_source_has_not_ends_the_prefix(missing: int) -> None:
    pair = Pair(6)
    pair.source.store.drop([pair.names[missing]])

    async def work() -> None:
        with held(fetch := pair.fetch()):
            await pair.target.fetching(fetch)
            assert fetch.num_whole == missing
        assert pair.arrived() == [*pair.blocks[:missing], *[None] * (6 - missing)]

    run(pair, MemoryNetwork(), work)


def test_a_fetch_may_begin_in_the_midst_of_a_prefix() -> None:
    pair = Pair(6)
    put_chain(pair.target.store, pair.names[:2], pair.blocks[:2])

    async def work() -> None:
        with held(fetch := pair.fetch(start=2)):
            await pair.target.fetching(fetch)
            assert fetch.num_whole == 4
        assert pair.arrived() == pair.blocks

    run(pair, MemoryNetwork(), work)


def test_a_block_that_came_from_elsewhere_meanwhile_is_not_kept_twice() -> None:
    pair = Pair(6)
    put_chain(pair.target.store, pair.names[:2], pair.blocks[:2])

    async def work() -> None:
        with held(fetch := pair.fetch()):
            await pair.target.fetching(fetch)
            assert fetch.num_whole == 6
        assert pair.target.store.stat().memory.num_blocks == 6

    run(pair, MemoryNetwork(), work)


def test_blocks_on_the_disk_of_the_source(tmp_path: Path) -> None:
    pair = Pair(6, log=Log(tmp_path / "log", SHAPE, 1 << 20, b"test"))
    pair.source.store.flush()
    pair.source.store.demote(pair.names[1:4])
    pair.source.store.flush()
    assert pair.source.store.tier(pair.names[2]) is Tier.DISK

    async def work() -> None:
        with held(fetch := pair.fetch()):
            await pair.target.fetching(fetch)
        assert pair.arrived() == pair.blocks

    run(pair, MemoryNetwork(), work)


# Room.


@pytest.mark.parametrize("way", ["bytes", "lent"])
def test_it_goes_on_as_room_comes(way: str) -> None:
    """The target has three slots; what it had gives way when the first three blocks are offered."""
    pair = Pair(8, room=6, shares=way == "lent")
    others = [bytes([9, number]) * 8 for number in range(3)]
    put_chain(pair.target.store, others, contents(3))
    seen: list[int] = []
    drop = pair.target.store.drop
    pair.target.store.drop = lambda names: (time.sleep(0.02), drop(names))  # type: ignore[method-assign]

    def make_way(fact: events.Event) -> None:
        pair.target._told(fact)
        if isinstance(fact, events.Came):
            seen.append(fact.stop)
            pair.target.mover.do(events.Drop(tuple(others)))

    async def work() -> None:
        target = pair.target
        target.mover._told = make_way
        with held(fetch := pair.fetch()):
            await target.fetching(fetch)
            assert fetch.num_whole == 6
        assert seen == [3, 6]
        assert pair.arrived() == [*pair.blocks[:6], None, None]

    run(pair, MemoryNetwork(), work)


@pytest.mark.parametrize("host", ["", "another"])
def test_without_any_room_nothing_is_fetched(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`another`: the target would read blocks where they lie, but they lie on another host."""
    pair = Pair(4, room=2, shares=bool(host))
    taken = pair.target.store.reserve(2)

    async def work() -> None:
        monkeypatch.setattr(fetches, "host_id", lambda: host)
        with held(fetch := pair.fetch()):
            await pair.target.fetching(fetch)
            assert fetch.num_whole == 0
        pair.target.store.give_back(taken)

    run(pair, MemoryNetwork(), work)


# Blocks copied from where they lie.


def test_lent_blocks_are_copied_and_given_back() -> None:
    pair = Pair(6, shares=True)

    async def work() -> None:
        with held(fetch := pair.fetch()):
            await pair.target.fetching(fetch)
            assert fetch.num_whole == 6
            async with asyncio.timeout(WAIT_S):
                while pair.source.store.stat().num_pinned:
                    await asyncio.sleep(0.001)
            assert pair.target.facts[-1] == events.FetchEnded(KEY, 6)
        assert pair.arrived() == pair.blocks
        fetcher = pair.target.mover.fetcher
        assert (fetcher.bytes_lent, fetcher.bytes_in) == (6 * LAYOUT.block_bytes, 0)

    run(pair, MemoryNetwork(), work)


def test_a_cancelled_loan_is_copied_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its second layer: none of its blocks is whole, and its slots may be filled anew."""
    pair = Pair(6, shares=True)
    copy_bytes, num_copies, cancelled = fetches.copy_bytes, 0, threading.Event()

    def cancel() -> None:
        pair.target.mover.fetcher.cancel(KEY)
        cancelled.set()

    def counted(into: memoryview, data: memoryview) -> None:
        nonlocal num_copies
        num_copies += 1
        copy_bytes(into, data)
        if num_copies == 9:
            loop.call_soon_threadsafe(cancel)
            assert cancelled.wait(WAIT_S)

    monkeypatch.setattr(fetches, "copy_bytes", counted)

    async def work() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        with held(fetch := pair.fetch()):
            await pair.target.fetching(fetch)
            assert fetch.num_whole == 0 and num_copies <= 12

    loop: asyncio.AbstractEventLoop
    run(pair, MemoryNetwork(), work)


def test_an_arena_that_cannot_be_mapped_is_asked_for_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of another container of the same host."""
    pair = Pair(6, shares=True)
    monkeypatch.setattr(PeerArena, "attach", lambda handle: None)

    async def work() -> None:
        with held(fetch := pair.fetch()):
            await pair.target.fetching(fetch)
            assert fetch.num_whole == 6
        assert pair.arrived() == pair.blocks
        assert pair.target.reasons == [] and not pair.target.mover.fetcher.bytes_lent

    run(pair, MemoryNetwork(), work)


def slot_of(pair: Pair, at: int) -> int:
    (pinned,) = pair.source.store.pin([pair.names[at]])
    assert pinned is not None
    pair.source.store.unpin([pinned])
    return pinned.slot


def test_a_lent_block_that_changes_while_it_is_copied_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is lost, so that the owner takes its slots back and fills them anew. A load that reads it as it
    comes gets none of it."""
    pair = Pair(6, shares=True)
    copy_bytes, num_copies, cancelled = fetches.copy_bytes, 0, threading.Event()

    def cancel() -> None:
        pair.target.mover.fetcher.cancel(KEY)
        cancelled.set()

    def late(into: memoryview, data: memoryview) -> None:
        nonlocal num_copies
        num_copies += 1
        if num_copies == 9:  # layer 1, block 2
            pair.source.store.arena.slice(slot_of(pair, 2), 1)[5] ^= 1
        copy_bytes(into, data)

    monkeypatch.setattr(fetches, "copy_bytes", late)

    async def work() -> None:
        with held(fetch := pair.fetch()):
            fetch.hold()
            load = pair.target.cache.load(pair.names, range(6), fetch)
            await pair.target.fetching(fetch)
            with pytest.raises(PrefixMissing):
                await asyncio.to_thread(load.wait, LAYOUT.num_layers - 1, 6)
            await asyncio.to_thread(load.over.wait)
            await asyncio.sleep(0)
            assert pair.target.facts[-1] == events.FetchEnded(KEY, 0)
        assert pair.target.mover.fetcher.seal_mismatches == 1
        assert all(got in (None, sent) for got, sent in zip(pair.arrived(), pair.blocks, strict=True))

    run(pair, MemoryNetwork(), work)


# Ends in mid-way.


@pytest.mark.parametrize("codec", [codecs.NONE, codecs.ZSTD])
@pytest.mark.parametrize("at", [900, 2500, 4000, 6000])
def test_a_cancelled_fetch_gives_everything_back(codec: str, at: int) -> None:
    """The slots it gives back are written by nothing that is still on its way."""
    pair = Pair(20, room=20)
    harm = Harm(Fault.CANCEL, at, Random(at))

    async def work() -> None:
        harm.then = lambda: pair.target.mover.fetcher.cancel(KEY)
        with held(fetch := pair.fetch(codec)):
            await pair.target.fetching(fetch)
        assert harm.is_done and fetch.num_whole < 20
        store = pair.target.store
        for slot in (slots := store.reserve(20)):
            store.arena.slot(slot)[:] = b"\xa5" * LAYOUT.block_bytes
        for _ in range(200):
            await asyncio.sleep(0)
        assert all(set(store.arena.slot(slot)) == {0xA5} for slot in slots), "a late byte was written"
        store.give_back(slots)
        assert all(got in (None, sent) for got, sent in zip(pair.arrived(), pair.blocks, strict=True))

    run(pair, HarmfulNetwork(harm), work)


def test_large_payloads_end_in_the_midst_over_sockets_too() -> None:
    """4 MiB a message: what the kernel still brings of the one under way goes nowhere."""
    layout = KVLayout(dtype="bfloat16", block_size=16, num_layers=3, num_kv_heads=8, head_dim=128)
    names, random = names_of(64), Random(1)
    blocks = [random.randbytes(layout.block_bytes) for _ in names]

    async def main() -> None:
        source = Side(store_of(layout, 70), layout, 2)
        target = Side(store_of(layout, 64), layout, 2)
        put_chain(source.store, names, blocks)
        before, store = state(source.store), target.store
        fetcher = target.mover.fetcher
        place, num_placed = fetcher.place, 0

        def placed(*arguments: Any) -> list[memoryview]:
            nonlocal num_placed
            num_placed += 1
            if num_placed == 2:
                asyncio.get_running_loop().call_soon(fetcher.cancel, KEY)
            return place(*arguments)

        fetcher.place = placed  # type: ignore[method-assign]
        server = await join(TcpNetwork(connections=2), target, source)
        fetch = target.fetch(events.Fetch(KEY, OTHER, tuple(names), 0))
        await target.fetching(fetch)
        assert num_placed >= 2 and fetch.num_whole == 0
        for slot in (slots := store.reserve(64)):
            store.arena.slot(slot)[:] = b"\xa5" * layout.block_bytes
        assert len(slots) == 64
        async with asyncio.timeout(WAIT_S):
            while state(source.store) != before:
                await asyncio.sleep(0.002)
        assert target.session is not None
        target.session.close()
        while not (target.reasons and source.reasons):
            await asyncio.sleep(0.001)
        canary = b"\xa5" * layout.block_bytes
        assert all(store.arena.slot(slot) == canary for slot in slots), "a late byte was written"
        store.give_back(slots)
        server.close()
        for side in (source, target):
            side.close()

    asyncio.run(main())


def test_a_stalled_fetch_writes_nothing_when_its_bytes_come_after_all() -> None:
    pair = Pair(20, room=20)
    network = MemoryNetwork(connections=2)

    async def work() -> None:
        store = pair.target.store
        fetch = pair.fetch()
        task = asyncio.create_task(pair.target.fetching(fetch))
        while fetch.answer is None:
            await asyncio.sleep(0)
        network.links[0].is_stalled = True
        for _ in range(50):
            await asyncio.sleep(0.001)
        pair.target.mover.do(events.EndFetch(KEY))
        await task
        fetch.release()
        for slot in (slots := store.reserve(20)):
            store.arena.slot(slot)[:] = b"\xa5" * LAYOUT.block_bytes
        network.links[0].resume()
        for _ in range(200):
            await asyncio.sleep(0)
        assert all(set(store.arena.slot(slot)) == {0xA5} for slot in slots), "a late byte was written"
        store.give_back(slots)

    run(pair, network, work)


def test_a_fetch_cancelled_before_its_session_is_there_asks_for_nothing() -> None:
    pair = Pair(4)

    async def work() -> None:
        fetcher, there = pair.target.mover.fetcher, asyncio.Event()

        async def reach(node: NodeId) -> Any:
            await there.wait()
            return pair.target.session

        fetcher._reach = reach
        with held(fetch := pair.fetch()):
            task = asyncio.create_task(fetcher.begin(fetch))
            await asyncio.sleep(0)
            fetcher.cancel(KEY)
            there.set()
            await task
            assert fetch.num_whole == 0
        assert pair.source.mover._loans.bytes_out == 0

    run(pair, MemoryNetwork(), work)


@pytest.mark.parametrize("connections", [1, 3])
def test_a_lost_connection(connections: int) -> None:
    """Of several, the others take over; the only one ends the fetch with what was whole."""
    pair = Pair(100)
    harm = Harm(Fault.LOST, 30_000, Random(1))

    async def work() -> None:
        with held(fetch := pair.fetch()):
            await pair.target.fetching(fetch)
        assert harm.is_done
        arrived = pair.arrived()
        if connections > 1:
            assert arrived == pair.blocks
        else:
            assert arrived[-1] is None
        assert all(got in (None, sent) for got, sent in zip(arrived, pair.blocks, strict=True))

    run(pair, HarmfulNetwork(harm, connections), work)


@pytest.mark.parametrize("network", ["memory", "tcp"])
def test_the_source_leaves_in_midway(network: str) -> None:
    pair = Pair(100)
    receive = pair.target.mover.fetcher.receive

    async def work() -> None:
        def leave(connection: Any, given: Given) -> None:
            receive(connection, given)
            assert pair.source.session is not None
            pair.source.session.abort("killed")

        pair.target.mover.fetcher.receive = leave  # type: ignore[method-assign]
        with held(fetch := pair.fetch()):
            await pair.target.fetching(fetch)
            assert fetch.num_whole < 100
        assert all(got in (None, sent) for got, sent in zip(pair.arrived(), pair.blocks, strict=True))

    run(pair, NETWORKS[network](), work)


def test_nobody_to_ask() -> None:
    pair = Pair(4)

    async def work() -> None:
        assert pair.target.session is not None
        pair.target.session.close()
        pair.target.addresses.clear()
        with held(fetch := pair.fetch()):
            await pair.target.fetching(fetch)
            assert fetch.num_whole == 0

    run(pair, MemoryNetwork(), work)


# What must not be believed.


@pytest.mark.parametrize("codec", [codecs.NONE, codecs.ZSTD])
def test_a_block_damaged_in_the_arena_of_the_source(codec: str) -> None:
    pair = Pair(6)
    pair.source.store.arena.slice(slot_of(pair, 3), 1)[7] ^= 0x20

    async def work() -> None:
        with held(fetch := pair.fetch(codec)):
            await pair.target.fetching(fetch)
            assert fetch.num_whole <= 3
        assert pair.target.mover.fetcher.seal_mismatches == 1
        assert all(got in (None, sent) for got, sent in zip(pair.arrived(), pair.blocks, strict=True))

    run(pair, MemoryNetwork(), work)


ZERO = memoryview(bytes(LAYOUT.slice_bytes))
SEALS = (b"x" * 16,)
HANDLE = ArenaHandle("/proc/self/fd/0", b"n" * 16, 4, SHAPE)
LIES: dict[str, Callable[[Any, Pull], None]] = {
    "wrong seals": lambda c, w: c.send(Given(w.key, 0, 0, SEALS), ZERO),
    "too many bytes": lambda c, w: c.send(Given(w.key, 0, 0, SEALS), ZERO, ZERO),
    "too few bytes": lambda c, w: c.send(Given(w.key, 0, 0, SEALS), ZERO[1:]),
    "more blocks than room": lambda c, w: c.send(Given(w.key, 0, 0, SEALS * 5), *[ZERO] * 5),
    "past the end": lambda c, w: c.send(Given(w.key, 0, 4, SEALS), ZERO),
    "before the start": lambda c, w: c.send(Given(w.key, 0, -1, SEALS), ZERO),
    "no layer of the model": lambda c, w: c.send(Given(w.key, 3, 0, SEALS), ZERO),
    "a negative layer": lambda c, w: c.send(Given(w.key, -1, 0, SEALS), ZERO),
    "no payload": lambda c, w: c.send(Given(w.key, 0, 0, SEALS)),
    "nothing sealed": lambda c, w: c.send(Given(w.key, 0, 0, ())),
    "the end of what did not come": lambda c, w: c.send(Ended(w.key, w.room)),
    "more than there was room for": lambda c, w: c.send(Ended(w.key, 99)),
    "lent unasked": lambda c, w: c.send(Lent(w.key, HANDLE, (0,), (SEALS * 3,))),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_end_the_fetch_and_leave_nothing(lie: str) -> None:
    pair = Pair(4, room=2)

    async def work() -> None:
        """The source answers a Pull with something else."""
        pair.source.mover._heard[Pull] = lambda session, peer, pull: LIES[lie](session, pull)
        with held(fetch := pair.fetch()):
            async with asyncio.timeout(WAIT_S):
                await pair.target.fetching(fetch)
            assert fetch.num_whole == 0
        assert pair.target.store.stat().memory.num_blocks == 0

    run(pair, MemoryNetwork(), work)


class Begun:
    """A fetch of four blocks with room for three, of which the first is here in layer 0; and what must come next."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.session, self.sent = pair, Mute(), contents(4)
        self.fetch = pair.target.fetch(events.Fetch(KEY, OTHER, tuple(pair.names), 0))
        pair.target.store.reserve(pair.target.store.arena.num_slots - 3)
        assert self.fetch.make_room() == 3
        assert self.arrive(0, 0, 1)
        self.next = self.given(0, 1, 2)

    def slices(self, layer: int, first: int, count: int) -> list[bytes]:
        at = layer * LAYOUT.slice_bytes
        return [block[at : at + LAYOUT.slice_bytes] for block in self.sent[first : first + count]]

    def given(self, layer: int, first: int, count: int) -> Given:
        return Given(KEY, layer, first, tuple(map(seal, self.slices(layer, first, count))))

    def place(self, given: Given, more_bytes: int = 0) -> list[memoryview] | None:
        size = len(given.seals) * LAYOUT.slice_bytes + more_bytes
        return self.fetch.place(self.session, given, size)  # type: ignore[arg-type]

    def arrive(self, layer: int, first: int, count: int) -> bool:
        given = self.given(layer, first, count)
        targets = self.place(given)
        assert targets is not None
        for target, data in zip(targets, self.slices(layer, first, count), strict=True):
            target[:] = data
        return self.fetch.receive(given)


class Mute:
    """Stands for a session."""

    peer, closed = "somebody", False

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.refused: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def refuse(self, message: Any) -> bool:
        self.refused.append(message)
        return True


@pytest.fixture
def begun() -> Iterator[Begun]:
    pair = Pair(4, room=8)
    yield Begun(pair)
    for side in (pair.source, pair.target):
        side.close()


def test_what_must_come_next_is_taken(begun: Begun) -> None:
    assert begun.arrive(0, 1, 2) and begun.arrive(2, 0, 3) and begun.arrive(1, 0, 3)
    assert begun.fetch.count() == begun.fetch.num_whole == 3 and begun.fetch.count() == 0
    assert begun.fetch.adopt(begun.pair.names[:3]) == 3
    assert begun.pair.arrived() == [*begun.sent[:3], None]


@pytest.mark.parametrize(
    ("changes", "more_bytes"),
    [
        ({"first": 0}, 0),  # what is here already, under its seals
        ({"first": -1}, 0),
        ({"first": 2}, 0),  # there is room for three
        ({"first": 3, "seals": (b"",)}, 0),
        ({"layer": 3}, 0),
        ({"layer": -1}, 0),
        ({"seals": ()}, 0),
        ({"seals": (b"",) * 3}, 0),
        ({}, 1),
        ({}, -1),
    ],
)
def test_what_must_not_come_next_is_placed_nowhere(
    begun: Begun, changes: dict[str, Any], more_bytes: int
) -> None:
    assert begun.place(msgspec.structs.replace(begun.next, **changes), more_bytes) is None
    assert begun.place(begun.next) is not None, "a refusal changed something"
    assert begun.place(msgspec.structs.replace(begun.next, seals=(b"x", b"y"))) is None, "two in one place"


def test_what_is_not_next_does_not_count(begun: Begun) -> None:
    assert not begun.arrive(0, 2, 1), "the block before it is missing"
    assert begun.fetch.num_whole == 0


def test_nothing_is_placed_when_it_is_over(begun: Begun) -> None:
    begun.fetch.end()
    assert begun.place(begun.next) is None


def test_what_is_under_way_when_a_fetch_ends_is_refused_before_its_slots_are_given_back() -> None:
    pair, line = Pair(4, room=8), Mute()
    reserved: list[int] = []

    def refuse(message: Any) -> bool:
        reserved.append(pair.target.store.stat().num_reserved)
        return True

    line.refuse = refuse  # type: ignore[method-assign]

    async def reach(node: NodeId) -> Any:
        return line

    async def work() -> None:
        pair.target.mover.open(asyncio.get_running_loop())
        pair.target.mover.fetcher._reach = reach
        fetch = pair.fetch()
        running = asyncio.create_task(pair.target.fetching(fetch))
        while not line.sent:
            await asyncio.sleep(0)
        assert fetch.place(line, Given(KEY, 0, 0, SEALS), LAYOUT.slice_bytes) is not None  # type: ignore[arg-type]
        pair.target.mover.fetcher.cancel(KEY)
        await running
        fetch.release()

    asyncio.run(work())
    assert reserved == [4] and pair.target.store.stat().num_reserved == 0
    for side in (pair.source, pair.target):
        side.close()


def test_of_a_fetch_only_the_session_is_heard_that_was_asked(begun: Begun) -> None:
    """The same peer, though with another key, or another one."""
    fetcher, stranger = begun.pair.target.mover.fetcher, Mute()
    fetcher._open[KEY] = begun.fetch
    begun.fetch.session = begun.session  # type: ignore[assignment]

    async def work() -> None:
        answer = begun.fetch.ask(begun.session, Pull(KEY, 0, 3))  # type: ignore[arg-type]
        assert begun.place(begun.next) is not None
        with pytest.raises(ProtocolError, match="nobody asked"):
            fetcher.place(stranger, begun.next, 2 * LAYOUT.slice_bytes)  # type: ignore[arg-type]
        fetcher.receive(stranger, begun.next)  # type: ignore[arg-type]
        fetcher.void(stranger, begun.next)  # type: ignore[arg-type]
        fetcher.answer(stranger, Ended(KEY, 3))  # type: ignore[arg-type]
        assert not answer.done() and not fetcher.bytes_in and not fetcher.seal_mismatches
        assert begun.place(begun.next) is None, "it is under way still"
        fetcher.cancel(KEY)
        assert answer.result() is None

    asyncio.run(work())


LOAN = Lent(KEY, ArenaHandle("/nowhere", b"n" * 16, 4, SHAPE), (0, 3), ((b"s",) * 3,) * 2)
LOANS: dict[str, Lent] = {
    "a slot that the arena has not": msgspec.structs.replace(LOAN, slots=(0, 4)),
    "a negative slot": msgspec.structs.replace(LOAN, slots=(-1, 0)),
    "a layer without a seal": msgspec.structs.replace(LOAN, seals=((b"s",) * 3, (b"s",) * 2)),
    "a slot without seals": msgspec.structs.replace(LOAN, seals=LOAN.seals[:1]),
    "more than was wanted": msgspec.structs.replace(LOAN, slots=(0,) * 4, seals=((b"s",) * 3,) * 4),
    "another shape": msgspec.structs.replace(
        LOAN, arena=msgspec.structs.replace(LOAN.arena, shape=Shape(3, LAYOUT.slice_bytes + 8))
    ),
}


def test_a_loan_is_what_was_asked_for_in_every_way(begun: Begun) -> None:
    assert not begun.fetch.asked_for(LOAN), "nothing is wanted yet"
    begun.fetch.pull = Pull(KEY, 1, 3, host="here")
    assert begun.fetch.asked_for(LOAN)
    assert [loan for loan, lent in LOANS.items() if begun.fetch.asked_for(lent)] == []
    begun.fetch.pull = msgspec.structs.replace(begun.fetch.pull, host="")
    assert not begun.fetch.asked_for(LOAN), "it is to be sent"


FALSE_LOANS: dict[str, Callable[[Lent], Lent]] = {
    "slots without seals": lambda lent: msgspec.structs.replace(lent, seals=lent.seals[1:]),
    "layers without seals": lambda lent: msgspec.structs.replace(
        lent, seals=tuple([seals[1:] for seals in lent.seals])
    ),
    "slots of nowhere": lambda lent: msgspec.structs.replace(lent, slots=(-1, *lent.slots[1:])),
    "more blocks": lambda lent: msgspec.structs.replace(lent, slots=lent.slots * 2, seals=lent.seals * 2),
    "another shape": lambda lent: msgspec.structs.replace(
        lent, arena=msgspec.structs.replace(lent.arena, shape=Shape(1, 8), num_slots=4)
    ),
}


@pytest.mark.parametrize("loan", FALSE_LOANS)
def test_a_false_loan_ends_the_fetch(loan: str) -> None:
    pair = Pair(4, shares=True)

    async def work() -> None:
        answer = pair.target.mover.fetcher.answer

        def altered(connection: Any, message: Lent | Ended) -> None:
            answer(connection, FALSE_LOANS[loan](message) if isinstance(message, Lent) else message)

        pair.target.mover.fetcher.answer = altered  # type: ignore[method-assign]
        with held(fetch := pair.fetch()):
            await pair.target.fetching(fetch)
            assert fetch.num_whole == 0

    run(pair, MemoryNetwork(), work)


@pytest.mark.parametrize(
    "pull",
    [
        Pull(KEY, 0, 4, codec="rot13"),
        Pull(KEY, 0, 0),
        Pull(KEY, 0, -1),
        Pull(KEY, 5, 4),
        Pull(KEY, -1, 4),
    ],
    ids=["unknown codec", "no room", "negative room", "behind the end", "before the start"],
)
@pytest.mark.parametrize("names", [names_of(4), []], ids=["names", "no names"])
def test_a_strange_pull_costs_the_source_nothing(names: list[BlockName], pull: Pull) -> None:
    pair = Pair(4)

    async def work() -> None:
        assert pair.target.session is not None
        for said in (Want(KEY, tuple(names), 0), pull):
            pair.target.session.send(said)
        for _ in range(50):
            await asyncio.sleep(0.001)
        pair.target.session.send(Enough(KEY))

    run(pair, MemoryNetwork(), work)


def test_what_nobody_asked_for_is_read_past() -> None:
    pair = Pair(4)

    async def work() -> None:
        assert pair.source.session is not None
        for answer in (Ended(KEY, 3), Lent(KEY, HANDLE, (0,), (SEALS * 3,)), Enough(KEY)):
            pair.source.session.send(answer)
        pair.source.session.send(Given(KEY, 0, 0, SEALS), ZERO)
        for _ in range(50):
            await asyncio.sleep(0)
        with held(fetch := pair.fetch()):
            await pair.target.fetching(fetch)
        assert pair.arrived() == pair.blocks

    run(pair, MemoryNetwork(), work)


def test_a_second_pull_before_the_first_was_answered_ends_the_session() -> None:
    pair = Pair(4)

    async def work() -> None:
        assert pair.target.session is not None
        pair.target.session.send(Want(KEY, tuple(pair.names), 0))
        while not pair.source.heard(Want):
            await asyncio.sleep(0.001)
        for _ in range(2):
            pair.target.session.send(Pull(KEY, 0, 4))
        while not pair.target.reasons:
            await asyncio.sleep(0.001)
        assert "a second Pull" in pair.target.reasons[0]

    run(pair, MemoryNetwork(), work)


# Both at once.


def test_nodes_whose_loads_all_wait_for_each_other_still_answer() -> None:
    """Every loader of the source waits for blocks that the target is to give, which waits likewise."""
    pair = Pair(4)

    async def work() -> None:
        names = tuple(names_of(9)[8:])
        orders = [events.Fetch(RequestId(f"w{at}"), OTHER, names, 0) for at in range(LOADERS)]
        waiting = [pair.source.fetch(order) for order in orders]
        loads = []
        for fetch in waiting:
            fetch.hold()
            loads.append(pair.source.cache.load(names_of(9)[8:], [0], fetch))
        with held(fetch := pair.fetch()):
            async with asyncio.timeout(WAIT_S):
                await pair.target.fetching(fetch)
            assert fetch.num_whole == 4
        for load, fetch in zip(loads, waiting, strict=True):
            await asyncio.to_thread(load.cancel)
            fetch.release()

    run(pair, MemoryNetwork(), work)


def test_many_fetches_at_once_over_one_session() -> None:
    pair = Pair(40, room=400)

    async def work() -> None:
        fetches_ = [pair.fetch(key=f"f{number}") for number in range(8)]
        await asyncio.gather(*[pair.target.fetching(fetch) for fetch in fetches_])
        assert [fetch.num_whole for fetch in fetches_] == [40] * 8
        for fetch in fetches_:
            fetch.release()
        assert pair.arrived() == pair.blocks
        assert pair.target.store.stat().memory.num_blocks == 40

    run(pair, TcpNetwork(connections=2), work)
