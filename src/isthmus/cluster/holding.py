"""KV of this node's attempts that lies with other nodes: asked for room, shipped there, attended to there.

    home ──Room──> holder ──Kept──>        ──Shipment…──> ──Stowed──>        ──Attend──> ──Attended──>        ──Gone──>
         ──Claim──>       ──Found──>

What comes back is in `returning.py`.

All of it goes over the session that this node opened to the holder; when it ends, what lies there is lost to this node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from isthmus.attempts import Share
from isthmus.blocks import seal
from isthmus.cluster.messages import Attend, Attended, Claim, Found, Gone, Kept, Room, Shipment, Shrink, Stowed
from isthmus.cluster.returning import Returning
from isthmus.cluster.sessions import Reach, Spawn, Tell
from isthmus.cluster.wire import sealed
from isthmus.engine.interface import Asking, HolderLost, KVBytes
from isthmus.errors import ProtocolError
from isthmus.messenger import Priority, Sending, Session
from isthmus.node import events
from isthmus.types import NodeId, RequestId

SHIPMENT_BLOCKS = 64
"""Of one layer in a frame."""
Posts = Callable[..., None]
"""Calls a function with arguments in the event loop, from any thread, in the order of the calls."""


class _Place:
    """An attempt's share with one holder. `session`: None until it is open."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.session: Session | None = None
        self.asked = self.claimed = False  # its answer is still to come
        self.sendings: list[Sending] = []


