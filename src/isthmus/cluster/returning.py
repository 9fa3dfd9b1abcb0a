"""KV of this node's attempts on its way back from holders, into blocks of the engine that are nobody's meanwhile.

home ──Reclaim──> holder ──Reclaimed…──> home ──Shrink or Gone──> holder
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.blocks import seal
from isthmus.cluster.messages import Reclaim, Reclaimed
from isthmus.cluster.sessions import Tell
from isthmus.cluster.wire import Frames
from isthmus.engine.codecs import NONE
from isthmus.engine.interface import KVBytes, runs_of
from isthmus.errors import ProtocolError
from isthmus.messenger import Session
from isthmus.node import events
from isthmus.types import RequestId, Span


class _Return:
    """`first`: of its blocks, at the holder. `stops`: how many of each layer are here or on their way into place;
    `is_damaged`: a seal did not match, and what follows is awaited, so that it is not taken for another return."""

    def __init__(self, reclaim: events.Reclaim, session: Session, memory: KVBytes) -> None:
        self.blocks, self.first, self.session = reclaim.blocks, reclaim.first, session
        self.frames = Frames(memory.layout)
        self.stops = [0] * memory.layout.num_layers
        self.is_damaged = False


class Returning:
    """For an event loop. Each return is told to be over once."""

    def __init__(self, memory: KVBytes, tell: Tell) -> None:
        self._memory, self._tell = memory, tell
        self._returns: dict[RequestId, _Return] = {}
        self.bytes_in = self.seal_mismatches = 0

    def reclaim(self, reclaim: events.Reclaim, session: Session | None) -> None:
        """`session`: with the holder; None if that is gone."""
        key = reclaim.key
        if session is None or session.closed:
            self._tell(events.Reclaimed(key, whole=False))
            return
        self._returns[key] = _Return(reclaim, session, self._memory)
        session.send(Reclaim(key, reclaim.first, len(reclaim.blocks)))

    def end(self, key: RequestId, *, whole: bool = False) -> None:
        """Nothing more is written to its blocks when this returns."""
        found = self._returns.pop(key, None)
        if found is not None:
            found.frames.refuse()
            self._tell(events.Reclaimed(key, whole))

    def lost(self, session: Session) -> None:
        for key in [key for key, each in self._returns.items() if each.session is session]:
            self.end(key)

    def place(self, session: Session, head: Reclaimed, size: int) -> Sequence[memoryview]:
        """Where the payload goes. Raises ProtocolError for what was not asked for."""
        found, layout = self._returns.get(head.key), self._memory.layout
        if found is None or found.session is not session:
            return [memoryview(bytearray(size))]  # nobody waits for it any more: read past it
        start = head.first - found.first
        stop = start + len(head.seals)
        fits = 0 <= head.layer < layout.num_layers and start == found.stops[head.layer]
        if not (fits and start < stop <= len(found.blocks)):
            raise ProtocolError(f"KV of {head.key}, layer {head.layer}, is not what must come back next")
        tokens = Span(start * layout.block_size, stop * layout.block_size)
        runs = runs_of(found.blocks, layout.block_size, tokens.start, tokens.stop)
        targets = [self._memory.landing(head.layer, *run) for run in runs]
        placed = found.frames.place(head, session, NONE, tokens, targets, size)
        if placed is None:
            raise ProtocolError(f"KV of {head.key}, layer {head.layer}, is not of its size")
        found.stops[head.layer] = stop
        return placed

    def receive(self, session: Session, head: Reclaimed) -> None:
        found, layout = self._returns.get(head.key), self._memory.layout
        if found is None or found.session is not session or (targets := found.frames.take(head)) is None:
            return
        start = head.first - found.first
        stop = start + len(head.seals)
        runs = runs_of(found.blocks, layout.block_size, start * layout.block_size, stop * layout.block_size)
        for run, buffer in zip(runs, targets, strict=True):
            self._memory.land(head.layer, *run, buffer)
        self.bytes_in += len(head.seals) * layout.slice_bytes
        for block, expected in zip(found.blocks[start:stop], head.seals, strict=True):
            slots = block * layout.block_size, (block + 1) * layout.block_size
            if not found.is_damaged and seal(self._memory.export(head.layer, *slots)) != expected:
                self.seal_mismatches += 1
                found.is_damaged = True  # it lies with its holder still
        if min(found.stops) == stop == len(found.blocks) and head.layer == layout.num_layers - 1:
            self.end(head.key, whole=not found.is_damaged)  # layers come in their order

    def void(self, head: Reclaimed) -> None:
        """The holder gave up in the midst of it."""
        self.end(head.key)
