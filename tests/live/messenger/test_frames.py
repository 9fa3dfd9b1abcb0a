from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import ProtocolError
from isthmus.live.messenger.frames import (
    GOOD,
    MAX_HEADER,
    MAX_SLICE,
    PREFIX_BYTES,
    STAGING,
    VOID,
    FrameKind,
    FrameReader,
    Prefix,
    prefix_of,
)

Item = tuple[bytes, bytes, tuple[int, ...]]
"""Header, payload, and the pieces of memory its payload is to lie in."""


class Inbox:
    """Receives every payload into fresh memory, and keeps all."""

    def __init__(self, items: Sequence[Item] = ()) -> None:
        self.reader = FrameReader(self)
        self.frames: list[tuple[bytes, bytes]] = []
        self.verdicts: list[bool] = []
        self.admitted: list[int] = []
        self.grown_bytes: list[int] = []
        self.memory: list[bytearray] = []
        self._pieces = [pieces for _, payload, pieces in items]
        self._header = b""

    def admit(self, prefix: Prefix) -> None:
        self.admitted.append(prefix.header)

    def grown(self) -> None:
        self.grown_bytes.append(self.reader.grown_bytes)

    def begin(self, prefix: Prefix, header: bytes) -> Sequence[memoryview]:
        self._header = header
        pieces = (
            self._pieces.pop(0) if self._pieces else ((min(prefix.length, 1 << 20),) if prefix.length else ())
        )
        self.memory = [bytearray(piece) for piece in pieces if piece]
        return [memoryview(piece) for piece in self.memory]

    def end(self, prefix: Prefix, is_good: bool) -> bool:
        self.frames.append((self._header, b"".join(self.memory)))
        self.verdicts.append(is_good)
        return True

    def feed(self, wire: bytes, cut: Callable[[], int]) -> None:
        """Receives `wire` in reads of at most `cut()` bytes each."""
        at = 0
        while at < len(wire):
            left = wire[at : at + cut()]
            count = 0
            for buffer in self.reader.buffers():
                assert len(buffer) > 0
                part = left[count : count + len(buffer)]
                buffer[: len(part)] = part
                count += len(part)
            at += count
            self.reader.advance(count)


def frame(header: bytes, payload: bytes = b"", verdict: bytes = GOOD) -> bytes:
    size = len(payload)
    head = prefix_of(FrameKind.DATA, header, total=size, length=size)
    return head + header + payload + (verdict if payload else b"")


def item(header: bytes, payload: bytes, cuts: Sequence[int] = ()) -> Item:
    edges = [0, *sorted(min(cut, len(payload)) for cut in cuts), len(payload)]
    return header, payload, tuple(stop - start for start, stop in pairwise(edges))


