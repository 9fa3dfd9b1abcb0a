"""What one layer of some blocks is on a link: its bytes as they are, or encoded where the conductor said so.

Seals are of the KV itself where the codec gives it back bit for bit, so that they guard encoding and decoding too;
of what int8 made of each block otherwise. For an event loop: a frame of the slowest codec keeps it a few
milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isthmus.blocks import KVLayout, seal
from isthmus.engine import codecs
from isthmus.errors import ProtocolError

ENCODED_BLOCKS = 64
"""Blocks of one encoded frame: more would keep the event loop for long."""


def pack(
    codec: str,
    layout: KVLayout,
    parts: Sequence[memoryview],
    num_tokens: int,
    seals: Callable[[], Sequence[bytes]],
) -> tuple[Sequence[memoryview], tuple[bytes, ...]]:
    """Payload and seals. `parts`: one layer of `num_tokens` tokens from a block's first on; `seals`: of each block."""
    if codec == codecs.NONE:
        return parts, tuple(seals())
    data = codecs.encode(codec, layout, parts, num_tokens)
    if codec in codecs.EXACT:
        return [memoryview(data)], tuple(seals())
    blocks = codecs.encoded_blocks(codec, layout, data, num_tokens)
    return [memoryview(data)], tuple(map(seal, blocks))


def fits(codec: str, layout: KVLayout, num_tokens: int, size: int) -> bool:
    """Whether so many bytes can be that many tokens."""
    most = codecs.encoded_bytes(codec, layout, num_tokens)
    return size <= most if codec == codecs.ZSTD else size == most


def unpack(
    codec: str,
    layout: KVLayout,
    data: memoryview,
    targets: Sequence[memoryview],
    num_tokens: int,
    seals: Sequence[bytes],
) -> bool:
    """Decodes into the targets; False for bytes that nobody encoded. Seals of the KV itself are the caller's to check:
    `seals_kv` says whether they are."""
    try:
        if not seals_kv(codec):
            blocks = codecs.encoded_blocks(codec, layout, data, num_tokens)
            if tuple(map(seal, blocks)) != tuple(seals):
                return False
        codecs.decode(codec, layout, data, targets, num_tokens)
    except ProtocolError:
        return False
    return True


def seals_kv(codec: str) -> bool:
    """Whether a frame's seals are of the decoded KV."""
    return codec in codecs.EXACT
