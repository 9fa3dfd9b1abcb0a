"""KV of a home at its holder: shares by heads, what goes on under another key, what is shipped again or comes home."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from isthmus.core.attempts import Share
from isthmus.core.blocks import seal
from isthmus.core.node import events
from isthmus.core.node.letters import Vacate
from isthmus.core.types import RequestId
from isthmus.live.engine.emulated import EmulatedMemory
from isthmus.live.engine.interface import Asking, HolderLost
from isthmus.live.messenger import Priority, Sending, Session
from isthmus.live.peers import messages
from tests.live.cluster.fault_peers import LAYOUT, OTHER, Side, join, kv_block, store_of
from tests.memory_network import MemoryNetwork

TWO_HEADS = msgspec.structs.replace(LAYOUT, num_kv_heads=2)
SIZE, LAYERS = TWO_HEADS.block_size, TWO_HEADS.num_layers
OLD, KEY = RequestId("r#1"), RequestId("r#2")
BLOCKS = [kv_block(TWO_HEADS, number) for number in range(8)]
ROOM = (6, 2, 4)
HALF = Share(3, 1, 2)
"""The second half of the heads, from the fourth block on."""


class Pair:
    """A home and a holder; the test decides for both."""

    def __init__(self) -> None:
        self.home, self.holder = (Side(store_of(TWO_HEADS, 4), TWO_HEADS, 8) for _ in range(2))
        for number, data in enumerate(BLOCKS):
            for layer in range(LAYERS):
                self.home.memory.fill(layer, [number], memoryview(data), [layer * TWO_HEADS.slice_bytes])

    async def told(self, side: Side, kind: type, count: int = 1) -> Any:
        async with asyncio.timeout(60):
            while len(found := [fact for fact in side.facts if isinstance(fact, kind)]) < count:
                await asyncio.sleep(0.001)
        return found[-1]

    def host(self, key: RequestId = OLD, share: Share = HALF) -> None:
        self.holder.do(events.Host(key, OTHER, share, ROOM))

    async def ship(self, key: RequestId, first: int, blocks: Sequence[int], share: Share = HALF) -> None:
        self.home.do(events.Ship(key, OTHER, first, tuple(blocks), share))
        stowed = events.Stowed(key, OTHER, first + len(blocks))
        async with asyncio.timeout(60):
            while stowed not in self.holder.facts:
                await asyncio.sleep(0.001)

    async def pass_by(self) -> None:
        """All that was sent before came."""
        self.home.do(events.Tell(OTHER, Vacate(RequestId("nobody"))))
        self.holder.facts.clear()
        await self.told(self.holder, events.Heard)

    def frame(self, key: RequestId, layer: int, first: int) -> None:
        """One of half the heads of block 0, as a home sends it."""
        data = self.home.memory.export_heads(layer, 0, SIZE, HALF.part, HALF.parts)
        assert self.home.session is not None
        self.home.session.send(messages.Shipment(key, layer, first, (seal(data),)), data)

    def there(self, number: int, share: Share) -> list[bytes]:
        """What the holder has as this number of a share, layer by layer."""
        memory: EmulatedMemory = (
            self.holder.memory.split(share.parts) if share.parts > 1 else self.holder.memory
        )
        room = [block * share.parts + at for block in ROOM for at in range(share.parts)]
        slots = room[number] * SIZE, (room[number] + 1) * SIZE
        return [bytes(memory.export(layer, *slots)) for layer in range(LAYERS)]

    def here(self, block: int, share: Share) -> list[bytes]:
        slots = block * SIZE, (block + 1) * SIZE
        return [
            bytes(self.home.memory.export_heads(layer, *slots, share.part, share.parts))
            for layer in range(LAYERS)
        ]


def with_pair(test: Callable[[Pair], Any]) -> None:
    async def run() -> None:
        pair = Pair()
        server = await join(MemoryNetwork(connections=1), pair.home, pair.holder)
        await test(pair)
        server.close()
        for side in (pair.home, pair.holder):
            side.close()

    asyncio.run(run())


def test_a_block_of_all_heads_has_room_for_two_of_half_of_them() -> None:
    async def test(pair: Pair) -> None:
        pair.host()
        await pair.ship(OLD, 0, (5, 1, 7, 0))
        await pair.ship(OLD, 4, (3, 2))
        for number, block in enumerate((5, 1, 7, 0, 3, 2)):
            assert pair.there(number, HALF) == pair.here(block, HALF)
        size = 6 * TWO_HEADS.block_bytes // 2
        assert pair.home.mover.gauges()["kv_bytes_shipped_total"] == size
        assert pair.holder.mover.gauges()["kv_bytes_stowed_total"] == size

    with_pair(test)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_flipped_bit_is_found_and_what_came_before_counts_on(layer: int) -> None:
    async def test(pair: Pair) -> None:
        pair.host()
        await pair.ship(OLD, 0, (5, 1))
        receive = pair.holder.mover.hosts.receive

        def received(session: Session, head: messages.Shipment) -> None:
            if head.layer == layer:
                block = ROOM[1] * HALF.parts
                pair.holder.memory.split(2).export(layer, block * SIZE, (block + 1) * SIZE)[3] ^= 1
            receive(session, head)

        pair.holder.mover.hosts.receive = received  # type: ignore[method-assign]
        pair.home.do(events.Ship(OLD, OTHER, 2, (7, 4), HALF))
        while events.Stowed(OLD, OTHER, 2, damaged=True) not in pair.holder.facts:
            await asyncio.sleep(0.001)
        await pair.pass_by()
        assert not await asked(pair, OLD, 2 * SIZE) and await asked(pair, OLD, 2 * SIZE + 1) == NONE_HERE
        assert pair.holder.mover.gauges()["seal_mismatches_total"] == 1

    with_pair(test)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_what_its_home_gave_up_in_the_midst_is_not_whole_though_more_came(layer: int) -> None:
    async def test(pair: Pair) -> None:
        pair.host()
        await pair.ship(OLD, 0, (5, 1))
        hosts, session = pair.holder.mover.hosts, pair.holder.session
        assert session is not None
        for at in range(LAYERS):
            if at == layer:
                head = messages.Shipment(OLD, at, 2, (b"x" * 16,))
                hosts.place(session, head, TWO_HEADS.slice_bytes // 2)
                hosts.void(session, head)
            else:
                pair.frame(OLD, at, 2)
                pair.frame(OLD, at, 3)
                await pair.pass_by()
        assert not await asked(pair, OLD, 2 * SIZE) and await asked(pair, OLD, 2 * SIZE + 1) == NONE_HERE
        await pair.ship(OLD, 2, (3, 7))
        assert not await asked(pair, OLD, 4 * SIZE)

    with_pair(test)


def test_what_is_whole_goes_on_under_another_key() -> None:
    """What is shipped again takes the place of what was there."""

    async def test(pair: Pair) -> None:
        pair.host()
        await pair.ship(OLD, 0, (5, 1, 7))
        pair.holder.do(events.Rekey(OLD, KEY, OTHER, HALF, 3))
        pair.host(KEY)
        await pair.ship(KEY, 2, (4, 6))
        assert events.Stowed(KEY, OTHER, 2) in pair.holder.facts, "first what is written anew counts no more"
        for number, block in enumerate((5, 1, 4, 6)):
            assert pair.there(number, HALF) == pair.here(block, HALF)
        assert not await asked(pair, KEY, 4 * SIZE)
        pair.home.do(events.Ship(OLD, OTHER, 3, (0,), HALF))  # the home before it has no room any more
        await pair.pass_by()
        assert pair.there(3, HALF) == pair.here(6, HALF)

    with_pair(test)


def test_what_was_being_written_anew_when_another_took_it_over_is_not_whole() -> None:
    """The node may have decided before it heard of that."""

    async def test(pair: Pair) -> None:
        pair.host()
        await pair.ship(OLD, 0, (5, 1, 7))
        pair.frame(OLD, 0, 1)
        await pair.pass_by()
        pair.holder.do(events.Rekey(OLD, KEY, OTHER, HALF, 3))
        await asyncio.sleep(0.01)
        assert pair.holder.facts[-1] == events.Stowed(KEY, OTHER, 1)
        assert not await asked(pair, KEY, SIZE) and await asked(pair, KEY, SIZE + 1) == NONE_HERE

    with_pair(test)


@pytest.mark.parametrize("share", [Share(2, 1, 2), Share(3, 0, 2), Share(3, 0, 1)])
def test_its_room_is_for_another_share_too(share: Share) -> None:
    async def test(pair: Pair) -> None:
        pair.host()
        await pair.ship(OLD, 0, (5, 1, 7))
        pair.holder.do(events.Rekey(OLD, KEY, OTHER, share, 0))
        assert await asked(pair, KEY, 1, share.parts) == NONE_HERE
        await pair.ship(KEY, 0, (0, 3), share)
        assert pair.there(1, share) == pair.here(3, share)

    with_pair(test)


@pytest.mark.parametrize("leaves", ["home", "all"])
def test_of_who_left_nothing_counts(leaves: str) -> None:
    """Also what was on its way just then."""

    async def test(pair: Pair) -> None:
        pair.host()
        await pair.ship(OLD, 0, (5, 1))
        for layer in range(LAYERS - 1):
            pair.frame(OLD, layer, 2)
        await pair.pass_by()
        pair.holder.do(events.Unhost(OLD, OTHER))
        if leaves == "all":
            pair.holder.do(events.Unhost(OLD))
        before = [bytes(layer) for layer in pair.holder.memory.layers]
        pair.frame(OLD, LAYERS - 1, 2)
        pair.home.do(events.Ship(OLD, OTHER, 0, (4,), HALF))
        await pair.pass_by()
        assert [bytes(layer) for layer in pair.holder.memory.layers] == before
        assert not any(isinstance(fact, events.Stowed) for fact in pair.holder.facts)
        assert pair.home.reasons == []

    with_pair(test)


@pytest.mark.parametrize(
    ("layer", "first", "count"), [(-1, 0, 1), (LAYERS, 0, 1), (0, -1, 1), (0, 1, 1), (0, 0, 7)], ids=str
)
def test_what_cannot_come_next_ends_the_session(layer: int, first: int, count: int) -> None:
    """A gap, or what there is no room for."""

    async def test(pair: Pair) -> None:
        pair.host()
        data, session = bytes(count * TWO_HEADS.slice_bytes // 2), pair.home.session
        assert session is not None
        session.send(messages.Shipment(OLD, layer, first, (b"x" * 16,) * count), memoryview(data))
        assert "is not what must come next" in (await pair.told(pair.home, events.Gone)).reason

    with_pair(test)


def test_nothing_is_written_to_blocks_that_were_trimmed() -> None:
    """By a home that ships there and says that it needs them no more."""

    async def test(pair: Pair) -> None:
        pair.host()
        await pair.ship(OLD, 0, (5, 1))
        hosts, session = pair.holder.mover.hosts, pair.holder.session
        assert session is not None
        head = messages.Shipment(OLD, 0, 2, (b"", b""))
        hosts.place(session, head, TWO_HEADS.slice_bytes)
        pair.holder.do(events.Trim(OLD, 1))
        hosts.receive(session, head)
        assert hosts.bytes_in == 2 * LAYERS * TWO_HEADS.slice_bytes // 2
        assert not await asked(pair, OLD, SIZE) and await asked(pair, OLD, SIZE + 1) == NONE_HERE

    with_pair(test)


async def asked(pair: Pair, key: RequestId, num_tokens: int, parts: int = HALF.parts) -> str:
    """What comes of a question; nothing if it is answered."""
    pair.home.do(events.OpenLine(OTHER))
    remote, loop = pair.home.mover.holders.remote([key]), asyncio.get_running_loop()
    asking = Asking(OTHER, ((0, 1, num_tokens, 40, 12),), HALF.part, parts)
    try:
        await loop.run_in_executor(None, remote.ask, 1, asking, memoryview(b"queries!"))
        assert bytes(await loop.run_in_executor(None, remote.answer, 1, asking)) == b"queries!"
    except HolderLost as lost:
        return str(lost)
    return ""


NONE_HERE = "it has no KV of this attempt"


def test_nobody_attends_to_what_is_not_whole_or_another_share() -> None:
    async def test(pair: Pair) -> None:
        pair.host()
        await pair.ship(OLD, 0, (5, 1))
        assert not await asked(pair, OLD, 2 * SIZE)
        assert await asked(pair, OLD, 2 * SIZE + 1) == NONE_HERE
        assert await asked(pair, OLD, 2 * SIZE, parts=1) == NONE_HERE
        assert not await asked(pair, OLD, 1)

    with_pair(test)


def test_nobody_attends_to_blocks_that_are_free() -> None:
    """Rows that are known by their number are of the guest that was there."""

    async def test(pair: Pair) -> None:
        pair.host()
        await pair.ship(OLD, 0, (5, 1))
        pair.home.do(events.OpenLine(OTHER))
        remote, loop = pair.home.mover.holders.remote([OLD]), asyncio.get_running_loop()
        asking = Asking(OTHER, ((0, 1, SIZE, 40, 12),), HALF.part, HALF.parts)
        for is_there in (True, False):
            await loop.run_in_executor(None, remote.ask, 1, asking, memoryview(b"queries!"))
            if is_there:
                await loop.run_in_executor(None, remote.answer, 1, asking)
                pair.holder.mover.do(events.Unhost(OLD))
            else:
                with pytest.raises(HolderLost, match=NONE_HERE):
                    await loop.run_in_executor(None, remote.answer, 1, asking)

    with_pair(test)


WHOLE = Share()


def send_back(pair: Pair) -> None:
    """The second and third block of what the holder has."""
    pair.home.do(events.Reclaim(OLD, OTHER, (3, 0)))
    pair.holder.do(events.Ship(OLD, OTHER, 0, ROOM[1:]))


class Slow:
    """A session over which nothing gets anywhere, and what is sent over it."""

    over, num_sent, num_cancelled = False, 0, 0

    def send(self, head: messages.Shipment, *payload: memoryview) -> Slow:
        self.num_sent += 1
        return self

    def cancel(self) -> None:
        self.num_cancelled += 1


def test_nothing_is_sent_back_of_blocks_that_were_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be another's before they are sent."""

    async def test(pair: Pair) -> None:
        pair.host(share=WHOLE)
        await pair.ship(OLD, 0, (5, 1, 7), WHOLE)
        slow = Slow()
        monkeypatch.setattr(pair.holder.peers, "open_to", lambda peer: slow)
        pair.holder.do(events.Ship(OLD, OTHER, 0, ROOM[1:]))
        assert (slow.num_sent, slow.num_cancelled) == (LAYERS, 0)
        pair.holder.do(events.Trim(OLD, 1))
        assert slow.num_cancelled == LAYERS

    with_pair(test)


