"""KV of a home at its holder: shares by heads, what goes on under another key, what is shipped again or comes home.

A liar is the home of what `here` holds, or holds what `here` is the home of; where both ends are of use, `here` is the
home and `there` the holder.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from isthmus.core.attempts import Share
from isthmus.core.node import events
from isthmus.core.types import RequestId
from isthmus.live.engine.interface import Asking, HolderLost
from isthmus.live.messenger import LineLost
from isthmus.live.peers.messages import Attend, ShipmentSlices
from tests.live.kv.world import (
    KEY,
    LAYOUT,
    OTHER,
    THIRD,
    HarmfulNetwork,
    Liar,
    Node,
    World,
    kv_block,
    played,
    sealed,
    until,
)

TWO_HEADS = msgspec.structs.replace(LAYOUT, num_kv_heads=2)
SIZE, LAYERS = TWO_HEADS.block_size, TWO_HEADS.num_layers
NEXT = RequestId("a#2")
BLOCKS = [kv_block(TWO_HEADS, number) for number in range(8)]
ROOM = (6, 2, 4)
HALF, WHOLE = Share(3, 1, 2), Share()
"""The second half of the heads, from the fourth block on; all of them."""
CANARY = b"\xa5" * TWO_HEADS.block_bytes

two_heads: dict[str, Any] = {"layout": TWO_HEADS, "blocks": 8}
lines = two_heads | {"network": lambda: HarmfulNetwork(piece=0)}
"""Who opens a line in memory waits for nobody's first message."""


def slices(number: int, share: Share) -> list[bytes]:
    """What goes of a block, layer by layer."""
    width = 2 * LAYOUT.head_dim  # of a vector of one head
    found = []
    for layer in range(LAYERS):
        data = BLOCKS[number][layer * TWO_HEADS.slice_bytes :][: TWO_HEADS.slice_bytes]
        vectors = [data[at : at + width] for at in range(0, len(data), width)]
        found.append(b"".join(vectors[share.part :: share.parts] if share.parts == 2 else vectors))
    return found


def lies_there(node: Node, number: int, share: Share) -> list[bytes]:
    """What a holder has as this number of a share."""
    memory = node.memory.split(share.parts) if share.parts > 1 else node.memory
    room = [block * share.parts + at for block in ROOM for at in range(share.parts)]
    return [
        bytes(memory.export(layer, room[number] * SIZE, (room[number] + 1) * SIZE)) for layer in range(LAYERS)
    ]


def host(node: Node, key: RequestId = KEY, share: Share = HALF) -> None:
    node.do(events.Host(key, OTHER, share, ROOM))


def frame(
    layer: int, first: int, *blocks: int, share: Share = HALF, key: RequestId = KEY
) -> tuple[ShipmentSlices, bytes]:
    """As an honest node sends it."""
    parts = [slices(block, share)[layer] for block in blocks]
    return ShipmentSlices(key, layer, first, sealed(parts)), b"".join(parts)


def ship(liar: Liar, first: int, *blocks: int, share: Share = HALF, key: RequestId = KEY) -> None:
    for layer in range(LAYERS):
        liar.say(*frame(layer, first, *blocks, share=share, key=key))


async def held(world: World, *blocks: int, share: Share = HALF) -> Liar:
    """`here` has room for a liar's attempt, and these blocks of it."""
    liar = await world.liar(layout=TWO_HEADS)
    host(world.here, share=share)
    ship(liar, 0, *blocks, share=share)
    await world.quiet()
    assert world.here.facts[-1] == events.ShipmentStored(KEY, OTHER, len(blocks))
    return liar


async def attends(liar: Liar, key: RequestId, *nums_tokens: int, parts: int = 2) -> list[bool]:
    """Whether the holder attends to so many tokens."""
    asker, found = await liar.sessions[0].line(60), []
    for num_tokens in nums_tokens:
        head = msgspec.msgpack.encode(Attend(1, 0, ((key, 1, num_tokens, 40, 12),), parts))
        question = await asyncio.to_thread(asker.ask, head, memoryview(b"queries!"))
        answer = await asyncio.to_thread(asker.answer, question)
        found.append(answer is not None)
        assert answer is None or bytes(answer) == b"queries!"
    asker.hang_up()
    return found


