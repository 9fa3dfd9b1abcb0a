"""Whole blocks of an attempt's KV on their way between a home and a holder, in frames of one layer of some blocks.

home ══Shipment…══> holder       into room of a guest (`hosting.py`)
holder ══Shipment…══> home       into blocks of the engine that are nobody's meanwhile
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.core.attempts import Share
from isthmus.core.blocks import seal
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.types import NodeId, RequestId, Span
from isthmus.live.engine.codecs import NONE
from isthmus.live.engine.interface import KVBytes, runs_of
from isthmus.live.messenger import Sending, Session
from isthmus.live.peers.messages import ShipmentSlices
from isthmus.live.peers.sessions import Peers, Tell
from isthmus.live.peers.wire import KVFrames, sealed

FRAME_BLOCKS = 64


def framed(blocks: Sequence[int], num_layers: int) -> Iterator[tuple[int, int, Sequence[int]]]:
    """What is sent, frame by frame: the layer, which of `blocks` is the first, and these blocks."""
    for start in range(0, len(blocks), FRAME_BLOCKS):
        for layer in range(num_layers):
            yield layer, start, blocks[start : start + FRAME_BLOCKS]


class Landing:
    """Where it arrives: `blocks` of the engine's memory. `placed`: how many of them each layer has, or has on its way
    into its place; `whole`: how many it has, without a gap."""

    def __init__(self, memory: KVBytes, blocks: Sequence[int]) -> None:
        self.memory, self.blocks = memory, blocks
        self.go_on(0)
        self._frames = KVFrames(memory.layout)

    def go_on(self, num_whole: int) -> None:
        """So many are whole, and nothing is on its way."""
        self.placed, self.whole = ([num_whole] * self.memory.layout.num_layers for _ in range(2))

    @property
    def num_whole(self) -> int:
        """In all layers."""
        return min(self.whole)

    def place(self, session: Session, head: ShipmentSlices, size: int) -> Sequence[memoryview]:
        """Where a frame goes. Raises ProtocolError for what is not expected."""
        layout, first, stop = self.memory.layout, head.first, head.first + len(head.seals)
        fits = 0 <= head.layer < layout.num_layers and 0 <= first <= self.placed[head.layer]
        if not (fits and first < stop <= len(self.blocks)):
            raise ProtocolError(f"KV of {head.key}, layer {head.layer}, is not what must come next")
        tokens = Span(first * layout.block_size, stop * layout.block_size)
        targets = [self.memory.landing(head.layer, *run) for run in self._runs(tokens)]
        placed = self._frames.place(head, session, NONE, tokens, targets, size)
        if placed is None:
            raise ProtocolError(f"KV of {head.key}, layer {head.layer}, is not of its size")
        self.placed[head.layer] = stop
        if head.layer == 0:  # it comes first: what other layers have from there on is of what was there before
            self.whole = [min(whole, first) for whole in self.whole]
        self.whole[head.layer] = min(self.whole[head.layer], first)
        return placed

    def take(self, head: ShipmentSlices) -> bool | None:
        """A whole frame: whether all seals match; None for one that nobody waits for."""
        targets, memory, size = self._frames.take(head), self.memory, self.memory.layout.block_size
        if targets is None:
            return None
        first, stop = head.first, head.first + len(head.seals)
        for run, buffer in zip(self._runs(Span(first * size, stop * size)), targets, strict=True):
            memory.land(head.layer, *run, buffer)
        matches = all(
            seal(memory.export(head.layer, block * size, (block + 1) * size)) == expected
            for block, expected in zip(self.blocks[first:stop], head.seals, strict=True)
        )
        if matches and self.whole[head.layer] == first:
            self.whole[head.layer] = stop
        return matches

    def _runs(self, tokens: Span) -> Iterator[tuple[int, int]]:
        return runs_of(self.blocks, self.memory.layout.block_size, tokens.start, tokens.stop)

    def void(self, session: Session, head: ShipmentSlices) -> None:
        """It will not come."""
        self._frames.void(session, head)

    def refuse(self) -> None:
        """Nothing more is written when this returns."""
        self._frames.refuse()


class Shipments:
    """For an event loop. What leaves, and what comes home; each return is told to be over once."""

    def __init__(self, memory: KVBytes, peers: Peers, tell: Tell) -> None:
        self._memory, self._peers, self._tell = memory, peers, tell
        self._sendings: dict[RequestId, dict[NodeId, list[Sending]]] = {}
        self._returns: dict[RequestId, tuple[NodeId, Landing]] = {}  # and where they come from
        self.bytes_out = self.bytes_in = self.seal_mismatches = 0

    def ship(self, ship: events.Ship) -> None:
        session, layout, share = self._peers.open_to(ship.peer), self._memory.layout, ship.share
        if session is None:
            return  # the node hears that it is gone
        sendings = self._sendings.setdefault(ship.key, {}).setdefault(ship.peer, [])
        sendings[:] = [sending for sending in sendings if not sending.over]
        for layer, start, blocks in framed(ship.blocks, layout.num_layers):
            payload, seals = self._slices(layer, blocks, share)
            sendings.append(session.send(ShipmentSlices(ship.key, layer, ship.first + start, seals), *payload))
            self.bytes_out += len(blocks) * layout.slice_bytes // share.parts

    def _slices(
        self, layer: int, blocks: Sequence[int], share: Share
    ) -> tuple[Sequence[memoryview], tuple[bytes, ...]]:
        """What goes of these blocks in a layer, and seals of that: all bytes from where they lie, or a share's
        heads."""
        memory, size = self._memory, self._memory.layout.block_size
        if share.parts == 1:
            return sealed(memory, layer, blocks)
        heads = [
            memory.export_heads(layer, at * size, (at + 1) * size, share.part, share.parts) for at in blocks
        ]
        return heads, tuple([seal(each) for each in heads])

    def stop(self, key: RequestId, peer: NodeId | None = None) -> None:
        """Nothing is read from its blocks any more for `peer`, or for anybody, when this returns."""
        everyone = self._sendings.get(key, {})
        for node in [peer] if peer is not None else list(everyone):
            for sending in everyone.pop(node, ()):
                sending.cancel()
        if not everyone:
            self._sendings.pop(key, None)

    # What comes home.

    def reclaim(self, reclaim: events.Reclaim) -> None:
        self._returns[reclaim.key] = reclaim.holder, Landing(self._memory, reclaim.blocks)

    def release(self, key: RequestId) -> None:
        """Nothing more is read from its blocks, or written to those of what comes back, when this returns."""
        self.stop(key)
        self._end(key, whole=False)

    def _end(self, key: RequestId, *, whole: bool) -> None:
        found = self._returns.pop(key, None)
        if found is not None:
            found[1].refuse()
            self._tell(events.Reclaimed(key, whole))

    def awaits(self, peer: NodeId | None, head: ShipmentSlices) -> bool:
        """Whether this is a part of what comes home."""
        holder, _ = self._returns.get(head.key, (None, None))
        return holder is not None and holder == peer

    def place(self, session: Session, head: ShipmentSlices, size: int) -> Sequence[memoryview]:
        """Where the payload goes. Raises ProtocolError for what is not expected."""
        return self._returns[head.key][1].place(session, head, size)

    def receive(self, head: ShipmentSlices) -> None:
        """What came damaged lies with its holder still; what follows is awaited, so that it is not taken for another
        return."""
        _, landing = self._returns[head.key]
        matches, count = landing.take(head), len(landing.blocks)
        if matches is None:
            return
        self.bytes_in += len(head.seals) * self._memory.layout.slice_bytes
        self.seal_mismatches += not matches
        if head.layer == len(landing.whole) - 1 and head.first + len(head.seals) == count:
            self._end(head.key, whole=landing.num_whole == count)

    def void(self, head: ShipmentSlices) -> None:
        """The holder gave up in the midst of it."""
        self._end(head.key, whole=False)
