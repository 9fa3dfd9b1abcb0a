"""The receiving half of a session, without I/O: where slices go, and in which order messages are delivered.

    unknown ──first slice──> placed ──last slice──> whole ──all earlier ones are through──> on_message
                                │                     │
                                └──── cancelled, or session ended ────> on_void

Memory that `place` gave is the session's until exactly one of `on_message`, `on_void`; not one byte is written
to it afterwards, wherever slices of it still are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.core.errors import ProtocolError
from isthmus.live.messenger.frames import (
    MAX_HEADER,
    MAX_SLICE,
    PREFIX_BYTES,
    FrameKind,
    FrameReader,
    Pieces,
    Prefix,
    prefix_of,
    read,
    scratch,
)
from isthmus.live.messenger.lane import Lane
from isthmus.live.messenger.outbox import TALK_BYTES, Frame, Priority, kept_bytes

if TYPE_CHECKING:
    from isthmus.live.messenger.session import Session


class _Incoming:
    """A message on its way in, or one that will not come (`void`). A message without payload that must wait stays
    encoded, in `header`: decoded it may be ten times as large."""

    __slots__ = (
        "header", "held", "kept", "lengths", "message", "pieces", "received", "size", "void", "writers",
    )  # fmt: skip

    def __init__(self, message: Any, size: int, header: bytes | None = None) -> None:
        self.message, self.size, self.header = message, size, header
        self.pieces: Pieces | None = None
        self.received = 0
        self.lengths: dict[int, int] = {}  # of slices that are whole, by offset
        self.writers: dict[int, FrameReader] = {}  # who is receiving which slice
        self.void = False
        self.held = 0  # bytes counted against the window
        self.kept = 0  # bytes that lie here for it

    @property
    def whole(self) -> bool:
        return self.received == self.size

    def check_slices(self) -> None:
        """Raises ProtocolError for slices that overlap: they would leave holes."""
        at = 0
        for offset, length in sorted(self.lengths.items()):
            if offset != at:
                raise ProtocolError("slices of a payload overlap")
            at += length

    def divert(self) -> None:
        for reader in self.writers.values():
            reader.divert()
        self.writers.clear()


class Inbox:
    """Messages of one session on their way in. `window`: bytes of messages and payloads that may wait for an earlier
    message of their priority. Payloads lie in memory of the owner; at most `most_kept` bytes of messages wait here,
    more than an honest sender ever sends."""

    def __init__(self, decode: Callable[[bytes], Any], session: Session, window: int) -> None:
        self._decode, self._session, self._window = decode, session, window
        self._open: tuple[dict[int, _Incoming], ...] = tuple({} for _ in Priority)
        self.through = [0 for _ in Priority]
        """By priority: number of the first message that is neither delivered nor void."""
        self.stopped = False
        """Delivers no more: the session is ending."""
        self.voided = 0
        self.most_kept = TALK_BYTES + kept_bytes(MAX_HEADER)
        self._held_bytes = self._kept_bytes = 0
        self._delivering: set[int] = set()

    def begin(self, prefix: Prefix, header: bytes, reader: FrameReader) -> list[memoryview]:
        """Returns memory for the payload of a frame that `reader` receives. Calls `place` for a message's first
        frame."""
        if prefix.priority >= len(Priority):
            raise ProtocolError(f"priority {prefix.priority} does not exist")
        incoming = self._incoming(prefix, header)
        if incoming is None or incoming.void or prefix.offset in incoming.lengths:
            return scratch(prefix.length)
        if incoming.size != prefix.total:
            raise ProtocolError("slices of one payload disagree on its length")
        if not prefix.length:
            return []
        before = incoming.writers.get(prefix.offset)
        if before is not None:  # over a lane that is lost, though we do not know it yet
            before.divert()
        incoming.writers[prefix.offset] = reader
        assert incoming.pieces is not None
        return incoming.pieces.cut(prefix.offset, prefix.length)

    def end(self, prefix: Prefix, reader: FrameReader, is_good: bool) -> None:
        """Takes a whole frame and delivers messages that are complete. A frame that is not good does not count: its
        message was cancelled, and the notice of that is on its way."""
        opened = self._open[prefix.priority]
        incoming = opened.get(prefix.seq)
        if incoming is None or incoming.void:
            return
        if prefix.length:
            if incoming.writers.get(prefix.offset) is not reader:
                return
            del incoming.writers[prefix.offset]
            if not is_good:
                return
            incoming.lengths[prefix.offset] = prefix.length
            incoming.received += prefix.length
            if len(incoming.lengths) > 1 and incoming.whole:
                incoming.check_slices()
        if prefix.seq == self.through[prefix.priority]:
            self._deliver(prefix.priority)
        else:
            self._hold(incoming, prefix.length, 0)

    def cancelled(self, priority: int, seq: int) -> None:
        """Voids a message that its sender took back, even before its first frame."""
        if priority >= len(Priority):
            raise ProtocolError(f"priority {priority} does not exist")
        if seq < self.through[priority]:
            return
        incoming = self._open[priority].get(seq)
        if incoming is None:
            incoming = self._open[priority][seq] = _Incoming(None, 0)
            self._hold(incoming, PREFIX_BYTES, kept_bytes(0))
        self._void(incoming, tell=True)
        self._deliver(priority)

    def refuse(self, message: Any) -> tuple[int, int] | None:
        """Gives up a message whose payload is under way: its memory is the caller's again. Returns its priority and
        number; None when no such message is open."""
        for priority, opened in enumerate(self._open):
            for seq, incoming in opened.items():
                if incoming.message is message and not incoming.void:
                    self._void(incoming, tell=False)
                    self._deliver(priority)
                    return priority, seq
        return None

    def lane_lost(self, reader: FrameReader) -> None:
        """Forgets the slices that this lane was receiving: they will come again."""
        for opened in self._open:
            for incoming in opened.values():
                for offset in [at for at, writer in incoming.writers.items() if writer is reader]:
                    del incoming.writers[offset]

    def end_all(self) -> None:
        """Gives all placed memory back to its owner: the session is over."""
        for opened in self._open:
            for incoming in list(opened.values()):
                if not incoming.void:
                    self._void(incoming, tell=True)
            opened.clear()

    def _incoming(self, prefix: Prefix, header: bytes) -> _Incoming | None:
        """Finds or opens the message of a frame. Returns None when it was delivered already."""
        if prefix.seq < self.through[prefix.priority]:
            return None
        opened = self._open[prefix.priority]
        incoming = opened.get(prefix.seq)
        if incoming is None:
            waits = prefix.seq > self.through[prefix.priority]
            if prefix.total:
                message = self._read(header)
                incoming = _Incoming(message, prefix.total)
                incoming.pieces = Pieces(self._session.place(message, prefix.total))
            else:
                incoming = _Incoming(None, 0, header) if waits else _Incoming(self._read(header), 0)
            opened[prefix.seq] = incoming
            if incoming.pieces is not None and incoming.pieces.size != prefix.total:
                raise ProtocolError(f"a payload of {prefix.total} bytes does not fit the message it came with")
            if waits:
                self._hold(incoming, PREFIX_BYTES + prefix.header, kept_bytes(prefix.header))
        return incoming

    def _read(self, header: bytes) -> Any:
        return read(self._decode, header, "a message")

    def _void(self, incoming: _Incoming, *, tell: bool) -> None:
        incoming.void, incoming.header = True, None
        incoming.divert()
        placed, incoming.pieces = incoming.pieces, None
        self.voided += 1
        if placed is not None and tell:
            self._session.on_void(incoming.message)

    def _hold(self, incoming: _Incoming, count: int, kept: int) -> None:
        """Counts bytes that wait for an earlier message. Raises ProtocolError beyond the limits; an honest sender
        stops before."""
        incoming.held += count
        incoming.kept += kept
        self._held_bytes += count
        self._kept_bytes += kept
        if self._held_bytes > self._window + TALK_BYTES + MAX_SLICE or self._kept_bytes > self.most_kept:
            raise ProtocolError("the peer sent more than it was allowed to")

    def _deliver(self, priority: int) -> None:
        if priority in self._delivering:
            return  # called from within on_message: the loop below goes on
        self._delivering.add(priority)
        try:
            while not self.stopped and self._deliver_next(priority):
                pass
        finally:
            self._delivering.discard(priority)

    def _deliver_next(self, priority: int) -> bool:
        opened, seq = self._open[priority], self.through[priority]
        incoming = opened.get(seq)
        if incoming is None or not (incoming.void or incoming.whole):
            return False
        del opened[seq]
        self.through[priority] = seq + 1
        self._held_bytes -= incoming.held
        self._kept_bytes -= incoming.kept
        if not incoming.void:
            incoming.pieces = None
            message = incoming.message if incoming.header is None else self._read(incoming.header)
            self._session.on_message(message)
        return True


ACK_BYTES = 16 << 20
ACK_FRAMES = 256
"""Frames after which an acknowledgement goes at once, as after ACK_BYTES. One that travels alone costs as much as
receiving some hundred KiB, so there should be few."""


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """`through`: by priority, number of the first message that is still needed. `frames`: number of each lane, and
    how many frames came over it so far."""

    through: tuple[int, ...]
    frames: tuple[tuple[int, int], ...]


class Close(msgspec.Struct, frozen=True, array_like=True):
    """Last frame of a session. `finals`: by priority, how many messages were sent before it."""

    finals: tuple[int, ...]
    reason: str


_encode = msgspec.msgpack.Encoder().encode


class Arrivals:
    """Frames that came over each lane and are not acknowledged. `is_due`: an acknowledgement must go by itself."""

    def __init__(self, window: int) -> None:
        self.is_due = False
        self._limit = min(ACK_BYTES, window // 4)
        self._new: dict[Lane, int] = {}
        self._bytes = 0

    def count(self, lane: Lane, size: int) -> bool:
        """Counts a frame of `size` bytes. Returns True when the acknowledgement should not wait any longer."""
        lane.frames_in += 1
        self._new[lane] = self._new.get(lane, 0) + 1
        self._bytes += size
        return self._bytes >= self._limit or self._new[lane] >= ACK_FRAMES

    def forget(self, lane: Lane) -> None:
        self._new.pop(lane, None)

    def repeat(self, lanes: Sequence[Lane]) -> None:
        """Acknowledges again the frames that came over these lanes."""
        for lane in lanes:
            self._new.setdefault(lane, 0)
        self.is_due = True

    def frame(self, through: Sequence[int]) -> Frame:
        """Encodes an acknowledgement of everything that came."""
        header = _encode(Ack(tuple(through), tuple((lane.number, lane.frames_in) for lane in self._new)))
        self._new.clear()
        self._bytes, self.is_due = 0, False
        return Frame(prefix_of(FrameKind.ACK, header) + header)
