"""KV of a prompt on its way to where it decodes: the same bytes at the same positions, or nothing that counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.blocks import seal
from isthmus.core.node import events
from isthmus.core.node.letters import FetchRequest, HandoverConfirmed, HandoverGranted, Shrink
from isthmus.core.types import Span
from isthmus.live.engine import codecs
from isthmus.live.peers import wire
from isthmus.live.peers.messages import HandoverSent, HandoverSlices
from tests.live.kv.world import (
    BLOCKS,
    KEY,
    LAYOUT,
    NAMES,
    OTHER,
    THIRD,
    Liar,
    World,
    chunks,
    layer_of,
    plain,
    played,
    ready,
    sealed,
    until,
)

SIZE, LAYERS, TOKEN = LAYOUT.block_size, LAYOUT.num_layers, LAYOUT.token_bytes
OURS, THEIRS = (2, 6, 0, 9, 4, 11), (5, 3, 1, 0, 2, 4)
BLANK = bytes(LAYOUT.block_bytes)


def kv(layer: int, start: int, stop: int) -> bytes:
    """Of a prompt's token positions."""
    whole = b"".join(layer_of(data, layer) for data in BLOCKS[: -(-stop // SIZE)])
    return whole[start * TOKEN : stop * TOKEN]


def frame(layer: int, first: int, stop: int, codec: str = "none") -> tuple[HandoverSlices, bytes]:
    """One layer of blocks from `first` on, as an honest node sends it."""
    data = memoryview(kv(layer, first * SIZE, stop))
    parts = [data[at : at + SIZE * TOKEN] for at in range(0, len(data), SIZE * TOKEN)]
    payload, seals = wire.pack(codec, LAYOUT, parts, stop - first * SIZE, lambda: list(map(seal, parts)))
    return HandoverSlices(KEY, layer, first, stop, seals), b"".join(payload)


def say_all(liar: Liar, num_tokens: int, layers: Sequence[int] = range(LAYERS), token: int = 77) -> None:
    for layer in layers:
        liar.say(*frame(layer, 0, num_tokens))
    liar.say(HandoverSent(KEY, token))


def expected(num_tokens: int, codec: str = "none") -> list[bytes]:
    """A prompt's KV, layer by layer, as it must lie there."""
    found = []
    for layer in range(LAYERS):
        data = kv(layer, 0, num_tokens)
        if codec not in codecs.EXACT:
            decoded = memoryview(bytearray(len(data)))
            codecs.decode(
                codec, LAYOUT, memoryview(frame(layer, 0, num_tokens, codec)[1]), [decoded], num_tokens
            )
            data = bytes(decoded)
        found.append(data)
    return found


def lies(world: World, blocks: Sequence[int], num_tokens: int) -> list[bytes]:
    """What lies at a prompt's positions in the memory of `here`."""
    counts = [min(SIZE, num_tokens - at) for at in range(0, num_tokens, SIZE)]
    return [
        b"".join(
            bytes(world.here.memory.export(layer, block * SIZE, block * SIZE + count))
            for block, count in zip(blocks, counts, strict=False)
        )
        for layer in range(LAYERS)
    ]


def whole_memory(world: World) -> list[bytes]:
    return [bytes(layer) for layer in world.here.memory.layers]


def fill(world: World) -> None:
    """`there` has computed the prompt, in `THEIRS`."""
    for number, data in zip(THEIRS, BLOCKS, strict=False):
        world.there.write(number, data)


def finish(world: World, token: int = 77) -> None:
    world.there.mover.first_token(KEY, token)
    world.there.do(events.FinishHandover(KEY))


TABLES = st.permutations(range(12))


@settings(max_examples=60)
@given(st.integers(1, 44), TABLES, TABLES, st.lists(st.integers(1, 44), max_size=4), st.integers(0, 5))
@played(blocks=12)
async def test_the_same_bytes_lie_at_the_same_positions_afterwards(
    world: World,
    num_tokens: int,
    theirs: Sequence[int],
    ours: Sequence[int],
    ends: Sequence[int],
    grant_at: int,
) -> None:
    here, there, extent = world.here, world.there, plain(num_tokens)
    for number, data in zip(theirs, BLOCKS, strict=False):
        there.write(number, data)
    there.send(extent)
    spans = chunks(num_tokens, ends)
    for number, tokens in enumerate(spans):
        if number == grant_at:
            here.expect(extent, ours)
            await there.heard(HandoverGranted)
        await asyncio.to_thread(ready, there, tokens, theirs)
        ready(there, tokens, theirs)  # nothing goes twice
    finish(world)
    if grant_at >= len(spans):
        await world.quiet()
        assert not here.placed, "something was sent before the grant"
        here.expect(extent, ours)
    await there.heard(HandoverConfirmed)
    assert lies(world, ours, num_tokens) == expected(num_tokens)
    others = ours[-(-num_tokens // SIZE) :]
    assert all(here.block(number) == BLANK for number in others), "another request's block was written"
    assert here.tokens == {KEY: 77} and len(here.of(events.HandoverComplete)) == 1 and here.of(events.Progress)
    there.do(events.ReleaseResources(KEY))
    moved = sum(message.stop - SIZE * message.first_block for message in here.placed) * TOKEN
    gauges = here.mover.gauges(), there.mover.gauges()
    assert [each[f"kv_bytes_{way}_total"] for each in gauges for way in ("in", "out")] == [moved, 0, 0, moved]


@played(blocks=300)
async def test_long_prompts_go_in_frames_of_some_blocks(world: World) -> None:
    world.here.expect(plain(299 * SIZE), range(300))
    for number in range(299):
        world.there.write(299 - number, BLOCKS[number])
    world.there.send(plain(299 * SIZE))
    ready(world.there, Span(0, 299 * SIZE), range(299, 0, -1))
    finish(world)
    await world.there.heard(HandoverConfirmed)
    assert [world.here.block(number) for number in range(299)] == BLOCKS[:299]
    assert max(len(message.seals) for message in world.here.placed) == 256  # type: ignore[union-attr]


@played(alone=True)
async def test_the_stages_of_a_pipeline_group_send_their_layers(world: World) -> None:
    here, first = world.here, 0
    here.expect(plain(10), OURS)
    for stage, num_layers in enumerate((1, 2)):
        layout = replace(LAYOUT, num_layers=num_layers)
        node = world.node(layout=layout, first_layer=first, stage=stage)
        await world.join(node, here)
        for number, data in zip(THEIRS, BLOCKS, strict=False):
            node.write(number, data[first * LAYOUT.slice_bytes :])
        node.send(plain(10))
        await world.quiet()
        node.mover.send(KEY, computed=True)
        ready(node, Span(0, 10), THEIRS)
        if not stage:
            node.mover.first_token(KEY, 7)
        first += num_layers
    await here.told(events.HandoverComplete)
    assert lies(world, OURS, 10) == expected(10)


@pytest.mark.parametrize("computed", [True, False])
@played()
async def test_of_what_was_computed_before_the_grant_the_first_token_goes_with_it(
    world: World, computed: bool
) -> None:
    world.there.decides = lambda fact: False
    fill(world)
    world.there.send(plain(10))
    ready(world.there, Span(0, 10), THEIRS)
    world.there.mover.first_token(KEY, 77)
    world.here.expect(plain(10), OURS)
    world.there.do(events.SendHandover(KEY, OTHER, plain(10), computed))
    await world.quiet()
    assert world.here.landed == computed and lies(world, OURS, 10) == expected(10)


# Recurrent states, and prefixes that are not handed over.

STATES = 2


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize(("num_tokens", "start"), [(1, 0), (3, 0), (4, 0), (5, 1), (19, 0), (13, 2)])
@played(layout=replace(LAYOUT, state_bytes=LAYOUT.block_bytes + 8))
async def test_a_recurrent_state_comes_after_the_prompt_bit_for_bit(
    world: World, num_tokens: int, start: int, codec: str, with_state: bool
) -> None:
    """Codecs of KV leave it alone."""
    count = -(-num_tokens // SIZE)
    source, target = range(count + STATES), range(8, 8 + count + STATES)
    for number in source:
        world.there.write(number, BLOCKS[number])
    extent = plain(num_tokens, start=start, codec=codec, state_blocks=STATES)
    world.here.expect(extent, target)
    world.there.send(extent)
    ready(world.there, Span(0, num_tokens), source)
    if with_state:
        tokens = Span(count * SIZE, (count + STATES) * SIZE)
        world.there.mover.kv_ready(KEY, Span(0, LAYERS), tokens, tuple(source))
    finish(world)
    await world.quiet()
    assert world.here.landed == with_state and not world.here.failed
    assert [world.here.block(8 + at) for at in range(start)] == [BLANK] * start
    if codec == "none" and num_tokens >= SIZE * (start + 1):
        assert world.here.block(8 + start) == BLOCKS[start]
    if with_state:
        assert [world.here.block(8 + at) for at in source[count:]] == [BLOCKS[at] for at in source[count:]]


@pytest.mark.parametrize(
    ("first", "stop", "count"), [(2, 5 * SIZE, 3), (1, 3 * SIZE, 2)], ids=["behind it", "half"]
)
@played(alone=True)
async def test_a_state_comes_whole_after_all_kv(world: World, first: int, stop: int, count: int) -> None:
    liar = await world.liar()
    world.here.expect(plain(SIZE + 1, state_blocks=STATES), (5, 6, 7, 8))
    liar.say(HandoverSlices(KEY, 0, first, stop, (b"",) * count), bytes(count * SIZE * TOKEN))
    await refused(world)


# What must not be believed.


async def refused(world: World, why: str = "is not what must come next") -> None:
    world.network.thaw()
    await world.quiet()
    assert [fact.peer for fact in world.here.of(events.Gone)] == [OTHER]
    assert why in world.here.of(events.Gone)[0].reason


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"first_block": 0, "seals": (b"",) * 3}, SIZE),  # again
        ({"first_block": -1}, 2 * SIZE),
        ({"layer": LAYERS}, 0),
        ({"layer": -1, "first_block": 0, "seals": (b"",) * 3}, SIZE),  # not the last one
        ({"stop": 11}, 1),  # past the prompt
        ({"stop": 4, "seals": ()}, 0),  # nothing
        ({"stop": 3}, -5),
        ({"seals": (b"",)}, 0),  # one block unsealed
        ({"seals": (b"",) * 3}, 0),
        ({}, 1),
        ({}, -1),
    ],
)
@played(alone=True)
async def test_what_must_not_come_next_ends_the_session(
    world: World, changes: dict[str, Any], more: int
) -> None:
    """Block 0 of layer 0 is there."""
    liar = await world.liar()
    world.here.expect(plain(10), OURS)
    liar.say(*frame(0, 0, 4))
    await world.quiet()
    before = whole_memory(world)
    head, payload = frame(0, 1, 10)
    liar.say(replace(head, **changes), (payload * 3)[: len(payload) + more * TOKEN])
    await refused(world)
    assert whole_memory(world) == before and world.here.failed


@pytest.mark.parametrize("how", ["places changed", "a gap"])
@played(alone=True)
async def test_blocks_lie_in_their_order_or_do_not_count(world: World, how: str) -> None:
    liar = await world.liar()
    world.here.expect(plain(12), OURS)
    head, payload = frame(0, 0, 8)
    if how == "a gap":  # frames may be placed in any order, not received
        liar.say(*frame(0, 1, 12))
        say_all(liar, 12, (1, 2))
    else:
        half = len(payload) // 2
        liar.say(head, payload[half:] + payload[:half])
    await world.quiet()
    assert "layer 0 came damaged" in world.here.of(events.Broken)[0].reason and not world.here.landed


@pytest.mark.parametrize("lie", ["a frame", "a frame without a payload", "a first token"])
@played(alone=True)
async def test_kv_comes_from_the_node_of_its_attempt_alone(world: World, lie: str) -> None:
    liar, stranger = await world.liar(), await world.liar(THIRD)
    world.here.expect(plain(4), OURS)
    head, payload = frame(0, 0, 4)
    if lie == "a first token":
        stranger.say(HandoverSent(KEY, 66))
    else:
        stranger.say(head, *([payload] if lie == "a frame" else []))
    await world.quiet()
    assert stranger.reasons and f"comes from {OTHER}, not from" in stranger.reasons[0]
    say_all(liar, 4)
    await world.quiet()
    assert world.here.landed and world.here.tokens == {KEY: 77} and not world.here.mismatches
    assert lies(world, OURS, 4) == expected(4)


@played(alone=True)
async def test_the_first_token_is_believed_once_and_nothing_before_the_grant(world: World) -> None:
    liar, here = await world.liar(), world.here
    say_all(liar, 4, token=66)
    await world.quiet()
    assert not here.facts and here.block(OURS[0]) == BLANK, "it is read past"
    here.expect(plain(4), OURS)
    for token in (77, 88):
        liar.say(HandoverSent(KEY, token))
    await world.quiet()
    say_all(liar, 4, token=99)
    await world.quiet()
    assert here.tokens == {KEY: 77} and here.landed and not here.reasons


@pytest.mark.parametrize("first", [1, 2], ids=["the same blocks", "one of them"])
@played(alone=True)
async def test_two_frames_under_way_never_share_a_block(world: World, first: int) -> None:
    """The frame that came last would lie under the seals of the other."""
    liar = await world.liar()
    world.here.expect(plain(10), OURS)
    liar.say(*frame(0, 0, 4))
    await world.under_way(liar, *frame(0, 1, 10))
    liar.say(*frame(1, 0, 10))
    await world.quiet()
    assert not world.here.of(events.Gone), "another layer"
    head, payload = frame(0, first, 10)
    liar.say(replace(head, seals=(b"x",) * len(head.seals)), payload)
    await refused(world)


@played(alone=True)
async def test_a_frame_that_its_sender_gave_up_may_come_again(world: World) -> None:
    liar = await world.liar()
    world.here.expect(plain(10), OURS)
    sending = await world.under_way(liar, *frame(0, 0, 10))
    sending.cancel()
    say_all(liar, 10)
    await world.quiet()
    world.network.thaw()
    await world.quiet()
    assert world.here.landed and lies(world, OURS, 10) == expected(10)


@played(alone=True)
async def test_only_the_session_of_a_frame_takes_it_back(world: World) -> None:
    liar = await world.liar(sessions=2)
    early = await world.under_way(liar, *frame(0, 0, 10), over=1)
    world.here.expect(plain(10), OURS)
    await world.under_way(liar, *frame(0, 0, 10))
    early.cancel()
    await world.quiet()
    head, payload = frame(0, 0, 10)
    liar.say(replace(head, seals=(b"x",) * 3), payload)
    await refused(world)


@played(alone=True)
async def test_a_frame_is_not_taken_for_whole_because_of_an_equal_one_without_a_payload(world: World) -> None:
    liar = await world.liar(sessions=2)
    world.here.expect(plain(4), OURS)
    zeros, payload = sealed([bytes(SIZE * TOKEN)]), bytes(SIZE * TOKEN)
    for layer in (1, 2):
        liar.say(HandoverSlices(KEY, layer, 0, 4, zeros), payload, over=1)
    liar.say(HandoverSent(KEY, 77), over=1)
    await world.under_way(liar, HandoverSlices(KEY, 0, 0, 4, zeros), payload)
    liar.say(HandoverSlices(KEY, 0, 0, 4, zeros), over=1)
    await world.quiet()
    assert not world.here.landed and world.here.of(events.Broken)


# Blocks that are given back.


@pytest.mark.parametrize("how", ["given up", "whole"])
@played(alone=True)
async def test_what_is_under_way_at_the_end_is_written_nowhere(world: World, how: str) -> None:
    liar, here = await world.liar(), world.here
    here.expect(plain(6), OURS)
    if how == "whole":
        say_all(liar, 6, (1, 2))
        liar.say(*frame(0, 0, 6))
        await world.quiet()
        assert here.landed
        here.landed = False
        here.expect(plain(6), OURS)
        for layer in range(LAYERS):
            liar.say(*frame(layer, 0, 6))
        await world.under_way(liar, *frame(0, 1, 6))
        liar.say(HandoverSent(KEY, 77))
        await world.quiet()
        assert here.landed
    else:
        await world.under_way(liar, *frame(0, 0, 6))
        here.give_up(KEY, "cancelled")
    for number in OURS:
        here.write(number, BLOCKS[20])
    say_all(liar, 6)
    world.network.thaw()
    await world.quiet()
    assert all(here.block(number) == BLOCKS[20] for number in OURS), "a late byte was written"
    assert not here.of(events.Gone)


@pytest.mark.parametrize("from_thread", [False, True])
@played()
async def test_what_is_released_before_it_began_takes_nothing(world: World, from_thread: bool) -> None:
    """Actions of a thread are not overtaken by those of the event loop."""
    here, there = world.here, world.there
    there.send(plain(10))
    grant = events.ReceiveHandover(KEY, OTHER, plain(10), OURS)
    if from_thread:
        thread = threading.Thread(target=here.mover.do, args=(grant,))
        thread.start()
        thread.join()
    else:
        here.do(grant)
    here.do(events.ReleaseResources(KEY))
    there.mover.send(KEY)
    fill(world)
    ready(there, Span(0, 10), THEIRS)
    await world.quiet()
    assert here.block(OURS[0]) == BLANK


@played(alone=True)
async def test_nothing_is_sent_of_blocks_that_were_given_back(world: World) -> None:
    liar, here = await world.liar(), world.here
    here.send(plain(8))
    await world.quiet()
    here.mover.send(KEY)
    for link in world.network.links:
        link.freeze()
    ready(here, Span(0, 4), THEIRS)
    here.do(events.ReleaseResources(KEY))
    ready(here, Span(4, 8), THEIRS)
    world.network.thaw()
    await world.quiet()
    assert not liar.of(HandoverSlices)
    assert here.mover.gauges()["kv_bytes_out_total"] == 4 * LAYERS * TOKEN, "of those that are over too"


# Sessions.


@played()
async def test_a_lost_session_is_told_once_to_either_side_and_ends_what_went_over_it(world: World) -> None:
    here, there = world.here, world.there
    here.expect(plain(10), OURS)
    there.send(plain(10))
    await there.heard(HandoverGranted)
    here.decides = lambda fact: not isinstance(fact, events.LetterReceived)  # answers nothing
    there.fetch(2, key=KEY)
    await here.heard(FetchRequest)
    there.session.abort("killed")  # type: ignore[union-attr]
    assert await there.told(events.Gone) == events.Gone(OTHER, "killed")
    assert await there.told(events.BlocksFetched) == events.BlocksFetched(KEY, 0)
    await here.told(events.Gone)
    await world.quiet()
    assert all(node.failed and len(node.of(events.Gone)) == 1 for node in (here, there))


@pytest.mark.parametrize("is_known", [False, True])
@played(alone=True)
async def test_of_a_node_that_cannot_be_reached_all_that_needs_it_ends(world: World, is_known: bool) -> None:
    here = world.here
    if is_known:
        here.addresses[OTHER] = "127.0.0.1:999"
    actions: list[Any] = [
        events.SendLetter(OTHER, Shrink(KEY, 0)),
        events.OfferHandover(KEY, OTHER, plain(10)),
        events.Fetch(KEY, OTHER, NAMES[:2], 0),
    ]
    for count, action in enumerate(actions, 1):
        here.do(action)
        assert "cannot be reached" in (await here.told(events.Gone, count)).reason
    assert await here.told(events.BlocksFetched) == events.BlocksFetched(KEY, 0)
    await until(lambda: not here.tasks)


@played(alone=True)
async def test_payloads_come_with_frames_of_kv_alone(world: World) -> None:
    liar = await world.liar()
    liar.say(HandoverConfirmed(KEY), bytes(7))
    await refused(world, "carried 7 bytes")
