"""KV of other nodes' attempts that lies here: room for it, taken in, attended to. See `holding.py` for the other side.

Each node that asks has a line, and a thread here that computes what comes over it, beside the iterations of this node's
own attempts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from isthmus.attempts import Share
from isthmus.cluster.landing import Landing, framed
from isthmus.cluster.messages import (
    KNOWN_ROWS,
    Attend,
    Claim,
    Found,
    Reclaim,
    Reclaimed,
    Reserve,
    Reserved,
    Shipment,
    Shrink,
    Stowed,
)
from isthmus.cluster.sessions import Tell
from isthmus.cluster.wire import sealed
from isthmus.engine.interface import Asked, KVBytes
from isthmus.errors import ProtocolError
from isthmus.messenger import Answerer, LineLost, Sending, Session, read
from isthmus.node import events
from isthmus.types import NodeId, RequestId

Attends = Callable[[int, Sequence[Asked], memoryview, int], memoryview]
"""`isthmus.engine.interface.Engine.attend`."""
log = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(Attend).decode


class _Guest:
    """A share of one attempt's KV here, in a memory whose blocks have no other heads. `stowed`: blocks that are
    whole."""

    def __init__(self, memory: KVBytes, share: Share, room: tuple[int, ...] = ()) -> None:
        """`room`: blocks of all heads."""
        self.share, self.landing = share, Landing(memory, ())
        self.give(room)
        self.stowed = 0
        self.sessions: dict[NodeId, Session] = {}
        self.sendings: list[Sending] = []

    @property
    def blocks(self) -> Sequence[int]:
        return self.landing.blocks

    def give(self, room: tuple[int, ...]) -> None:
        """Blocks of all heads, those that it has already first."""
        parts = self.share.parts
        self.room = room
        self.landing.blocks = [block * parts + at for block in room for at in range(parts)]

    def keep(self, count: int) -> None:
        """Only so many blocks are of use."""
        self.stowed = min(self.stowed, count)
        self.landing.stops = [min(stop, count) for stop in self.landing.stops]

    def stop(self) -> None:
        """Nothing more is written to its blocks when this returns, or read from them for anybody."""
        self.landing.refuse()
        for sending in self.sendings:
            sending.cancel()


class _Claimed(NamedTuple):
    """What was claimed over a session, until it is heard. `has_left`: it is not wanted any more."""

    session: Session
    share: Share
    has_left: bool = False


class _Known(NamedTuple):
    """What the rows of a step are here, if these guests are still there with so many blocks."""

    guests: list[tuple[RequestId, _Guest | None, int]]
    rows: list[Asked]
    num_rows: int


class Hosts:
    """For an event loop, but for what is said."""

    def __init__(self, memory: KVBytes, attends: Attends, tell: Tell) -> None:
        self._memory, self._attends, self._tell = memory, attends, tell
        self._split: dict[int, KVBytes] = {1: memory}  # by the number of parts
        self._guests: dict[RequestId, _Guest] = {}
        self._claims: dict[tuple[RequestId, NodeId], _Claimed] = {}
        self.bytes_in = self.num_attended = self.seal_mismatches = 0

    # Room.

    def reserve(self, session: Session, peer: NodeId, wanted: Reserve) -> None:
        """Raises ProtocolError for none."""
        if wanted.num_blocks < 1:
            raise ProtocolError(f"{peer} wants room for {wanted.num_blocks} blocks")
        guest = self._guests.get(wanted.key)
        if guest is None or (guest.share != wanted.share and not guest.sessions):  # who had the other left
            guest = self._guests[wanted.key] = _Guest(self._memory_of(wanted.share.parts), wanted.share)
        if guest.share != wanted.share:
            raise ProtocolError(f"{peer} wants room for another share of {wanted.key}")
        guest.sessions[peer] = session
        session.answer_lines(self.answer)
        self._tell(events.Asked(wanted.key, peer, wanted.num_blocks, wanted.share))

    def _memory_of(self, parts: int) -> KVBytes:
        """The memory as blocks with a `parts`-th of the heads. Raises ProtocolError."""
        if parts not in self._split:
            layout = self._memory.layout
            if parts < 1 or layout.vectors == 1 or layout.num_kv_heads % parts:
                raise ProtocolError(f"KV of {layout.num_kv_heads} heads has no {parts} parts")
            self._split[parts] = self._memory.split(parts)
        return self._split[parts]

    def host(self, host: events.Host) -> None:
        guest = self._guests.get(host.key)
        session = None if guest is None else guest.sessions.get(host.peer)
        if guest is None or session is None:
            return  # it left meanwhile
        if host.blocks:
            guest.give(host.blocks)
        elif not guest.blocks:
            del guest.sessions[host.peer]
            if not guest.sessions:
                del self._guests[host.key]
        session.send(Reserved(host.key, bool(host.blocks)))

    def claim(self, session: Session, peer: NodeId, claim: Claim) -> None:
        """Raises ProtocolError for what nobody can have."""
        self._memory_of(claim.share.parts)
        session.answer_lines(self.answer)
        self._claims[claim.key, peer] = _Claimed(session, claim.share)
        self._tell(events.Claimed(claim.key, peer, claim.old))

    def rekey(self, rekey: events.Rekey) -> None:
        """Nothing is written in the name of the old attempt any more when this returns."""
        claimed = self._claims.pop((rekey.key, rekey.peer), None)
        if claimed is None:
            return  # it was claimed twice
        session, share, has_left = claimed
        guest = self._guests.get(rekey.key)
        if rekey.old in self._guests:
            others = {} if guest is None else guest.sessions  # who wants room and was not heard yet
            guest = self._guests[rekey.key] = self._taken(self._guests.pop(rekey.old), share)
            guest.sessions |= others
        elif rekey.old and guest is None:  # its home was gone before it was told of its room
            guest = self._guests[rekey.key] = _Guest(self._memory_of(share.parts), share)
        session.send(Found(rekey.key, 0 if guest is None else guest.stowed))
        if guest is not None:
            guest.sessions[rekey.peer] = session
            if session.closed or has_left:
                self.gone(session, rekey.peer, rekey.key, lost=not has_left)

    def _taken(self, guest: _Guest, share: Share) -> _Guest:
        """With what is whole of it; of another share than is looked for, with nothing."""
        guest.stop()
        if guest.share != share:
            return _Guest(self._memory_of(share.parts), share, guest.room)
        guest.keep(guest.stowed)
        guest.sessions.clear()
        return guest

    def gone(self, session: Session, peer: NodeId, key: RequestId, *, lost: bool = False) -> None:
        guest, claimed = self._guests.get(key), self._claims.get((key, peer))
        if claimed is not None and claimed.session is session and not lost:
            self._claims[key, peer] = claimed._replace(has_left=True)
        if guest is None or guest.sessions.get(peer) is not session:
            return
        del guest.sessions[peer]
        if not guest.sessions and not guest.blocks:
            del self._guests[key]
        self._tell(events.Left(key, peer, lost))

    def shrunk(self, session: Session, peer: NodeId, shrink: Shrink) -> None:
        guest = self._guests.get(shrink.key)
        if guest is not None and guest.sessions.get(peer) is session:
            self._tell(events.Shrunk(shrink.key, peer, shrink.num_blocks))

    def trim(self, trim: events.Trim) -> None:
        """The blocks behind these were sent back, and their home attends to them there. Nothing is written to them any
        more when this returns."""
        guest, count = self._guests.get(trim.key), trim.num_blocks
        if guest is not None:
            guest.landing.refuse()
            guest.keep(count)
            guest.give(guest.room[:count])  # last: who asks meanwhile is to find every block in the table

    def unhost(self, key: RequestId) -> None:
        """Nothing is written to its blocks any more when this returns; what is still read is for nobody."""
        guest = self._guests.get(key)
        if guest is None:
            return
        guest.stop()
        if guest.sessions:  # asked for again since
            again = self._guests[key] = _Guest(guest.landing.memory, guest.share)
            again.sessions = guest.sessions
        else:
            del self._guests[key]

    def lost(self, session: Session) -> None:
        for key, guest in list(self._guests.items()):
            for peer, other in list(guest.sessions.items()):
                if other is session:
                    self.gone(session, peer, key, lost=True)

    # KV.

    def place(self, session: Session, head: Shipment, size: int) -> Sequence[memoryview]:
        """Where the payload goes. Raises ProtocolError for what is not expected."""
        guest = self._guests.get(head.key)
        if guest is None or session not in guest.sessions.values():
            return [memoryview(bytearray(size))]  # its home left: read past it
        placed = guest.landing.place(session, head, head.first, size)
        guest.stowed = min(guest.stowed, head.first)
        return placed

    def receive(self, session: Session, head: Shipment) -> None:
        guest = self._guests.get(head.key)
        if guest is None or (matches := guest.landing.take(head, head.first)) is None:
            return
        landing, stop = guest.landing, head.first + len(head.seals)
        self.bytes_in += len(head.seals) * landing.memory.layout.slice_bytes
        if not matches:
            self.seal_mismatches += 1
            session.send(Stowed(head.key, 0, damaged=True))
        elif landing.is_whole(head.layer, stop):
            guest.stowed = stop
            session.send(Stowed(head.key, stop))

    def void(self, session: Session, head: Shipment) -> None:
        """Its home gave up in the midst of it."""
        if head.key in self._guests:
            self._guests[head.key].landing.void(head)

    def reclaim(self, session: Session, head: Reclaim) -> None:
        """Sends blocks back to the home that asks for them. Raises ProtocolError for some that are not here."""
        guest, layout, stop = self._guests.get(head.key), self._memory.layout, head.first + head.num_blocks
        if guest is None or session not in guest.sessions.values():
            return  # it left meanwhile
        if guest.share.parts > 1 or not 0 <= head.first < stop <= guest.stowed:
            raise ProtocolError(f"blocks [{head.first}, {stop}) of {head.key} are wanted back and not here")
        guest.sendings = [sending for sending in guest.sendings if not sending.over]
        for layer, start, blocks in framed(guest.blocks[head.first : stop], layout.num_layers):
            payload, seals = sealed(self._memory, layer, blocks)
            guest.sendings.append(session.send(Reclaimed(head.key, layer, head.first + start, seals), *payload))

    # Attention.

    def answer(self, line: Answerer) -> None:
        """Questions come over this line from now on."""
        threading.Thread(target=self._serve, args=(line,), name="attention", daemon=True).start()

    def _serve(self, line: Answerer) -> None:
        """In a thread of its own, until the line ends."""
        known: dict[int, _Known] = {}
        try:
            while True:
                data, q = line.next()
                head = read(_decode, data, "a question")
                if head.rows:
                    known[head.number % KNOWN_ROWS] = self._asked(head)
                line.answer(self._answer(head, known.get(head.number), q))
        except LineLost as lost:
            log.debug("a line for attention is over: %s", lost)
        except ProtocolError as error:
            log.warning("a line for attention ends: %s", error)
        finally:
            line.hang_up()

    def _asked(self, head: Attend) -> _Known:
        """What is asked for may not be here; that is found with each question."""
        guests: list[tuple[RequestId, _Guest | None, int]] = []
        rows, size = list[Asked](), self._memory.layout.block_size
        for key, num_rows, num_tokens, first, position in head.rows:
            if num_rows < 1 or num_tokens < 1:
                raise ProtocolError(f"{num_rows} queries of {num_tokens} tokens")
            guest, num_blocks = self._guests.get(key), -(-num_tokens // size)
            if guest is not None and len(guest.blocks) < num_blocks:
                guest = None
            blocks = () if guest is None else guest.blocks[:num_blocks]
            guests.append((key, guest, num_blocks))
            rows.append(Asked(blocks, num_rows, num_tokens, first, position))
        return _Known(guests, rows, sum([each.num_rows for each in rows]))

    def _answer(self, head: Attend, asked: _Known | None, q: memoryview) -> memoryview | None:
        """None where an attempt has no KV here, or not so much."""
        if asked is None:
            raise ProtocolError(f"rows of number {head.number} were never told")
        for key, guest, num_blocks in asked.guests:
            if guest is None or self._guests.get(key) is not guest or guest.share.parts != head.parts:
                return None
            if num_blocks > guest.stowed:
                return None
        if not 0 <= head.layer < self._memory.layout.num_layers or q.nbytes % asked.num_rows:
            raise ProtocolError(f"{q.nbytes} bytes of queries for {asked.num_rows} rows in layer {head.layer}")
        self.num_attended += len(asked.rows)
        return self._attends(head.layer, asked.rows, q, head.parts)