async def has(liar: Liar, num_blocks: int, key: RequestId = KEY) -> None:
    """So many blocks of this attempt are whole at its holder, and no more."""
    found = await attends(liar, key, *[SIZE * num_blocks] * bool(num_blocks), SIZE * num_blocks + 1)
    assert found == [True] * bool(num_blocks) + [False]


# What is shipped.


@played(**two_heads)
async def test_a_block_of_all_heads_has_room_for_two_of_half_of_them(world: World) -> None:
    here, there = world.here, world.there
    for number, data in enumerate(BLOCKS):
        here.write(number, data)
    host(there)
    here.do(events.Ship(KEY, OTHER, 0, (5, 1, 7, 0), HALF), events.Ship(KEY, OTHER, 4, (3, 2), HALF))
    await world.quiet()
    assert there.facts[-1] == events.ShipmentStored(KEY, OTHER, 6)
    for number, block in enumerate((5, 1, 7, 0, 3, 2)):
        assert lies_there(there, number, HALF) == slices(block, HALF)
    size = 6 * TWO_HEADS.block_bytes // 2
    assert here.mover.gauges()["kv_bytes_shipped_total"] == size
    assert there.mover.gauges()["kv_bytes_stowed_total"] == size


@pytest.mark.parametrize("layer", range(LAYERS))
@played(alone=True, **two_heads)
async def test_a_flipped_bit_is_found_and_what_came_before_counts_on(world: World, layer: int) -> None:
    liar = await held(world, 5, 1)
    for at in range(LAYERS):
        head, payload = frame(at, 2, 7, 4)
        liar.say(head, bytes([payload[0], payload[1] ^ (at == layer), *payload[2:]]))
    await world.quiet()
    assert events.ShipmentStored(KEY, OTHER, 2, damaged=True) in world.here.facts and world.here.mismatches == 1
    await has(liar, 2)


@pytest.mark.parametrize("layer", range(LAYERS))
@played(alone=True, **two_heads)
async def test_what_its_home_gave_up_in_the_midst_is_not_whole_though_more_came(
    world: World, layer: int
) -> None:
    liar = await held(world, 5, 1)
    for at in range(LAYERS):
        if at == layer:
            (await world.under_way(liar, *frame(at, 2, 3))).cancel()
            await world.quiet()
            world.network.thaw()
        else:
            liar.say(*frame(at, 2, 3))
            liar.say(*frame(at, 3, 7))
        await world.quiet()
    await has(liar, 2)
    ship(liar, 2, 3, 7)
    await world.quiet()
    await has(liar, 4)


