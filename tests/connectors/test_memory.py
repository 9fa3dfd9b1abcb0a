"""The connector's shared memory and that of isthmus are one layout, whoever makes it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest

from isthmus.live.store.arena import PAGE_BYTES, Arena, PeerArena, Shape
from isthmus_vllm import memory
from isthmus_vllm.memory import attach, create
from isthmus_vllm.wire import Memory

from .adapter import handle_of, memory_of


def filled(slot: int, layer: int) -> bytes:
    return bytes([slot * 16 + layer]) * 96


def test_isthmus_reads_what_the_connector_made() -> None:
    area = create(num_slots=3, num_layers=2, slice_bytes=96)
    for slot in range(3):
        for layer in range(2):
            area.bytes_SLX[slot, layer] = slot * 16 + layer
    peer = PeerArena.attach(handle_of(area.memory))
    assert peer is not None
    assert all(bytes(peer.slice(slot, layer)) == filled(slot, layer) for slot in range(3) for layer in range(2))


def test_the_connector_reads_what_isthmus_made() -> None:
    arena = Arena(Shape(2, 96), 3)
    for slot in range(3):
        for layer in range(2):
            arena.slice(slot, layer)[:] = filled(slot, layer)
    assert arena.handle is not None
    area = attach(memory_of(arena.handle))
    found = [bytes(area.bytes_SLX[slot, layer].tolist()) for slot in range(3) for layer in range(2)]
    assert found == [filled(slot, layer) for slot in range(3) for layer in range(2)]
    assert area.address(2, 1) == area.bytes_SLX[2, 1].data_ptr()
    arena.slice(1, 1)[:] = bytes(96)
    assert not area.bytes_SLX[1, 1].any()


def test_a_page_before_the_slots_is_as_long_as_in_isthmus() -> None:
    assert memory.PAGE_BYTES == PAGE_BYTES


@pytest.mark.parametrize("place", [(3, 0), (-1, 0), (0, 2), (0, -1)])
def test_an_address_is_within(place: tuple[int, int]) -> None:
    with pytest.raises(IndexError):
        create(num_slots=3, num_layers=2, slice_bytes=96).address(*place)


def test_others_cannot_write_or_shorten_it() -> None:
    area = create(num_slots=1, num_layers=1, slice_bytes=96)
    fd = os.open(area.memory.path, os.O_RDWR)
    try:
        with pytest.raises(OSError):
            os.ftruncate(fd, 10)
        with pytest.raises(OSError):
            mmap.mmap(fd, PAGE_BYTES)
    finally:
        os.close(fd)


def test_only_what_was_meant_is_mapped() -> None:
    real = create(num_slots=1, num_layers=1, slice_bytes=96).memory
    wrong = [
        Memory(real.path, b"?" * 16, 1, 1, 96),
        Memory(real.path, real.nonce, 2, 1, 96),
        Memory(real.path, real.nonce, -1, -1, 96),
        Memory("/etc/passwd", real.nonce, 1, 1, 96),
    ]
    for told in wrong:
        with pytest.raises(ValueError):
            attach(told)
    with pytest.raises(OSError):
        attach(Memory("/proc/1/fd/99999", real.nonce, 1, 1, 96))


def test_it_outlives_its_maker() -> None:
    code = """
from isthmus_vllm.memory import create
area = create(num_slots=1, num_layers=1, slice_bytes=96)
area.bytes_SLX[:] = 7
print(area.memory.path, area.memory.nonce.hex(), flush=True)
input()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as maker:
        assert maker.stdout is not None
        path, nonce = maker.stdout.readline().split()
        area = attach(Memory(path, bytes.fromhex(nonce), 1, 1, 96))
        maker.kill()
        maker.wait()
    assert (area.bytes_SLX == 7).all()
