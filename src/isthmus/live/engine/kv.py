"""The paged KV memory of one engine: one tensor a KV layer, addressed by slot = block * block_size + offset."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from isthmus.core.blocks import KVLayout
from isthmus.live.engine.kernels import Kernels
from isthmus.live.engine.kernels.plain import PlainKernels

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


# Blocks between host memory and a CUDA device: through pinned memory, on a stream beside the one that computes.


STAGE_BYTES = 8 << 20
"""Bytes of each half of the pinned memory: enough for copies at full speed."""


class Staging:
    """One direction of one KV memory. `layers[i]`: `[num_blocks, slice_bytes]`, bytes on the device.

    Pinned memory in two halves: while one is copied by the device, the host fills or empties the other. Calls may
    come from any thread and wait for each other; each returns when its bytes are in place.
    """

    def __init__(self, layers: Sequence[Tensor], kernels: Kernels) -> None:
        device, size = layers[0].device, layers[0].shape[1]
        self._layers, self._kernels, self._size = layers, kernels, size
        self._room = max(1, STAGE_BYTES // size)
        self._stream = torch.cuda.Stream(device)
        self._device = torch.empty(2, self._room, size, dtype=torch.uint8, device=device)
        self._pinned = torch.empty(2, self._room, size, dtype=torch.uint8, pin_memory=True)
        self._host = [half.view(-1).numpy() for half in self._pinned]
        self._places = np.arange(self._room, dtype=np.int64) * size
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._written = [torch.cuda.Event() for _ in layers]
        self._lock = threading.Lock()

    def written(self, layer: int) -> None:
        """Notes that work queued by the calling thread up to here writes the layer; `save` waits for it."""
        self._written[layer].record()

    def fill(self, layer: int, blocks: np.ndarray, source: np.ndarray, offsets: np.ndarray) -> None:
        with self._lock, torch.cuda.stream(self._stream):
            for half, part in self._parts(len(blocks)):
                count = part.stop - part.start
                self._copied[half].synchronize()
                self._kernels.copy_slices(
                    self._host[half], self._places[:count], source, offsets[part], self._size
                )
                staged = self._device[half, :count].copy_(self._pinned[half, :count], non_blocking=True)
                self._layers[layer].index_copy_(0, self._index(blocks[part]), staged)
                self._copied[half].record()
            self._stream.synchronize()

    def save(self, layer: int, blocks: np.ndarray, target: np.ndarray, offsets: np.ndarray) -> None:
        with self._lock, torch.cuda.stream(self._stream):
            self._stream.wait_event(self._written[layer])
            before: tuple[int, slice] | None = None
            for half, part in self._parts(len(blocks)):
                count = part.stop - part.start
                staged = self._device[half, :count]
                torch.index_select(self._layers[layer], 0, self._index(blocks[part]), out=staged)
                self._pinned[half, :count].copy_(staged, non_blocking=True)
                self._copied[half].record()
                if before is not None:
                    self._empty(*before, target, offsets)
                before = half, part
            if before is not None:
                self._empty(*before, target, offsets)

    def _empty(self, half: int, part: slice, target: np.ndarray, offsets: np.ndarray) -> None:
        """Copies a half, once the device has filled it, to its places in the arena."""
        self._copied[half].synchronize()
        places = self._places[: part.stop - part.start]
        self._kernels.copy_slices(target, offsets[part], self._host[half], places, self._size)

    def _parts(self, count: int) -> Iterator[tuple[int, slice]]:
        for turn, first in enumerate(range(0, count, self._room)):
            yield turn % 2, slice(first, min(first + self._room, count))

    def _index(self, blocks: np.ndarray) -> Tensor:
        return torch.as_tensor(blocks, device=self._device.device)