@pytest.mark.parametrize(
    ("layer", "first", "count", "size"),
    [(-1, 0, 1, 1), (LAYERS, 0, 1, 1), (0, -1, 1, 1), (0, 1, 1, 1), (0, 0, 7, 7), (0, 0, 0, 1), (0, 0, 1, 2)],
)
@played(alone=True, **two_heads)
async def test_what_cannot_come_next_ends_the_session(
    world: World, layer: int, first: int, count: int, size: int
) -> None:
    liar = await world.liar(layout=TWO_HEADS)
    host(world.here)
    liar.say(ShipmentSlices(KEY, layer, first, (b"x" * 16,) * count), bytes(size * TWO_HEADS.slice_bytes // 2))
    await until(lambda: liar.reasons)
    assert ("is not what must come next" if size == count else "is not") in liar.reasons[0]


@pytest.mark.parametrize("end", [False, True])
@played(alone=True, **two_heads)
async def test_of_who_left_nothing_counts(world: World, end: bool) -> None:
    here, liar = world.here, await held(world, 5, 1)
    for layer in range(LAYERS - 1):
        liar.say(*frame(layer, 2, 7))
    await world.quiet()
    here.do(events.Unhost(KEY, OTHER), *([events.Unhost(KEY)] if end else []))
    before, num_facts = [bytes(layer) for layer in here.memory.layers], len(here.facts)
    liar.say(*frame(LAYERS - 1, 2, 7))
    ship(liar, 0, 4)
    await world.quiet()
    assert [bytes(layer) for layer in here.memory.layers] == before
    assert len(here.facts) == num_facts and not liar.reasons


# Under another key, and in other blocks.


@played(alone=True, **two_heads)
async def test_what_is_whole_goes_on_under_another_key(world: World) -> None:
    here, liar = world.here, await held(world, 5, 1, 7)
    here.do(events.Rekey(KEY, NEXT, OTHER, HALF, 3))
    host(here, NEXT)
    ship(liar, 2, 4, 6, key=NEXT)
    ship(liar, 3, 0)  # the home before it has no room any more
    await world.quiet()
    assert events.ShipmentStored(NEXT, OTHER, 2) in here.facts, "first what is written anew counts no more"
    for number, block in enumerate((5, 1, 4, 6)):
        assert lies_there(here, number, HALF) == slices(block, HALF)
    await has(liar, 4, NEXT)


@pytest.mark.parametrize("share", [Share(2, 1, 2), Share(3, 0, 2), Share(3, 0, 1)])
@played(alone=True, **two_heads)
async def test_its_room_is_for_another_share_too(world: World, share: Share) -> None:
    liar = await held(world, 5, 1, 7)
    world.here.do(events.Rekey(KEY, NEXT, OTHER, share, 0))
    assert await attends(liar, NEXT, 1, parts=share.parts) == [False]
    ship(liar, 0, 0, 3, share=share, key=NEXT)
    await world.quiet()
    assert lies_there(world.here, 1, share) == slices(3, share)


@played(alone=True, **two_heads)
async def test_what_was_being_written_anew_when_another_took_it_over_is_not_whole(world: World) -> None:
    liar = await held(world, 5, 1, 7)
    liar.say(*frame(0, 1, 0))
    await world.quiet()
    world.here.do(events.Rekey(KEY, NEXT, OTHER, HALF, 3))
    await world.quiet()
    assert world.here.facts[-1] == events.ShipmentStored(NEXT, OTHER, 1)
    await has(liar, 1, NEXT)


@played(alone=True, **two_heads)
async def test_what_was_trimmed_is_gone_and_may_come_anew(world: World) -> None:
    liar = await held(world, 5, 1, 7)
    world.here.do(events.Trim(KEY, 1))
    await has(liar, 1)
    host(world.here)
    liar.say(*frame(0, 2, 0))
    await until(lambda: liar.reasons)
    assert "is not what must come next" in liar.reasons[0]


GIVEN_BACK: dict[str, Callable[[Node], object]] = {
    "another took it over": lambda node: node.do(events.Rekey(KEY, NEXT, OTHER, HALF, 0)),
    "its guest is gone": lambda node: node.do(events.Unhost(KEY)),
    "it was trimmed": lambda node: node.do(events.Trim(KEY, 1)),
    "a return is over": lambda node: node.do(events.ReleaseResources(KEY)),
}


@pytest.mark.parametrize("how", GIVEN_BACK)
@played(alone=True, **two_heads)
async def test_nothing_is_written_into_blocks_that_were_given_back(world: World, how: str) -> None:
    here, share = world.here, WHOLE if how == "a return is over" else HALF
    if share is WHOLE:
        liar = await world.liar(layout=TWO_HEADS)
        here.do(events.Reclaim(KEY, OTHER, ROOM))
    else:
        liar = await held(world, 5, 1, share=share)
    first = 2 if how == "it was trimmed" else 0
    await world.under_way(liar, *frame(0, first, 7, 3, share=share))
    GIVEN_BACK[how](here)
    for block in range(8):
        here.write(block, CANARY)
    world.network.thaw()
    await world.quiet()
    assert all(here.block(block) == CANARY for block in range(8)), "a late byte was written"
    assert not liar.reasons


@pytest.mark.parametrize("how", ["released", "trimmed", "its guest is gone"])
@played(alone=True, **two_heads)
async def test_nothing_is_sent_of_blocks_that_were_given_back(world: World, how: str) -> None:
    here, liar = world.here, await held(world, 5, 1, share=WHOLE)
    for link in world.network.links:
        link.freeze()
    here.do(events.Ship(KEY, OTHER, 0, ROOM[:2]))
    ends = {
        "released": events.ReleaseResources(KEY),
        "trimmed": events.Trim(KEY, 0),
        "its guest is gone": events.Unhost(KEY),
    }
    here.do(ends[how])
    world.network.thaw()
    await world.quiet()
    assert not liar.of(ShipmentSlices)


# What comes home.


@pytest.mark.parametrize("damaged", range(LAYERS))
@played(alone=True, **two_heads)
async def test_what_comes_back_damaged_is_not_taken(world: World, damaged: int) -> None:
    here, liar, told = world.here, await world.liar(layout=TWO_HEADS), list[int]()
    here.at_message = lambda: told.append(len(here.of(events.Reclaimed)))
    for attempt in range(2):
        here.do(events.Reclaim(KEY, OTHER, (3, 0)))
        for layer in range(LAYERS):
            head, payload = frame(layer, 0, 1, 7, share=WHOLE)
            harm = (layer == damaged) > attempt
            liar.say(head, bytes([*payload[:7], payload[7] ^ harm, *payload[8:]]))
        await world.quiet()
    assert here.of(events.Reclaimed) == [events.Reclaimed(KEY, False), events.Reclaimed(KEY, True)]
    assert told == [0] * LAYERS + [1] * LAYERS, "its last frame is waited for"
    assert here.mismatches == 1 and not liar.reasons
    assert (here.block(3), here.block(0)) == (BLOCKS[1], BLOCKS[7])
    assert here.mover.gauges()["kv_bytes_returned_total"] == 4 * TWO_HEADS.block_bytes


@pytest.mark.parametrize("how", ["released", "given up"])
@played(alone=True, **two_heads)
async def test_a_return_that_ends_before_its_time_is_told_once_and_writes_nothing(
    world: World, how: str
) -> None:
    here, liar = world.here, await world.liar(layout=TWO_HEADS)
    here.do(events.Reclaim(KEY, OTHER, (3, 0)))
    sending = await world.under_way(liar, *frame(0, 0, 1, 7, share=WHOLE))
    if how == "given up":
        sending.cancel()
        await world.quiet()
    for _ in range(2):
        here.do(events.ReleaseResources(KEY))
    here.write(3, CANARY)
    here.write(0, CANARY)
    world.network.thaw()
    ship(liar, 0, 1, 7, share=WHOLE)
    await world.quiet()
    assert here.of(events.Reclaimed) == [events.Reclaimed(KEY, whole=False)]
    assert here.block(3) == here.block(0) == CANARY and not here.mover.gauges()["kv_bytes_returned_total"]


@played(alone=True, **two_heads)
async def test_only_the_holder_brings_it_home(world: World) -> None:
    liar, stranger = await world.liar(layout=TWO_HEADS), await world.liar(THIRD, layout=TWO_HEADS)
    world.here.do(events.Reclaim(KEY, OTHER, (3, 0)))
    ship(stranger, 0, 5, 5, share=WHOLE)
    await world.quiet()
    assert not world.here.of(events.Reclaimed) and not any(world.here.block(3))
    ship(liar, 0, 1, 7, share=WHOLE)
    await world.quiet()
    assert world.here.of(events.Reclaimed) == [events.Reclaimed(KEY, True)]


# Questions.


@played(alone=True, **two_heads)
async def test_nobody_attends_to_what_is_not_whole_or_another_share(world: World) -> None:
    liar = await held(world, 5, 1)
    await has(liar, 2)
    assert await attends(liar, KEY, 2 * SIZE, parts=1) == [False]
    assert await attends(liar, KEY, 1) == [True] and world.here.mover.gauges()["attention_answered_total"] == 2


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(0, 1), (1, 0)])
@played(alone=True, **two_heads)
async def test_a_question_of_nothing_ends_its_line(world: World, num_rows: int, num_tokens: int) -> None:
    liar = await held(world, 5, 1)
    asker = await liar.sessions[0].line(60)
    head = msgspec.msgpack.encode(Attend(1, 0, ((KEY, num_rows, num_tokens, 40, 12),), 2))
    question = await asyncio.to_thread(asker.ask, head, memoryview(b"queries!"))
    with pytest.raises(LineLost):
        await asyncio.to_thread(asker.answer, question)
    asker.hang_up()
    await has(liar, 2)