@pytest.mark.parametrize("damaged", range(LAYERS))
def test_what_comes_back_damaged_is_not_taken(damaged: int) -> None:
    """And may be asked back again at once."""

    async def test(pair: Pair) -> None:
        pair.host(share=WHOLE)
        await pair.ship(OLD, 0, (5, 1, 7), WHOLE)
        returning = pair.home.mover.shipments
        receive, damages, over = returning.receive, [damaged], list[int]()

        def received(head: messages.Shipment) -> None:
            if damages and head.layer == damages[0]:
                damages.clear()
                pair.home.memory.export(damaged, 3 * SIZE, 4 * SIZE)[7] ^= 1
            receive(head)
            over.append(sum(isinstance(fact, events.Reclaimed) for fact in pair.home.facts))

        returning.receive = received  # type: ignore[method-assign]
        send_back(pair)
        assert await pair.told(pair.home, events.Reclaimed) == events.Reclaimed(OLD, whole=False)
        send_back(pair)
        assert await pair.told(pair.home, events.Reclaimed, 2) == events.Reclaimed(OLD, whole=True)
        assert over == [0] * LAYERS + [1] * LAYERS, "its last frame is waited for"
        assert returning.seal_mismatches == 1 and not pair.home.reasons
        assert [pair.here(block, WHOLE) for block in (3, 0)] == [pair.here(block, WHOLE) for block in (1, 7)]

    with_pair(test)


