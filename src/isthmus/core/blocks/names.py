"""Block names: a keyed BLAKE3 chain over full blocks of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import blake3

from isthmus.core.blocks.layout import KVLayout
from isthmus.core.types import BlockName

NAME_BYTES, KEY_BYTES = 16, 32
_STATE_KEY = blake3.blake3(b"", derive_key_context="isthmus 2026 recurrent state name").digest()


def _length_prefixed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class BlockNamer:
    """Names the full blocks of a token sequence for one model revision, KV layout and tenant salt.

    `name[i] = blake3(key, name[i-1] + tokens of block i)[:16]`, where the key is derived from revision,
    layout and salt. Two sequences share a name exactly when they share every token up to that block's end,
    the model, the layout and the salt (up to 128-bit collisions). Who has the `key` can name blocks (`names_by`), and
    cannot tell the salt.
    """

    def __init__(self, *, revision: str, layout: KVLayout, salt: str = "") -> None:
        context = _length_prefixed(revision.encode(), layout.fingerprint(), salt.encode())
        self.key = blake3.blake3(context, derive_key_context="isthmus 2026 kv block name").digest()
        self.block_size = layout.block_size

    def names(self, tokens: Sequence[int], *, parent: bytes | None = None, start: int = 0) -> list[BlockName]:
        """Names of the full blocks of `tokens[start:]`; `parent` names the block that ends at `start`.

        A tail shorter than a block has no name.
        """
        return names_by(self.key, self.block_size, tokens, parent=parent, start=start)


def names_by(
    key: bytes, block_size: int, tokens: Sequence[int], *, parent: bytes | None = None, start: int = 0
) -> list[BlockName]:
    """As a `BlockNamer` with this key names them; `key` has KEY_BYTES."""
    previous: bytes = parent if parent is not None else bytes(NAME_BYTES)
    names: list[BlockName] = []
    for at in range(start, len(tokens) - block_size + 1, block_size):
        body = previous + array("I", tokens[at : at + block_size]).tobytes()
        previous = blake3.blake3(body, key=key).digest(length=NAME_BYTES)
        names.append(previous)
    return names


def state_name(name: BlockName, part: int, count: int) -> BlockName:
    """Name of one of the `count` blocks that hold the recurrent state at the end of block `name`.

    They follow that block in a chain, part 0 first: who holds the last part holds them all, and the prefix. A published
    trace's numbers, which are 0 or more, give negative ones.
    """
    if isinstance(name, int):
        return -(name * count + part) - 1
    return blake3.blake3(name + part.to_bytes(4, "little"), key=_STATE_KEY).digest(length=NAME_BYTES)


def state_names(name: BlockName, count: int) -> tuple[BlockName, ...]:
    """Names of all of them, in order."""
    return tuple([state_name(name, part, count) for part in range(count)])
