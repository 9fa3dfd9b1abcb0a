"""KV of this node's attempts on its way back from holders, into blocks of the engine that are nobody's meanwhile.

home ──Reclaim──> holder ──Reclaimed…──> home ──Shrink or Vacate──> holder
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.cluster.landing import Landing
from isthmus.cluster.messages import Reclaim, Reclaimed
from isthmus.cluster.sessions import Tell
from isthmus.engine.interface import KVBytes
from isthmus.errors import ProtocolError
from isthmus.messenger import Session
from isthmus.node import events
from isthmus.types import RequestId


class _Return:
    """`first`: of its blocks, at the holder. `is_damaged`: a seal did not match, and what follows is awaited, so that
    it is not taken for another return."""

    def __init__(self, reclaim: events.Reclaim, session: Session, memory: KVBytes) -> None:
        self.landing = Landing(memory, reclaim.blocks)
        self.first, self.session, self.is_damaged = reclaim.first, session, False


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
            found.landing.refuse()
            self._tell(events.Reclaimed(key, whole))

    def lost(self, session: Session) -> None:
        for key in [key for key, each in self._returns.items() if each.session is session]:
            self.end(key)

    def place(self, session: Session, head: Reclaimed, size: int) -> Sequence[memoryview]:
        """Where the payload goes. Raises ProtocolError for what was not asked for."""
        found = self._returns.get(head.key)
        if found is None or found.session is not session:
            return [memoryview(bytearray(size))]  # nobody waits for it any more: read past it
        start = head.first - found.first
        if found.landing.stops[head.layer : head.layer + 1] != [start]:
            raise ProtocolError(f"KV of {head.key}, layer {head.layer}, is not what must come back next")
        return found.landing.place(session, head, start, size)

    def receive(self, session: Session, head: Reclaimed) -> None:
        found = self._returns.get(head.key)
        if found is None or found.session is not session:
            return
        landing, start = found.landing, head.first - found.first
        matches = landing.take(head, start)
        if matches is None:
            return
        self.bytes_in += len(head.seals) * self._memory.layout.slice_bytes
        if not matches and not found.is_damaged:
            self.seal_mismatches += 1
            found.is_damaged = True  # it lies with its holder still
        stop = start + len(head.seals)
        if stop == len(landing.blocks) and landing.is_whole(head.layer, stop):
            self.end(head.key, whole=not found.is_damaged)

    def void(self, session: Session, head: Reclaimed) -> None:
        """The holder gave up in the midst of it."""
        self.end(head.key)
