"""Whole blocks of an attempt's KV on their way between a home and a holder, in frames of one layer of some blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.blocks import seal
from isthmus.cluster.messages import Reclaimed, Shipment
from isthmus.cluster.wire import Frames
from isthmus.engine.codecs import NONE
from isthmus.engine.interface import KVBytes, runs_of
from isthmus.errors import ProtocolError
from isthmus.messenger import Session
from isthmus.types import Span

FRAME_BLOCKS = 64


def framed(blocks: Sequence[int], num_layers: int) -> Iterator[tuple[int, int, Sequence[int]]]:
    """What is sent, frame by frame: the layer, which of `blocks` is the first, and these blocks."""
    for start in range(0, len(blocks), FRAME_BLOCKS):
        for layer in range(num_layers):
            yield layer, start, blocks[start : start + FRAME_BLOCKS]


class Landing:
    """Where it arrives: `blocks` of the engine's memory. `stops`: how many of them each layer has, or has on its way
    into its place."""

    def __init__(self, memory: KVBytes, blocks: Sequence[int]) -> None:
        self.memory, self.blocks = memory, blocks
        self.stops = [0] * memory.layout.num_layers
        self._frames = Frames(memory.layout)

    def place(
        self, session: Session, head: Shipment | Reclaimed, first: int, size: int
    ) -> Sequence[memoryview]:
        """Where a frame goes whose first block is number `first` of these. Raises ProtocolError for what is not
        expected."""
        layout, stop = self.memory.layout, first + len(head.seals)
        fits = 0 <= head.layer < layout.num_layers and 0 <= first <= self.stops[head.layer]
        if not (fits and first < stop <= len(self.blocks)):
            raise ProtocolError(f"KV of {head.key}, layer {head.layer}, is not what must come next")
        tokens = Span(first * layout.block_size, stop * layout.block_size)
        targets = [self.memory.landing(head.layer, *run) for run in self._runs(tokens)]
        placed = self._frames.place(head, session, NONE, tokens, targets, size)
        if placed is None:
            raise ProtocolError(f"KV of {head.key}, layer {head.layer}, is not of its size")
        self.stops[head.layer] = stop
        return placed

    def take(self, head: Shipment | Reclaimed, first: int) -> bool | None:
        """A whole frame: whether all seals match; None for one that nobody waits for."""
        targets, memory, size = self._frames.take(head), self.memory, self.memory.layout.block_size
        if targets is None:
            return None
        stop = first + len(head.seals)
        for run, buffer in zip(self._runs(Span(first * size, stop * size)), targets, strict=True):
            memory.land(head.layer, *run, buffer)
        return all(
            seal(memory.export(head.layer, block * size, (block + 1) * size)) == expected
            for block, expected in zip(self.blocks[first:stop], head.seals, strict=True)
        )

    def _runs(self, tokens: Span) -> Iterator[tuple[int, int]]:
        return runs_of(self.blocks, self.memory.layout.block_size, tokens.start, tokens.stop)

    def is_whole(self, layer: int, stop: int) -> bool:
        """Whether with this frame so many blocks are: layers come in their order."""
        return layer == len(self.stops) - 1 and min(self.stops) >= stop

    def void(self, head: Shipment) -> None:
        """It will not come."""
        self._frames.void(head)

    def refuse(self) -> None:
        """Nothing more is written when this returns."""
        self._frames.refuse()