@pytest.mark.parametrize("how", ["released", "voided"])
def test_a_return_that_ends_before_its_time_is_told_once_and_writes_nothing(how: str) -> None:
    """The holder lets go of it in the midst, or home does."""

    async def test(pair: Pair) -> None:
        home, returns, session = pair.home, pair.home.mover.shipments, pair.home.session
        assert session is not None
        home.do(events.Reclaim(OLD, OTHER, (3, 0)))
        head = messages.Shipment(OLD, 0, 0, (b"x" * 16,))
        home.mover.place(session, head, TWO_HEADS.slice_bytes)
        if how == "voided":
            home.mover.on_void(session, head)
        for _ in range(2):
            home.do(events.Release(OLD))
        assert not returns.awaits(OTHER, head)
        blocks = [pair.here(block, WHOLE) for block in (3, 0)]
        pair.holder.do(events.Host(OLD, OTHER, WHOLE, ROOM), events.Ship(OLD, OTHER, 0, ROOM[1:]))
        await asyncio.sleep(0.02)
        told = [fact for fact in home.facts if isinstance(fact, events.Reclaimed)]
        assert told == [events.Reclaimed(OLD, whole=False)]
        assert [pair.here(block, WHOLE) for block in (3, 0)] == blocks and not returns.bytes_in

    with_pair(test)


