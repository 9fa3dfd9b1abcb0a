"""Bytes arrive whole, both ways, and a side that delivers others is found out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from isthmus.bench import BenchError
from isthmus.bench.transfer_peers import (
    Direction,
    Memcpy,
    Peer,
    Sockets,
    shown_bytes,
    touched,
    verify,
)

SIZE, PIECE = 100_000, 4096


@pytest.fixture
def memory() -> memoryview:
    return touched(SIZE)


@pytest.fixture(params=["memcpy", "one socket", "three sockets"])
def peer(request: pytest.FixtureRequest, memory: memoryview) -> Iterator[Peer]:
    found: Peer = (
        Memcpy(memory) if request.param == "memcpy" else Sockets(memory, 1 if "one" in request.param else 3)
    )
    with contextlib.closing(found):
        yield found


def test_whole_both_ways(peer: Peer) -> None:
    for direction in Direction:
        verify(peer, direction, SIZE, PIECE)
        verify(peer, direction, SIZE // 2, SIZE)
        assert peer.transfer(direction, SIZE, PIECE) > 0


class Faulty(Memcpy):
    def transfer(self, direction: Direction, size: int, piece: int) -> float:
        return super().transfer(direction, size - 1, piece)


def test_a_missing_byte_is_found(memory: memoryview) -> None:
    peer = Faulty(memory)
    peer._target[SIZE - 1] = 1
    with pytest.raises(BenchError, match="arrived damaged"):
        verify(peer, Direction.PUSH, SIZE, PIECE)


def test_a_socket_echo_is_timed(memory: memoryview) -> None:
    with contextlib.closing(Sockets(memory, 1)) as peer:
        assert 0 < peer.echo(4096) < 60


def test_sizes_as_shown() -> None:
    assert [shown_bytes(n) for n in (1 << 30, 3 << 20, 1 << 16, 100)] == ["1 GiB", "3 MiB", "64 KiB", "100 B"]
