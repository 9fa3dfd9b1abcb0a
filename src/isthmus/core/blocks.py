"""A KV block is a named, sealed, immutable value.

The *name* says what the block must contain (model revision, KV layout, tenant salt, all tokens up to its
end); the *seal* says which bytes it does contain. Pure: no clock, no I/O, no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import blake3
import msgspec
import xxhash

from isthmus.core.types import BlockName

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

MAX_SNAPSHOTS = 4
"""Of one request at once: the one it goes on from, at a branch, at the last full block, at the end."""


class KVLayout(msgspec.Struct, frozen=True):
    """Layout of one block: per layer `[block_size, vectors, num_kv_heads, head_dim]`, K first, token-major.

    `num_layers`: those that keep KV of every token. `vectors`: 2 for K and V, 1 for a latent vector that is both (MLA).
    `state_bytes`: what the other layers keep of a sequence, however long (recurrent states, all layers together). A
    snapshot of it fills `state_blocks` whole blocks with names of their own (`state_name`), so that one pool, one
    cache and one transfer serve both groups.

    Token-major with K and V side by side, so that any run of tokens of one layer is one byte range:
    it is sent, received and sealed without a copy.

    `codec`: what the numbers have been through; "" if nothing, so that they are what the model computed, else the
    lossy codec of `isthmus.live.engine.codecs` that a link sent them with. They are of `dtype` again in any case.

    `form`: of an engine that lays a block out in its own way, what its bytes are of; "" for the layout above. They are
    as many, and mean something to that engine alone.
    """

    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    codec: str = ""
    vectors: int = 2
    state_bytes: int = 0
    form: str = ""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, K and V."""
        return self.vectors * self.num_kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]

    @property
    def slice_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.block_size * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.slice_bytes

    @property
    def state_blocks(self) -> int:
        """Number of blocks that hold one snapshot of the recurrent state; 0 for models without."""
        return -(-self.state_bytes // self.block_bytes)

    @property
    def least_blocks(self) -> int:
        """Fewer serve nobody: one block of a prompt and one of its answer, and all snapshots they may need."""
        return 2 + MAX_SNAPSHOTS * self.state_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def fingerprint(self) -> bytes:
        fields = (self.dtype, self.block_size, self.num_layers, self.num_kv_heads, self.head_dim)
        others = [self.codec] if self.codec else []
        if self.vectors != 2:
            others.append(f"vectors {self.vectors}")
        if self.state_bytes:
            others.append(f"state {self.state_bytes}")
        if self.form:
            others.append(f"form {self.form}")
        return "/".join(map(str, (*fields, *others))).encode()


# Block names: a keyed BLAKE3 chain over full blocks of tokens.


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


# Seals: a 128-bit digest of a block's bytes in one layer, checked when they come from another node or the SSD.
#
# XXH3 finds torn, flipped, truncated and misplaced bytes at memory speed. It does not stop somebody who forges
# bytes on purpose; that is the transport's task (authenticated sessions).


SEAL_BYTES = 16


def seal(data: memoryview | bytes) -> bytes:
    """Digest of one layer slice (contiguous bytes)."""
    return xxhash.xxh3_128_digest(data)
