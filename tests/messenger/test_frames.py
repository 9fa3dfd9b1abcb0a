from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import ProtocolError
from isthmus.messenger import FrameReader, frame
from isthmus.messenger.frames import MAGIC, MAX_HEADER, MAX_PAYLOAD


class Small(msgspec.Struct, frozen=True, tag=True):
    text: str


class Bulk(msgspec.Struct, frozen=True, tag=True):
    """Says in which pieces its payload is to lie."""

    pieces: tuple[int, ...]


Message = Small | Bulk
DECODE = msgspec.msgpack.Decoder(Message).decode


class Inbox:
    """Places every payload into fresh memory, in the pieces its message names, and keeps all."""

    def __init__(self) -> None:
        self.memory: list[list[bytearray]] = []
        self.reader: FrameReader[Message] = FrameReader(DECODE, self._place)
        self.messages: list[Message] = []
        self.bytes_staged = 0

    def _place(self, message: Message, size: int) -> Sequence[memoryview]:
        if isinstance(message, Small):
            assert size == 0
            return []
        self.memory.append([bytearray(piece) for piece in message.pieces])
        return [memoryview(piece) for piece in self.memory[-1]]

    def feed(self, wire: bytes, cut: Callable[[], int]) -> None:
        """Receives `wire` in reads of at most `cut()` bytes each."""
        at = 0
        while at < len(wire):
            buffer = self.reader.buffer()
            assert len(buffer) > 0
            count = min(cut(), len(buffer), len(wire) - at)
            buffer[:count] = wire[at : at + count]
            at += count
            self.messages += self.reader.advance(count)

    @property
    def payloads(self) -> list[bytes]:
        return [b"".join(pieces) for pieces in self.memory]


def wire_of(messages: Sequence[Message], payloads: Sequence[bytes]) -> bytes:
    left = list(payloads)
    parts = []
    for message in messages:
        payload = left.pop(0) if isinstance(message, Bulk) else b""
        parts += [frame(message, len(payload)), payload]
    return b"".join(parts)


def bulk(data: bytes, *cuts: int) -> Bulk:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return Bulk(tuple(stop - start for start, stop in pairwise(edges)))