@pytest.mark.parametrize(
    "gives",
    [events.Rekey(OLD, KEY, OTHER, HALF, 0), events.Unhost(OLD), events.Trim(OLD, 1), events.Release(OLD)],
    ids=lambda gives: type(gives).__name__,
)
def test_what_is_on_its_way_into_blocks_that_are_given_back_is_refused(gives: events.Action) -> None:
    """They are another's when that returns; a home gives back blocks into which KV was to return."""

    async def test(pair: Pair) -> None:
        side = pair.home if isinstance(gives, events.Release) else pair.holder
        pair.host()
        pair.home.do(events.Reclaim(OLD, OTHER, (3, 0)))
        session, refused = side.session, list[Any]()
        assert session is not None
        head = messages.Shipment(OLD, 0, 0, (b"x" * 16,))
        side.mover.place(session, head, TWO_HEADS.slice_bytes // (1 if side is pair.home else 2))
        session.refuse = refused.append  # type: ignore[method-assign, assignment]
        side.do(gives)
        assert refused == [head]

    with_pair(test)


def test_what_is_on_its_way_when_an_attempt_is_released_is_taken_back() -> None:
    """Its blocks are another's when that returns."""

    async def test(pair: Pair) -> None:
        session, sendings = pair.home.session, list[Sending]()
        assert session is not None
        send = session.send

        def noted(*message: Any, **how: Any) -> Sending:
            sendings.append(send(*message, **how))
            return sendings[-1]

        session.send = noted  # type: ignore[method-assign]
        pair.home.do(events.Ship(OLD, OTHER, 0, (5, 1), HALF))
        assert len(sendings) == LAYERS and not any(sending.over for sending in sendings)
        pair.home.do(events.Release(OLD))
        assert all(sending.over for sending in sendings)

    with_pair(test)


@pytest.mark.parametrize("opened_by_holder", [False, True])
def test_questions_overtake_shipments(opened_by_holder: bool) -> None:
    """They go over a line of their own, whoever opened the session."""

    async def test(pair: Pair) -> None:
        if opened_by_holder:
            pair.home, pair.holder = pair.holder, pair.home
            _, port = await MemoryNetwork.listen(
                pair.home.network,
                "127.0.0.1",
                0,
                messages.PeerMessage,
                lambda: pair.holder,  # type: ignore[arg-type]
            )
            pair.home.addresses[OTHER] = f"127.0.0.1:{port}"
        sent: list[tuple[type, Priority]] = []
        session = pair.home.peers.open_to(OTHER)
        assert session is not None
        send = session.send

        def noted(message: Any, *payload: Any, priority: Priority = Priority.NORMAL, **rest: Any) -> Any:
            sent.append((type(message), priority))
            return send(message, *payload, priority=priority, **rest)

        session.send = noted  # type: ignore[method-assign]
        pair.host()
        await pair.ship(OLD, 0, (5, 1))
        assert not await asked(pair, OLD, 8)
        assert sent == [(messages.Shipment, Priority.NORMAL)] * LAYERS

    with_pair(test)


@pytest.mark.parametrize("how", ["nobody", "closed", "hung up"])
def test_without_a_line_the_engine_hears_that_its_holder_is_lost_and_another_may_be_opened(how: str) -> None:
    async def test(pair: Pair) -> None:
        pair.host()
        await pair.ship(OLD, 0, (5, 1))
        holders, address = pair.home.mover.holders, pair.home.addresses[OTHER]
        assert not await asked(pair, OLD, 1)
        if how == "hung up":
            holders.line_of(OTHER).asker.hang_up()
        else:
            for session in list(pair.home.peers._names):
                session.close()
            await pair.told(pair.holder, events.Gone)
            pair.home.addresses[OTHER] = "127.0.0.1:9" if how == "nobody" else address
        if how == "nobody":
            assert await asked(pair, OLD, 1) == "there is no line to it"
            pair.home.addresses[OTHER] = address
        assert not await asked(pair, OLD, 1)

    with_pair(test)
