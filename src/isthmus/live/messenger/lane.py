"""One connection of a session, without I/O: frames to be written to it, and the reader of its bytes.

The binding repeats `views` -> write -> `wrote`, and read into `reader.buffers()` -> `reader.advance`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from isthmus.live.messenger.frames import GOOD, IO_PARTS, VOID, FrameReader, zeros
from isthmus.live.messenger.outbox import Frame, Sending

if TYPE_CHECKING:
    from isthmus.live.messenger.session import Session

WRITE_BYTES = 1 << 20
"""Bytes given to a lane at once. A later message of higher priority waits for them."""


_GOOD, _VOID = memoryview(GOOD), memoryview(VOID)


class _Unwritten:
    """A frame, or what is left of it to write."""

    __slots__ = ("at", "frame", "is_acknowledged", "parts")

    def __init__(self, frame: Frame, is_acknowledged: bool) -> None:
        self.frame, self.is_acknowledged = frame, is_acknowledged
        self.parts: list[memoryview] = [memoryview(frame.head), *frame.views]
        if frame.views:
            self.parts.append(_GOOD)
        self.at = 0


class Lane:
    """One connection, numbered by the side that opened the session; a number is never used again."""

    def __init__(self, session: Session, number: int) -> None:
        self._session, self.number = session, number
        self.reader = FrameReader(session, self)
        self.frames_in = 0  # of those that are acknowledged
        self.frames_written = 0  # of those that are to be acknowledged
        self.frames_out = 0  # acknowledged by the peer
        self.progress_ns = 0  # when something of it was last acknowledged, or began to be waited for
        self.unacked: deque[Frame] = deque()
        self._unwritten: deque[_Unwritten] = deque()
        self._unwritten_bytes = 0

    def fill(self) -> bool:
        """Takes frames until a batch is full. Returns False when there is nothing to write."""
        while self._unwritten_bytes < WRITE_BYTES:
            taken = self._session.next_frame(self)
            if taken is None:
                break
            frame, is_acknowledged = taken
            if is_acknowledged:
                self.unacked.append(frame)
            self._unwritten.append(_Unwritten(frame, is_acknowledged))
            self._unwritten_bytes += frame.length
        return self._unwritten_bytes > 0

    @property
    def unwritten_bytes(self) -> int:
        return self._unwritten_bytes

    def views(self) -> list[memoryview]:
        """Returns the bytes to write next, in order, as much as one system call takes."""
        found: list[memoryview] = []
        for unwritten in self._unwritten:
            found += unwritten.parts[unwritten.at : unwritten.at + IO_PARTS]
            if len(found) >= IO_PARTS:
                return found[:IO_PARTS]
        return found

    def wrote(self, count: int) -> None:
        self._unwritten_bytes -= count
        while count:
            unwritten = self._unwritten[0]
            part = unwritten.parts[unwritten.at]
            if count < len(part):
                unwritten.parts[unwritten.at] = part[count:]
                return
            count -= len(part)
            unwritten.at += 1
            if unwritten.at == len(unwritten.parts):
                self._unwritten.popleft()
                self.frames_written += unwritten.is_acknowledged

    def blank(self, sending: Sending) -> None:
        """Stops reading the memory of this message: zeros fill up its unwritten frames."""
        for unwritten in self._unwritten:
            if unwritten.frame.sending is sending and unwritten.frame.views:
                first = max(unwritten.at, 1)  # part 0 is the head, the last one the verdict
                left = sum(map(len, unwritten.parts[first:-1]))
                unwritten.parts[first:] = [*zeros(left), _VOID]

    def acknowledged(self, count: int) -> list[Frame]:
        """Books that the peer has received `count` frames of this lane in all. Returns those newly acknowledged."""
        found = []
        while self.frames_out < count and self.unacked:
            found.append(self.unacked.popleft())
            self.frames_out += 1
        return found
