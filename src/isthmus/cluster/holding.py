"""KV of this node's attempts that lies with other nodes: asked for room, shipped there, attended to there.

    home ──Reserve──> holder ──Reserved──>   ──Shipment…──> ──Stowed──>   ──Attend──> ──sums──>   ──Vacate──>
         ──Claim────>        ──Found─────>

What comes back is in `returning.py`.

All of it goes over the session that this node opened to the holder, and what is asked over a line beside it, by threads
that compute; when the session ends, what lies there is lost to this node.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from isthmus.attempts import Share
from isthmus.blocks import seal
from isthmus.cluster.landing import framed
from isthmus.cluster.messages import (
    KNOWN_ROWS,
    Attend,
    Claim,
    Found,
    Reserve,
    Reserved,
    Shipment,
    Shrink,
    Stowed,
    Vacate,
)
from isthmus.cluster.returning import Returning
from isthmus.cluster.sessions import Reach, Spawn, Tell
from isthmus.cluster.wire import sealed
from isthmus.engine.interface import Asking, HolderLost, KVBytes
from isthmus.messenger import Asker, LineLost, Question, Sending, Session
from isthmus.node import events
from isthmus.types import NodeId, RequestId

_encode = msgspec.msgpack.Encoder().encode


class _Place:
    """An attempt's share with one holder. `session`, `line`: None until they are open."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.session: Session | None = None
        self.line: _Line | None = None
        self.asked = self.claimed = False  # its answer is still to come
        self.sendings: list[Sending] = []


class _Line:
    """Where one holder is asked, by several threads."""

    def __init__(self, asker: Asker) -> None:
        self.asker = asker
        self._lock = threading.Lock()
        self._told: dict[int, Asking] = {}
        """Whose rows it knows, by number."""
        self._next = 0

    def ask(self, layer: int, asking: Asking, keys: Sequence[RequestId], q: memoryview) -> Question:
        """`keys`: of the chunks. Raises LineLost."""
        with self._lock:
            number, rows = self._number_of(asking), tuple[Any, ...]()
            if number is None:
                number, self._next = self._next, (self._next + 1) % KNOWN_ROWS
                rows = tuple([(keys[chunk], *rest) for chunk, *rest in asking.chunks])
            question = self.asker.ask(_encode(Attend(layer, number, rows, asking.parts)), q)
            self._told[number] = asking
            return question

    def _number_of(self, asking: Asking) -> int | None:
        """Of the very rows, for those that are equal may be of other requests."""
        for number, known in self._told.items():
            if known is asking:
                return number
        return None