async def asked(world: World, asking: Asking, remote: object = None) -> str:
    """What comes of a question of `here`; nothing if it is answered."""
    world.here.do(events.OpenLine(OTHER))
    elsewhere = remote or world.here.mover.holders.remote([KEY])
    try:
        await asyncio.to_thread(elsewhere.ask, 1, asking, memoryview(b"queries!"))  # type: ignore[attr-defined]
        answer = await asyncio.to_thread(elsewhere.answer, 1, asking)  # type: ignore[attr-defined]
    except HolderLost as lost:
        return str(lost)
    assert bytes(answer) == b"queries!"
    return ""


def asking_of(num_tokens: int) -> Asking:
    return Asking(OTHER, ((0, 1, num_tokens, 40, 12),), HALF.part, HALF.parts)


@pytest.mark.parametrize("which", [0, 1])
@played(**lines)
async def test_several_attempts_of_one_home_are_apart_at_one_holder(world: World, which: int) -> None:
    here, there, keys = world.here, world.there, [KEY, NEXT]
    for number, data in enumerate(BLOCKS):
        here.write(number, data)
    for at, key in enumerate(keys):
        there.do(events.Host(key, OTHER, HALF, (2 * at, 2 * at + 1)))
        here.do(events.Ship(key, OTHER, 0, (5, 1, 7)[: 3 - 2 * at], HALF))
    await world.quiet()

    async def both(*nums_tokens: int) -> str:
        chunks = tuple([(at, 1, num_tokens, 40, 12) for at, num_tokens in enumerate(nums_tokens)])
        return await asked(world, Asking(OTHER, chunks, HALF.part, HALF.parts), here.mover.holders.remote(keys))

    assert not await both(3 * SIZE, SIZE)
    assert await both(SIZE, SIZE + 1) == await both(3 * SIZE + 1, 1) == "it has no KV of this attempt"
    there.do(events.Trim(keys[which], 0))
    assert await both(SIZE, SIZE) == "it has no KV of this attempt"
    there.do(events.Unhost(keys[which]))
    other = [(1 - which, 1, SIZE, 40, 12)]
    asking = Asking(OTHER, tuple(other), HALF.part, HALF.parts)
    assert not await asked(world, asking, here.mover.holders.remote(keys))
    gauges = here.mover.gauges()
    assert [gauges[f"attention_{what}_total"] for what in ("asked", "bytes_asked", "bytes_answered")] == [
        5,
        40,
        16,
    ]


