"""The pages of vLLM's KV tensors: where they lie, how they are copied to and from arenas, and their seals.

A page is one block's KV in one layer: one contiguous run of bytes, copied as it is, in the attention back end's layout
(on CPU the keys are packed for its instruction set). A seal is XXH3-128 of a page.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from isthmus.core.blocks import seal
from isthmus.live.store.arena import Arena, PeerArena, Shape

Seals = tuple[bytes, ...]
"""Of one block, by layer."""


class Area:
    """An arena, this process's own or the adapter's, as addresses and as a tensor: `bytes_SLX[slot, layer, byte]`."""

    def __init__(self, arena: Arena | PeerArena) -> None:
        self.arena = arena
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that torch cannot mark a tensor read-only
            whole = torch.frombuffer(arena.memory, dtype=torch.uint8)
        self.bytes_SLX = whole.view(arena.num_slots, arena.shape.num_layers, arena.shape.slice_bytes)
        self._start = self.bytes_SLX.data_ptr()

    def address(self, slot: int, layer: int) -> int:
        """Returns where a layer's slice starts. Raises IndexError for a slot or layer that does not exist."""
        shape = self.arena.shape
        if not (0 <= slot < self.arena.num_slots and 0 <= layer < shape.num_layers):
            raise IndexError(f"slot {slot}, layer {layer}")
        return self._start + slot * shape.block_bytes + layer * shape.slice_bytes


class Pages(Protocol):
    """The pages of all layers. One thread may store while another fetches."""

    num_layers: int
    slice_bytes: int

    def adopt_staging(self, staging: Area) -> None:
        """Prepares the only area that `store` copies to. Called once, before the first `store`."""

    def mark(self) -> object:
        """Returns the present point of the model's work, to be given to `store`."""

    def store(
        self, blocks: Sequence[int], staging: Area, slots: Sequence[int], *, after: object
    ) -> list[Seals]:
        """Copies blocks to slots after the model's work before `after`, waits for the copies, and returns seals."""

    def fetch(self, arena: Area, slot: int, block: int, seals: Seals) -> bool:
        """Copies a slot to a block; returns False if its bytes do not match the seals. The copy may only be complete
        once `settle` returns."""

    def settle(self) -> None:
        """Waits until all fetched bytes are in place."""


def pages_of(layers: Sequence[Tensor], num_blocks: int) -> Pages:
    """Returns the pages of all layers' KV tensors, in order. Raises ValueError unless each page is one run of bytes,
    all pages have one size, and no two layers share a tensor."""
    views = [page_view(layer, num_blocks) for layer in layers]
    sizes = {view.shape[1] for view in views}
    if len(sizes) != 1:
        raise ValueError(f"layers with pages of different sizes: {sorted(sizes)} bytes")
    if len({view.data_ptr() for view in views}) != len(views):
        raise ValueError("layers that share their KV cache")
    if views[0].device.type == "cpu":
        return CpuPages(views)
    if views[0].device.type == "cuda":
        return CudaPages(views)
    raise ValueError(f"KV on {views[0].device.type}: only cpu and cuda are known")


def page_view(layer: Tensor, num_blocks: int) -> Tensor:
    """Returns a KV tensor [block, …] as bytes [block, byte of its page]. Raises ValueError unless a page is one run of
    bytes. The tensor may have several kernel blocks, side by side, for each of the `num_blocks`."""
    if layer.dim() < 2 or num_blocks < 1 or layer.shape[0] % num_blocks:
        raise ValueError(f"a KV tensor of shape {tuple(layer.shape)} for {num_blocks} blocks")
    run = 1
    for stride, size in sorted(zip(layer.stride()[1:], layer.shape[1:], strict=True)):
        if size != 1 and stride != run:
            raise ValueError(f"pages in pieces: shape {tuple(layer.shape)}, strides {layer.stride()}")
        run *= size
    step, parts = layer.stride(0), layer.shape[0] // num_blocks
    if step < run or (parts > 1 and step != run):
        raise ValueError(f"pages in pieces: shape {tuple(layer.shape)}, strides {layer.stride()}")
    item = layer.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=layer.device).set_(layer.untyped_storage())
    shape, strides = (num_blocks, parts * run * item), (parts * step * item, 1)
    return whole.as_strided(shape, strides, layer.storage_offset() * item)


class _At:
    """Seals of bytes at an address."""

    def __init__(self, size: int) -> None:
        self._type = ctypes.c_char * size

    def seal(self, address: int) -> bytes:
        return seal(memoryview(self._type.from_address(address)))