class Holders:
    """For an event loop; `remote` gives what the engine's thread asks. `answer_s`: how long one may take."""

    def __init__(self, memory: KVBytes, reach: Reach, tell: Tell, spawn: Spawn, answer_s: float) -> None:
        self._memory, self._reach, self._tell, self._spawn = memory, reach, tell, spawn
        self._answer_s = answer_s
        self._places: dict[RequestId, dict[NodeId, _Place]] = {}
        self.returning = Returning(memory, tell)
        self._lines: dict[Session, _Line] = {}
        self._opening = asyncio.Lock()
        self.bytes_shipped = self.bytes_asked = self.bytes_answered = self.num_asked = 0

    # What the node decided.

    def reserve(self, reserve: events.Reserve) -> None:
        place = self._place_of(reserve)
        place.asked = True
        self._spawn(self._ask(reserve, place, Reserve(reserve.key, reserve.num_blocks, reserve.share)))

    def claim(self, claim: events.Claim) -> None:
        place = self._place_of(claim)
        place.claimed = True
        self._spawn(self._ask(claim, place, Claim(claim.key, claim.old, claim.share)))

    def _place_of(self, action: events.Reserve | events.Claim) -> _Place:
        return self._places.setdefault(action.key, {}).setdefault(action.holder, _Place(action.share))

    async def _ask(
        self, action: events.Reserve | events.Claim, place: _Place, message: Reserve | Claim
    ) -> None:
        try:
            session = place.session or await self._reach(action.holder)
        except (OSError, TimeoutError):
            session = None
        if self._places.get(action.key, {}).get(action.holder) is not place:
            return  # it was left meanwhile
        if session is None or session.closed:
            self._unanswered(action.key, action.holder, place)
            return
        place.session = session
        session.send(message)

    def _unanswered(self, key: RequestId, holder: NodeId, place: _Place) -> None:
        """There is no session for what it was asked."""
        if place.claimed:
            self._found(key, holder, place, 0)
        if place.asked:
            self._reserved(key, holder, place, granted=False)

    def _found(self, key: RequestId, holder: NodeId, place: _Place, num_blocks: int) -> None:
        place.claimed = False
        self._tell(events.Found(key, holder, num_blocks))

    def _reserved(self, key: RequestId, holder: NodeId, place: _Place, *, granted: bool) -> None:
        place.asked = False
        self._tell(events.Reserved(key, holder, granted))

    def ship(self, ship: events.Ship) -> None:
        place = self._places.get(ship.key, {}).get(ship.holder)
        if place is None or place.session is None:
            return
        layout = self._memory.layout
        for layer, start, blocks in framed(ship.blocks, layout.num_layers):
            payload, seals = self._slices(layer, blocks, place)
            head = Shipment(ship.key, layer, ship.first + start, seals)
            place.sendings.append(place.session.send(head, *payload))
            self.bytes_shipped += len(blocks) * layout.slice_bytes // place.share.parts

    def _slices(
        self, layer: int, blocks: Sequence[int], place: _Place
    ) -> tuple[Sequence[memoryview], tuple[bytes, ...]]:
        """What one holder gets of these blocks in a layer, and seals of that: all bytes from where they lie, or its
        heads."""
        memory, size, share = self._memory, self._memory.layout.block_size, place.share
        if share.parts > 1:
            heads = [
                memory.export_heads(layer, at * size, (at + 1) * size, share.part, share.parts) for at in blocks
            ]
            return heads, tuple([seal(each) for each in heads])
        return sealed(memory, layer, blocks)

    def release(self, key: RequestId) -> None:
        """Nothing is read from its blocks any more, nor written to those that come back, when this returns."""
        self.returning.end(key)
        for place in self._places.get(key, {}).values():
            for sending in place.sendings:
                sending.cancel()

    def vacate(self, vacate: events.Vacate) -> None:
        places = self._places.get(vacate.key, {})
        place = places.pop(vacate.holder, None)
        if not places:
            self._places.pop(vacate.key, None)
        if place is not None and place.session is not None:
            for sending in place.sendings:
                sending.cancel()
            place.session.send(Vacate(vacate.key))

    def reclaim(self, reclaim: events.Reclaim) -> None:
        place = self._places.get(reclaim.key, {}).get(reclaim.holder)
        self.returning.reclaim(reclaim, place.session if place is not None else None)

    def shrink(self, shrink: events.Shrink) -> None:
        place = self._places.get(shrink.key, {}).get(shrink.holder)
        if place is not None and place.session is not None:
            place.session.send(Shrink(shrink.key, shrink.num_blocks))

    # What holders say.

    def reserved(self, session: Session, reserved: Reserved) -> None:
        holder, place = self._place(session, reserved.key)
        if place is not None and place.asked:
            told = partial(self._reserved, reserved.key, holder, place)
            self._with_line(session, reserved.key, place, reserved.granted, lambda there: told(granted=there))

    def found(self, session: Session, found: Found) -> None:
        holder, place = self._place(session, found.key)
        if place is not None and place.claimed:
            told = partial(self._found, found.key, holder, place)
            there = found.num_blocks > 0
            self._with_line(
                session, found.key, place, there, lambda there: told(found.num_blocks if there else 0)
            )

    def _with_line(
        self, session: Session, key: RequestId, place: _Place, there: bool, told: Callable[[bool], None]
    ) -> None:
        """What is there is of use once there is a line."""
        if there and place.line is None:
            self._spawn(self._open(session, key, place, told))
        else:
            told(there)

    async def _open(
        self, session: Session, key: RequestId, place: _Place, told: Callable[[bool], None]
    ) -> None:
        try:
            place.line = await self._line(session)
        except (OSError, TimeoutError):
            session.send(Vacate(key))
        if place.session is session and place in self._places.get(key, {}).values():
            told(place.line is not None)

    async def _line(self, session: Session) -> _Line:
        """One for each session. Raises OSError, TimeoutError."""
        async with self._opening:
            line = self._lines.get(session)
            if line is None or line.asker.is_over:
                line = self._lines[session] = _Line(await session.line(self._answer_s))
            return line

    def stowed(self, session: Session, stowed: Stowed) -> None:
        holder, place = self._place(session, stowed.key)
        if place is None:
            return
        if stowed.damaged:
            reason = f"a KV block came to {holder} damaged (seal mismatch)"
            self._tell(events.Broken(stowed.key, reason))
            return
        place.sendings = [sending for sending in place.sendings if not sending.over]
        self._tell(events.Shipped(stowed.key, holder, stowed.stop))

    def _place(self, session: Session, key: RequestId) -> tuple[NodeId, _Place | None]:
        """Whose place it is over this session; None: it was left."""
        for holder, place in self._places.get(key, {}).items():
            if place.session is session:
                return holder, place
        return NodeId(""), None

    def lost(self, session: Session, reason: str) -> None:
        self.returning.lost(session)
        for key, places in list(self._places.items()):
            for holder, place in list(places.items()):
                if place.session is not session:
                    continue
                place.session = None
                if place.line is None and (place.asked or place.claimed):  # nothing lies there yet
                    self._unanswered(key, holder, place)
                else:
                    self._tell(events.Broken(key, f"{holder}, which has its KV, is gone: {reason}"))
        self._lines.pop(session, None)  # it was hung up

    # Attention there.

    def remote(self, keys: Sequence[RequestId]) -> Remote:
        """For one run over chunks of these attempts."""
        return Remote(self, keys)

    def line_of(self, key: RequestId, holder: str) -> _Line:
        """From the engine's thread. Raises HolderLost."""
        place = self._places.get(key, {}).get(NodeId(holder))
        if place is None or place.line is None:
            raise HolderLost(holder, "there is no session")
        return place.line


