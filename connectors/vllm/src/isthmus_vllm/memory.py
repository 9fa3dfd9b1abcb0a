"""An arena of isthmus as addresses and as a tensor: this process's own, or that of the adapter."""

from __future__ import annotations

import warnings

import torch

from isthmus.live.store.arena import Arena, PeerArena


class Area:
    """`bytes_SLX` is a tensor [slot, layer, byte of the slice] over all slots of `arena`."""

    def __init__(self, arena: Arena | PeerArena) -> None:
        self.arena = arena
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that torch cannot mark a tensor read-only
            whole = torch.frombuffer(arena.memory, dtype=torch.uint8)
        self.bytes_SLX = whole.view(arena.num_slots, arena.shape.num_layers, arena.shape.slice_bytes)
        self._start = self.bytes_SLX.data_ptr()

    def address(self, slot: int, layer: int) -> int:
        """Where a layer slice starts. IndexError for a slot or layer that there is not."""
        shape = self.arena.shape
        if not (0 <= slot < self.arena.num_slots and 0 <= layer < shape.num_layers):
            raise IndexError(f"slot {slot}, layer {layer}")
        return self._start + slot * shape.block_bytes + layer * shape.slice_bytes
