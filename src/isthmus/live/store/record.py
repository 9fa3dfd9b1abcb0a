"""One block on the SSD: a header and the block's bytes, the payload. Pure: bytes in, bytes out.

    header:  | magic, version, fingerprint, place, sequence, name, parent | one seal per layer | digest of all before |
    file:    | 16 headers | 16 payloads | 16 headers | 16 payloads | ...

Headers lie together so that a start reads few and large pieces. The fingerprint stands for the format, the model and
the shape; the place is the record's own, so that one that was copied or written elsewhere does not count; a higher
sequence was written later.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from isthmus.core.blocks import SEAL_BYTES, seal
from isthmus.core.types import BlockName
from isthmus.live.store.arena import PAGE_BYTES, Shape, aligned_buffer, round_up

_MAGIC = b"isthmusB"
_VERSION = 1
GROUP = 16
"""Number of records whose headers lie together."""
FINGERPRINT_BYTES = 16
_MAX_NAME_BYTES = 32
_NO_NAME, _BYTES_NAME, _INT_NAME = range(3)
_FIXED = struct.Struct(f"<8sI{FINGERPRINT_BYTES}sQQBB{_MAX_NAME_BYTES}sBB{_MAX_NAME_BYTES}s")
_LARGE_BYTES = 64 * 1024
_SMALL_ALIGN = 64


class RecordHeader(NamedTuple):
    """Header of a record: the block that its payload holds."""

    name: BlockName
    parent: BlockName | None
    seals: tuple[bytes, ...]
    sequence: int


class RecordFormat:
    """Sizes and header codec of the records of one model and shape."""

    def __init__(self, shape: Shape, revision: bytes) -> None:
        self.shape = shape
        self.is_large = shape.block_bytes >= _LARGE_BYTES
        """Whether records lie at page borders and bypass the page cache, where they can."""
        self.align = PAGE_BYTES if self.is_large else _SMALL_ALIGN
        self._used_bytes = _FIXED.size + (shape.num_layers + 1) * SEAL_BYTES
        self.header_bytes = round_up(self._used_bytes, self.align)
        self.payload_bytes = round_up(shape.block_bytes, self.align)
        self.record_bytes = self.header_bytes + self.payload_bytes
        self.group_bytes = GROUP * self.record_bytes
        what = struct.pack("<IQQ", _VERSION, shape.num_layers, shape.slice_bytes) + revision
        self.fingerprint = hashlib.blake2b(what, digest_size=FINGERPRINT_BYTES).digest()

    def head_offset(self, index: int) -> int:
        """Returns where in a file the header of record number `index` starts."""
        group, at = divmod(index, GROUP)
        return group * self.group_bytes + at * self.header_bytes

    def payload_offset(self, index: int) -> int:
        group, at = divmod(index, GROUP)
        return group * self.group_bytes + GROUP * self.header_bytes + at * self.payload_bytes

    def file_bytes(self, count: int) -> int:
        """Returns the length of a file of `count` records."""
        return self.payload_offset(count - 1) + self.payload_bytes if count else 0

    def num_records(self, size: int) -> int:
        """Returns how many records fit into a file of `size` bytes."""
        groups, rest = divmod(size, self.group_bytes)
        return groups * GROUP + max(0, rest - GROUP * self.header_bytes) // self.payload_bytes

    def encode(self, header: RecordHeader, place: int) -> bytes:
        """Encodes the header of the record at `place`, padded to `header_bytes`."""
        fixed = _FIXED.pack(
            _MAGIC, _VERSION, self.fingerprint, place, header.sequence,
            *_pack_name(header.name), *_pack_name(header.parent),
        )  # fmt: skip
        body = fixed + b"".join(header.seals)
        return (body + seal(body)).ljust(self.header_bytes, b"\0")

    def empty_heads(self, count: int) -> memoryview:
        """Returns `count` headers, as they lie together, of records that hold nothing."""
        heads = aligned_buffer(count * self.header_bytes)
        for at in range(0, len(heads), self.header_bytes):
            heads[at : at + len(_MAGIC)] = _MAGIC
        return heads

    def decode(self, data: memoryview, place: int) -> RecordHeader | None:
        """Decodes the header of the record at `place`; None when there is none, or a damaged or misplaced one."""
        if len(data) < self._used_bytes or data[: len(_MAGIC)] != _MAGIC:
            return None
        end = self._used_bytes - SEAL_BYTES
        if seal(data[:end]) != data[end : self._used_bytes]:
            return None
        _, version, fingerprint, at, sequence, *names = _FIXED.unpack_from(data)
        if (version, fingerprint, at) != (_VERSION, self.fingerprint, place):
            return None
        name, parent = _unpack_name(*names[:3]), _unpack_name(*names[3:])
        if name is None:
            return None
        raw = bytes(data[_FIXED.size : end])
        seals = tuple(raw[at : at + SEAL_BYTES] for at in range(0, len(raw), SEAL_BYTES))
        return RecordHeader(name, parent, seals, sequence)


def has_records(start: memoryview) -> bool:
    """Whether a file that begins so holds records, of any model: it begins with headers, or only zeros."""
    found = any(start[at : at + len(_MAGIC)] == _MAGIC for at in range(0, len(start), _SMALL_ALIGN))
    return found or start == bytes(len(start)) or _MAGIC.startswith(start)


def check_name(name: BlockName | None) -> None:
    """Raises ValueError for a name that a record cannot hold."""
    _pack_name(name)


def _pack_name(name: BlockName | None) -> tuple[int, int, bytes]:
    if name is None:
        return _NO_NAME, 0, b""
    if isinstance(name, int):
        try:
            return _INT_NAME, 16, name.to_bytes(16, "little", signed=True)
        except OverflowError:
            raise ValueError(f"a block name has at most 128 bits: {name}") from None
    if len(name) > _MAX_NAME_BYTES:
        raise ValueError(f"a block name has at most {_MAX_NAME_BYTES} bytes: {name!r}")
    return _BYTES_NAME, len(name), name


def _unpack_name(kind: int, length: int, raw: bytes) -> BlockName | None:
    if kind == _INT_NAME:
        return int.from_bytes(raw[:length], "little", signed=True)
    return raw[:length] if kind == _BYTES_NAME else None
