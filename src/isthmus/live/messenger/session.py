"""A session with a peer, without I/O: messages both ways over several lanes, each delivered once.

The binding brings lanes up and down, moves their bytes, and offers a few services (`Port`); the session decides
what goes over which lane, when the peer hears what arrived, and when everything is over.

    open ──close, or the peer's CLOSE──> closing ──everything written, or too late──> ended
     │                                                                                  ^
     └── aborted; all lanes lost and none came back in time ────────────────────────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from isthmus.core.errors import ProtocolError
from isthmus.core.types import NS_PER_S
from isthmus.live.messenger.credentials import Identity
from isthmus.live.messenger.frames import (
    ACK_SOON,
    GOOD,
    MAX_HEADER,
    PREFIX_BYTES,
    FrameKind,
    Pieces,
    Prefix,
    prefix_of,
    read,
    scratch,
)
from isthmus.live.messenger.inbox import Ack, Arrivals, Close, Inbox
from isthmus.live.messenger.lane import Lane
from isthmus.live.messenger.line import Answerer, Asker
from isthmus.live.messenger.outbox import TALK_BYTES, Done, Frame, Outbox, Priority, Sending
from isthmus.live.messenger.ports import STANDARD, Handler, Port, Stat, Terms, Timers
from isthmus.live.messenger.streams import Stream

LINGER_S = 5.0
"""Longest time that closing may take."""
STALL_S = 10.0
"""A lane without progress for so long, while others make some, is given up."""
MAX_FIRST = 64 << 10
"""Bytes of the first message that the opener may send, and of all that may come before it is delivered. Also the
limit of a notice's header at any time."""
MAX_GROWN = TALK_BYTES + 8 * MAX_HEADER
"""Bytes of long headers on their way in, over all connections together."""
MAX_REASON = 4096
MAX_BACKLOG = 256 << 20
"""Bytes of messages, payloads not counted, that may wait for a peer that takes nothing."""


CLOSED_HERE = "closed here"
_encode = msgspec.msgpack.Encoder().encode
_decode_ack, _decode_close = msgspec.msgpack.Decoder(Ack).decode, msgspec.msgpack.Decoder(Close).decode