BULKS = st.builds(
    lambda data, cuts: (bulk(data, *cuts), data),
    st.one_of(
        st.binary(max_size=100), st.integers(0, 200_000).map(lambda size: bytes(range(256)) * (size // 256))
    ),
    st.lists(st.integers(0, 200_000), max_size=3),
)
SMALLS = st.builds(Small, st.one_of(st.text(max_size=30), st.integers(0, 200_000).map(lambda size: "x" * size)))


@settings(max_examples=80)
@given(st.lists(st.one_of(SMALLS, BULKS), max_size=6), st.data())
def test_however_the_wire_is_cut_the_same_messages_come(items: list, data: st.DataObject) -> None:
    messages = [item[0] if isinstance(item, tuple) else item for item in items]
    payloads = [item[1] for item in items if isinstance(item, tuple)]
    wire = wire_of(messages, payloads)
    smallest = max(1, len(wire) // 300)
    sizes = data.draw(st.lists(st.integers(smallest, 4 * smallest + 70_000), min_size=1, max_size=20))
    inbox, turn = Inbox(), iter(range(10**9))
    inbox.feed(wire, lambda: sizes[next(turn) % len(sizes)])
    assert inbox.messages == messages
    assert inbox.payloads == payloads


def test_byte_by_byte_is_a_cut_too() -> None:
    messages = [Small("a"), bulk(b"payload", 2, 2, 5), Small("b"), bulk(b""), Small("")]
    inbox = Inbox()
    inbox.feed(wire_of(messages, [b"payload", b""]), lambda: 1)
    assert inbox.messages == messages
    assert inbox.payloads == [b"payload", b""]


def test_a_message_comes_as_soon_as_its_last_byte_does() -> None:
    wire = wire_of([bulk(b"payload")], [b"payload"])
    inbox = Inbox()
    inbox.feed(wire[:-1], lambda: 1)
    assert inbox.messages == []
    inbox.feed(wire[-1:], lambda: 1)
    assert inbox.messages == [bulk(b"payload")]


def test_a_large_payload_is_received_in_place() -> None:
    """What was read together with the header is moved; all that follows goes where it belongs at once."""
    data = bytes(range(256)) * 1024
    inbox, wire = Inbox(), wire_of([bulk(data, 100_000)], [data])
    inbox.feed(wire[:5000], lambda: 5000)
    first, second = inbox.memory[0]
    buffer = inbox.reader.buffer()
    assert buffer.obj is first and len(buffer) == len(first) - (5000 - (len(wire) - len(data)))
    inbox.feed(wire[5000:], lambda: len(buffer))
    assert inbox.reader.buffer().obj is not second
    assert inbox.payloads == [data]


def test_nothing_after_a_payload_lands_in_its_memory() -> None:
    data = b"p" * 1000
    inbox = Inbox()
    inbox.feed(wire_of([bulk(data), Small("after")], [data]), lambda: 10**6)
    assert inbox.payloads == [data] and inbox.messages[1] == Small("after")


def reading(wire: bytes, place: Callable[[object, int], Sequence[memoryview]] = lambda *_: ()) -> None:
    reader = FrameReader(DECODE, place)
    while wire:
        buffer = reader.buffer()
        count = min(len(buffer), len(wire))
        buffer[:count] = wire[:count]
        wire = wire[count:]
        list(reader.advance(count))


def prefix(magic: int = MAGIC, header: int = 8, payload: int = 0) -> bytes:
    return magic.to_bytes(4, "little") + header.to_bytes(4, "little") + payload.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("wire", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "protocol version"),
        (prefix(magic=MAGIC + 1), "protocol version"),
        (prefix(header=MAX_HEADER + 1), "limits"),
        (prefix(payload=MAX_PAYLOAD + 1), "limits"),
        (prefix(header=0), "could not be read"),
        (prefix(header=1) + b"\xc1", "could not be read"),
        (prefix(header=3) + msgspec.msgpack.encode(17)[:1] + b"xx", "could not be read"),
        (frame({"type": "Unknown"}), "could not be read"),
        (frame({"type": "Small", "text": 5}), "could not be read"),
        (frame(Small("a"), 5), "does not fit"),
    ],
)
def test_what_is_no_frame_is_refused(wire: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        reading(wire)


def test_a_string_that_is_no_utf8_is_refused() -> None:
    header = msgspec.msgpack.encode(Small("good")).replace(b"good", b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="could not be read"):
        reading(prefix(header=len(header)) + header)


@pytest.mark.parametrize("given_size", [4, 6])
def test_memory_of_another_size_than_the_payload_is_refused(given_size: int) -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        reading(frame(Bulk((5,)), 5) + b"12345", lambda *_: [memoryview(bytearray(given_size))])


def memory_for(_: object, size: int) -> list[memoryview]:
    return [memoryview(bytearray(min(size, 1000)))]


@given(st.binary(max_size=300), st.booleans())
def test_garbage_never_raises_anything_else(garbage: bytes, well_begun: bool) -> None:
    wire = prefix(header=len(garbage)) + garbage if well_begun else garbage
    with suppress(ProtocolError):
        reading(wire, memory_for)


@given(st.integers(0, 60), st.integers(1, 255))
def test_a_flipped_byte_never_raises_anything_else(at: int, flip: int) -> None:
    wire = bytearray(wire_of([Small("some text é"), bulk(b"12")], [b"12"]))
    wire[at % len(wire)] ^= flip
    with suppress(ProtocolError):
        reading(bytes(wire), memory_for)


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        frame(Small("x" * (MAX_HEADER + 1)))
