"""KV on its way: what a prefill node still has to send, and what a decode node still has to receive.

Both live in the node's event loop. Bytes go from the sender's KV memory to the receiver's, block slice by
block slice; the receiver counts an attempt as landed when every layer is whole and every seal matched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from isthmus.blocks import KVLayout, seal
from isthmus.cluster.cache import Load
from isthmus.cluster.fetches import Fetch
from isthmus.cluster.messages import Begin, Grant, Landed, Offer, Sent, Slices, Withdrawn
from isthmus.cluster.wire import ENCODED_BLOCKS, fits, pack, seals_kv, unpack
from isthmus.engine.codecs import NONE
from isthmus.engine.interface import KVBytes, runs_of
from isthmus.errors import ProtocolError
from isthmus.messenger import Priority, Sending, Session
from isthmus.types import Span, TokenLogprobs

MAX_FRAME_BLOCKS = 256

Landing = list[tuple[tuple[int, int], memoryview]]
"""Slot ranges of a layer, each with the memory its bytes go to."""


class _Extent:
    """What is handed over of a request, in positions: tokens from `start` on, then whole blocks from `states` on that
    hold its recurrent state, up to `stop`."""

    def __init__(self, begin: Begin, layout: KVLayout) -> None:
        size = layout.block_size
        self._size, self._codec = size, begin.codec
        self.start, self.num_tokens = begin.handover_start * size, len(begin.tokens)
        self.states = layout.blocks_for(self.num_tokens) * size
        self.stop = self.states + layout.state_blocks * size if layout.state_blocks else self.num_tokens

    def codec(self, position: int) -> str:
        """States are not KV: no codec of numbers fits them."""
        return self._codec if position < self.states else NONE

    def resumes(self, received: int) -> int:
        """Where the next frame of a layer starts that has so much."""
        if received == self.num_tokens < self.stop:
            return self.states
        return received // self._size * self._size


class Outgoing:
    """One departing request on the prefill node. Slices wait here until the decode node grants room.

    `first_layer`: of the model, that is the first in `memory`: a pipeline stage sends its own layers.
    """

    def __init__(self, begin: Begin, memory: KVBytes, first_layer: int = 0) -> None:
        self.begin, self._memory, self._first_layer = begin, memory, first_layer
        self._connection: Session | None = None
        self._sendings: list[Sending] = []
        self._granted = False
        self._waiting: list[tuple[int, Span, Sequence[int]]] = []
        self._extent = _Extent(begin, memory.layout)
        self._told = [self._extent.start] * memory.layout.num_layers
        self._sent: Sent | None = None
        self.bytes_out = 0

    def attach(self, connection: Session) -> None:
        self._connection = connection
        stop = self._first_layer + self._memory.layout.num_layers
        connection.send(Offer(self.begin.request, self.begin.attempt, self._first_layer, stop))

    def is_on(self, connection: Session) -> bool:
        return self._connection is connection

    def grant(self) -> None:
        self._granted = True
        waiting, self._waiting = self._waiting, []
        for layer, tokens, blocks in waiting:
            self._send(layer, tokens, blocks)
        self._finish()

    def ready(self, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        """KV of these layers and positions is in place: send it, now or after the grant; nothing twice."""
        size = self._memory.layout.block_size
        for layer in range(layers.start, layers.stop):
            span = Span(max(tokens.start, self._told[layer] // size * size), tokens.stop)
            if span.stop <= self._told[layer]:
                continue
            self._told[layer] = span.stop
            if self._granted:
                self._send(layer, span, blocks)
            else:
                self._waiting.append((layer, span, blocks))

    def prefilled(self, token: int, logprobs: TokenLogprobs | None) -> None:
        self._sent = Sent(self.begin.request, self.begin.attempt, token, logprobs)
        self._finish()

    def withdraw(self) -> None:
        """Nothing more of it is sent."""
        for sending in self._sendings:
            sending.cancel()
        self._sendings.clear()
        if self._connection is not None:
            self._connection.send(Withdrawn(self.begin.request, self.begin.attempt))

    def _finish(self) -> None:
        if self._granted and self._sent is not None and self._connection is not None:
            self._connection.send(self._sent)

    def _send(self, layer: int, tokens: Span, blocks: Sequence[int]) -> None:
        assert self._connection is not None
        layout, codec = self._memory.layout, self._extent.codec(tokens.start)
        size = layout.block_size
        most = (MAX_FRAME_BLOCKS if codec == NONE else ENCODED_BLOCKS) * size
        for start in range(tokens.start, tokens.stop, most):
            stop = min(tokens.stop, start + most)
            span = Span(start, stop)
            parts = [self._memory.export(layer, *run) for run in runs_of(blocks, size, start, stop)]
            payload, seals = pack(codec, layout, parts, len(span), partial(self._seals, layer, span, blocks))
            self.bytes_out += (stop - start) * self._memory.layout.token_bytes
            number = self._first_layer + layer
            head = Slices(self.begin.request, self.begin.attempt, number, start // size, stop, seals)
            self._sendings.append(self._connection.send(head, *payload, priority=Priority.URGENT))

    def _seals(self, layer: int, tokens: Span, blocks: Sequence[int]) -> list[bytes]:
        return [
            seal(self._memory.export(layer, *slots)) for slots in _slots(blocks, self._memory.layout, tokens)
        ]


class Incoming:
    """One expected request on the decode node. Its layers may come over several sessions, each some of them."""

    def __init__(self, begin: Begin, memory: KVBytes) -> None:
        self.begin, self._memory = begin, memory
        self.blocks: Sequence[int] | None = None
        self.sent: Sent | None = None
        self._senders: dict[Session, Span] = {}
        self._granted: set[Session] = set()
        self._extent = _Extent(begin, memory.layout)
        self._received = [self._extent.start] * memory.layout.num_layers
        self.fetch: Fetch | None = None
        """What is not handed over, on its way from another node; then `recall` reads from it."""
        self.recall: Load | None = None
        self._recalled = not begin.handover_start
        self.progressed_s = math.inf
        """When the last slice came (loop time, s); infinite until the first, for the sender may queue."""
        self._landing: dict[Slices, tuple[Session, Landing, memoryview | None]] = {}
        """Frames being received: into this request's blocks, or to be decoded into them."""

    def offered(self, connection: Session, offer: Offer) -> None:
        """Raises ProtocolError for layers that are not the model's, or another session's."""
        layers = Span(offer.first_layer, offer.stop_layer)
        taken = any(layers.start < other.stop and other.start < layers.stop for other in self._senders.values())
        if taken or not 0 <= layers.start < layers.stop <= len(self._received):
            raise ProtocolError(f"layers {layers.start} to {layers.stop} of {offer.request} cannot be taken")
        self._senders[connection] = layers
        self.match()

    def is_from(self, connection: Session) -> bool:
        return connection in self._senders

    def match(self) -> None:
        """Grants once both sides are known: the sender by its offer, the room by the scheduler."""
        if self.blocks is None:
            return
        for connection in self._senders:
            if connection not in self._granted:
                self._granted.add(connection)
                connection.send(Grant(self.begin.request, self.begin.attempt))

    def place(self, connection: Session, slices: Slices, size: int) -> list[memoryview] | None:
        """Where the payload goes; None when it cannot be part of what is to come. What was received stays as it is."""
        layout, start = self._memory.layout, slices.first_block * self._memory.layout.block_size
        layers = self._senders.get(connection)
        expected = (
            connection in self._granted
            and layers is not None
            and layers.start <= slices.layer < layers.stop
            and self._extent.resumes(self._received[slices.layer]) <= start
            and start
            < slices.stop
            <= (self._extent.stop if start >= self._extent.states else self._extent.num_tokens)
            and len(slices.seals) == layout.blocks_for(slices.stop - start)
            and fits(self._extent.codec(start), layout, slices.stop - start, size)
            and not any(self._overlap(slices, other) for other in self._landing)
        )
        if not expected or self.blocks is None:
            return None
        runs = runs_of(self.blocks, layout.block_size, start, slices.stop)
        landing = [(run, self._memory.landing(slices.layer, *run)) for run in runs]
        targets = [buffer for _, buffer in landing]
        encoded = None if self._extent.codec(start) == NONE else memoryview(bytearray(size))
        self._landing[slices] = connection, landing, encoded
        return targets if encoded is None else [encoded]

    def _overlap(self, slices: Slices, other: Slices) -> bool:
        """Whether both are for the same bytes: whichever comes last would be under the seals of the other."""
        size = self._memory.layout.block_size
        return (
            slices.layer == other.layer
            and slices.first_block * size < other.stop
            and other.first_block * size < slices.stop
        )

    def receive(self, slices: Slices) -> bool:
        """Books a whole frame; False when it is not the next of its layer or a seal does not match: then nothing of
        it counts."""
        if slices not in self._landing or self.blocks is None:
            return False  # it came without a payload
        _, landing, encoded = self._landing.pop(slices)
        layout = self._memory.layout
        start = slices.first_block * layout.block_size
        codec = self._extent.codec(start)
        if start != self._extent.resumes(self._received[slices.layer]):
            return False
        tokens, targets = Span(start, slices.stop), [buffer for _, buffer in landing]
        if encoded is not None and not unpack(codec, layout, encoded, targets, len(tokens), slices.seals):
            return False
        for run, buffer in landing:
            self._memory.land(slices.layer, *run, buffer)
        for expected, slots in zip(slices.seals, _slots(self.blocks, layout, tokens), strict=True):
            if seals_kv(codec) and seal(self._memory.export(slices.layer, *slots)) != expected:
                return False
        self._received[slices.layer] = slices.stop
        return True

    def void(self, slices: Slices) -> None:
        """A frame that was being received will not come."""
        self._landing.pop(slices, None)

    def recalled(self) -> bool:
        """The load of what is not handed over ended; False when not all of it could be loaded."""
        assert self.recall is not None
        self._recalled = self.recall.num_blocks == len(self.recall.names)
        return self._recalled

    @property
    def complete(self) -> bool:
        """Every KV group is whole: KV of all tokens and, if the model has one, the recurrent state."""
        if self.sent is None or not self._recalled:
            return False
        return all(count == self._extent.stop for count in self._received)

    def landed(self) -> None:
        self._refuse_placed()
        for connection in self._senders:
            connection.send(Landed(self.begin.request, self.begin.attempt))

    def _refuse_placed(self) -> None:
        """Nothing more is written into its blocks when this returns."""
        for slices, (connection, _, _) in self._landing.items():
            connection.refuse(slices)
        self._landing.clear()

    def withdraw(self) -> None:
        """Nothing more is written into its blocks when this returns."""
        if self.recall is not None:
            self.recall.cancel()
        if self.fetch is not None:
            self.fetch.release()
            self.fetch = None
        self._refuse_placed()
        for connection in self._senders:
            connection.send(Withdrawn(self.begin.request, self.begin.attempt))


def _slots(blocks: Sequence[int], layout: KVLayout, tokens: Span) -> list[tuple[int, int]]:
    """Slot range of each block that holds `tokens`; `tokens` starts on a block border."""
    size = layout.block_size
    return [
        (blocks[start // size] * size, blocks[start // size] * size + min(size, tokens.stop - start))
        for start in range(tokens.start, tokens.stop, size)
    ]
