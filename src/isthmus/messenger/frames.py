"""Frames, without I/O: `magic | header length | payload length | header | payload`.

The header is one msgpack message. The payload is raw bytes that the receiver wants in place: when a frame's
header has come, `place` says where its payload goes, and the bytes are received there, not copied there.

    prefix ──16 bytes──> header ──decoded──> payload ──all bytes──> prefix
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from isthmus.errors import ProtocolError

MAGIC = 0x31545349  # "IST1": another protocol version has another magic
MAX_HEADER = 16 << 20
MAX_PAYLOAD = 1 << 31
_PREFIX = struct.Struct("<IIQ")
_STAGING = 1 << 16

Message = TypeVar("Message")
Place = Callable[[Any, int], Sequence[memoryview]]

_encoder = msgspec.msgpack.Encoder()


def frame(message: Any, payload_bytes: int = 0) -> bytes:
    """Prefix and header of a frame; the payload's bytes follow it on the wire."""
    header = _encoder.encode(message)
    if len(header) > MAX_HEADER:
        raise ProtocolError(f"message of {len(header)} bytes exceeds the limit of {MAX_HEADER}")
    return _PREFIX.pack(MAGIC, len(header), payload_bytes) + header


class FrameReader(Generic[Message]):
    """Turns received bytes into messages. Small frames pass through a staging buffer; the rest of a large
    payload is received straight into its place.

    The owner repeats: read up to `len(buffer())` bytes into `buffer()`, then iterate `advance(count)`.
    """

    def __init__(self, decode: Callable[[bytes], Message], place: Place) -> None:
        self._decode, self._place = decode, place
        self._staging = memoryview(bytearray(_STAGING))
        self._first = self._last = 0  # staged bytes not yet parsed: [first, last)
        self._needed: tuple[int, int] | None = None  # (header, payload) bytes of the frame under way
        self._message: Message | None = None
        self._targets: list[memoryview] = []  # payload memory still to fill, in order

    def buffer(self) -> memoryview:
        """Where the next received bytes go. Never empty."""
        if self._targets and self._first == self._last:
            return self._targets[0]
        if self._last == len(self._staging):
            self._make_room()
        return self._staging[self._last :]

    def advance(self, count: int) -> Iterator[Message]:
        """Books `count` bytes received into `buffer()`; yields each message whose frame is now complete.

        Raises ProtocolError on bytes that are no frame, a frame over the limits or an unknown message.
        """
        if self._targets and self._first == self._last:
            self._fill(count)
        else:
            self._last += count
        while True:
            if self._message is None and not self._begin():
                return
            if not self._drain_staging():
                return
            message, self._message = self._message, None
            assert message is not None
            yield message

    def _make_room(self) -> None:
        left = self._staging[self._first : self._last]
        if self._first:
            self._staging[: len(left)] = bytes(left)
        else:  # one header larger than the staging buffer
            grown = memoryview(bytearray(2 * len(self._staging)))
            grown[: len(left)] = left
            self._staging = grown
        self._first, self._last = 0, len(left)

    def _take(self, count: int) -> memoryview | None:
        if self._last - self._first < count:
            return None
        taken = self._staging[self._first : self._first + count]
        self._first += count
        if self._first == self._last:
            self._first = self._last = 0
        return taken

    def _begin(self) -> bool:
        """Parses prefix and header when they are here; False when more bytes are needed."""
        if self._needed is None:
            prefix = self._take(_PREFIX.size)
            if prefix is None:
                return False
            magic, header, payload = _PREFIX.unpack(prefix)
            if magic != MAGIC:
                raise ProtocolError("the peer does not speak this protocol version")
            if header > MAX_HEADER or payload > MAX_PAYLOAD:
                raise ProtocolError(f"a frame of {header} + {payload} bytes exceeds the limits")
            self._needed = (header, payload)
        header, payload = self._needed
        body = self._take(header)
        if body is None:
            return False
        try:
            self._message = self._decode(bytes(body))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a message could not be read: {error}") from None
        self._needed = None
        self._targets = [
            memoryview(part).cast("B") for part in self._place(self._message, payload) if len(part)
        ]
        if sum(map(len, self._targets)) != payload:
            raise ProtocolError(f"a payload of {payload} bytes does not fit the message it came with")
        return True

    def _drain_staging(self) -> bool:
        """Moves staged payload bytes to their place; True when the payload is complete."""
        while self._targets:
            count = min(len(self._targets[0]), self._last - self._first)
            if count == 0:
                return False
            taken = self._take(count)
            assert taken is not None
            self._targets[0][:count] = taken
            self._fill(count)
        return True

    def _fill(self, count: int) -> None:
        if count == len(self._targets[0]):
            self._targets.pop(0)
        else:
            self._targets[0] = self._targets[0][count:]
