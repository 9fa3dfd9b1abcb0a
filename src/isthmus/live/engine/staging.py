"""Blocks between host memory and a CUDA device: through pinned memory, on a stream beside the one that computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from isthmus.live.engine.kernels import Kernels

STAGE_BYTES = 8 << 20
"""Of one half of the pinned memory: long copies run at full speed, and little memory is taken from paging."""


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
        """What the device copied into a half goes to its place in the arena."""
        self._copied[half].synchronize()
        places = self._places[: part.stop - part.start]
        self._kernels.copy_slices(target, offsets[part], self._host[half], places, self._size)

    def _parts(self, count: int) -> Iterator[tuple[int, slice]]:
        for turn, first in enumerate(range(0, count, self._room)):
            yield turn % 2, slice(first, min(first + self._room, count))

    def _index(self, blocks: np.ndarray) -> Tensor:
        return torch.as_tensor(blocks, device=self._device.device)
