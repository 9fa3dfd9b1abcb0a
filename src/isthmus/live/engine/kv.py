"""The paged KV memory of one engine: one tensor a KV layer, addressed by slot = block * block_size + offset."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from isthmus.core.blocks import KVLayout
from isthmus.live.engine.kernels import Kernels
from isthmus.live.engine.kernels.plain import PlainKernels
from isthmus.live.engine.staging import Staging

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVMemory:
    """`layers[i]`: `[num_blocks * block_size, vectors, num_kv_heads, head_dim]`; two vectors are K, then V. `whole`:
    one layer after the other as one memory, unless it was `split`."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        kernels: Kernels | None = None,
        layers: list[Tensor] | None = None,
    ) -> None:
        """`layers`: memory that there is already."""
        shape = (num_blocks * layout.block_size, layout.vectors, layout.num_kv_heads, layout.head_dim)
        self.layout, self.num_blocks = layout, num_blocks
        self.kernels = kernels or PlainKernels()
        if layers is None:
            whole = torch.zeros((layout.num_layers, *shape), dtype=TORCH_DTYPES[layout.dtype], device=device)
            self.whole: Tensor = whole.flatten(0, 1)
            layers = list(whole.unbind())
        self.layers: list[Tensor] = layers
        self._raw = [layer.view(num_blocks, -1).view(torch.uint8) for layer in self.layers]
        self._on_host = device.type == "cpu"
        if self._on_host:
            self._bytes = [bytes_of(layer) for layer in self.layers]
        else:
            self._loads, self._stores = (Staging(self._raw, self.kernels) for _ in range(2))

    def export(self, layer: int, first: int, stop: int) -> memoryview:
        """The bytes of slots `[first, stop)` of a layer, to be read; on the host a view, not a copy."""
        if self._on_host:
            width = self.layout.token_bytes
            return self._bytes[layer][first * width : stop * width]
        return bytes_of(self.layers[layer][first:stop].cpu())

    def export_heads(self, layer: int, first: int, stop: int, part: int, parts: int) -> memoryview:
        """See `KVBytes`."""
        kv_SVKD = self.layers[layer][first:stop]
        count = kv_SVKD.shape[2] // parts
        return bytes_of(kv_SVKD[:, :, part * count : (part + 1) * count].cpu())

    def split(self, parts: int) -> KVMemory:
        """See `KVBytes`."""
        heads = self.layout.num_kv_heads // parts
        layout = msgspec.structs.replace(self.layout, num_kv_heads=heads)
        layers = [layer.view(-1, layout.vectors, heads, layout.head_dim) for layer in self.layers]
        return KVMemory(layout, self.num_blocks * parts, layers[0].device, self.kernels, layers)

    def landing(self, layer: int, first: int, stop: int) -> memoryview:
        """A buffer to receive slots `[first, stop)` of a layer into; `land` makes its bytes the KV."""
        if self._on_host:
            return self.export(layer, first, stop)
        return bytes_of(torch.empty_like(self.layers[layer][first:stop], device="cpu"))

    def land(self, layer: int, first: int, stop: int, data: memoryview) -> None:
        """Completes a `landing`; on the host the bytes are in place already."""
        if not self._on_host:
            target = self.layers[layer][first:stop]
            target.copy_(torch.frombuffer(data, dtype=target.dtype).view(target.shape))

    def fill(self, layer: int, blocks: Sequence[int], arena: memoryview, offsets: Sequence[int]) -> None:
        """Blocks from the arena; see `KVBytes`. On the host one call in C for all of them."""
        numbers, at = self._places(blocks, arena, offsets)
        source = np.frombuffer(arena, np.uint8)
        if self._on_host:
            size, target = self.layout.slice_bytes, np.frombuffer(self._bytes[layer], np.uint8)
            self.kernels.copy_slices(target, numbers * size, source, at, size)
        else:
            self._loads.fill(layer, numbers, source, at)

    def save(self, layer: int, blocks: Sequence[int], arena: memoryview, offsets: Sequence[int]) -> None:
        """Blocks into the arena; see `KVBytes`."""
        assert not arena.readonly, "a block is saved to memory that may be written"
        numbers, at = self._places(blocks, arena, offsets)
        target = np.frombuffer(arena, np.uint8)
        if self._on_host:
            size, source = self.layout.slice_bytes, np.frombuffer(self._bytes[layer], np.uint8)
            self.kernels.copy_slices(target, at, source, numbers * size, size)
        else:
            self._stores.save(layer, numbers, target, at)

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """All bytes of these blocks, in order of block, then layer; a copy, on the device."""
        return torch.stack([raw[list(blocks)] for raw in self._raw], dim=1).flatten()

    def write_blocks(self, blocks: Sequence[int], data: Tensor) -> None:
        """The reverse of `read_blocks`."""
        slices = data.view(len(blocks), len(self._raw), -1)
        for layer, raw in enumerate(self._raw):
            raw[list(blocks)] = slices[:, layer]
            self.written(layer)

    def written(self, layer: int) -> None:
        """The work queued so far on the device writes all KV of a layer that `save` may be asked for next."""
        if not self._on_host:
            self._stores.written(layer)

    def _places(
        self, blocks: Sequence[int], arena: memoryview, offsets: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and offsets for C, which checks nothing."""
        numbers, at = np.asarray(blocks, np.int64), np.asarray(offsets, np.int64)
        last = arena.nbytes - self.layout.slice_bytes
        assert ((numbers >= 0) & (numbers < self.num_blocks)).all(), "blocks lie outside the KV memory"
        assert ((at >= 0) & (at <= last)).all(), "offsets lie outside the arena"
        assert len(numbers) == len(at), "each block has its place in the arena"
        return numbers, at


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a dense tensor on the host, not a copy."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
