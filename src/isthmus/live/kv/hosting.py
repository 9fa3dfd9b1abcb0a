"""Attention to KV of this node's attempts that lies with other nodes: asked over lines, by threads that compute.

How KV gets there is in `shipments.py`; a line is opened beside the session with a holder, and ends with it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

import msgspec

from isthmus.core.attempts import Share
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.types import NodeId, RequestId
from isthmus.live.engine.interface import Asking, HolderLost, HolderQueries, KVBytes
from isthmus.live.kv.loans import Landing, Shipments
from isthmus.live.messenger import Answerer, Asker, LineLost, Question, Session, read
from isthmus.live.peers.messages import KNOWN_ROWS, Attend, ShipmentSlices
from isthmus.live.peers.sessions import Peers, Spawn, Tell

_encode = msgspec.msgpack.Encoder().encode


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


class HolderLines:
    """Lines to holders. `open_line` in the event loop; `remote` gives what the engine's thread asks. `answer_s`: how
    long a holder may take."""

    def __init__(self, peers: Peers, spawn: Spawn, answer_s: float) -> None:
        self._peers, self._spawn, self._answer_s = peers, spawn, answer_s
        self._lines: dict[NodeId, Future[_Line]] = {}
        self.bytes_asked = self.bytes_answered = self.num_asked = 0

    def open_line(self, holder: NodeId) -> None:
        """One to each holder: a new one where the last is over."""
        line = self._lines.get(holder)
        if line is not None and (not line.done() or _works(line)):
            return
        opened = self._lines[holder] = Future()
        # Nobody waits for what is not opened any more.
        self._spawn(self._open(holder, opened)).add_done_callback(lambda _: opened.cancel())

    async def _open(self, holder: NodeId, opened: Future[_Line]) -> None:
        try:
            session = await self._peers.dialled(holder)
            opened.set_result(_Line(await session.line(self._answer_s)))
        except (OSError, TimeoutError) as error:
            opened.set_exception(LineLost(str(error)))

    def lost(self, holder: NodeId) -> None:
        line = self._lines.pop(holder, None)
        if line is not None and line.done() and _works(line):
            line.result().asker.hang_up()

    # Attention there.

    def remote(self, keys: Sequence[RequestId]) -> Remote:
        """For one run over chunks of these attempts."""
        return Remote(self, keys)

    def line_of(self, holder: str) -> _Line:
        """From the engine's thread. Raises HolderLost."""
        try:
            return self._lines[NodeId(holder)].result(self._answer_s)
        except (KeyError, LineLost, TimeoutError, CancelledError) as error:
            raise HolderLost(holder, "there is no line to it") from error


def _works(line: Future[_Line]) -> bool:
    return not line.cancelled() and line.exception() is None and not line.result().asker.is_over


class Remote:
    """`isthmus.live.engine.interface.Elsewhere` over lines. `keys`: of the run's chunks."""

    def __init__(self, holders: HolderLines, keys: Sequence[RequestId]) -> None:
        self._holders, self._keys = holders, keys
        self._asked: dict[tuple[int, str, int, int], tuple[Asker, Question]] = {}

    def ask(self, layer: int, asking: Asking, q: memoryview) -> None:
        holder, first = asking.holder, asking.chunks[0][0]
        line = self._holders.line_of(holder)
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


# KV of other nodes' attempts that lies here: room for it, taken in, attended to. See `holding.py` for the other side.
#
# Each node that asks has a line, and a thread here that computes what comes over it, beside the iterations of this
# node's own attempts.


Attends = Callable[[int, Sequence[HolderQueries], memoryview, int], memoryview]
"""`isthmus.live.engine.interface.Engine.attend`."""
log = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(Attend).decode


class _HostedShare:
    """A share of one attempt's KV here, in a memory whose blocks have no other heads. `stowed`: blocks that are
    whole; `peers`: who may ship more."""

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
        """Blocks of all heads, those that it has already first."""
        parts = self.share.parts
        self.room = room
        self.landing.blocks = [block * parts + at for block in room for at in range(parts)]


class _Known(NamedTuple):
    """What the rows of a step are here, if these guests are still there with so many blocks."""

    guests: list[tuple[RequestId, _HostedShare | None, int]]
    rows: list[HolderQueries]
    num_rows: int


class HostedKV:
    """For an event loop, but for what is said. `shipments`: what leaves here, and what comes home."""

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
        """The memory as blocks with a `parts`-th of the heads."""
        if parts not in self._split:
            self._split[parts] = self._memory.split(parts)
        return self._split[parts]

    def rekey(self, rekey: events.Rekey) -> None:
        """Nothing is written in the name of the old attempt any more when this returns. What of it was being written
        anew just now is not whole."""
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
        """The blocks behind these were sent back, and their home attends to them there. Nothing is written to them any
        more, or read for anybody, when this returns."""
        guest, count = self._guests[trim.key], trim.num_blocks
        guest.landing.refuse()
        self._shipments.stop(trim.key)
        guest.stowed = min(guest.stowed, count)
        guest.landing.go_on(guest.stowed)
        guest.give(guest.room[:count])  # last: who asks meanwhile is to find every block in the table

    def unhost(self, unhost: events.Unhost) -> None:
        """Nothing is written to its blocks any more when this returns; what is still read is for nobody."""
        self._shipments.stop(unhost.key, unhost.peer)
        guest = self._guests[unhost.key]
        if unhost.peer is not None:
            guest.peers.discard(unhost.peer)
            return
        guest.landing.refuse()
        del self._guests[unhost.key]

    # KV.

    def place(self, session: Session, head: ShipmentSlices, size: int) -> Sequence[memoryview]:
        """Where the payload goes. Raises ProtocolError for what is not expected."""
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
        """The sender gave up in the midst of it."""
        if self._shipments.awaits(self._node_of(session), head):
            self._shipments.void(head)
        elif head.key in self._guests:
            self._guests[head.key].landing.void(session, head)

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