class Holders:
    """For an event loop; `remote` gives what the engine's thread asks. `answer_s`: how long one may take."""

    def __init__(
        self, memory: KVBytes, reach: Reach, tell: Tell, spawn: Spawn, later: Posts, answer_s: float
    ) -> None:
        self._memory, self._reach, self._tell, self._spawn = memory, reach, tell, spawn
        self._later, self._answer_s = later, answer_s
        self._places: dict[RequestId, dict[NodeId, _Place]] = {}
        self.returning = Returning(memory, tell)
        self._answers: dict[int, _Answer] = {}
        self._numbers = count(1)  # of more than one thread
        self.bytes_shipped = self.bytes_asked = self.bytes_answered = self.num_asked = 0

    # What the node decided.

    def reserve(self, reserve: events.Reserve) -> None:
        place = self._place_of(reserve)
        place.asked = True
        self._spawn(self._ask(reserve, place, Room(reserve.key, reserve.num_blocks, reserve.share)))

    def claim(self, claim: events.Claim) -> None:
        place = self._place_of(claim)
        place.claimed = True
        self._spawn(self._ask(claim, place, Claim(claim.key, claim.old, claim.share)))

    def _place_of(self, action: events.Reserve | events.Claim) -> _Place:
        return self._places.setdefault(action.key, {}).setdefault(action.holder, _Place(action.share))

    async def _ask(self, action: events.Reserve | events.Claim, place: _Place, message: Room | Claim) -> None:
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
            self._kept(key, holder, place, granted=False)

    def _found(self, key: RequestId, holder: NodeId, place: _Place, num_blocks: int) -> None:
        place.claimed = False
        self._tell(events.Found(key, holder, num_blocks))

    def _kept(self, key: RequestId, holder: NodeId, place: _Place, *, granted: bool) -> None:
        place.asked = False
        self._tell(events.Reserved(key, holder, granted))

    def ship(self, ship: events.Ship) -> None:
        place = self._places.get(ship.key, {}).get(ship.holder)
        if place is None or place.session is None:
            return
        layout = self._memory.layout
        for start in range(0, len(ship.blocks), SHIPMENT_BLOCKS):
            blocks = ship.blocks[start : start + SHIPMENT_BLOCKS]
            for layer in range(layout.num_layers):
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
            place.session.send(Gone(vacate.key))

    def reclaim(self, reclaim: events.Reclaim) -> None:
        place = self._places.get(reclaim.key, {}).get(reclaim.holder)
        self.returning.reclaim(reclaim, place.session if place is not None else None)

    def shrink(self, shrink: events.Shrink) -> None:
        place = self._places.get(shrink.key, {}).get(shrink.holder)
        if place is not None and place.session is not None:
            place.session.send(Shrink(shrink.key, shrink.num_blocks))

    # What holders say.

    def kept(self, session: Session, kept: Kept) -> None:
        holder, place = self._place(session, kept.key)
        if place is not None and place.asked:
            self._kept(kept.key, holder, place, granted=kept.granted)

    def found(self, session: Session, found: Found) -> None:
        holder, place = self._place(session, found.key)
        if place is not None and place.claimed:
            self._found(found.key, holder, place, found.num_blocks)

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
                if place.asked or place.claimed:
                    self._unanswered(key, holder, place)
                else:
                    self._tell(events.Broken(key, f"{holder}, which has its KV, is gone: {reason}"))
        for number, answer in list(self._answers.items()):
            if answer.session is session:
                del self._answers[number]
                answer.fail(reason)

    # Attention there.

    def remote(self, keys: Sequence[RequestId]) -> Remote:
        """For one step over chunks of these attempts."""
        return Remote(self, keys)

    def ask(self, key: RequestId, head: Attend, q: memoryview, answer: _Answer) -> None:
        """In the event loop."""
        place = self._places.get(key, {}).get(NodeId(answer.holder))
        if place is None or place.session is None or place.session.closed:
            answer.fail("there is no session")
            return
        answer.session = place.session
        self._answers[head.number] = answer
        place.session.send(head, q, priority=Priority.URGENT)
        self.num_asked += 1
        self.bytes_asked += q.nbytes

    def place(self, session: Session, attended: Attended, size: int) -> Sequence[memoryview]:
        """Raises ProtocolError for what was not asked."""
        answer = self._answers.get(attended.number)
        if answer is None:
            return [memoryview(bytearray(size))]  # nobody waits for it any more: read past it
        if answer.session is not session:
            raise ProtocolError(f"an answer to what another node was asked: {attended.number}")
        answer.data = memoryview(bytearray(size))
        return [answer.data]

    def answered(self, session: Session, attended: Attended) -> None:
        answer = self._answers.get(attended.number)
        if answer is None or answer.session is not session:
            return
        del self._answers[attended.number]
        if answer.data is None:
            answer.fail("it has no KV of this attempt")
            return
        self.bytes_answered += answer.data.nbytes
        answer.came.set()

    def void(self, attended: Attended) -> None:
        answer = self._answers.pop(attended.number, None)
        if answer is not None:
            answer.fail("it gave up in the midst of its answer")

    def post(
        self, key: RequestId, layer: int, rows: tuple[Any, ...], parts: int, q: memoryview, answer: _Answer
    ) -> None:
        """From the engine's threads."""
        self._later(self.ask, key, Attend(next(self._numbers), layer, rows, parts), q, answer)

    @property
    def answer_s(self) -> float:
        return self._answer_s


class _Answer:
    """What a holder was asked in one layer; set in the event loop, waited for in the engine's thread."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.session: Session | None = None
        self.data: memoryview | None = None
        self.reason = ""
        self.came = threading.Event()

    def fail(self, reason: str) -> None:
        self.reason = reason
        self.came.set()


class Remote:
    """`isthmus.engine.interface.Elsewhere` over sessions. `keys`: of the step's chunks."""

    def __init__(self, holders: Holders, keys: Sequence[RequestId]) -> None:
        self._holders, self._keys = holders, keys
        self._answers: dict[tuple[int, str, int], _Answer] = {}

    def ask(self, layer: int, asking: Asking, q: memoryview) -> None:
        answer = self._answers[layer, asking.holder, asking.chunks[0][0]] = _Answer(asking.holder)
        rows = tuple([(self._keys[chunk], *rest) for chunk, *rest in asking.chunks])
        self._holders.post(self._keys[asking.chunks[0][0]], layer, rows, asking.parts, q, answer)

    def answer(self, layer: int, asking: Asking) -> memoryview:
        answer = self._answers.pop((layer, asking.holder, asking.chunks[0][0]))
        if not answer.came.wait(self._holders.answer_s):
            raise HolderLost(asking.holder, f"no answer in {self._holders.answer_s:g} s")
        if answer.reason or answer.data is None:
            raise HolderLost(asking.holder, answer.reason)
        return answer.data
