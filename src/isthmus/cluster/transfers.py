"""KV on its way: what a prefill node still has to send, and what a decode node still has to receive.

Both live in the node's event loop. Bytes go from the sender's KV memory to the receiver's, block slice by
block slice; the receiver counts an attempt as landed when every layer is whole and every seal matched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from isthmus.blocks import KVLayout, seal
from isthmus.cluster.messages import Begin, Grant, Landed, Offer, Sent, Slices, Withdrawn
from isthmus.engine.interface import KVBytes, runs_of
from isthmus.messenger import Connection
from isthmus.types import Span, TokenLogprobs

MAX_FRAME_BLOCKS = 256


class Outgoing:
    """One departing request on the prefill node. Slices wait here until the decode node grants room."""

    def __init__(self, begin: Begin, memory: KVBytes) -> None:
        self.begin, self._memory = begin, memory
        self._connection: Connection | None = None
        self._granted = False
        self._waiting: list[tuple[int, Span, Sequence[int]]] = []
        self._sent: Sent | None = None

    def attach(self, connection: Connection) -> None:
        self._connection = connection
        connection.send(Offer(self.begin.request, self.begin.attempt))

    def is_on(self, connection: Connection) -> bool:
        return self._connection is connection

    def grant(self) -> None:
        self._granted = True
        waiting, self._waiting = self._waiting, []
        for layer, tokens, blocks in waiting:
            self._send(layer, tokens, blocks)
        self._finish()

    def ready(self, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        """KV of these layers and positions is in place: send it, now or after the grant."""
        for layer in range(layers.start, layers.stop):
            if self._granted:
                self._send(layer, tokens, blocks)
            else:
                self._waiting.append((layer, tokens, blocks))

    def prefilled(self, token: int, logprobs: TokenLogprobs | None) -> None:
        self._sent = Sent(self.begin.request, self.begin.attempt, token, logprobs)
        self._finish()

    def withdraw(self) -> None:
        if self._connection is not None:
            self._connection.send(Withdrawn(self.begin.request, self.begin.attempt))

    def _finish(self) -> None:
        if self._granted and self._sent is not None and self._connection is not None:
            self._connection.send(self._sent)

    def _send(self, layer: int, tokens: Span, blocks: Sequence[int]) -> None:
        assert self._connection is not None
        size = self._memory.layout.block_size
        for start in range(tokens.start, tokens.stop, MAX_FRAME_BLOCKS * size):
            stop = min(tokens.stop, start + MAX_FRAME_BLOCKS * size)
            payload = [self._memory.export(layer, *run) for run in runs_of(blocks, size, start, stop)]
            seals = tuple(self._seals(layer, Span(start, stop), blocks))
            head = Slices(self.begin.request, self.begin.attempt, layer, start // size, stop, seals)
            self._connection.send(head, *payload)

    def _seals(self, layer: int, tokens: Span, blocks: Sequence[int]) -> list[bytes]:
        return [
            seal(self._memory.export(layer, *slots)) for slots in _slots(blocks, self._memory.layout, tokens)
        ]


class Incoming:
    """One expected request on the decode node."""

    def __init__(self, begin: Begin, memory: KVBytes) -> None:
        self.begin, self._memory = begin, memory
        self.blocks: Sequence[int] | None = None
        self.connection: Connection | None = None
        self.sent: Sent | None = None
        self.receiving = False
        """A frame is being received into this request's blocks: they must not be freed now."""
        self.doomed = False
        """Given up while a frame was being received: free the blocks when the frame ends."""
        self._num_tokens = len(begin.tokens)
        self._received = [0] * memory.layout.num_layers
        self.granted = False
        self.progressed_s = math.inf
        """When the last slice came (loop time, s); infinite until the first, for the sender may queue."""
        self._landing: list[tuple[tuple[int, int], memoryview]] = []

    def match(self) -> None:
        """Grants once both sides are known: the sender by its offer, the room by the scheduler."""
        if self.connection is not None and self.blocks is not None and not self.granted:
            self.granted = True
            self.connection.send(Grant(self.begin.request, self.begin.attempt))

    def place(self, slices: Slices, size: int) -> list[memoryview] | None:
        """Where the payload goes; None when it is not what must come next."""
        layout, start = self._memory.layout, slices.first_block * self._memory.layout.block_size
        expected = (
            self.granted
            and 0 <= slices.layer < layout.num_layers
            and start == self._received[slices.layer] // layout.block_size * layout.block_size
            and start < slices.stop <= self._num_tokens
            and len(slices.seals) == layout.blocks_for(slices.stop - start)
            and size == (slices.stop - start) * layout.token_bytes
        )
        if not expected or self.blocks is None:
            return None
        self.receiving = True
        runs = runs_of(self.blocks, layout.block_size, start, slices.stop)
        self._landing = [(run, self._memory.landing(slices.layer, *run)) for run in runs]
        return [buffer for _, buffer in self._landing]

    def receive(self, slices: Slices) -> bool:
        """Books a whole frame; False when a seal does not match, and then nothing of it counts."""
        self.receiving = False
        assert self.blocks is not None
        for run, buffer in self._landing:
            self._memory.land(slices.layer, *run, buffer)
        tokens = Span(slices.first_block * self._memory.layout.block_size, slices.stop)
        for expected, slots in zip(slices.seals, _slots(self.blocks, self._memory.layout, tokens), strict=True):
            if seal(self._memory.export(slices.layer, *slots)) != expected:
                return False
        self._received[slices.layer] = slices.stop
        return True

    @property
    def complete(self) -> bool:
        return self.sent is not None and all(count == self._num_tokens for count in self._received)

    def landed(self) -> None:
        assert self.connection is not None
        self.connection.send(Landed(self.begin.request, self.begin.attempt))

    def withdraw(self) -> None:
        if self.connection is not None:
            self.connection.send(Withdrawn(self.begin.request, self.begin.attempt))


def _slots(blocks: Sequence[int], layout: KVLayout, tokens: Span) -> list[tuple[int, int]]:
    """Slot range of each block that holds `tokens`; `tokens` starts on a block border."""
    size = layout.block_size
    return [
        (blocks[start // size] * size, blocks[start // size] * size + min(size, tokens.stop - start))
        for start in range(tokens.start, tokens.stop, size)
    ]
