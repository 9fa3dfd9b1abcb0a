from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.blocks import KVLayout, seal
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.node.extent import Extent
from isthmus.core.types import NodeId, RequestId, Span
from isthmus.live.engine.kv import KVMemory
from isthmus.live.kv import handover
from isthmus.live.kv.handover import HandoverReceiver, HandoverSender, Incoming, Outgoing
from isthmus.live.messenger import Priority
from isthmus.live.peers.messages import Sent, Slices

SIZE, LAYERS, BLOCKS = 4, 2, 12
LAYOUT = KVLayout(dtype="float32", block_size=SIZE, num_layers=LAYERS, num_kv_heads=1, head_dim=2)
A = RequestId("a#1")
PEER = NodeId("there")
FROM: Any = object()
"""The session with it."""


class Wire:
    """Stands for a Session: keeps what is sent; payloads as one string of bytes."""

    closed, peer = False, "somebody"

    def __init__(self) -> None:
        self.sent: list[tuple[Any, bytes]] = []
        self.refused: list[Any] = []
        self.num_cancelled = 0

    def send(self, message: Any, *payload: memoryview, priority: Priority | None = None) -> Wire:
        self.sent.append((message, b"".join(payload)))
        return self

    def cancel(self) -> None:
        self.num_cancelled += 1

    def refuse(self, message: Any) -> bool:
        self.refused.append(message)
        return True

    @property
    def messages(self) -> list[Any]:
        return [message for message, _ in self.sent]

    @property
    def slices(self) -> list[tuple[Slices, bytes]]:
        return [(message, payload) for message, payload in self.sent if isinstance(message, Slices)]


