"""KV of one attempt on its way: what this engine still has to send of it, and what it still has to receive.

Both live in the event loop. Bytes go from the sender's KV memory to the receiver's, block slice by block slice; an
attempt is complete where every layer is whole and every seal matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from isthmus.blocks import KVLayout, seal
from isthmus.cluster.messages import Grant, Landed, Offer, Sent, Slices
from isthmus.cluster.wire import ENCODED_BLOCKS, Frames, pack, seals_kv
from isthmus.engine.codecs import NONE
from isthmus.engine.interface import KVBytes, runs_of
from isthmus.messenger import Priority, Sending, Session
from isthmus.node.extent import Extent
from isthmus.types import RequestId, Span, TokenLogprobs

MAX_FRAME_BLOCKS = 256


class Outgoing:
    """One departing attempt. Slices wait here until they may be sent.

    `first_layer`: of the model, that is the first in `memory`: a pipeline stage sends its own layers.
    """

    def __init__(self, key: RequestId, extent: Extent, memory: KVBytes, first_layer: int = 0) -> None:
        self.key, self._extent, self._memory, self._first_layer = key, extent, memory, first_layer
        self._connection: Session | None = None
        self._sendings: list[Sending] = []
        self._may_send = self._is_computed = False
        self._waiting: list[tuple[int, Span, Sequence[int]]] = []
        self._told = [extent.start] * memory.layout.num_layers
        self._sent: Sent | None = None
        self.bytes_out = 0

    def attach(self, connection: Session) -> None:
        self._connection = connection
        stop = self._first_layer + self._memory.layout.num_layers
        connection.send(Offer(self.key, self._first_layer, stop))

    def is_on(self, connection: Session) -> bool:
        return self._connection is connection

    @property
    def is_sent(self) -> bool:
        """All of it went; the peer may have it."""
        return self._may_send and all(told == self._extent.stop for told in self._told)

    def send(self) -> None:
        """There is room for it: what is here goes, and what will be. Call it once it is attached."""
        self._may_send = True
        waiting, self._waiting = self._waiting, []
        for layer, tokens, blocks in waiting:
            self._send(layer, tokens, blocks)
        self._finish()

    def ready(self, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        """KV of these layers and positions is in place: send it, now or later; nothing twice."""
        size = self._memory.layout.block_size
        for layer in range(layers.start, layers.stop):
            span = Span(max(tokens.start, self._told[layer] // size * size), tokens.stop)
            if span.stop <= self._told[layer]:
                continue
            self._told[layer] = span.stop
            if self._may_send:
                self._send(layer, span, blocks)
            else:
                self._waiting.append((layer, span, blocks))

    def first_token(self, token: int, logprobs: TokenLogprobs | None) -> None:
        self._sent = Sent(self.key, token, logprobs)
        self._finish()

    def computed(self) -> None:
        """All its KV is ready."""
        self._is_computed = True
        self._finish()

    def cancel(self) -> None:
        """Nothing more of it is sent."""
        for sending in self._sendings:
            sending.cancel()
        self._sendings.clear()

    def _finish(self) -> None:
        """Its first token goes once, from where it is known: not from the later stages of a pipeline group."""
        if self._may_send and self._is_computed and self._sent is not None:
            assert self._connection is not None
            self._connection.send(self._sent)
            self._sent = None

    def _send(self, layer: int, tokens: Span, blocks: Sequence[int]) -> None:
        assert self._connection is not None
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
            head = Slices(self.key, number, start // size, stop, seals)
            self._sendings.append(self._connection.send(head, *payload, priority=Priority.URGENT))

    def _seals(self, layer: int, tokens: Span, blocks: Sequence[int]) -> list[bytes]:
        return [
            seal(self._memory.export(layer, *slots)) for slots in _slots(blocks, self._memory.layout, tokens)
        ]


class Incoming:
    """One attempt that is received into `blocks`. Its layers may come over several sessions, each some of them."""

    def __init__(self, key: RequestId, extent: Extent, blocks: Sequence[int], memory: KVBytes) -> None:
        self.key, self._extent, self._blocks, self._memory = key, extent, blocks, memory
        self.sent: Sent | None = None
        self.senders: dict[Session, Span] = {}
        self._received = [extent.start] * memory.layout.num_layers
        self._frames = Frames(memory.layout)

    def grant(self, connection: Session, layers: Span) -> None:
        """Takes these layers from this session."""
        self.senders[connection] = layers
        connection.send(Grant(self.key))

    def place(self, connection: Session, slices: Slices, size: int) -> list[memoryview] | None:
        """Where the payload goes; None when it cannot be part of what is to come. What was received stays as it is."""
        layout, start = self._memory.layout, slices.first_block * self._memory.layout.block_size
        layers = self.senders.get(connection)
        expected = (
            layers is not None
            and layers.start <= slices.layer < layers.stop
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
        return self._frames.place(slices, connection, codec, tokens, targets, size)

    def receive(self, slices: Slices) -> bool:
        """Books a whole frame; False when it is not the next of its layer or a seal does not match: then nothing of
        it counts."""
        targets, layout = self._frames.take(slices), self._memory.layout
        tokens = Span(slices.first_block * layout.block_size, slices.stop)
        if targets is None or tokens.start != self._extent.resumes(self._received[slices.layer]):
            return False
        runs = runs_of(self._blocks, layout.block_size, tokens.start, tokens.stop)
        for run, buffer in zip(runs, targets, strict=True):
            self._memory.land(slices.layer, *run, buffer)
        is_sealed = seals_kv(self._extent.codec_at(tokens.start))
        for expected, slots in zip(slices.seals, _slots(self._blocks, layout, tokens), strict=True):
            if is_sealed and seal(self._memory.export(slices.layer, *slots)) != expected:
                return False
        self._received[slices.layer] = slices.stop
        return True

    def void(self, slices: Slices) -> None:
        """A frame that was being received will not come."""
        self._frames.void(slices)

    @property
    def complete(self) -> bool:
        """Every KV group is whole: KV of all tokens and, if the model has one, the recurrent state."""
        return self.sent is not None and all(count == self._extent.stop for count in self._received)

    def land(self) -> None:
        for connection in self.senders:
            connection.send(Landed(self.key))

    def refuse(self) -> None:
        """Nothing more is written into its blocks when this returns."""
        self._frames.refuse()


def _slots(blocks: Sequence[int], layout: KVLayout, tokens: Span) -> list[tuple[int, int]]:
    """Slot range of each block that holds `tokens`; `tokens` starts on a block border."""
    size = layout.block_size
    return [
        (blocks[start // size] * size, blocks[start // size] * size + min(size, tokens.stop - start))
        for start in range(tokens.start, tokens.stop, size)
    ]
