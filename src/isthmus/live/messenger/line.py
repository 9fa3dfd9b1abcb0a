"""Questions of one thread and answers of another, over a connection of its own beside a session.

Over a session the thread that asks would wake its event loop, which wakes the peer's, which wakes the thread that
answers, and so back. On a line each thread reads and writes the socket itself, so one thread wakes the other.

The side that opened the session opens its lines; a line ends with its session. Questions are answered in order, and
several may be asked before the first is answered. A lost connection ends the line: nothing is sent again.

    question:  bytes of the head and of the payload (u32, u64, little-endian); head; payload
    answer:    bytes (u64); these. 0 bytes: the question cannot be answered
"""

from __future__ import annotations

import select
import struct
import threading
from collections import deque

from isthmus.live.messenger.streams import Stream

MAX_HEAD = 16 << 20
MAX_PAYLOAD = 1 << 30
_QUESTION = struct.Struct("<IQ")
_ANSWER = struct.Struct("<Q")


class LineLost(Exception):
    """Raised when the connection ended, or nothing came for too long. The line is of no use any more."""


class _End:
    """Socket of either side. `limit_s`: longest wait for bytes; None: for ever."""

    def __init__(self, stream: Stream, limit_s: float | None) -> None:
        self._stream, self._limit_s = stream, limit_s
        self._changed = threading.Condition()
        self._using = threading.Lock()  # the stream; TLS reads and writes with one state
        self._waiting = 0
        self._is_over = False
        self.bytes_in = self.bytes_out = 0

    @property
    def is_over(self) -> bool:
        return self._is_over

    def hang_up(self) -> None:
        """Ends the line on both sides, and wakes who waits for it. From any thread; idempotent."""
        self._is_over = True
        self._stream.hang_up()
        with self._changed:
            self._changed.notify_all()
            self._close()

    def _close(self) -> None:
        """Closes the socket once nobody waits for it: its number may then be another's."""
        if self._is_over and not self._waiting:
            with self._using:
                self._stream.close()

    def _wait(self, events: int) -> int:
        """Waits for one of the poll events. Returns those that happened. Raises LineLost."""
        with self._changed:
            if self._is_over:
                raise LineLost("it was hung up")
            self._waiting += 1
            poll = select.poll()
            poll.register(self._stream.fileno(), events)
        try:
            with self._using:
                if events & select.POLLIN and self._stream.pending:
                    return select.POLLIN
            found = poll.poll(None if self._limit_s is None else self._limit_s * 1000)
        finally:
            with self._changed:
                self._waiting -= 1
                self._close()
        if not found:
            raise LineLost(f"nothing came in {self._limit_s:g} s")
        return found[0][1]

    def _receive(self, buffer: memoryview) -> int:
        """Reads into `buffer` without waiting. Returns the number of bytes, perhaps 0. Raises LineLost."""
        with self._using:
            try:
                count = None if self._is_over else self._stream.receive([buffer])
            except OSError as error:
                raise LineLost(str(error)) from None
        if self._is_over:  # what came after that may be anything
            raise LineLost("it was hung up")
        if count == 0:
            raise LineLost("the other side hung up")
        self.bytes_in += count or 0
        return count or 0

    def _send(self, views: list[memoryview]) -> list[memoryview]:
        """Writes without waiting. Returns the views still to write. Raises LineLost."""
        with self._using:
            try:
                count = None if self._is_over else self._stream.send(views)
            except OSError as error:
                raise LineLost(str(error)) from None
        if self._is_over:
            raise LineLost("it was hung up")
        if count is None:
            return views
        self.bytes_out += count
        return rest_of(views, count)


class Question:
    """A question that was asked, and the answer as far as it came."""

    __slots__ = ("answer", "is_over", "left")

    def __init__(self) -> None:
        self.answer: memoryview | None = None
        self.left = memoryview(bytearray(_ANSWER.size))
        self.is_over = False


class Asker(_End):
    """The side that asks, for several threads. One of the threads that wait reads, for all of them."""

    def __init__(self, stream: Stream, limit_s: float | None) -> None:
        super().__init__(stream, limit_s)
        self._asked: deque[Question] = deque()
        self._is_read = False
        self._writing = threading.Lock()

    def ask(self, head: bytes, payload: memoryview) -> Question:
        """Sends a question; returns when all of it is on its way. Reads answers meanwhile, so that two sides that
        send much to each other do not block. Raises LineLost."""
        question = Question()
        with self._writing:
            with self._changed:
                self._asked.append(question)
            views = [memoryview(_QUESTION.pack(len(head), payload.nbytes) + head), payload]
            while views := self._send(views):
                self._advance(select.POLLIN | select.POLLOUT)
        return question

    def answer(self, question: Question) -> memoryview | None:
        """Waits for the answer. None: the question cannot be answered. Raises LineLost."""
        while not question.is_over:
            self._advance(select.POLLIN, question)
        return question.answer

    def _advance(self, events: int, question: Question | None = None) -> None:
        """Reads what is there; else waits for one of the events, or for the thread that reads already."""
        with self._changed:
            if question is not None and question.is_over:
                return
            reads = not self._is_read
            if reads and self._read():
                self._changed.notify_all()
                return
            if not reads and not events & select.POLLOUT:
                self._changed.wait()
                return
            self._is_read = True
        try:
            found = self._wait(events)
        finally:
            if reads:
                with self._changed:
                    self._is_read = False
                    self._changed.notify_all()
        if not reads and not found & select.POLLOUT:  # who reads is about to
            with self._changed:
                self._changed.wait(0.001)

    def _read(self) -> bool:
        """Reads more of the first answer. Returns False where nothing is there."""
        question = self._asked[0] if self._asked else None
        if question is None:
            if self._receive(memoryview(bytearray(1))):
                raise LineLost("an answer to nothing")
            return False
        count = self._receive(question.left)
        if count < len(question.left):
            question.left = question.left[count:]
            return count > 0
        if question.answer is None and (size := self._size_of(question)):
            question.answer = question.left = memoryview(bytearray(size))
        else:
            question.is_over = True
            self._asked.popleft()
        return True

    @staticmethod
    def _size_of(question: Question) -> int:
        (size,) = _ANSWER.unpack(question.left.obj)
        if size > MAX_PAYLOAD:
            raise LineLost(f"an answer of {size} bytes")
        return int(size)


class Answerer(_End):
    """The side that answers, for one thread."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream, None)

    def next(self) -> tuple[memoryview, memoryview]:
        """Waits for the next question. Returns its head and payload. Raises LineLost at the end."""
        head_bytes, payload_bytes = _QUESTION.unpack(self._whole(_QUESTION.size))
        if head_bytes > MAX_HEAD or payload_bytes > MAX_PAYLOAD:
            raise LineLost("a question too long")
        return self._whole(head_bytes), self._whole(payload_bytes)

    def answer(self, data: memoryview | None) -> None:
        """Sends an answer. None: the question cannot be answered. Raises LineLost."""
        views = [memoryview(_ANSWER.pack(0 if data is None else data.nbytes))]
        if data is not None:
            views.append(data)
        while views := self._send(views):
            self._wait(select.POLLOUT)

    def _whole(self, size: int) -> memoryview:
        data = left = memoryview(bytearray(size))
        while len(left):
            count = self._receive(left)
            left = left[count:]
            if not count:
                self._wait(select.POLLIN)
        return data


def rest_of(views: list[memoryview], count: int) -> list[memoryview]:
    """Returns the views without their first `count` bytes."""
    for at, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[at + 1 :]]
        count -= len(view)
    return []