class Session:
    """Sends and receives typed messages with payloads. Not thread-safe: use it from its event loop.

    `first_s`: how long the peer, who opened the session, may take to send its first message; until the owner has
    taken that, little else is kept. None: this side opened it.
    """

    def __init__(
        self, types: Any, handler: Handler, port: Port, terms: Terms = STANDARD, first_s: float | None = None
    ) -> None:
        self._handler, self._port, self.terms = handler, port, terms
        self._outbox = Outbox(port.wake, self._let_go)
        self._inbox = Inbox(msgspec.msgpack.Decoder(types).decode, self, terms.window)
        self.lanes: list[Lane] = []
        self._by_number: dict[int, Lane] = {}
        self._headers: dict[Lane, bytes] = {}
        self._arrivals = Arrivals(terms.window)
        self._timers = Timers(port)
        self._is_stranger = first_s is not None
        if first_s is not None:
            self._most_kept, self._inbox.most_kept = self._inbox.most_kept, MAX_FIRST
            silent = f"nothing came in {first_s:g} s (limits.greeting_s)"
            self._timers.after(first_s, "first", partial(self.fail, silent))
        self._closing = self._close_sent = self._ended = False
        self._reason = self._lost = ""
        self._resume_s = 0.0
        self._room: asyncio.Event | None = None
        self._finals: tuple[int, ...] | None = None  # the peer's, when it closed
        self._lanes_lost = self._resent = self._messages_in = self._messages_out = 0
        self._on_line: Callable[[Answerer], None] | None = None
        self._lines: list[Asker | Answerer] = []
        self._line_bytes_in = self._line_bytes_out = 0  # of those that ended and are not in the list any more
        self.peer = "unconnected"
        self.identity: Identity | None = None  # the peer's, where a certificate says it
        self.bytes_in = 0
        self.bytes_out = 0

    # What users do.

    def send(
        self,
        message: Any,
        *payload: memoryview,
        priority: Priority | None = None,
        done: Done | None = None,
    ) -> Sending:
        """Queues a message; with a payload its priority is NORMAL, without one CONTROL, unless given.

        The payload's memory must stay as it is until `done(True)`: the peer has it all, or `done(False)`: it was
        cancelled or the session ended. Sending on a closed session does nothing but `done(False)`.
        Raises ProtocolError when the message itself is over the limit.
        """
        pieces, header = Pieces(payload), _encode(message)
        if len(header) > MAX_HEADER:
            raise ProtocolError(f"message of {len(header)} bytes exceeds the limit of {MAX_HEADER}")
        if priority is None:
            priority = Priority.NORMAL if pieces.size else Priority.CONTROL
        if self.closed:
            sending = Sending(self._outbox, header, pieces, priority, None)
            sending.over = True
            if done is not None:
                refused = done
                self._port.soon(lambda: refused(False))
            return sending
        self._messages_out += 1
        sending = self._outbox.submit(header, pieces, priority, done)
        if self._outbox.queued_headers > MAX_BACKLOG:
            self.abort(
                f"{self.peer} takes nothing: {self._outbox.queued_headers} bytes of messages wait for it"
            )
        return sending

    async def room(self, below: int = 1 << 20) -> None:
        """Waits until less than `below` bytes of payloads wait for a connection, or the session is closed.

        Wait here before sealing or copying a payload: bytes that are sent while they are in the processor's cache are
        read from memory only once.
        """
        while self._outbox.queued_bytes >= below and not self.closed:
            self._room = self._room or asyncio.Event()
            await self._room.wait()

    def refuse(self, message: Any) -> bool:
        """Gives up a message that was placed and has not come yet. True: its memory is the caller's again, `on_void`
        is not called, and its sender hears `done(False)`. False: it is not under way."""
        found = self._inbox.refuse(message)
        if found is None:
            return False
        self._outbox.notice(FrameKind.REFUSE, *found)
        self._acknowledge()  # messages that waited behind it are through
        return True

    async def line(self, patience_s: float) -> Asker:
        """Opens a line for another thread; possible on the side that opened the session. Raises OSError,
        TimeoutError."""
        asker = Asker(await self._port.line(), patience_s)
        self._add_line(asker)
        if self._ended:
            asker.hang_up()
            raise ConnectionError("its session ended meanwhile")
        return asker

    def answer_lines(self, on_line: Callable[[Answerer], None]) -> None:
        """Lets the peer open lines; `on_line` is called with each."""
        self._on_line = on_line

    @property
    def takes_lines(self) -> bool:
        return self._on_line is not None

    def close(self, reason: str = CLOSED_HERE) -> None:
        """Ends the session after what is queued is sent. Idempotent."""
        if self.closed:
            return
        self._closing, self._reason = True, reason
        self._inbox.stopped = True
        self._tell_room()
        self._timers.after(LINGER_S, "linger", self._end)
        if self.lanes:
            self._port.wake()
        else:
            self._port.soon(self._end)

    def abort(self, reason: str) -> None:
        """Ends the session at once; what is queued is dropped. Idempotent."""
        if self._ended:
            return
        self._reason = self._reason or reason
        self._closing = self._close_sent = self._inbox.stopped = True
        self._drop_lanes()
        self._port.soon(self._end)

    @property
    def closed(self) -> bool:
        return self._closing or self._ended

    @property
    def ended(self) -> bool:
        """Whether `on_close` was called."""
        return self._ended

    @property
    def suspended(self) -> bool:
        """Whether every connection is lost and one may come back."""
        return self._timers.is_running("resume")

    def stat(self) -> Stat:
        return Stat(
            lanes=len(self.lanes),
            lanes_lost=self._lanes_lost,
            bytes_in=self.bytes_in + self._line_bytes_in + sum([line.bytes_in for line in self._lines]),
            bytes_out=self.bytes_out + self._line_bytes_out + sum([line.bytes_out for line in self._lines]),
            messages_in=self._messages_in,
            messages_out=self._messages_out,
            queued_bytes=self._outbox.queued_bytes + self._outbox.queued_headers,
            unacked_bytes=self._outbox.unacked_bytes,
            resent=self._resent,
            voided=self._inbox.voided,
            retransmits=self._port.retransmits(),
        )

    # What the binding does.

    def agree(self, terms: Terms) -> None:
        """Takes the peer's terms, once, before the first lane."""
        self._outbox.window, self._resume_s = terms.window, min(self.terms.resume_s, terms.resume_s)

    def lane_up(self, number: int) -> Lane:
        """Adds a connection, which belongs to no other session."""
        lane = Lane(self, number)
        self.lanes.append(lane)
        self._by_number[number] = lane
        self._timers.stop("resume")
        if self._messages_in:
            self._arrivals.is_due = True  # what arrived over lanes that were lost need not come again
        self._port.soon(self._port.wake)
        return lane

    def take_line(self, stream: Stream) -> None:
        """Takes a line that the peer opened."""
        assert self._on_line is not None, "a line that nobody takes is turned away"
        answerer = Answerer(stream)
        self._add_line(answerer)
        self._on_line(answerer)

    def _add_line(self, line: Asker | Answerer) -> None:
        """Adds a line, and keeps only the byte counts of lines that ended."""
        over = [each for each in self._lines if each.is_over]
        self._line_bytes_in += sum([each.bytes_in for each in over])
        self._line_bytes_out += sum([each.bytes_out for each in over])
        self._lines = [each for each in self._lines if each not in over] + [line]

    def lane_down(self, lane: Lane, reason: str) -> None:
        """Removes a connection that ended. Frames on it go over the others."""
        if self._by_number.pop(lane.number, None) is None:
            return
        self.lanes.remove(lane)
        self._inbox.lane_lost(lane.reader)
        self._arrivals.forget(lane)
        if self._ended:
            return
        if self._close_sent or self._finals is not None:
            if not self.lanes:
                self._end()
            return
        self._lanes_lost += 1
        self._resent += len(lane.unacked)
        self._outbox.lost(list(lane.unacked))
        if self.lanes:
            self._arrivals.repeat(self.lanes)  # an acknowledgement may have been lost with it
            self._port.wake()
            return
        self._lost = reason or "closed by the peer"
        if self._resume_s > 0 and not self._closing:
            self._timers.after(self._resume_s, "resume", self.give_up)
        else:
            self._reason = self._reason or self._lost
            self._port.soon(self._end)

    def give_up(self, reason: str = "") -> None:
        """Ends a suspended session: no connection will come back."""
        self._timers.stop("resume")
        if not self.lanes:
            self._reason = self._reason or reason or self._lost
            self._end()

    def fail(self, reason: str) -> None:
        """Tells the peer that it broke a rule, or that this side is broken, and ends."""
        if self._ended or self._close_sent:
            return
        self._reason = self._reason or reason
        self._closing = self._inbox.stopped = True
        self._timers.after(LINGER_S, "linger", self._end)
        self._outbox.end()
        self._port.wake()

    def next_frame(self, lane: Lane) -> tuple[Frame, bool] | None:
        """Returns the frame to write next, and whether the peer will acknowledge it."""
        if self._close_sent or self._ended:
            return None
        if self._arrivals.is_due or (self._timers.is_running("ack") and not self._outbox.empty):
            self._timers.stop("ack")
            return self._arrivals.frame(self._inbox.through), False
        if self._outbox.empty:
            return (self._close_frame(), False) if self._closing else None
        frame = self._outbox.next()
        if frame is not None:
            if frame.sending is not None:
                self.bytes_out += frame.length
                self._tell_room()
            if not lane.unacked:
                lane.progress_ns = self._port.now_ns()
            if len(self.lanes) > 1:
                self._timers.after(STALL_S / 2, "stall", self._watch)
            return frame, True
        return None

    # What lanes bring.

    def admit(self, prefix: Prefix) -> None:
        """Judges a frame whose header is still to come. Raises ProtocolError for a header that is too long."""
        is_message = prefix.kind & ~ACK_SOON == FrameKind.DATA and not self._is_stranger
        most = MAX_HEADER if is_message else MAX_FIRST
        if prefix.header > most:
            raise ProtocolError(f"a header of {prefix.header} bytes came where {most} may")

    def grown(self) -> None:
        """Judges the memory that long headers take. Raises ProtocolError when it is too much."""
        most = MAX_FIRST if self._is_stranger else MAX_GROWN
        if sum([lane.reader.grown_bytes for lane in self.lanes]) > most:
            raise ProtocolError("the peer sent more than it was allowed to")

    def begin(self, lane: Lane, prefix: Prefix, header: bytes) -> Sequence[memoryview]:
        """Returns memory of exactly `prefix.length` bytes for the payload, in pieces that are not empty."""
        if prefix.kind & ~ACK_SOON == FrameKind.DATA:
            if self._closing:
                return scratch(prefix.length)
            return self._inbox.begin(prefix, header, lane.reader)
        if prefix.length:
            raise ProtocolError(f"a frame of kind {prefix.kind} carries a payload")
        self._headers[lane] = header
        return ()

    def end(self, lane: Lane, prefix: Prefix, is_good: bool) -> bool:
        """Takes a whole frame. False: nothing more is wanted from this connection."""
        kind = prefix.kind & ~ACK_SOON
        if kind == FrameKind.DATA:
            self._end_data(lane, prefix, is_good)
        else:
            self._end_notice(lane, prefix, kind, self._headers.pop(lane))
        if self._finals is not None and not self._ended and self._all_came():
            self._end()
        return not self._ended

    def _end_data(self, lane: Lane, prefix: Prefix, is_good: bool) -> None:
        if not self._closing:
            self._count_in(lane, prefix)
            self._inbox.end(prefix, lane.reader, is_good)

    def _end_notice(self, lane: Lane, prefix: Prefix, kind: int, header: bytes) -> None:
        if kind == FrameKind.ACK:
            self._acknowledged(read(_decode_ack, header, "an Ack"))
        elif kind == FrameKind.CLOSE:
            self._peer_closed(read(_decode_close, header, "a Close"))
        elif prefix.priority >= len(Priority):
            raise ProtocolError(f"priority {prefix.priority} does not exist")
        elif kind == FrameKind.CANCEL:
            self._count_in(lane, prefix)
            self._inbox.cancelled(prefix.priority, prefix.seq)
        elif kind == FrameKind.REFUSE:
            self._count_in(lane, prefix)
            self._outbox.refused(prefix.priority, prefix.seq)
        else:
            raise ProtocolError(f"frames of kind {kind} do not belong here")

    def _acknowledged(self, ack: Ack) -> None:
        for number, count in ack.frames:
            lane = self._by_number.get(number)
            if lane is not None:
                lane.progress_ns = self._port.now_ns()
                if count > lane.frames_written:
                    raise ProtocolError("the peer acknowledges what was not sent")
                for frame in lane.acknowledged(count):
                    self._outbox.arrived(frame)
        for priority, seq in zip(Priority, ack.through, strict=False):
            self._outbox.delivered(priority, seq)
        if not self._outbox.empty or self._closing:
            self._port.wake()

    def _peer_closed(self, close: Close) -> None:
        if self._finals is None:
            self._finals = close.finals
            self._reason = self._reason or (
                f"closed by the peer: {close.reason}" if close.reason else "closed by the peer"
            )
            self._timers.after(LINGER_S, "linger", self._end)

    def _all_came(self) -> bool:
        assert self._finals is not None
        return self._closing or all(
            through >= final for through, final in zip(self._inbox.through, self._finals, strict=False)
        )

    # For the inbox.

    def on_message(self, message: Any) -> None:
        self._messages_in += 1
        self._handler.on_message(self, message)
        if self._is_stranger and not self.closed:
            self._is_stranger, self._inbox.most_kept = False, self._most_kept
            self._timers.stop("first")

    def place(self, message: Any, size: int) -> Sequence[memoryview]:
        return self._handler.place(self, message, size)

    def on_void(self, message: Any) -> None:
        self._handler.on_void(self, message)

    # Acknowledgements.

    def _count_in(self, lane: Lane, prefix: Prefix) -> None:
        count = PREFIX_BYTES + prefix.header + prefix.length + (len(GOOD) if prefix.length else 0)
        if prefix.kind & ~ACK_SOON == FrameKind.DATA:
            self.bytes_in += count
        if self._arrivals.count(lane, count):
            self._acknowledge()
        elif prefix.kind & ACK_SOON:
            self._timers.after(self._port.ack_delay_s, "ack", self._acknowledge)

    def _acknowledge(self) -> None:
        if not self._arrivals.is_due:
            self._arrivals.is_due = True
            self._port.wake()

    def _watch(self) -> None:
        """Gives up lanes that stall. If all stall, the peer or the network is slow, and none is given up."""
        busy = [lane for lane in self.lanes if lane.unacked]
        latest_ns = max((lane.progress_ns for lane in self.lanes), default=0)
        for lane in busy:
            if latest_ns - lane.progress_ns > STALL_S * NS_PER_S:
                self._port.abort(lane)
                self.lane_down(lane, "it stalled")
        if busy:
            self._timers.after(STALL_S / 2, "stall", self._watch)

    # Ends.

    def _close_frame(self) -> Frame:
        """Returns the last frame of the session. Other lanes still write what they have."""
        self._close_sent = True
        reason = "" if self._reason == CLOSED_HERE else self._reason[:MAX_REASON]
        for lane in self.lanes:
            self._port.soon(partial(self._port.finish, lane))
        header = _encode(Close(self._outbox.final_seqs, reason))
        return Frame(prefix_of(FrameKind.CLOSE, header) + header)

    def _tell_room(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None

    def _let_go(self, sending: Sending) -> None:
        for lane in self.lanes:
            lane.blank(sending)

    def _drop_lanes(self) -> None:
        for lane in list(self.lanes):
            self._port.abort(lane)
            lane.reader.divert()
        self.lanes.clear()
        self._by_number.clear()

    def _end(self) -> None:
        """Gives everything open back to its owner, once, then tells the owner of the end."""
        if self._ended:
            return
        self._ended = self._closing = self._inbox.stopped = True
        self._drop_lanes()
        for line in self._lines:
            line.hang_up()
        self._tell_room()
        self._timers.stop_all()
        self._inbox.end_all()
        self._outbox.end()
        self._port.ended()
        self._handler.on_close(self, self._reason or "closed by the peer")