class Remote:
    """`isthmus.engine.interface.Elsewhere` over lines. `keys`: of the run's chunks."""

    def __init__(self, holders: Holders, keys: Sequence[RequestId]) -> None:
        self._holders, self._keys = holders, keys
        self._asked: dict[tuple[int, str, int, int], tuple[Asker, Question]] = {}

    def ask(self, layer: int, asking: Asking, q: memoryview) -> None:
        holder, first = asking.holder, asking.chunks[0][0]
        line = self._holders.line_of(self._keys[first], holder)
        try:
            question = line.ask(layer, asking, self._keys, q)
        except LineLost as lost:
            raise self._lost(line.asker, holder, lost) from None
        self._asked[layer, holder, asking.part, first] = line.asker, question
        self._holders.num_asked += 1
        self._holders.bytes_asked += q.nbytes

    def answer(self, layer: int, asking: Asking) -> memoryview:
        asker, question = self._asked.pop((layer, asking.holder, asking.part, asking.chunks[0][0]))
        try:
            data = asker.answer(question)
        except LineLost as lost:
            raise self._lost(asker, asking.holder, lost) from None
        if data is None:
            raise HolderLost(asking.holder, "it has no KV of this attempt")
        self._holders.bytes_answered += data.nbytes
        return data

    @staticmethod
    def _lost(asker: Asker, holder: str, lost: LineLost) -> HolderLost:
        asker.hang_up()
        return HolderLost(holder, str(lost))
