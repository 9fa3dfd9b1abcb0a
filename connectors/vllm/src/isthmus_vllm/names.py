"""Names of KV blocks: the keyed BLAKE3 chain of `isthmus.core.blocks.names`, with the key already derived.

The key covers model revision, layout and tenant salt, so this side needs to know none of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import blake3

NAME_BYTES = 16
KEY_BYTES = 32


class Chain:
    """Names of the full blocks of one sequence of tokens, made as far as they are asked for."""

    def __init__(self, key: bytes, block_size: int) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key of a namer has {KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._block_size = block_size
        self._body = struct.Struct(f"<{block_size}I")
        self._names: list[bytes] = []

    def names(self, tokens: Sequence[int], first: int, end: int) -> tuple[bytes, ...]:
        """Names of blocks `first` to `end`, not including `end`. `tokens` may have grown since, never changed."""
        size = self._block_size
        assert end * size <= len(tokens), "a block has no name before all its tokens are known"
        for index in range(len(self._names), end):
            parent = self._names[-1] if self._names else bytes(NAME_BYTES)
            body = self._body.pack(*tokens[index * size : (index + 1) * size])
            self._names.append(blake3.blake3(parent + body, key=self._key).digest(length=NAME_BYTES))
        return tuple(self._names[first:end])

    def parent(self, first: int) -> bytes | None:
        """Name of the block before `first`, which must have been made; None for the first block."""
        return self._names[first - 1] if first else None
