"""The shape of KV bytes. Blocks of different layouts have different names and never mix."""

from __future__ import annotations

import msgspec

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
