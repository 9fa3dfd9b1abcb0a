"""Frames, without I/O: `prefix | header | payload | verdict`, one after the other on each connection.

The prefix says what the frame is and how long its parts are. The header is a msgpack message. The payload is raw
bytes that the receiver wants in place: when prefix and header have come, the session says where the payload goes,
and it is received there, not copied there. One byte behind a payload says whether it is good: a sender that takes
a message back fills up the frame under way with bytes that mean nothing.

Prefix and header carry digests of their own: a flipped byte there would put a payload in the wrong place, so it
ends the session. A flipped byte of a payload is found by the seals of whoever sent it.

    prefix ──44 bytes──> header ──begin──> payload ──> verdict ──end──> prefix
                              └──no payload: begin, end────────────────────┘
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable
from enum import IntEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import xxhash

from isthmus.core.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from isthmus.live.messenger.lane import Lane
    from isthmus.live.messenger.session import Session

MAGIC = 0x5349
MAGIC_BYTES = 2
MAX_HEADER = 16 << 20
MAX_SLICE = 32 << 20
_FIELDS = struct.Struct("<HBBIQQQII")
_CHECK = struct.Struct("<I")
PREFIX_BYTES = _FIELDS.size + _CHECK.size
GOOD, VOID = b"\x55", b"\xaa"
"""Verdicts."""
STAGING = 16 << 10
"""Bytes read ahead behind a payload: enough for a prefix and most headers, little to copy when it is payload."""


class FrameKind(IntEnum):
    HELLO = 1
    WELCOME = 2
    DATA = 3
    ACK = 4
    CANCEL = 5
    REFUSE = 6
    CLOSE = 7
    CHALLENGE = 8
    ANSWER = 9


ACK_SOON = 0x80
"""Set in the kind of a DATA frame whose sender waits to hear that it came."""


class Prefix(NamedTuple):
    """`seq` numbers the messages of a priority; `total` is the whole payload's length, of which this frame
    carries `[offset, offset + length)`."""

    kind: int
    priority: int
    header: int
    seq: int
    total: int
    offset: int
    length: int
    header_check: int


def check_of(data: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data) & 0xFFFF_FFFF


def prefix_of(
    kind: int,
    header: bytes,
    *,
    header_check: int | None = None,
    priority: int = 0,
    seq: int = 0,
    total: int = 0,
    offset: int = 0,
    length: int = 0,
) -> bytes:
    """Encodes the first bytes of a frame. `header` follows, then `length` bytes of payload and a verdict, if there is
    a payload."""
    check = check_of(header) if header_check is None else header_check
    fields = _FIELDS.pack(MAGIC, kind, priority, len(header), seq, total, offset, length, check)
    return fields + _CHECK.pack(check_of(fields))


def check_magic(data: memoryview) -> None:
    """Checks the first MAGIC_BYTES of a frame. Raises ProtocolError for those of another protocol."""
    if data[:MAGIC_BYTES] != MAGIC.to_bytes(MAGIC_BYTES, "little"):
        raise ProtocolError("the peer does not speak this protocol")


def parse_prefix(data: memoryview) -> Prefix:
    """Decodes a prefix. Raises ProtocolError for bytes that are no frame, a damaged frame, or one over the limits."""
    check_magic(data)
    _, *fields = _FIELDS.unpack_from(data)
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != check_of(data[: _FIELDS.size]):
        raise ProtocolError("a frame came damaged (checksum of its prefix)")
    prefix = Prefix(*fields)
    if prefix.header > MAX_HEADER or prefix.length > MAX_SLICE or prefix.offset + prefix.length > prefix.total:
        raise ProtocolError(f"a frame of {prefix.header} + {prefix.length} bytes is over the limits")
    return prefix


def check_header(prefix: Prefix, header: bytes) -> None:
    if check_of(header) != prefix.header_check:
        raise ProtocolError("a frame came damaged (checksum of its header)")


class FrameReader:
    """Turns received bytes into frames.

    The owner repeats: read into `buffers()`, in order, then `advance(count)`.
    """

    def __init__(self, session: Session, lane: Lane) -> None:
        self._session, self._lane = session, lane
        self._staging = memoryview(bytearray(STAGING))
        self._first = self._last = 0  # staged bytes not yet parsed: [first, last)
        self._prefix: Prefix | None = None
        self._begun = False
        self._targets: list[memoryview] = []  # payload memory still to fill, in order
        self._at = 0  # targets before this one are full
        self._left = 0  # payload bytes of this frame still to come

    def buffers(self) -> list[memoryview]:
        """Returns memory for the next received bytes: the rest of the payload, then what follows it. Never empty."""
        if self._begun:
            targets = self._targets[self._at : self._at + IO_PARTS]
            if len(targets) == len(self._targets) - self._at:
                targets.append(self._staging)
            return targets
        return [self._staging[self._last :]]

    @property
    def grown_bytes(self) -> int:
        """Bytes of memory taken for a header longer than STAGING."""
        return len(self._staging) - STAGING

    def advance(self, count: int) -> bool:
        """Books `count` bytes received into `buffers()`. Returns False when the session wants nothing more.
        Raises ProtocolError for bytes that are no frame, and whatever the session raises."""
        if self._begun:
            count -= self._fill(count)
        self._last += count
        is_wanted = self._parse()
        if self._last == len(self._staging):
            self._make_room()
        return is_wanted

    def divert(self) -> None:
        """Reads past the rest of the payload under way: its memory is not touched any more."""
        if self._begun:
            self._targets, self._at = scratch(self._left), 0

    def _parse(self) -> bool:
        while True:
            if not self._begun and not self._begin():
                return True
            if not self._drain():
                return True
            verdict = self._verdict()
            if verdict is None:
                return True
            prefix, self._prefix, self._begun = self._prefix, None, False
            self._targets, self._at = [], 0
            assert prefix is not None
            if not self._session.end(self._lane, prefix, verdict == GOOD):
                return False

    def _begin(self) -> bool:
        """Parses prefix and header. Returns False when more bytes are needed."""
        if self._prefix is None:
            taken = self._take(PREFIX_BYTES)
            if taken is None:
                return False
            prefix = parse_prefix(taken)
            self._session.admit(prefix)
            self._prefix = prefix
        taken = self._take(self._prefix.header)
        if taken is None:
            return False
        header = bytes(taken)
        if self._last == 0 and len(self._staging) > STAGING:  # it was grown for this header
            self._staging = memoryview(bytearray(STAGING))
        check_header(self._prefix, header)
        self._targets, self._at = list(self._session.begin(self._lane, self._prefix, header)), 0
        self._left, self._begun = self._prefix.length, True
        return True

    def _drain(self) -> bool:
        """Copies staged payload bytes to their place. Returns True when the payload is complete."""
        while self._left:
            target = self._targets[self._at]
            count = min(len(target), self._last - self._first)
            if count == 0:
                return False
            taken = self._take(count)
            assert taken is not None
            target[:count] = taken
            self._fill(count)
        return True

    def _verdict(self) -> bytes | None:
        assert self._prefix is not None
        if not self._prefix.length:
            return GOOD
        taken = self._take(len(GOOD))
        if taken is None:
            return None
        verdict = bytes(taken)
        if verdict not in (GOOD, VOID):
            raise ProtocolError("a frame came damaged (its verdict)")
        return verdict

    def _fill(self, count: int) -> int:
        """Books up to `count` bytes as received in place. Returns how many."""
        filled = min(count, self._left)
        self._left -= filled
        rest = filled
        while rest:
            target = self._targets[self._at]
            if rest < len(target):
                self._targets[self._at] = target[rest:]
                break
            rest -= len(target)
            self._at += 1
        return filled

    def _take(self, count: int) -> memoryview | None:
        if self._last - self._first < count:
            return None
        taken = self._staging[self._first : self._first + count]
        self._first += count
        if self._first == self._last:
            self._first = self._last = 0
        return taken

    def _make_room(self) -> None:
        """Makes room behind the staged bytes. Memory grows as bytes come, not as they are announced."""
        left = self._staging[self._first : self._last]
        needed = self._prefix.header if self._prefix else PREFIX_BYTES
        size = len(self._staging)
        if len(left) == size:  # a header larger than the staging buffer
            grown = memoryview(bytearray(min(needed, 2 * size)))
            grown[: len(left)] = left
            self._staging = grown
        else:
            self._staging[: len(left)] = bytes(left)
        self._first, self._last = 0, len(left)
        if len(self._staging) > size:
            self._session.grown()


IO_PARTS = 512
"""Pieces that one system call sends or receives; Linux takes 1,024."""

_SCRATCH = memoryview(bytearray(64 << 10))
_ZEROS = memoryview(bytes(64 << 10))


def _repeated(view: memoryview, size: int) -> list[memoryview]:
    whole, rest = divmod(size, len(view))
    return [view] * whole + ([view[:rest]] if rest else [])


def scratch(size: int) -> list[memoryview]:
    """Returns memory of `size` bytes that nobody reads."""
    return _repeated(_SCRATCH, size)


def zeros(size: int) -> list[memoryview]:
    """Returns `size` bytes of filling."""
    return _repeated(_ZEROS, size)


class Pieces:
    """Contiguous pieces of memory, in order, as one range `[0, size)`. Empty pieces are left out."""

    __slots__ = ("_starts", "size", "views")

    def __init__(self, parts: Iterable[memoryview]) -> None:
        self.views = [part.cast("B") for part in parts if part.nbytes]
        ends = list(accumulate(map(len, self.views)))
        self.size = ends[-1] if ends else 0
        self._starts = [0, *ends[:-1]]

    def cut(self, start: int, length: int) -> list[memoryview]:
        """Returns the range `[start, start + length)`, which must lie within the whole, as pieces."""
        if length == self.size:
            return list(self.views)
        found = []
        at = bisect_right(self._starts, start) - 1
        within = start - self._starts[at]
        while length:
            view = self.views[at][within : within + length]
            found.append(view)
            length -= len(view)
            at, within = at + 1, 0
        return found


Value = TypeVar("Value")


def read(decode: Callable[[Any], Value], data: bytes | memoryview, what: str) -> Value:
    """Decodes a value that a peer sent. Raises ProtocolError for bytes that are no msgpack, have another type or an
    invalid value, or are nested deeper than the interpreter goes (unknown fields are read past, level by level)."""
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        raise ProtocolError(f"{what} could not be read: {error}") from None
