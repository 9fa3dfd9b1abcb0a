"""KV of a home at its holder: shares by heads, what is claimed of a home that is gone, and what is shipped again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from isthmus.attempts import Share
from isthmus.cluster import messages
from isthmus.engine.emulated import EmulatedMemory
from isthmus.engine.interface import Asking, HolderLost
from isthmus.messenger import MemoryNetwork, Priority, Session
from isthmus.node import events
from isthmus.types import RequestId
from tests.cluster.fault_peers import LAYOUT, OTHER, Side, join, kv_block, store_of

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

    async def reserve(self, key: RequestId, num_blocks: int, share: Share) -> None:
        self.home.mover.do(events.Reserve(key, OTHER, num_blocks, share))
        asked = await self.told(self.holder, events.Asked)
        assert asked == events.Asked(key, OTHER, num_blocks, share)
        self.holder.mover.do(events.Host(key, OTHER, ROOM))
        assert (await self.told(self.home, events.Reserved)).granted

    async def ship(self, key: RequestId, first: int, blocks: Sequence[int]) -> None:
        before = sum(isinstance(fact, events.Shipped) for fact in self.home.facts)
        self.home.mover.do(events.Ship(key, OTHER, first, tuple(blocks)))
        shipped = await self.told(self.home, events.Shipped, before + 1)
        assert shipped == events.Shipped(key, OTHER, first + len(blocks))

    async def claim(self, share: Share, old: RequestId = OLD) -> int:
        self.home.mover.do(events.Claim(KEY, OTHER, old, share))
        claimed = await self.told(self.holder, events.Claimed)
        self.holder.mover.do(events.Rekey(old, claimed.key, claimed.peer))
        found: events.Found = await self.told(self.home, events.Found)
        return found.num_blocks

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
        await pair.reserve(OLD, 6, HALF)
        await pair.ship(OLD, 0, (5, 1, 7, 0))
        await pair.ship(OLD, 4, (3, 2))
        for number, block in enumerate((5, 1, 7, 0, 3, 2)):
            assert pair.there(number, HALF) == pair.here(block, HALF)
        assert pair.home.mover.holders.bytes_shipped == 6 * TWO_HEADS.block_bytes // 2

    with_pair(test)


def test_what_is_claimed_is_whole_and_goes_on() -> None:
    """Under another key; what is shipped again takes the place of what was there."""

    async def test(pair: Pair) -> None:
        await pair.reserve(OLD, 6, HALF)
        await pair.ship(OLD, 0, (5, 1, 7))
        assert await pair.claim(HALF) == 3
        pair.home.facts.clear()
        pair.holder.facts.clear()
        await pair.reserve(KEY, 6, HALF)
        await pair.ship(KEY, 2, (4, 6))
        for number, block in enumerate((5, 1, 4, 6)):
            assert pair.there(number, HALF) == pair.here(block, HALF)
        assert pair.holder.mover._hosts._guests[KEY].stowed == 4
        pair.home.mover.do(events.Ship(OLD, OTHER, 3, (0,)))  # the home before it has no room any more
        await asyncio.sleep(0.01)
        assert pair.there(3, HALF) == pair.here(6, HALF)

    with_pair(test)


@pytest.mark.parametrize("share", [Share(2, 1, 2), Share(3, 0, 2), Share(3, 0, 1)])
def test_nothing_is_found_of_another_share(share: Share) -> None:
    async def test(pair: Pair) -> None:
        await pair.reserve(OLD, 6, HALF)
        await pair.ship(OLD, 0, (5, 1, 7))
        assert await pair.claim(share) == 0
        pair.home.facts.clear()
        pair.holder.facts.clear()
        await pair.reserve(KEY, 3, share)
        await pair.ship(KEY, 0, (0, 3))
        assert pair.there(1, share) == pair.here(3, share)

    with_pair(test)


def test_nothing_is_found_of_an_attempt_that_was_never_there() -> None:
    async def test(pair: Pair) -> None:
        pair.home.mover.do(events.Claim(KEY, OTHER, OLD, HALF))
        claimed = await pair.told(pair.holder, events.Claimed)
        pair.holder.mover.do(events.Rekey(RequestId(""), claimed.key, claimed.peer))
        assert (await pair.told(pair.home, events.Found)).num_blocks == 0

    with_pair(test)


@pytest.mark.parametrize("parts", [0, 3])
def test_heads_that_cannot_be_cut_so_end_the_session(parts: int) -> None:
    async def test(pair: Pair) -> None:
        pair.home.mover.do(events.Reserve(OLD, OTHER, 6, Share(0, 0, parts)))
        assert not (await pair.told(pair.home, events.Reserved)).granted
        assert any(f"KV of 2 heads has no {parts} parts" in reason for reason in pair.holder.reasons)

    with_pair(test)


def test_a_claim_over_no_session_finds_nothing() -> None:
    async def test(pair: Pair) -> None:
        session = pair.home.session
        assert session is not None
        session.abort("gone")
        pair.home.mover.do(events.Claim(KEY, OTHER, OLD, HALF))
        assert (await pair.told(pair.home, events.Found)).num_blocks == 0

    with_pair(test)


def test_who_leaves_before_its_claim_is_heard_has_left() -> None:
    """Else what it claimed would stay until its session ends."""

    async def test(pair: Pair) -> None:
        await pair.reserve(OLD, 6, HALF)
        await pair.ship(OLD, 0, (5, 1, 7))
        pair.home.mover.do(events.Claim(KEY, OTHER, OLD, HALF))
        await pair.told(pair.holder, events.Claimed)
        pair.home.mover.do(events.Vacate(KEY, OTHER))
        pair.home.mover.do(events.Reserve(RequestId("other#1"), OTHER, 1, HALF))  # comes after that
        await pair.told(pair.holder, events.Asked, 2)
        pair.holder.mover.do(events.Rekey(OLD, KEY, OTHER))
        assert await pair.told(pair.holder, events.Left) == events.Left(KEY, OTHER, lost=False)
        pair.holder.mover.do(events.Unhost(KEY))
        assert KEY not in pair.holder.mover._hosts._guests and OLD not in pair.holder.mover._hosts._guests

    with_pair(test)


def test_room_that_nobody_heard_of_is_claimed_and_left() -> None:
    """Its home was gone before it was told of it."""

    async def test(pair: Pair) -> None:
        pair.home.mover.do(events.Claim(KEY, OTHER, OLD, HALF))
        await pair.told(pair.holder, events.Claimed)
        pair.holder.mover.do(events.Rekey(OLD, KEY, OTHER))
        assert (await pair.told(pair.home, events.Found)).num_blocks == 0
        pair.home.mover.do(events.Vacate(KEY, OTHER))
        assert await pair.told(pair.holder, events.Left) == events.Left(KEY, OTHER, lost=False)
        assert KEY not in pair.holder.mover._hosts._guests

    with_pair(test)


def test_a_session_that_ends_while_more_room_is_wanted_takes_what_is_there_with_it() -> None:
    async def test(pair: Pair) -> None:
        await pair.reserve(OLD, 6, HALF)
        await pair.ship(OLD, 0, (5, 1, 7))
        pair.home.mover.do(events.Reserve(OLD, OTHER, 8, HALF))
        await pair.told(pair.holder, events.Asked, 2)
        assert pair.home.session is not None
        pair.home.session.abort("gone")
        assert (await pair.told(pair.home, events.Broken)).key == OLD

    with_pair(test)


def test_nothing_is_written_to_blocks_that_were_trimmed() -> None:
    """By a home that ships there and says that it needs them no more."""

    async def test(pair: Pair) -> None:
        await pair.reserve(OLD, 6, HALF)
        await pair.ship(OLD, 0, (5, 1))
        hosts, session = pair.holder.mover._hosts, pair.holder.session
        assert session is not None
        head = messages.Shipment(OLD, 0, 2, (b"", b""))
        hosts.place(session, head, TWO_HEADS.slice_bytes)
        hosts.trim(events.Trim(OLD, 1))
        hosts.receive(session, head)
        assert (
            not hosts._guests[OLD].landing._frames._frames
            and hosts.bytes_in == 2 * LAYERS * TWO_HEADS.slice_bytes // 2
        )

    with_pair(test)


async def asked(pair: Pair, key: RequestId, num_tokens: int, parts: int = HALF.parts) -> str:
    """What comes of a question; nothing if it is answered."""
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
        await pair.reserve(OLD, 6, HALF)
        await pair.ship(OLD, 0, (5, 1))
        assert not await asked(pair, OLD, 2 * SIZE)
        assert await asked(pair, OLD, 2 * SIZE + 1) == NONE_HERE
        assert await asked(pair, OLD, 2 * SIZE, parts=1) == NONE_HERE
        assert not await asked(pair, OLD, 1)

    with_pair(test)


def test_nobody_attends_to_blocks_that_are_free() -> None:
    """Rows that are known by their number are of the guest that was there."""

    async def test(pair: Pair) -> None:
        await pair.reserve(OLD, 6, HALF)
        await pair.ship(OLD, 0, (5, 1))
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


@pytest.mark.parametrize("damaged", range(LAYERS))
def test_what_comes_back_damaged_is_not_taken(damaged: int) -> None:
    """And may be asked back again at once."""
    whole = Share(0, 0, 1)

    async def test(pair: Pair) -> None:
        await pair.reserve(OLD, 3, whole)
        await pair.ship(OLD, 0, (5, 1, 7))
        returning = pair.home.mover.holders.returning
        tell = returning._tell
        receive, damages = returning.receive, [damaged]

        def received(session: Session, head: messages.Reclaimed) -> None:
            if damages and head.layer == damages[0]:
                damages.clear()
                pair.home.memory.export(damaged, 3 * SIZE, 4 * SIZE)[7] ^= 1
            receive(session, head)

        def told(fact: events.Event) -> None:
            tell(fact)
            if fact == events.Reclaimed(OLD, whole=False) and not pair.home.reasons:
                pair.home.mover.do(events.Reclaim(OLD, OTHER, 1, (3, 0)))

        returning.receive = received  # type: ignore[method-assign]
        returning._tell = told
        pair.home.mover.do(events.Reclaim(OLD, OTHER, 1, (3, 0)))
        assert await pair.told(pair.home, events.Reclaimed, 2) == events.Reclaimed(OLD, whole=True)
        assert returning.seal_mismatches == 1 and not pair.home.reasons
        assert [pair.here(block, whole) for block in (3, 0)] == [pair.here(block, whole) for block in (1, 7)]

    with_pair(test)


def test_questions_overtake_shipments() -> None:
    """They go over a line of their own."""

    async def test(pair: Pair) -> None:
        sent: list[tuple[type, Priority]] = []
        session = pair.home.session
        assert session is not None
        send = session.send

        def noted(message: Any, *payload: Any, priority: Priority = Priority.NORMAL, **rest: Any) -> Any:
            sent.append((type(message), priority))
            return send(message, *payload, priority=priority, **rest)

        session.send = noted  # type: ignore[method-assign]
        await pair.reserve(OLD, 6, HALF)
        await pair.ship(OLD, 0, (5, 1))
        remote, loop = pair.home.mover.holders.remote([OLD]), asyncio.get_running_loop()
        asking = Asking(OTHER, ((0, 1, 8, 40, 12),), HALF.part, HALF.parts)
        await loop.run_in_executor(None, remote.ask, 1, asking, memoryview(b"queries!"))
        answer = await loop.run_in_executor(None, remote.answer, 1, asking)
        assert bytes(answer) == b"queries!"
        assert [each for each in sent if each[0] is messages.Shipment] == [
            (messages.Shipment, Priority.NORMAL)
        ] * LAYERS
        assert messages.Attend not in [kind for kind, _ in sent]

    with_pair(test)