@played(answer_s=0.3, **lines)
async def test_a_holder_that_says_nothing_is_lost(world: World) -> None:
    await ready(world)
    go_on = threading.Event()
    world.there.attends = lambda q: (go_on.wait(60), q)[1]
    assert await asked(world, asking_of(1))
    go_on.set()


async def ready(world: World, blocks: Sequence[int] = (5, 1)) -> None:
    host(world.there)
    world.here.do(events.Ship(KEY, OTHER, 0, tuple(blocks), HALF))
    await world.quiet()


@played(**lines)
async def test_nobody_attends_to_blocks_that_are_free(world: World) -> None:
    await ready(world)
    asking, remote = asking_of(SIZE), world.here.mover.holders.remote([KEY])
    assert not await asked(world, asking, remote)
    world.there.do(events.Unhost(KEY))
    assert await asked(world, asking, remote) == "it has no KV of this attempt"
    host(world.there)
    assert await asked(world, asking, remote) == "it has no KV of this attempt"


@pytest.mark.parametrize("opened_by_holder", [False, True])
@played(**lines)
async def test_questions_overtake_shipments(world: World, opened_by_holder: bool) -> None:
    if opened_by_holder:
        world.here, world.there = world.there, world.here
    await ready(world)
    links = list(world.network.links)
    world.here.do(events.Ship(KEY, OTHER, 2, (7,), HALF))
    for link in links:
        link.freeze()
    assert not await asked(world, asking_of(2 * SIZE))
    assert world.there.facts[-1] == events.ShipmentStored(KEY, OTHER, 2)


@pytest.mark.parametrize("how", ["nobody", "closed"])
@played(**lines)
async def test_without_a_line_its_holder_is_lost_and_another_line_may_be_opened(world: World, how: str) -> None:
    await ready(world)
    here, address = world.here, world.here.addresses[OTHER]
    assert not await asked(world, asking_of(1))
    here.peers.left(OTHER)
    await world.there.told(events.Gone)
    if how == "nobody":
        here.addresses[OTHER] = "127.0.0.1:999"
        assert await asked(world, asking_of(1)) == "there is no line to it"
        here.addresses[OTHER] = address
    assert not await asked(world, asking_of(1))