LONG = st.integers(0, 200_000).map(lambda size: bytes(range(256)) * (size // 256))
BYTES = st.one_of(st.just(b""), st.binary(max_size=100), LONG)
ITEMS = st.builds(item, BYTES, BYTES, st.lists(st.integers(0, 200_000), max_size=3))


@settings(max_examples=80)
@given(st.lists(ITEMS, max_size=6), st.data())
def test_however_the_wire_is_cut_the_same_frames_come(items: list[Item], data: st.DataObject) -> None:
    wire = b"".join(frame(header, payload) for header, payload, _ in items)
    smallest = max(1, len(wire) // 300)
    sizes = data.draw(st.lists(st.integers(smallest, 4 * smallest + 70_000), min_size=1, max_size=20))
    inbox, turn = Inbox(items), iter(range(10**9))
    inbox.feed(wire, lambda: sizes[next(turn) % len(sizes)])
    assert inbox.frames == [(header, payload) for header, payload, _ in items]


def test_a_frame_comes_as_soon_as_its_last_byte_does() -> None:
    wire = frame(b"a", b"payload")
    inbox = Inbox()
    inbox.feed(wire[:-1], lambda: 1)
    assert inbox.frames == []
    inbox.feed(wire[-1:], lambda: 1)
    assert inbox.frames == [(b"a", b"payload")]


def test_a_large_payload_is_received_in_place() -> None:
    """What was read together with the header is moved; all that follows goes where it belongs at once."""
    data = bytes(range(256)) * 1024
    inbox, wire = Inbox([item(b"h", data, (100_000,))]), frame(b"h", data)
    inbox.feed(wire[:5000], lambda: 5000)
    first, second = inbox.memory
    buffers = inbox.reader.buffers()
    assert buffers[0].obj is first and len(buffers[0]) == len(first) - (5000 - PREFIX_BYTES - 1)
    assert buffers[1].obj is second
    assert len(buffers) == 3 and len(buffers[2]) == STAGING
    inbox.feed(wire[5000:], lambda: 1 << 30)
    assert inbox.frames == [(b"h", data)]


def test_memory_for_a_long_header_grows_as_its_bytes_come() -> None:
    """Announcing one costs nothing."""
    inbox, header = Inbox(), bytes(MAX_HEADER - 1)
    wire, come = frame(header), 0
    for size in (PREFIX_BYTES, STAGING, 5 * STAGING):
        inbox.feed(wire[come : come + size], lambda: 1000)
        come += size
        assert inbox.admitted == [len(header)]
        assert inbox.reader.grown_bytes <= 2 * come
    inbox.feed(wire[come:], lambda: 1 << 30)
    assert inbox.frames == [(header, b"")]
    assert inbox.grown_bytes == sorted(inbox.grown_bytes) and inbox.reader.grown_bytes == 0


def test_what_is_diverted_is_read_past() -> None:
    inbox = Inbox()
    wire = frame(b"h", b"p" * 200_000) + frame(b"after")
    inbox.feed(wire[:100_000], lambda: 1 << 30)
    before = bytes(inbox.memory[0])
    inbox.reader.divert()
    inbox.feed(wire[100_000:], lambda: 1 << 30)
    assert inbox.memory == []
    assert inbox.frames[0][1] == before and inbox.frames[1] == (b"after", b"")


def test_a_payload_taken_back_is_told_from_a_good_one() -> None:
    inbox = Inbox()
    inbox.feed(frame(b"a", b"1") + frame(b"b", b"2", VOID) + frame(b"c"), lambda: 7)
    assert inbox.verdicts == [True, False, True]


def reading(wire: bytes) -> Inbox:
    inbox = Inbox()
    inbox.feed(wire, lambda: 1 << 30)
    return inbox


@pytest.mark.parametrize(
    ("wire", "complaint"),
    [
        (b"GET / HTTP/1.1\r\nHost: some.where.example\r\n\r\n", "does not speak this protocol"),
        (bytes(PREFIX_BYTES), "does not speak this protocol"),
        (prefix_of(FrameKind.DATA, b"x" * (MAX_HEADER + 1)), "limits"),
        (prefix_of(FrameKind.DATA, b"", total=MAX_SLICE + 1, length=MAX_SLICE + 1), "limits"),
        (prefix_of(FrameKind.DATA, b"", total=10, offset=5, length=6), "limits"),
        (prefix_of(FrameKind.DATA, b"abc") + b"abd", "damaged"),
        (frame(b"a", b"1", verdict=b"?"), "damaged"),
    ],
)
def test_what_is_no_frame_is_refused(wire: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        reading(wire)


@given(st.binary(max_size=300), st.booleans())
def test_garbage_never_raises_anything_else(garbage: bytes, well_begun: bool) -> None:
    wire = prefix_of(FrameKind.DATA, garbage[:20]) + garbage if well_begun else garbage
    with suppress(ProtocolError):
        reading(wire)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_of_prefix_header_or_verdict_is_found(at: int, bit: int) -> None:
    wire, payload = bytearray(frame(b"some header", b"12")), range(PREFIX_BYTES + 11, PREFIX_BYTES + 13)
    at %= len(wire)
    wire[at] ^= 1 << bit
    if at in payload:
        assert reading(bytes(wire)).frames[0][1] != b"12"
    else:
        with pytest.raises(ProtocolError):
            reading(bytes(wire))
