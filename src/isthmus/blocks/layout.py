"""The shape of KV bytes. Blocks of different layouts have different names and never mix."""

from __future__ import annotations

import msgspec

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(msgspec.Struct, frozen=True):
    """Layout of one block: per layer `[block_size, 2, num_kv_heads, head_dim]`, K first, token-major.

    Token-major with K and V side by side, so that any run of tokens of one layer is one byte range:
    it is sent, received and sealed without a copy.

    `codec`: what the numbers have been through; "" if nothing, so that they are what the model computed, else the
    lossy codec of `isthmus.engine.codecs` that a link sent them with. They are of `dtype` again in any case.
    """

    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    codec: str = ""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, K and V."""
        return 2 * self.num_kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]

    @property
    def slice_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.block_size * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.slice_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def fingerprint(self) -> bytes:
        fields = (self.dtype, self.block_size, self.num_layers, self.num_kv_heads, self.head_dim)
        codec = (self.codec,) if self.codec else ()
        return "/".join(map(str, (*fields, *codec))).encode()
