"""Shared memory of equal slots, laid out as `isthmus.live.store.arena` does it.

An anonymous file (memfd) that the kernel frees with its last mapping. First a page with a magic word and a nonce, by
which a peer that opens it through /proc knows that it found what was meant; then the slots, each one block: its layer
slices in order.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import warnings
from contextlib import suppress

import torch

from isthmus_vllm.wire import Memory

PAGE_BYTES = 4096
_MAGIC = b"isthmus arena 1\n"
_NONCE_BYTES = 16
_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE: later mappings are read-only


class Area:
    """A mapping of shared memory. `bytes_SLX` is a tensor [slot, layer, byte of the slice] over it."""

    def __init__(self, mapped: mmap.mmap, memory: Memory) -> None:
        self.memory = memory
        shape = (memory.num_slots, memory.num_layers, memory.slice_bytes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that torch cannot mark a tensor read-only
            whole = torch.frombuffer(mapped, dtype=torch.uint8)
        self.bytes_SLX = whole[PAGE_BYTES:].view(shape)
        self._start = self.bytes_SLX.data_ptr()

    def address(self, slot: int, layer: int) -> int:
        """Where a layer slice starts. IndexError for a slot or layer that there is not."""
        memory = self.memory
        if not (0 <= slot < memory.num_slots and 0 <= layer < memory.num_layers):
            raise IndexError(f"slot {slot}, layer {layer}")
        return self._start + (slot * memory.num_layers + layer) * memory.slice_bytes


def create(*, num_slots: int, num_layers: int, slice_bytes: int) -> Area:
    """Fresh memory of this process, open to peers on this host through `area.memory`."""
    size = PAGE_BYTES + num_slots * num_layers * slice_bytes
    fd = os.memfd_create(
        "isthmus-vllm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    )  # open as long as the process lives
    os.ftruncate(fd, size)
    mapped = mmap.mmap(fd, size)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    mapped[: len(_MAGIC) + _NONCE_BYTES] = _MAGIC + nonce
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with suppress(OSError):  # kernels before 5.1 do not know it
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    return Area(mapped, Memory(f"/proc/{os.getpid()}/fd/{fd}", nonce, num_slots, num_layers, slice_bytes))


def attach(memory: Memory) -> Area:
    """A peer's memory, mapped for reading. ValueError if it is not what `memory` says, OSError if it is not there."""
    size = PAGE_BYTES + memory.num_slots * memory.num_layers * memory.slice_bytes
    if not _PATH.fullmatch(memory.path) or min(memory.num_slots, memory.num_layers, memory.slice_bytes) < 1:
        raise ValueError(f"no shared memory: {memory}")
    fd = os.open(memory.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # fails for what is no memfd
        # A file that its owner can make shorter would kill its readers by SIGBUS.
        if os.fstat(fd).st_size != size or not seals & fcntl.F_SEAL_SHRINK:
            raise ValueError(f"{memory.path} has another size, or can be made shorter")
        mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if mapped[: len(_MAGIC) + _NONCE_BYTES] != _MAGIC + memory.nonce:
        raise ValueError(f"{memory.path} is something else")
    return Area(mapped, memory)
