from __future__ import annotations

import mmap
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from isthmus.live.store import Arena, ArenaHandle, PeerArena, Shape
from tests.live.store.support import SMALL, descriptors

OWN = """
import time, msgspec
from isthmus.live.store import Arena, Shape
arena = Arena(Shape(3, 100), 1)
arena.slice(0, 1)[:] = b"o" * 100
print(msgspec.json.encode(arena.handle).decode(), flush=True)
time.sleep(60)
"""


def handle_of(arena: Arena) -> ArenaHandle:
    assert arena.handle is not None
    return arena.handle


def test_a_peer_sees_later_changes_cannot_write_and_outlives_the_owner() -> None:
    before = descriptors()
    arena = Arena(SMALL, 1)
    peer = PeerArena.attach(handle_of(arena))
    assert peer is not None and peer.memory.readonly
    arena.slice(0, 0)[:] = b"z" * 100
    assert bytes(peer.slice(0, 0)) == b"z" * 100
    fd = os.open(handle_of(arena).path, os.O_RDWR)
    with pytest.raises(PermissionError):  # nor by mapping the file itself
        mmap.mmap(fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    os.close(fd)
    arena.close()
    assert bytes(peer.slice(0, 0)) == b"z" * 100
    peer.close()
    assert descriptors() <= before


def test_a_handle_of_something_else_is_refused(tmp_path: object) -> None:
    arena = Arena(SMALL, 2)
    handle = handle_of(arena)
    for other in (
        msgspec.structs.replace(handle, path=f"{tmp_path}/missing"),
        msgspec.structs.replace(handle, path="/proc/self/fd"),
        msgspec.structs.replace(handle, nonce=bytes(16)),
        msgspec.structs.replace(handle, num_slots=3),
        msgspec.structs.replace(handle, shape=Shape(3, 101)),
        msgspec.structs.replace(handle, num_slots=-2, shape=Shape(-3, 100)),
    ):
        assert PeerArena.attach(other) is None
    arena.close()
    assert PeerArena.attach(handle) is None


def test_kill_9_of_the_owner_leaves_nothing_and_hurts_no_peer() -> None:
    command = [sys.executable, "-c", OWN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        handle = msgspec.json.decode(owner.stdout.readline(), type=ArenaHandle)
        peer = PeerArena.attach(handle)
        assert peer is not None
        owner.kill()
    assert PeerArena.attach(handle) is None
    assert bytes(peer.slice(0, 1)) == b"o" * 100
    peer.close()


def test_closing_twice_and_with_views_out_is_fine() -> None:
    arena = Arena(SMALL, 1)
    view = arena.slot(0)
    exported = np.frombuffer(arena.memory, np.uint8)
    arena.close()
    arena.close()
    view[:1] = b"v"
    assert exported[0] == ord("v")


def test_without_memfd_the_memory_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    arena = Arena(SMALL, 1)
    arena.slot(0)[:2] = b"ok"
    assert arena.handle is None
    arena.close()
