"""Frames of KV between nodes: one layer of some blocks, as they are or encoded by the codec of the route.

Seals are of the KV itself where the codec is exact, so that they guard encoding and decoding, too; of each block's
encoded bytes otherwise. For an event loop: a frame of the slowest codec takes a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from isthmus.core.blocks import KVLayout, seal
from isthmus.core.errors import ProtocolError
from isthmus.core.types import Span
from isthmus.live.engine import codecs
from isthmus.live.messenger import Session
from isthmus.live.peers.messages import FetchedSlices, HandoverSlices, ShipmentSlices

ENCODED_BLOCKS = 64
"""Blocks of one encoded frame: more would block the event loop for long."""


def pack(
    codec: str,
    layout: KVLayout,
    parts: Sequence[memoryview],
    num_tokens: int,
    seals: Callable[[], Sequence[bytes]],
) -> tuple[Sequence[memoryview], tuple[bytes, ...]]:
    """Returns payload and seals. `parts`: one layer of `num_tokens` tokens, from a block border on; `seals`: returns
    the seal of each block."""
    if codec == codecs.NONE:
        return parts, tuple(seals())
    data = codecs.encode(codec, layout, parts, num_tokens)
    if codec in codecs.EXACT:
        return [memoryview(data)], tuple(seals())
    blocks = codecs.encoded_blocks(codec, layout, data, num_tokens)
    return [memoryview(data)], tuple(map(seal, blocks))


Head = HandoverSlices | FetchedSlices | ShipmentSlices


class _Frame(NamedTuple):
    head: Head
    session: Session
    codec: str
    tokens: Span
    targets: list[memoryview]
    encoded: memoryview | None


class KVFrames:
    """Frames of KV on their way in: into their place, or beside it to be decoded. A head names a layer, and has a
    seal for each block."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._frames: dict[Head, _Frame] = {}

    def place(
        self, head: Head, session: Session, codec: str, tokens: Span, targets: list[memoryview], size: int
    ) -> list[memoryview] | None:
        """Returns memory for the `size` bytes of a frame; None when they cannot be these tokens, or another frame is
        under way there (the one that came last would lie under the seals of the other)."""
        most = codecs.encoded_bytes(codec, self._layout, len(tokens))
        fits = size <= most if codec == codecs.ZSTD else size == most
        if not fits or any(
            head.layer == other.layer and tokens.start < frame.tokens.stop and frame.tokens.start < tokens.stop
            for other, frame in self._frames.items()
        ):
            return None
        encoded = None if codec == codecs.NONE else memoryview(bytearray(size))
        self._frames[head] = _Frame(head, session, codec, tokens, targets, encoded)
        return targets if encoded is None else [encoded]

    def take(self, head: Head) -> list[memoryview] | None:
        """Returns the memory of a whole frame, decoded; None for a frame without a payload, though an equal one may
        be under way, or one that cannot be decoded. The caller checks the seals where the codec is exact."""
        frame = self._frames.get(head)
        if frame is None or frame.head is not head:
            return None
        del self._frames[head]
        if frame.encoded is None:
            return frame.targets
        codec, layout, num_tokens = frame.codec, self._layout, len(frame.tokens)
        try:
            if codec not in codecs.EXACT:
                blocks = codecs.encoded_blocks(codec, layout, frame.encoded, num_tokens)
                if tuple(map(seal, blocks)) != tuple(head.seals):
                    return None
            codecs.decode(codec, layout, frame.encoded, frame.targets, num_tokens)
        except ProtocolError:
            return None
        return frame.targets

    def void(self, session: Session, head: Head) -> None:
        """Forgets a frame that will not come over this session."""
        frame = self._frames.get(head)
        if frame is not None and frame.session is session:
            del self._frames[head]

    def refuse(self) -> None:
        """Refuses all frames under way: nothing more is written when this returns."""
        frames, self._frames = self._frames, {}
        for head, frame in frames.items():
            frame.session.refuse(head)
