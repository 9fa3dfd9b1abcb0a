"""The sending half of a session, without I/O: what goes next, over which lane, and what must go again.

A message goes as one frame, or as several where its payload is large; each frame carries the message's header, so
frames may take different lanes (connections) in any order, and any of them may be the first to arrive.

    queued ──next──> on a lane ──acknowledged──> done(True)
       ^                  │
       └── lane lost ─────┘        cancelled or session ended, at any time ──> done(False)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum

from isthmus.live.messenger.frames import (
    ACK_SOON,
    GOOD,
    MAX_SLICE,
    PREFIX_BYTES,
    FrameKind,
    Pieces,
    check_of,
    prefix_of,
)


class Priority(IntEnum):
    """A lower number overtakes between slices; messages of one priority keep their order."""

    CONTROL = 0
    URGENT = 1
    NORMAL = 2


SLICE = 1 << 20
"""Payload bytes of a frame: enough to hide a frame's cost, few enough that urgent messages need not wait long."""
HEADERS_PER_SLICE = 32
"""A slice has at least so many times the bytes of the header that goes with it."""
TALK_BYTES = 64 << 20
"""Bytes by which messages without payload may exceed the peer's window, so that payloads never hold them up. Also the
most bytes of messages that go ahead of a missing one."""
MESSAGE_BYTES = 1 << 10
"""Memory that the peer needs for a waiting message, beside its header."""

Done = Callable[[bool], None]


def kept_bytes(header: int) -> int:
    """Memory that the peer needs for a waiting message with a header of `header` bytes."""
    return MESSAGE_BYTES + header


class Sending:
    """A message on its way out."""

    __slots__ = (
        "_outbox",
        "again",
        "assigned",
        "check",
        "done",
        "header",
        "on_lanes",
        "over",
        "payload",
        "priority",
        "seq",
        "slice_bytes",
        "started",
    )

    def __init__(self, outbox: Outbox, header: bytes, payload: Pieces, priority: Priority, done: Done | None):
        self._outbox = outbox
        self.header, self.check = header, check_of(header)
        self.payload: Pieces | None = payload
        self.priority, self.done = priority, done
        self.seq = -1
        self.slice_bytes = min(max(SLICE, HEADERS_PER_SLICE * len(header)), MAX_SLICE)
        self.assigned = 0  # payload bytes given to lanes, each once
        self.started = False
        self.again: list[int] = []  # offsets of slices that were lost with their lane, last first
        self.on_lanes = 0  # frames on lanes that were not acknowledged
        self.over = False

    def cancel(self) -> None:
        """Sends no more of the message: its memory is the caller's again when this returns. Idempotent; does nothing
        when all of it has arrived."""
        self._outbox.cancel(self)

    @property
    def waits(self) -> bool:
        """Whether a part of the message must still be given to a lane."""
        assert self.payload is not None
        return not self.started or bool(self.again) or self.assigned < self.payload.size


class Frame:
    """One frame on its way: the slice of `sending` at `offset`, or a notice without a message."""

    __slots__ = ("head", "length", "offset", "sending", "views")

    def __init__(
        self,
        head: bytes,
        views: list[memoryview] | None = None,
        sending: Sending | None = None,
        offset: int = 0,
        length: int = 0,
    ) -> None:
        self.head, self.views, self.sending, self.offset = head, views or [], sending, offset
        self.length = len(head) + length + (len(GOOD) if length else 0)


