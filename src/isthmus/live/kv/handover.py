"""Attempts whose KV leaves this process, and those whose KV comes to it, and the sessions it goes over.

All of it lives in the event loop. Bytes go from the sender's KV memory to the receiver's, block slice by block slice;
an attempt is complete where every layer is whole and every seal matched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from isthmus.core.blocks import KVLayout, seal
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.node.letters import HandoverSpan
from isthmus.core.types import NodeId, RequestId, Span
from isthmus.live.engine.codecs import EXACT, NONE
from isthmus.live.engine.interface import KVBytes, runs_of
from isthmus.live.messenger import Priority, Sending, Session
from isthmus.live.peers.messages import HandoverSent, HandoverSlices
from isthmus.live.peers.sessions import Reach, Spawn, Tell
from isthmus.live.peers.wire import ENCODED_BLOCKS, KVFrames, pack

MAX_FRAME_BLOCKS = 256


class Outgoing:
    """One departing attempt. Slices wait here until they may be sent.

    `first_layer`: of the model, that is the first in `memory`: a pipeline stage sends its own layers.
    """

    def __init__(self, key: RequestId, extent: HandoverSpan, memory: KVBytes, first_layer: int = 0) -> None:
        self.key, self._extent, self._memory, self._first_layer = key, extent, memory, first_layer
        self.session: Session | None = None
        self._sendings: list[Sending] = []
        self._may_send = self._is_computed = False
        self._waiting: list[tuple[int, Span, Sequence[int]]] = []
        self._told = [extent.start] * memory.layout.num_layers
        self._sent: HandoverSent | None = None
        self.bytes_out = 0

    def attach(self, session: Session) -> None:
        self.session = session
        self._go_on()

    def send(self) -> None:
        """There is room for it: what is here goes, and what will be."""
        self._may_send = True
        self._go_on()

    def ready(self, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        """KV of these layers and positions is in place: send it, now or later; nothing twice."""
        size = self._memory.layout.block_size
        for layer in range(layers.start, layers.stop):
            span = Span(max(tokens.start, self._told[layer] // size * size), tokens.stop)
            if span.stop > self._told[layer]:
                self._told[layer] = span.stop
                self._waiting.append((layer, span, blocks))
        self._go_on()

    def first_token(self, token: int) -> None:
        self._sent = HandoverSent(self.key, token)
        self._go_on()

    def computed(self) -> None:
        """All its KV is ready."""
        self._is_computed = True
        self._go_on()

    def cancel(self) -> None:
        """Nothing more of it is sent."""
        for sending in self._sendings:
            sending.cancel()

    def _go_on(self) -> None:
        """Sends what may be sent. Its first token goes last, once, from where it is known: not from the later stages of
        a pipeline group."""
        if not self._may_send or self.session is None:
            return
        for part in self._waiting:
            self._send(self.session, *part)
        self._waiting.clear()
        if self._is_computed and self._sent is not None:
            self.session.send(self._sent)
            self._sent = None

    def _send(self, session: Session, layer: int, tokens: Span, blocks: Sequence[int]) -> None:
        layout, codec = self._memory.layout, self._extent.codec_at(tokens.start)
        size = layout.block_size
        most = (MAX_FRAME_BLOCKS if codec == NONE else ENCODED_BLOCKS) * size
        for start in range(tokens.start, tokens.stop, most):
            stop = min(tokens.stop, start + most)
            span = Span(start, stop)
            parts = [self._memory.export(layer, *run) for run in runs_of(blocks, size, start, stop)]
            payload, seals = pack(codec, layout, parts, len(span), partial(self._seals, layer, span, blocks))
            self.bytes_out += (stop - start) * self._memory.layout.token_bytes
            number = self._first_layer + layer
            head = HandoverSlices(self.key, number, start // size, stop, seals)
            self._sendings.append(session.send(head, *payload, priority=Priority.URGENT))

    def _seals(self, layer: int, tokens: Span, blocks: Sequence[int]) -> list[bytes]:
        return [
            seal(self._memory.export(layer, *slots)) for slots in _slots(blocks, self._memory.layout, tokens)
        ]


class IncomingHandover:
    """One attempt that is received into `blocks`. Its layers may come over several sessions with `peer`, of a pipeline
    group one for each stage."""

    def __init__(self, expected: events.ReceiveHandover, memory: KVBytes) -> None:
        self.key, self.peer, self._extent, self._blocks = (
            expected.key, expected.peer, expected.extent, expected.blocks
        )  # fmt: skip
        self._memory = memory
        self.sent: HandoverSent | None = None
        self._received = [self._extent.start] * memory.layout.num_layers
        self.frames = KVFrames(memory.layout)

    def place(self, session: Session, slices: HandoverSlices, size: int) -> list[memoryview] | None:
        """Where the payload goes; None when it cannot be part of what is to come. What was received stays as it is."""
        layout, start = self._memory.layout, slices.first_block * self._memory.layout.block_size
        expected = (
            0 <= slices.layer < layout.num_layers
            and self._extent.resumes(self._received[slices.layer]) <= start
            and start
            < slices.stop
            <= (self._extent.stop if start >= self._extent.states else self._extent.num_tokens)
            and len(slices.seals) == layout.blocks_for(slices.stop - start)
        )
        if not expected:
            return None
        runs = runs_of(self._blocks, layout.block_size, start, slices.stop)
        targets = [self._memory.landing(slices.layer, *run) for run in runs]
        codec, tokens = self._extent.codec_at(start), Span(start, slices.stop)
        return self.frames.place(slices, session, codec, tokens, targets, size)

    def receive(self, slices: HandoverSlices) -> bool:
        """Takes in a whole frame; False when it is not the next of its layer or a seal does not match: then nothing of
        it counts."""
        targets, layout = self.frames.take(slices), self._memory.layout
        tokens = Span(slices.first_block * layout.block_size, slices.stop)
        if targets is None or tokens.start != self._extent.resumes(self._received[slices.layer]):
            return False
        runs = runs_of(self._blocks, layout.block_size, tokens.start, tokens.stop)
        for run, buffer in zip(runs, targets, strict=True):
            self._memory.land(slices.layer, *run, buffer)
        is_sealed = self._extent.codec_at(tokens.start) in EXACT
        for expected, slots in zip(slices.seals, _slots(self._blocks, layout, tokens), strict=True):
            if is_sealed and seal(self._memory.export(slices.layer, *slots)) != expected:
                return False
        self._received[slices.layer] = slices.stop
        return True

    @property
    def complete(self) -> bool:
        """Every KV group is whole: KV of all tokens and, if the model has one, the recurrent state."""
        return self.sent is not None and all(count == self._extent.stop for count in self._received)


class HandoverSender:
    """For an event loop. `spawn` owns what it starts."""

    def __init__(self, memory: KVBytes, first_layer: int, reach: Reach, spawn: Spawn) -> None:
        self._memory, self._first_layer, self._reach, self._spawn = memory, first_layer, reach, spawn
        self._outgoing: dict[RequestId, Outgoing] = {}
        self._bytes_out = 0

    def offer(self, offer: events.OfferHandover) -> None:
        outgoing = Outgoing(offer.key, offer.extent, self._memory, self._first_layer)
        self._outgoing[offer.key] = outgoing
        self._spawn(self._attach(outgoing, offer.peer))

    async def _attach(self, outgoing: Outgoing, peer: NodeId) -> None:
        with suppress(OSError, TimeoutError):  # the node hears that it is gone
            outgoing.attach(await self._reach(peer))

    def on(self, key: RequestId, does: Callable[..., None], *arguments: object) -> None:
        """Calls a method of `Outgoing` if this attempt departs."""
        outgoing = self._outgoing.get(key)
        if outgoing is not None:
            does(outgoing, *arguments)

    def send(self, key: RequestId, *, computed: bool) -> None:
        if computed:
            self.on(key, Outgoing.computed)
        self.on(key, Outgoing.send)

    def release(self, key: RequestId) -> None:
        outgoing = self._outgoing.pop(key, None)
        if outgoing is not None:
            self._bytes_out += outgoing.bytes_out
            outgoing.cancel()

    @property
    def bytes_out(self) -> int:
        return self._bytes_out + sum([outgoing.bytes_out for outgoing in self._outgoing.values()])


class HandoverReceiver:
    """For an event loop. `received` hears of the first token of an attempt that is whole, before `tell`."""

    def __init__(
        self,
        memory: KVBytes,
        node_of: Callable[[Session], NodeId | None],
        tell: Tell,
        received: Callable[[RequestId, int], object],
    ) -> None:
        self._memory, self._node_of, self._tell, self._received = memory, node_of, tell, received
        self._incoming: dict[RequestId, IncomingHandover] = {}
        self.bytes_in = self.seal_mismatches = 0

    def expect(self, expected: events.ReceiveHandover) -> None:
        self._incoming[expected.key] = IncomingHandover(expected, self._memory)

    def _from(self, session: Session, key: RequestId) -> IncomingHandover | None:
        """What may come over this session; None for an attempt given up. Raises ProtocolError for another node's."""
        incoming = self._incoming.get(key)
        if incoming is not None and self._node_of(session) != incoming.peer:
            raise ProtocolError(f"KV of {key} comes from {incoming.peer}, not from {session.peer}")
        return incoming

    def place(self, session: Session, slices: HandoverSlices, size: int) -> Sequence[memoryview]:
        """Raises ProtocolError for what is not expected."""
        incoming = self._from(session, slices.key)
        if incoming is None:
            return [memoryview(bytearray(size))]  # an attempt given up: read past it
        targets = incoming.place(session, slices, size)
        if targets is None:
            raise ProtocolError(f"KV of {slices.key}, layer {slices.layer}, is not what must come next")
        self._tell(events.Progress(slices.key))
        return targets

    def receive(self, session: Session, slices: HandoverSlices) -> None:
        """Raises ProtocolError for what comes from another node."""
        incoming = self._from(session, slices.key)
        if incoming is None:
            return
        layout = self._memory.layout
        self.bytes_in += (slices.stop - slices.first_block * layout.block_size) * layout.token_bytes
        if incoming.receive(slices):
            self._maybe_whole(incoming)
            return
        self.seal_mismatches += 1
        self.release(slices.key)
        reason = f"a KV block of layer {slices.layer} came damaged (seal mismatch)"
        self._tell(events.Broken(slices.key, reason))

    def sent(self, session: Session, sent: HandoverSent) -> None:
        incoming = self._from(session, sent.key)
        if incoming is not None and incoming.sent is None:
            incoming.sent = sent
            self._maybe_whole(incoming)

    def _maybe_whole(self, incoming: IncomingHandover) -> None:
        if incoming.complete and incoming.sent is not None:
            self.release(incoming.key)
            self._received(incoming.key, incoming.sent.token)
            self._tell(events.HandoverComplete(incoming.key))

    def void(self, session: Session, slices: HandoverSlices) -> None:
        """The sender gave up in the midst of a frame."""
        incoming = self._incoming.get(slices.key)
        if incoming is not None:
            incoming.frames.void(session, slices)

    def release(self, key: RequestId) -> None:
        """Nothing more is written into its blocks when this returns."""
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            incoming.frames.refuse()


def _slots(blocks: Sequence[int], layout: KVLayout, tokens: Span) -> list[tuple[int, int]]:
    """Slot range of each block that holds `tokens`; `tokens` starts on a block border."""
    size = layout.block_size
    starts = range(tokens.start, tokens.stop, size)
    return [run for at in starts for run in runs_of(blocks, size, at, min(at + size, tokens.stop))]
