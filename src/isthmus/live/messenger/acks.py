"""What a session tells its peer about what arrived, and its last words."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from isthmus.live.messenger.frames import Kind, prefix_of
from isthmus.live.messenger.lane import Lane
from isthmus.live.messenger.outbox import Frame
from isthmus.live.messenger.reading import read

ACK_BYTES = 16 << 20
ACK_FRAMES = 256
"""What may have come before it is acknowledged without waiting. An acknowledgement that travels alone costs as much
as receiving some hundred KiB, so there should be few."""


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """All messages before `through` (by priority) need nothing more; `frames`: received so far, by lane."""

    through: tuple[int, ...]
    frames: tuple[tuple[int, int], ...]


class Close(msgspec.Struct, frozen=True, array_like=True):
    """Messages up to these numbers (by priority) were sent before it."""

    finals: tuple[int, ...]
    reason: str


_encode = msgspec.msgpack.Encoder().encode
_ack_of, _close_of = msgspec.msgpack.Decoder(Ack).decode, msgspec.msgpack.Decoder(Close).decode


class Arrivals:
    """What came over each lane and was not acknowledged yet. `is_due`: an acknowledgement is to go by itself."""

    def __init__(self, window: int) -> None:
        self.is_due = False
        self._limit = min(ACK_BYTES, window // 4)
        self._new: dict[Lane, int] = {}
        self._bytes = 0

    def count(self, lane: Lane, size: int) -> bool:
        """One more frame, of `size` bytes; True when all this should not wait any longer."""
        lane.frames_in += 1
        self._new[lane] = self._new.get(lane, 0) + 1
        self._bytes += size
        return self._bytes >= self._limit or self._new[lane] >= ACK_FRAMES

    def forget(self, lane: Lane) -> None:
        self._new.pop(lane, None)

    def repeat(self, lanes: Sequence[Lane]) -> None:
        """Acknowledges again what came over these."""
        for lane in lanes:
            self._new.setdefault(lane, 0)
        self.is_due = True

    def frame(self, through: Sequence[int]) -> Frame:
        """Acknowledges everything."""
        header = _encode(Ack(tuple(through), tuple((lane.number, lane.frames_in) for lane in self._new)))
        self._new.clear()
        self._bytes, self.is_due = 0, False
        return Frame(prefix_of(Kind.ACK, header) + header)


def close_frame(finals: tuple[int, ...], reason: str) -> Frame:
    header = _encode(Close(finals, reason))
    return Frame(prefix_of(Kind.CLOSE, header) + header)


def read_ack(header: bytes) -> Ack:
    return read(_ack_of, header, "an Ack")


def read_close(header: bytes) -> Close:
    return read(_close_of, header, "a Close")