class Outbox:
    """Messages of one session on their way out, as frames that lanes take and report on.

    `wake` is called when something can be sent that could not before, `let_go` when lanes must not read a message's
    memory any more. `window`: bytes that the peer lets be in flight.
    """

    def __init__(self, wake: Callable[[], None], let_go: Callable[[Sending], None]) -> None:
        self._wake, self._let_go = wake, let_go
        self.window = 0
        self.queued_bytes = 0  # of payloads, waiting for a lane
        self.queued_headers = 0  # of messages not begun
        self.unacked_bytes = 0  # on lanes
        self.ahead_bytes = 0  # sent, but not delivered for an earlier message of their priority is missing
        self.ahead_kept = 0  # what the messages of these cost the peer, without payloads
        self._notices: deque[Frame] = deque()
        self._queues: tuple[deque[Sending], ...] = tuple(deque() for _ in Priority)
        self._undelivered: tuple[deque[Sending], ...] = tuple(deque() for _ in Priority)
        self._next_seq = [0 for _ in Priority]

    def submit(self, header: bytes, payload: Pieces, priority: Priority, done: Done | None) -> Sending:
        sending = Sending(self, header, payload, priority, done)
        self._queues[priority].append(sending)
        self.queued_bytes += payload.size
        self.queued_headers += len(header)
        self._wake()
        return sending

    def notice(self, kind: FrameKind, priority: int, seq: int) -> None:
        """Queues a frame without header, before all messages."""
        self._notices.append(Frame(prefix_of(kind | ACK_SOON, b"", priority=priority, seq=seq)))
        self._wake()

    @property
    def empty(self) -> bool:
        """Whether everything was given to a lane."""
        return not self._notices and not any(self._queues)

    @property
    def final_seqs(self) -> tuple[int, ...]:
        return tuple(self._next_seq)

    def next(self) -> Frame | None:
        """Returns the frame that goes next; None when there is none or the peer's window is full."""
        if self._notices:
            return self._on_lane(self._notices.popleft())
        for queue in self._queues:
            if not queue:
                continue
            sending = queue[0]
            if not self._has_credit(sending):
                return None
            frame = self._slice(sending)
            if not sending.waits:
                queue.popleft()
            return self._on_lane(frame)
        return None

    def _has_credit(self, sending: Sending) -> bool:
        assert sending.payload is not None
        extra = 0 if sending.payload.size else TALK_BYTES
        undelivered = self._undelivered[sending.priority]
        if undelivered and undelivered[0] is not sending:
            if self.ahead_bytes >= self.window + extra:
                return False
            if not sending.started and self.ahead_kept >= TALK_BYTES:
                return False
        return self.unacked_bytes < self.window + extra

    def _slice(self, sending: Sending) -> Frame:
        payload = sending.payload
        assert payload is not None
        if not sending.started:
            sending.started = True
            self.queued_headers -= len(sending.header)
            sending.seq = self._next_seq[sending.priority]
            self._next_seq[sending.priority] += 1
            self._undelivered[sending.priority].append(sending)
            self._count_ahead(sending, PREFIX_BYTES + len(sending.header))
            if self._undelivered[sending.priority][0] is not sending:
                self.ahead_kept += kept_bytes(len(sending.header))
        if sending.again:
            offset = sending.again.pop()
        else:
            offset = sending.assigned
            length = min(sending.slice_bytes, payload.size - offset)
            sending.assigned += length
            self._count_ahead(sending, length)
        length = min(sending.slice_bytes, payload.size - offset)
        self.queued_bytes -= length
        head = prefix_of(
            FrameKind.DATA | ACK_SOON if payload.size or sending.done else FrameKind.DATA,
            sending.header,
            header_check=sending.check,
            priority=sending.priority,
            seq=sending.seq,
            total=payload.size,
            offset=offset,
            length=length,
        )
        sending.on_lanes += 1
        views = payload.cut(offset, length) if length else None
        return Frame(head + sending.header, views, sending, offset, length)

    def _count_ahead(self, sending: Sending, count: int) -> None:
        if self._undelivered[sending.priority][0] is not sending:
            self.ahead_bytes += count

    def _on_lane(self, frame: Frame) -> Frame:
        self.unacked_bytes += frame.length
        return frame

    # What became of frames.

    def arrived(self, frame: Frame) -> None:
        """Books a frame that the peer has received."""
        self.unacked_bytes -= frame.length
        sending = frame.sending
        if sending is None or sending.over:
            return
        sending.on_lanes -= 1
        if not sending.on_lanes and not sending.waits:
            self._end(sending, arrived=True)

    def lost(self, frames: list[Frame]) -> None:
        """Queues again the frames of a lost lane, before messages that were not begun."""
        back: list[Sending] = []
        for frame in frames:
            self.unacked_bytes -= frame.length
            sending = frame.sending
            if sending is None:
                self._notices.append(frame)
            elif not sending.over:
                sending.on_lanes -= 1
                if not sending.waits:
                    back.append(sending)
                self._again(sending, frame)
        for priority in Priority:
            queue = self._queues[priority]
            mine = [sending for sending in back if sending.priority is priority]
            while queue and queue[0].started:
                mine.append(queue.popleft())
            queue.extendleft(sorted(mine, key=lambda sending: sending.seq, reverse=True))
        self._wake()

    def _again(self, sending: Sending, frame: Frame) -> None:
        payload = sending.payload
        assert payload is not None
        sending.again.append(frame.offset)
        sending.again.sort(reverse=True)
        self.queued_bytes += min(sending.slice_bytes, payload.size - frame.offset)

    def delivered(self, priority: int, seq: int) -> None:
        """Books that the peer needs no message of this priority before number `seq` any more."""
        waiting = self._undelivered[priority]
        while waiting and waiting[0].seq < seq:
            sending = waiting.popleft()
            if not sending.over:
                self._settle(sending)
            if waiting:
                self.ahead_bytes -= PREFIX_BYTES + len(waiting[0].header) + waiting[0].assigned
                self.ahead_kept -= kept_bytes(len(waiting[0].header))

    def _settle(self, sending: Sending) -> None:
        """Ends a message that the peer needs no more though its frames were not all acknowledged. If all of it had
        been sent, it arrived; else the peer refused it, and the notice of that is late."""
        assert sending.payload is not None
        arrived = sending.assigned == sending.payload.size
        self._unqueue(sending)
        self._let_go(sending)
        self._end(sending, arrived=arrived)

    def cancel(self, sending: Sending) -> None:
        if sending.over:
            return
        self._unqueue(sending)
        if sending.started:
            self.notice(FrameKind.CANCEL, sending.priority, sending.seq)
        self._end(sending, arrived=False)

    def refused(self, priority: int, seq: int) -> None:
        """Ends a message that the peer refused."""
        for sending in self._undelivered[priority]:
            if sending.seq == seq and not sending.over:
                self._unqueue(sending)
                self._end(sending, arrived=False)
                return

    def end(self) -> None:
        """Ends all messages: the session is over."""
        open_ones = [sending for queue in self._undelivered for sending in queue if not sending.over]
        open_ones += [sending for queue in self._queues for sending in queue if not sending.started]
        for queue in (*self._queues, *self._undelivered):
            queue.clear()
        self._notices.clear()
        self.queued_bytes = self.queued_headers = 0
        for sending in open_ones:
            self._end(sending, arrived=False)

    def _unqueue(self, sending: Sending) -> None:
        """Takes the rest of a message out of its queue."""
        if sending.waits:
            payload = sending.payload
            assert payload is not None
            self._queues[sending.priority].remove(sending)
            self.queued_bytes -= payload.size - sending.assigned
            self.queued_bytes -= sum(min(sending.slice_bytes, payload.size - at) for at in sending.again)
            if not sending.started:
                self.queued_headers -= len(sending.header)

    def _end(self, sending: Sending, *, arrived: bool) -> None:
        sending.over = True
        sending.payload = None
        if not arrived:
            self._let_go(sending)
        if sending.done is not None:
            sending.done(arrived)