class CpuPages:
    """Pages in host memory, copied by address: without torch's thread pool, and without the interpreter lock."""

    def __init__(self, views: Sequence[Tensor]) -> None:
        self._views = list(views)
        self._starts = [(view.data_ptr(), view.stride(0)) for view in views]
        self._num_blocks = views[0].shape[0]
        self.num_layers, self.slice_bytes = len(views), views[0].shape[1]
        self._at = _At(self.slice_bytes)

    def adopt_staging(self, staging: Area) -> None:
        pass

    def mark(self) -> None:
        return None  # the model's work is done when its Python call returns

    def store(
        self, blocks: Sequence[int], staging: Area, slots: Sequence[int], *, after: object
    ) -> list[Seals]:
        return [self._store(block, staging, slot) for block, slot in zip(blocks, slots, strict=True)]

    def _store(self, block: int, staging: Area, slot: int) -> Seals:
        self._check(block, staging)
        seals = []
        for layer, (start, stride) in enumerate(self._starts):
            into = staging.address(slot, layer)
            ctypes.memmove(into, start + block * stride, self.slice_bytes)
            seals.append(self._at.seal(into))
        return tuple(seals)

    def fetch(self, arena: Area, slot: int, block: int, seals: Seals) -> bool:
        self._check(block, arena)
        for layer, (start, stride) in enumerate(self._starts):
            into = start + block * stride
            ctypes.memmove(into, arena.address(slot, layer), self.slice_bytes)
            if self._at.seal(into) != seals[layer]:
                return False
        return True

    def settle(self) -> None:
        pass

    def _check(self, block: int, area: Area) -> None:
        # Addresses know no bounds.
        if not 0 <= block < self._num_blocks:
            raise IndexError(f"block {block}")
        assert area.arena.shape == Shape(self.num_layers, self.slice_bytes)


class CudaPages:
    """Pages on a GPU, copied on streams of their own. Not tried on a GPU yet. Fetched pages go to pinned memory first,
    where their seals are checked before they are sent to the GPU."""

    _BOUNCES = 4

    def __init__(self, views: Sequence[Tensor]) -> None:
        self._views = list(views)
        self.num_layers, self.slice_bytes = len(views), views[0].shape[1]
        self._at = _At(self.slice_bytes)
        self._out, self._in = torch.cuda.Stream(), torch.cuda.Stream()
        shape = (self._BOUNCES, self.num_layers, self.slice_bytes)
        self._bounces_RLX = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._sent: list[torch.cuda.Event | None] = [None] * self._BOUNCES
        self._next = 0

    def adopt_staging(self, staging: Area) -> None:
        bytes_SLX = staging.bytes_SLX
        error = torch.cuda.cudart().cudaHostRegister(bytes_SLX.data_ptr(), bytes_SLX.numel(), 0)
        if error.value:
            raise RuntimeError(f"the staging area cannot be pinned: {error}")

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        return event

    def store(
        self, blocks: Sequence[int], staging: Area, slots: Sequence[int], *, after: object
    ) -> list[Seals]:
        assert isinstance(after, torch.cuda.Event)
        with torch.cuda.stream(self._out):
            self._out.wait_event(after)
            for block, slot in zip(blocks, slots, strict=True):
                for view, into in zip(self._views, staging.bytes_SLX[slot], strict=True):
                    into.copy_(view[block], non_blocking=True)
        self._out.synchronize()
        layers = range(self.num_layers)
        return [tuple([self._at.seal(staging.address(slot, layer)) for layer in layers]) for slot in slots]

    def fetch(self, arena: Area, slot: int, block: int, seals: Seals) -> bool:
        bounce, self._next = self._next, (self._next + 1) % self._BOUNCES
        if (sent := self._sent[bounce]) is not None:
            sent.synchronize()
        pages_LX = self._bounces_RLX[bounce]
        ctypes.memmove(pages_LX.data_ptr(), arena.address(slot, 0), self.num_layers * self.slice_bytes)
        for layer in range(self.num_layers):
            if self._at.seal(pages_LX[layer].data_ptr()) != seals[layer]:
                return False
        with torch.cuda.stream(self._in):
            for view, page in zip(self._views, pages_LX, strict=True):
                view[block].copy_(page, non_blocking=True)
            self._sent[bounce] = torch.cuda.Event()
            self._sent[bounce].record(self._in)
        return True

    def settle(self) -> None:
        self._in.synchronize()
