"""Memory of the DRAM tier: equal slots that peers on the same host can map.

The memory is an anonymous file (memfd), so the kernel frees it with the last process that maps it, however that
process ends. A peer opens it through /proc of the owner; a nonce in the first page shows whether it is the arena of
the handle, or that of a later process with the same number.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

_MAGIC = b"isthmus arena 1\n"
_NONCE_BYTES = 16
_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, not in Python's fcntl yet: later mappings are read-only


class Shape(msgspec.Struct, frozen=True):
    """Shape of a block: its layer slices in order, `num_layers * slice_bytes` bytes."""

    num_layers: int
    slice_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.slice_bytes


class ArenaHandle(msgspec.Struct, frozen=True):
    """Names an arena for peers on the same host."""

    path: str
    nonce: bytes
    num_slots: int
    shape: Shape


class Arena:
    """`num_slots` slots of one block each; slot i is `memory[i * block_bytes : (i + 1) * block_bytes]`.

    `handle` is None where the memory cannot be shared.
    """

    def __init__(self, shape: Shape, num_slots: int) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self.capacity_bytes = num_slots * shape.block_bytes
        size = PAGE_BYTES + self.capacity_bytes
        self._fd = _shared_file(size)
        self._map = mmap.mmap(-1 if self._fd is None else self._fd, size)
        self.memory = memoryview(self._map)[PAGE_BYTES:]
        self.handle = self._share()

    def slot(self, slot: int) -> memoryview:
        """Returns the whole block in slot `slot`."""
        size = self.shape.block_bytes
        return self.memory[slot * size : (slot + 1) * size]

    def slice(self, slot: int, layer: int) -> memoryview:
        """Returns one layer of the block in slot `slot`."""
        return _slice(self.memory, self.shape, slot, layer)

    def fileno(self) -> int:
        """Returns the descriptor of shared memory, for peers that do not see this process in their /proc."""
        assert self._fd is not None, "this memory cannot be shared"
        return self._fd

    def close(self) -> None:
        """Frees the memory, at once or with the last view into it. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        _unmap(self.memory, self._map)

    def _share(self) -> ArenaHandle | None:
        if self._fd is None:
            return None
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._map[: len(_MAGIC) + _NONCE_BYTES] = _MAGIC + nonce
        # Never shorter again, or a peer that reads its mapping would be killed by SIGBUS.
        for seals in (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, _SEAL_FUTURE_WRITE):
            with suppress(OSError):
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
        return ArenaHandle(f"/proc/{os.getpid()}/fd/{self._fd}", nonce, self.num_slots, self.shape)


class PeerArena:
    """Another process's arena, mapped for reading. Slots may be overwritten at any time unless pinned there."""

    def __init__(self, mapped: mmap.mmap, handle: ArenaHandle) -> None:
        self._map = mapped
        self.shape = handle.shape
        self.num_slots = handle.num_slots
        self.memory = memoryview(mapped)[PAGE_BYTES:]

    @classmethod
    def attach(cls, handle: ArenaHandle) -> PeerArena | None:
        """Maps the arena of `handle`; None when it is on another host, of another user, or gone."""
        if not _PATH.fullmatch(handle.path):
            return None
        try:
            fd = os.open(handle.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            return cls.of(fd, handle)
        finally:
            os.close(fd)

    @classmethod
    def of(cls, fd: int, handle: ArenaHandle) -> PeerArena | None:
        """Maps the arena behind a descriptor, which stays open; None when it is not that of `handle`."""
        shape = handle.shape
        size = PAGE_BYTES + handle.num_slots * shape.block_bytes
        if min(handle.num_slots, shape.num_layers, shape.slice_bytes) < 1:
            return None
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # fails for what is no memfd
            if os.fstat(fd).st_size != size or not seals & fcntl.F_SEAL_SHRINK:
                return None
            mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        if mapped[: len(_MAGIC) + _NONCE_BYTES] != _MAGIC + handle.nonce:
            mapped.close()
            return None
        return cls(mapped, handle)

    def slice(self, slot: int, layer: int) -> memoryview:
        """Returns one layer of the block in the owner's slot `slot`. Check its seal after copying, not before."""
        return _slice(self.memory, self.shape, slot, layer)

    def close(self) -> None:
        """Unmaps, at once or with the last view. Idempotent."""
        _unmap(self.memory, self._map)


def _slice(memory: memoryview, shape: Shape, slot: int, layer: int) -> memoryview:
    start = slot * shape.block_bytes + layer * shape.slice_bytes
    return memory[start : start + shape.slice_bytes]


def _unmap(memory: memoryview, mapped: mmap.mmap) -> None:
    with suppress(BufferError):  # somebody still holds a view; the map goes with the last one
        memory.release()
        mapped.close()


def _shared_file(size: int) -> int | None:
    """Makes an anonymous file of `size` bytes; None where the system has none or not of this size."""
    if not hasattr(os, "memfd_create"):
        return None
    fd = os.memfd_create("isthmus-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        return None
    return fd


PAGE_BYTES = 4096

Buffer = memoryview | bytes | bytearray | mmap.mmap


def copy_bytes(into: memoryview, data: Buffer) -> None:
    """Copies `data` to `into`, contiguous bytes of the same length. numpy releases the interpreter lock meanwhile;
    assigning to a slice of a memoryview holds it."""
    np.copyto(_bytes_of(into), _bytes_of(data))


def address(view: Buffer) -> int:
    """Returns the memory address at which the view starts."""
    interface: dict[str, Any] = _bytes_of(view).__array_interface__
    start: int = interface["data"][0]
    return start


def aligned_buffer(size: int) -> memoryview:
    """Returns zeroed memory that starts at a page border, as O_DIRECT wants it."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def round_up(size: int, align: int) -> int:
    return -(-size // align) * align


def _bytes_of(view: Buffer) -> NDArray[np.uint8]:
    return np.frombuffer(view, np.uint8)
