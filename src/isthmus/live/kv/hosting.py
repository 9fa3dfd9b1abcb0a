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

from isthmus.core.attempts import Share
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.types import NodeId, RequestId
from isthmus.live.engine.interface import HolderQueries, KVBytes
from isthmus.live.kv.shipments import Landing, Shipments
from isthmus.live.messenger import Answerer, LineLost, Session, read
from isthmus.live.peers.messages import KNOWN_ROWS, Attend, ShipmentSlices
from isthmus.live.peers.sessions import Tell

Attends = Callable[[int, Sequence[HolderQueries], memoryview, int], memoryview]
"""Attends as `isthmus.live.engine.interface.Engine.attend` does."""
log = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(Attend).decode


class _HostedShare:
    """A share of one attempt's KV that lies here, in a memory whose blocks have these heads alone. `stowed`: number
    of whole blocks; `peers`: nodes that may ship more."""

    def __init__(self, memory: KVBytes, share: Share, room: tuple[int, ...] = (), stowed: int = 0) -> None:
        """`room`: blocks of all heads."""
        self.share, self.landing = share, Landing(memory, ())
        self.give(room)
        self.stowed = stowed
        self.landing.go_on(stowed)
        self.peers: set[NodeId] = set()

    @property
    def blocks(self) -> Sequence[int]:
        return self.landing.blocks

    def give(self, room: tuple[int, ...]) -> None:
        """Sets the room, in blocks of all heads; it begins with those given before."""
        parts = self.share.parts
        self.room = room
        self.landing.blocks = [block * parts + at for block in room for at in range(parts)]


class _Known(NamedTuple):
    """Rows of a step as they lie here, valid while these guests still have so many blocks."""

    guests: list[tuple[RequestId, _HostedShare | None, int]]
    rows: list[HolderQueries]
    num_rows: int


class HostedKV:
    """KV of other nodes' attempts. For an event loop, except questions over lines. `shipments`: KV that leaves or
    comes home."""

    def __init__(
        self,
        memory: KVBytes,
        node_of: Callable[[Session], NodeId | None],
        attends: Attends,
        tell: Tell,
        shipments: Shipments,
    ) -> None:
        self._memory, self._node_of, self._attends, self._tell = memory, node_of, attends, tell
        self._shipments = shipments
        self._split: dict[int, KVBytes] = {1: memory}  # by the number of parts
        self._guests: dict[RequestId, _HostedShare] = {}
        self.bytes_in = self.num_attended = self.seal_mismatches = 0

    # Room.

    def host(self, host: events.Host) -> None:
        guest = self._guests.get(host.key)
        if guest is None:
            guest = self._guests[host.key] = _HostedShare(self._memory_of(host.share.parts), host.share)
        guest.give(host.blocks)
        guest.peers.add(host.peer)

    def _memory_of(self, parts: int) -> KVBytes:
        """Returns the memory seen as blocks with a `parts`-th of the heads."""
        if parts not in self._split:
            self._split[parts] = self._memory.split(parts)
        return self._split[parts]

    def rekey(self, rekey: events.Rekey) -> None:
        """Moves a guest to another attempt: nothing is written for the old one any more when this returns. Blocks
        that were being overwritten are not whole."""
        old, share = self._guests.pop(rekey.old), rekey.share
        old.landing.refuse()
        self._shipments.stop(rekey.old)
        memory = self._memory_of(share.parts)
        stowed = min(rekey.num_blocks, old.stowed)
        guest = self._guests[rekey.key] = _HostedShare(memory, share, old.room, stowed)
        guest.peers.add(rekey.peer)
        if stowed < rekey.num_blocks:
            self._tell(events.ShipmentStored(rekey.key, rekey.peer, stowed))

    def trim(self, trim: events.Trim) -> None:
        """Frees a guest's blocks from `num_blocks` on, which went back home: nothing is written to them, or read,
        when this returns."""
        guest, count = self._guests[trim.key], trim.num_blocks
        guest.landing.refuse()
        self._shipments.stop(trim.key)
        guest.stowed = min(guest.stowed, count)
        guest.landing.go_on(guest.stowed)
        guest.give(guest.room[:count])  # last: who asks meanwhile is to find every block in the table

    def unhost(self, unhost: events.Unhost) -> None:
        """Ends a guest, or a node's part in it: nothing is written to its blocks any more when this returns."""
        self._shipments.stop(unhost.key, unhost.peer)
        guest = self._guests[unhost.key]
        if unhost.peer is not None:
            guest.peers.discard(unhost.peer)
            return
        guest.landing.refuse()
        del self._guests[unhost.key]

    # KV.

    def place(self, session: Session, head: ShipmentSlices, size: int) -> Sequence[memoryview]:
        """Returns memory for a payload. Raises ProtocolError for one that is not expected."""
        guest, peer = self._guests.get(head.key), self._node_of(session)
        if self._shipments.awaits(peer, head):
            return self._shipments.place(session, head, size)
        if guest is None or peer not in guest.peers:
            return [memoryview(bytearray(size))]  # its home left: read past it
        placed = guest.landing.place(session, head, size)
        if head.first < guest.stowed:
            guest.stowed = head.first
            self._tell(events.ShipmentStored(head.key, peer, guest.stowed))
        return placed

    def receive(self, session: Session, head: ShipmentSlices) -> None:
        guest, peer = self._guests.get(head.key), self._node_of(session)
        if self._shipments.awaits(peer, head):
            self._shipments.receive(head)
            return
        if guest is None or peer not in guest.peers or (matches := guest.landing.take(head)) is None:
            return
        self.bytes_in += len(head.seals) * guest.landing.memory.layout.slice_bytes
        if not matches:
            self.seal_mismatches += 1
            self._tell(events.ShipmentStored(head.key, peer, guest.stowed, damaged=True))
        elif guest.landing.num_whole > guest.stowed:
            guest.stowed = guest.landing.num_whole
            self._tell(events.ShipmentStored(head.key, peer, guest.stowed))

    def void(self, session: Session, head: ShipmentSlices) -> None:
        """Forgets a frame that its sender gave up."""
        if self._shipments.awaits(self._node_of(session), head):
            self._shipments.void(head)
        elif head.key in self._guests:
            self._guests[head.key].landing.void(session, head)

    # Attention.

    def answer(self, line: Answerer) -> None:
        """Answers questions over this line, in a thread of its own."""
        threading.Thread(target=self._serve, args=(line,), name="attention", daemon=True).start()

    def _serve(self, line: Answerer) -> None:
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
        """Looks up the rows of a step. KV that is missing is noticed at each question."""
        guests: list[tuple[RequestId, _HostedShare | None, int]] = []
        rows, size = list[HolderQueries](), self._memory.layout.block_size
        for key, num_rows, num_tokens, first, position in head.rows:
            if num_rows < 1 or num_tokens < 1:
                raise ProtocolError(f"{num_rows} queries of {num_tokens} tokens")
            guest, num_blocks = self._guests.get(key), -(-num_tokens // size)
            if guest is not None and len(guest.blocks) < num_blocks:
                guest = None
            blocks = () if guest is None else guest.blocks[:num_blocks]
            guests.append((key, guest, num_blocks))
            rows.append(HolderQueries(blocks, num_rows, num_tokens, first, position))
        return _Known(guests, rows, sum([each.num_rows for each in rows]))

    def _answer(self, head: Attend, asked: _Known | None, q: memoryview) -> memoryview | None:
        """Attends. None where an attempt has no KV here, or too little."""
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