def extent(num_tokens: int, *, codec: str = "none", handover_start: int = 0, state_blocks: int = 0) -> Extent:
    states = -(-num_tokens // SIZE) * SIZE
    stop = states + state_blocks * SIZE if state_blocks else num_tokens
    return Extent(SIZE, handover_start * SIZE, num_tokens, states, stop, codec)


def memory(*, filled: bool) -> KVMemory:
    made = KVMemory(LAYOUT, BLOCKS, torch.device("cpu"))
    if filled:
        for number, layer in enumerate(made.layers):
            layer.copy_(torch.arange(layer.numel(), dtype=torch.float32).view(layer.shape) + 1000 * number)
    return made


def kv_of(kv: KVMemory, layer: int, blocks: Sequence[int], num_tokens: int) -> bytes:
    """The bytes of a request's tokens, position by position: the plain way."""
    slots = [blocks[position // SIZE] * SIZE + position % SIZE for position in range(num_tokens)]
    return b"".join(bytes(kv.export(layer, slot, slot + 1)) for slot in slots)


def sender(num_tokens: int) -> tuple[Outgoing, KVMemory, Wire]:
    kv, wire = memory(filled=True), Wire()
    return Outgoing(A, extent(num_tokens), kv), kv, wire


def finish(outgoing: Outgoing, token: int = 77) -> None:
    outgoing.first_token(token)
    outgoing.computed()


def receiver(num_tokens: int, blocks: Sequence[int]) -> tuple[Incoming, KVMemory]:
    kv = memory(filled=False)
    return Incoming(events.Receive(A, PEER, extent(num_tokens), tuple(blocks)), kv), kv


def place(incoming: Incoming, slices: Slices, size: int) -> list[memoryview] | None:
    return incoming.place(FROM, slices, size)


def arrive(incoming: Incoming, slices: Slices, payload: bytes) -> bool:
    """One frame comes in; False when a seal was wrong."""
    targets = place(incoming, slices, len(payload))
    assert targets is not None, f"{slices} was not expected"
    assert sum(map(len, targets)) == len(payload)
    for target in targets:
        target[:] = payload[: len(target)]
        payload = payload[len(target) :]
    return incoming.receive(slices)


def chunks_of(num_tokens: int, ends: Sequence[int]) -> list[Span]:
    """What a worker announces for prompt chunks that end at `ends`: whole blocks, and at last the rest."""
    spans, done = [], 0
    for end in sorted({*(end for end in ends if end < num_tokens), num_tokens}):
        stop = end if end == num_tokens else end // SIZE * SIZE
        if stop > done:
            spans.append(Span(done, stop))
            done = stop
    return spans


TABLES = st.permutations(range(BLOCKS))


@settings(max_examples=150)
@given(st.integers(1, (BLOCKS - 1) * SIZE), TABLES, TABLES, st.lists(st.integers(1, 44), max_size=5), st.data())
def test_the_same_bytes_lie_at_the_same_positions_afterwards(
    num_tokens: int, theirs: Sequence[int], ours: Sequence[int], ends: Sequence[int], data: st.DataObject
) -> None:
    """Whatever the block tables, the chunks, the frame size, and the moment of the grant."""
    spans = chunks_of(num_tokens, ends)
    grant_at = data.draw(st.integers(0, len(spans)))
    outgoing, source, wire = sender(num_tokens)
    incoming, target = receiver(num_tokens, ours)
    outgoing.attach(wire)  # type: ignore[arg-type]
    frame_blocks = data.draw(st.sampled_from([1, 2, 256]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover, "MAX_FRAME_BLOCKS", frame_blocks)
        for number, span in enumerate(spans):
            if number == grant_at:
                outgoing.send()
            for layer in range(LAYERS):
                outgoing.ready(Span(layer, layer + 1), span, tuple(theirs))
        if grant_at == len(spans):
            assert not wire.messages, "something was sent before the grant"
            finish(outgoing)
            outgoing.send()
        else:
            finish(outgoing)
    assert wire.messages[-1] == Sent(A, 77)
    assert wire.messages.count(Sent(A, 77)) == 1
    for slices, payload in wire.slices:
        assert len(slices.seals) <= frame_blocks
        assert not incoming.complete
        assert arrive(incoming, slices, payload)
    assert not incoming.complete
    incoming.sent = wire.messages[-1]
    assert incoming.complete
    for layer in range(LAYERS):
        assert kv_of(target, layer, ours, num_tokens) == kv_of(source, layer, theirs, num_tokens)
    touched = [block for block in range(BLOCKS) if any(target.export(0, block * SIZE, (block + 1) * SIZE))]
    assert sorted(touched) == sorted(ours[: LAYOUT.blocks_for(num_tokens)]), (
        "another request's block was written"
    )


def handovers(
    num_tokens: int = 4, blocks: tuple[int, ...] = (0, 1), *, expects: bool = True
) -> tuple[HandoverReceiver, list[Any], KVMemory, Wire]:
    """With the session over which an attempt's KV is to come."""
    told: list[Any] = []
    kv, wire = memory(filled=False), Wire()
    nodes = {wire: PEER}
    here = HandoverReceiver(kv, nodes.get, told.append, lambda key, token: told.append((key, token)))  # type: ignore[arg-type]
    if expects:
        here.expect(events.Receive(A, PEER, extent(num_tokens), blocks))
    return here, told, kv, wire


def sending(wire: Wire, num_tokens: int = 4) -> HandoverSender:
    """A node that offered an attempt to another one."""

    async def reach(node: NodeId) -> Any:
        return wire

    tasks: list[Any] = []
    made = HandoverSender(memory(filled=True), 0, reach, tasks.append)  # type: ignore[arg-type]
    made.offer(events.Offer(A, PEER, extent(num_tokens)))
    asyncio.run(tasks.pop())
    return made


def test_the_layers_may_come_over_several_sessions() -> None:
    """As from the stages of a pipeline group."""
    stages = [(memory(filled=True), Wire()) for _ in range(2)]
    incoming, kv = receiver(6, (7, 2))
    for number, (whole, wire) in enumerate(stages):
        outgoing = Outgoing(A, extent(6), one_layer(whole, number), number)
        outgoing.attach(wire)  # type: ignore[arg-type]
        outgoing.send()
        outgoing.ready(Span(0, 1), Span(0, 6), (3, 1))
        ((slices, payload),) = wire.slices
        assert slices.layer == number
        assert arrive(incoming, slices, payload)
    incoming.sent = Sent(A, 5)
    assert incoming.complete
    for layer in range(LAYERS):
        assert kv_of(kv, layer, (7, 2), 6) == kv_of(stages[0][0], layer, (3, 1), 6)


def one_layer(kv: KVMemory, number: int) -> KVMemory:
    made = KVMemory(replace(LAYOUT, num_layers=1), BLOCKS, torch.device("cpu"))
    made.layers[0].copy_(kv.layers[number])
    return made


def test_what_is_released_in_the_midst_is_taken_back() -> None:
    """Its blocks are another's when that returns."""
    wire = Wire()
    sender = sending(wire, 8)
    sender.send(A, computed=False)
    sender.on(A, Outgoing.ready, Span(0, LAYERS), Span(0, 4), (0,))
    sender.release(A)
    assert wire.num_cancelled == len(wire.slices) == LAYERS
    sender.on(A, Outgoing.ready, Span(0, LAYERS), Span(4, 8), (0, 1))
    sender.send(A, computed=True)
    assert len(wire.slices) == LAYERS
    assert sender.bytes_out == 4 * LAYERS * LAYOUT.token_bytes, "of those that are over too"


# What must not be believed.


def test_slices_over_another_session_harm_nobody() -> None:
    """Without a payload they are not placed first."""
    outgoing, there, wire = sender(4)
    outgoing.attach(wire)  # type: ignore[arg-type]
    outgoing.send()
    outgoing.ready(Span(0, 1), Span(0, 4), (5,))
    ((slices, payload),) = wire.slices
    here, told, kv, session = handovers(4, (2,))
    stranger: Any = Wire()
    (target,) = here.place(session, slices, len(payload))  # type: ignore[arg-type]
    target[:] = payload
    for strange in (slices, replace(slices, seals=())):
        for refused in (here.receive, lambda *given: here.place(*given, len(payload))):
            with pytest.raises(ProtocolError, match="comes from there, not from"):
                refused(stranger, strange)
        here.void(stranger, strange)
    with pytest.raises(ProtocolError):
        here.sent(stranger, Sent(A, 66))
    here.receive(session, slices)  # type: ignore[arg-type]
    assert told == [events.Moved(A)]
    assert (here.bytes_in, here.seal_mismatches) == (len(payload), 0)
    assert kv_of(kv, 0, (2,), 4) == kv_of(there, 0, (5,), 4)


@given(st.integers(1, 20), TABLES, st.data())
def test_any_flipped_bit_is_found_and_nothing_of_its_frame_counts(
    num_tokens: int, blocks: Sequence[int], data: st.DataObject
) -> None:
    outgoing, _, wire = sender(num_tokens)
    outgoing.attach(wire)  # type: ignore[arg-type]
    outgoing.send()
    outgoing.ready(Span(0, LAYERS), Span(0, num_tokens), tuple(blocks))
    incoming, _ = receiver(num_tokens, tuple(reversed(blocks)))
    incoming.sent = Sent(A, 77)
    (first, good), (second, payload) = wire.slices
    assert arrive(incoming, first, good)
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << bit % 8
    assert not arrive(incoming, second, bytes(damaged))
    assert not incoming.complete
    assert arrive(incoming, second, payload), "the same frame, whole, is what must come next"
    assert incoming.complete


def test_blocks_that_change_places_are_found() -> None:
    outgoing, _, wire = sender(8)
    outgoing.attach(wire)  # type: ignore[arg-type]
    outgoing.send()
    outgoing.ready(Span(0, 1), Span(0, 8), (0, 1))
    ((slices, payload),) = wire.slices
    incoming, _ = receiver(8, (0, 1, 2))
    half = len(payload) // 2
    assert not arrive(incoming, slices, payload[half:] + payload[:half])


def expected_next() -> tuple[Incoming, Slices, int]:
    """A receiver of 10 tokens that has block 0 of layer 0, and what must come next."""
    outgoing, _, wire = sender(10)
    outgoing.attach(wire)  # type: ignore[arg-type]
    outgoing.send()
    outgoing.ready(Span(0, 1), Span(0, 4), (0, 1, 2))
    incoming, _ = receiver(10, (3, 4, 5))
    assert arrive(incoming, *wire.slices[0])
    return incoming, Slices(A, 0, 1, 10, (b"", b"")), 6 * LAYOUT.token_bytes


def test_what_is_not_next_does_not_count() -> None:
    """Frames of a layer that come over several connections may be placed in any order, not received. All is in order
    with this one, but that the one before it is missing."""
    incoming, slices, _ = expected_next()
    payload = bytes(range(2 * LAYOUT.token_bytes))
    after = replace(slices, first_block=2, seals=(seal(payload),))
    assert not arrive(incoming, after, payload)


def test_two_frames_under_way_never_share_a_block() -> None:
    """Whichever came last would lie under the seals of the other."""
    incoming, slices, size = expected_next()
    assert place(incoming, slices, size) is not None
    again = replace(slices, seals=(b"x", b"y"))
    last = replace(slices, first_block=2, seals=(b"z",))
    assert place(incoming, again, size) is None
    assert place(incoming, last, 2 * LAYOUT.token_bytes) is None
    other = replace(slices, layer=1, first_block=0, seals=(b"",) * 3)
    assert place(incoming, other, 10 * LAYOUT.token_bytes) is not None, "another layer"
    incoming.frames.void(Wire(), slices)  # type: ignore[arg-type]
    assert place(incoming, again, size) is None, "of another session"
    incoming.frames.void(FROM, slices)
    assert place(incoming, again, size) is not None


def test_the_first_token_is_believed_once() -> None:
    here, told, _, wire = handovers()
    outgoing, _, out = sender(4)
    outgoing.attach(out)  # type: ignore[arg-type]
    outgoing.send()
    outgoing.ready(Span(0, LAYERS), Span(0, 4), (5,))
    for token in (77, 88):
        here.sent(wire, Sent(A, token))  # type: ignore[arg-type]
    for slices, payload in out.slices:
        (target,) = here.place(wire, slices, len(payload))  # type: ignore[arg-type]
        target[:] = payload
        here.receive(wire, slices)  # type: ignore[arg-type]
    assert told[-2:] == [(A, 77), events.Received(A)]


@pytest.mark.parametrize(
    ("changes", "more_bytes"),
    [
        ({"first_block": 0, "seals": (b"",) * 3}, SIZE * LAYOUT.token_bytes),  # again
        ({"first_block": -1}, 2 * SIZE * LAYOUT.token_bytes),
        ({"layer": LAYERS}, 0),
        ({"layer": -1, "first_block": 0, "seals": (b"",) * 3}, SIZE * LAYOUT.token_bytes),  # not the last one
        ({"stop": 11}, LAYOUT.token_bytes),  # past the prompt
        ({"stop": 4, "seals": ()}, -6 * LAYOUT.token_bytes),  # nothing
        ({"stop": 3}, -7 * LAYOUT.token_bytes),
        ({"seals": (b"",)}, 0),  # one block unsealed
        ({"seals": (b"", b"", b"")}, 0),
        ({}, 1),
        ({}, -1),
    ],
)
def test_what_must_not_come_next_is_refused(changes: dict[str, Any], more_bytes: int) -> None:
    incoming, slices, size = expected_next()
    assert place(incoming, replace(slices, **changes), size + more_bytes) is None
    assert place(incoming, slices, size) is not None, "a refusal changed something"


def test_nothing_is_accepted_before_the_grant() -> None:
    here, told, _, wire = handovers(expects=False)
    slices, size = Slices(A, 0, 0, 4, (b"",)), 4 * LAYOUT.token_bytes
    before = here.place(wire, slices, size)  # type: ignore[arg-type]
    assert [len(part) for part in before] == [size], "it is read past"
    here.receive(wire, slices)  # type: ignore[arg-type]
    here.sent(wire, Sent(A, 77))  # type: ignore[arg-type]
    assert not told


def test_what_is_under_way_when_an_attempt_is_released_is_refused() -> None:
    """Its blocks are another's then."""
    here, _, _, wire = handovers()
    slices = Slices(A, 0, 0, 4, (b"",))
    here.place(wire, slices, 4 * LAYOUT.token_bytes)  # type: ignore[arg-type]
    here.release(A)
    assert wire.refused == [slices]
    (past,) = here.place(wire, replace(slices, layer=1), 4 * LAYOUT.token_bytes)  # type: ignore[arg-type]
    assert past.nbytes == 4 * LAYOUT.token_bytes, "it is read past"


def test_nothing_is_written_to_what_was_received() -> None:
    """Its last block may be on its way again until then: the prompt could have grown in it."""
    here, told, _, wire = handovers(6, (1, 2))
    tail = []
    for layer in range(LAYERS):
        for first, stop in ((0, 4), (1, 6)):
            payload = bytes((stop - first * SIZE) * LAYOUT.token_bytes)
            sealed = Slices(A, layer, first, stop, (seal(payload),))
            (target,) = here.place(wire, sealed, len(payload))  # type: ignore[arg-type]
            target[:] = payload
            here.receive(wire, sealed)  # type: ignore[arg-type]
        tail.append(replace(sealed, seals=(b"again",)))
        here.place(wire, tail[-1], 2 * LAYOUT.token_bytes)  # type: ignore[arg-type]
    here.sent(wire, Sent(A, 77))  # type: ignore[arg-type]
    assert told[-1] == events.Received(A)
    assert wire.refused == tail


def test_a_frame_under_way_is_not_taken_for_whole_because_of_an_equal_one_without_a_payload() -> None:
    incoming, _ = receiver(4, (0,))
    size = 4 * LAYOUT.token_bytes
    first = Slices(A, 0, 0, 4, (seal(bytes(size)),))
    assert place(incoming, first, size) is not None
    assert not incoming.receive(replace(first))
    assert place(incoming, first, size) is None, "it is under way still"


# Recurrent states, and prefixes that are not handed over.

WITH_STATE = replace(LAYOUT, state_bytes=LAYOUT.block_bytes + 8)
STATE_BLOCKS = 2


def stateful(num_tokens: int, *, filled: bool, **how: Any) -> tuple[Extent, KVMemory]:
    made = memory(filled=filled)
    made.layout = WITH_STATE
    return extent(num_tokens, state_blocks=STATE_BLOCKS, **how), made


def hand_over(
    num_tokens: int, *, with_state: bool, **how: Any
) -> tuple[Incoming, KVMemory, KVMemory, list[Slices]]:
    """Sends a prompt from blocks 0, 1, ... with its state in the next ones; receives it into blocks from 5 on."""
    count = -(-num_tokens // SIZE)
    source = list(range(count + STATE_BLOCKS))
    moved, there = stateful(num_tokens, filled=True, **how)
    outgoing, wire = Outgoing(A, moved, there), Wire()
    outgoing.attach(wire)  # type: ignore[arg-type]
    outgoing.send()
    outgoing.ready(Span(0, LAYERS), Span(0, num_tokens), source[:count])
    if with_state:
        outgoing.ready(Span(0, LAYERS), Span(count * SIZE, (count + STATE_BLOCKS) * SIZE), source)
    finish(outgoing, 7)
    moved, here = stateful(num_tokens, filled=False, **how)
    incoming = Incoming(events.Receive(A, PEER, moved, tuple([5 + block for block in source])), here)
    for message, payload in wire.sent:
        if isinstance(message, Slices):
            assert arrive(incoming, message, payload)
        elif isinstance(message, Sent):
            incoming.sent = message
    return incoming, there, here, [message for message, _ in wire.slices]


@pytest.mark.parametrize("num_tokens", [1, SIZE - 1, SIZE, SIZE + 1, 4 * SIZE + 3])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_recurrent_state_comes_after_the_prompt_bit_for_bit(num_tokens: int, codec: str) -> None:
    """Whatever is done to KV on the way: a state is not numbers that a codec of KV may round."""
    incoming, there, here, _ = hand_over(num_tokens, with_state=True, codec=codec)
    assert incoming.complete
    count = -(-num_tokens // SIZE)
    for layer in range(LAYERS):
        first, stop = count * SIZE, (count + STATE_BLOCKS) * SIZE
        state = bytes(there.export(layer, first, stop))
        assert any(state) and bytes(here.export(layer, first + 5 * SIZE, stop + 5 * SIZE)) == state


@pytest.mark.parametrize("num_tokens", [SIZE, SIZE + 1])
def test_a_request_without_its_state_is_not_complete(num_tokens: int) -> None:
    """All KV is here, and whoever decoded now would write fluent nonsense."""
    incoming, *_ = hand_over(num_tokens, with_state=False)
    assert incoming.sent is not None and not incoming.complete


def test_a_state_that_is_not_the_next_thing_is_refused() -> None:
    moved, here = stateful(SIZE + 1, filled=False)
    incoming = Incoming(events.Receive(A, PEER, moved, (5, 6, 7, 8)), here)
    beyond = Slices(A, 0, 2, 5 * SIZE, (b"",) * 3)
    assert place(incoming, beyond, 3 * WITH_STATE.slice_bytes) is None
    half = Slices(A, 0, 1, 3 * SIZE, (b"",) * 2)
    assert place(incoming, half, 2 * WITH_STATE.slice_bytes) is None


@pytest.mark.parametrize("handover_start", [1, 2])
def test_what_the_other_side_has_does_not_cross(handover_start: int) -> None:
    incoming, there, here, slices = hand_over(3 * SIZE + 1, with_state=True, handover_start=handover_start)
    assert min(each.first_block for each in slices) == handover_start
    assert incoming.complete
    first, stop = handover_start * SIZE, (4 + STATE_BLOCKS) * SIZE
    sent = [*range(first, 3 * SIZE + 1), *range(4 * SIZE, stop)]
    for layer in range(LAYERS):
        for slot in sent:
            there_bytes = bytes(there.export(layer, slot, slot + 1))
            assert bytes(here.export(layer, slot + 5 * SIZE, slot + 5 * SIZE + 1)) == there_bytes


def test_a_frame_that_its_sender_gave_up_may_come_again() -> None:
    here, _, _, wire = handovers()
    slices, size = Slices(A, 0, 0, 4, (b"x",)), 4 * LAYOUT.token_bytes
    again = replace(slices, seals=(b"y",))
    here.place(wire, slices, size)  # type: ignore[arg-type]
    for session in (Wire(), wire):
        with pytest.raises(ProtocolError):
            here.place(wire, again, size)  # type: ignore[arg-type]
        here.void(session, slices)  # type: ignore[arg-type]
    assert here.place(wire, again, size)  # type: ignore[arg-type]


@pytest.mark.parametrize("computed", [True, False])
def test_of_what_was_computed_before_the_grant_the_first_token_goes_with_it(computed: bool) -> None:
    wire = Wire()
    sender = sending(wire)
    sender.on(A, Outgoing.ready, Span(0, LAYERS), Span(0, 4), (0, 1))
    sender.on(A, Outgoing.first_token, 77)
    assert not wire.slices
    sender.send(A, computed=computed)
    assert len(wire.slices) == LAYERS
    assert [said for said in wire.messages if isinstance(said, Sent)] == ([Sent(A, 77)] if computed else [])
