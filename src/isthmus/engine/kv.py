"""The paged KV memory of one engine: one tensor a layer, addressed by slot = block * block_size + offset."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.blocks import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVMemory:
    """`layers[i]`: `[num_blocks * block_size, 2, num_kv_heads, head_dim]`, K then V."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        shape = (num_blocks * layout.block_size, 2, layout.num_kv_heads, layout.head_dim)
        self.layout, self.num_blocks = layout, num_blocks
        dtype = TORCH_DTYPES[layout.dtype]
        self.layers: list[Tensor] = [
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)
        ]
        self._on_host = device.type == "cpu"
        self._bytes = [_bytes_of(layer) for layer in self.layers] if self._on_host else []

    def export(self, layer: int, first: int, stop: int) -> memoryview:
        """The bytes of slots `[first, stop)` of a layer, to be read; on the host a view, not a copy."""
        if self._on_host:
            width = self.layout.token_bytes
            return self._bytes[layer][first * width : stop * width]
        return _bytes_of(self.layers[layer][first:stop].cpu())

    def landing(self, layer: int, first: int, stop: int) -> memoryview:
        """A buffer to receive slots `[first, stop)` of a layer into; `land` makes its bytes the KV."""
        if self._on_host:
            return self.export(layer, first, stop)
        return _bytes_of(torch.empty_like(self.layers[layer][first:stop], device="cpu"))

    def land(self, layer: int, first: int, stop: int, data: memoryview) -> None:
        """Completes a `landing`; on the host the bytes are in place already."""
        if not self._on_host:
            target = self.layers[layer][first:stop]
            target.copy_(torch.frombuffer(data, dtype=target.dtype).view(target.shape))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
