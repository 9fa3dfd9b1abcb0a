"""The messenger's benchmark on transfers of a few kilobytes: rows, verified bytes, seals that bite."""

from __future__ import annotations

import contextlib
import json

import pytest

from isthmus.bench import BenchError, session_peer
from isthmus.bench.messenger import Plan, run
from isthmus.bench.session_peer import Sessions
from isthmus.bench.transfer_peers import Direction, Memcpy, Peer, Sockets, shown_bytes, touched, verify

KIB = 1024
SIZE, PIECE = 100_000, 4096


@pytest.fixture(autouse=True)
def no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.bench.messenger.SAMPLE_BYTES", 1)


class Elsewhere:
    """Says that a transfer takes as many seconds as it has GB."""

    def __init__(self) -> None:
        self.verified: list[tuple[int, int]] = []

    def verify(self, direction: Direction, size: int, piece: int) -> None:
        self.verified.append((size, piece))

    def seconds(self, direction: Direction, size: int, piece: int, count: int) -> float:
        return size / 1e9


@pytest.mark.parametrize("direction", Direction)
def test_rows_have_every_side(direction: Direction) -> None:
    lines: list[str] = []
    other = Elsewhere()
    plan = Plan(direction, (64 * KIB,), (4 * KIB, 48 * KIB, 128 * KIB), (1, 2), rounds=1, pings=3)
    found = run(plan, lines.append, {"other": other})
    rows = json.loads(json.dumps(found.json))
    assert [list(row) for row in rows] == [
        ["size", "pieces", "connections", "isthmus", "socket", "memcpy", "other"]
    ] * 4
    assert [(row["pieces"], row["connections"]) for row in rows] == [
        (piece * KIB, n) for n in (1, 2) for piece in (4, 48)
    ]
    assert all(min(row.values()) > 0 and row["other"] == pytest.approx(1.0) for row in rows)
    assert other.verified == [(64 * KIB, piece * KIB) for piece in (4, 48)] * 2
    assert len(lines) == 4 and lines[0].startswith("size 64 KiB, pieces 4 KiB, connections 1, isthmus ")
    shown, latency = found.tables
    assert [column.name for column in shown.columns][-2:] == ["/ socket", "/ other"]
    assert [row[0] for row in latency.rows] == ["isthmus", "socket"]


@pytest.mark.parametrize("kind", ["memcpy", "one socket", "three sockets"])
def test_bytes_are_whole_both_ways(kind: str) -> None:
    memory = touched(SIZE)
    peer: Peer = Memcpy(memory) if kind == "memcpy" else Sockets(memory, 1 if "one" in kind else 3)
    with contextlib.closing(peer):
        for direction in Direction:
            verify(peer, direction, SIZE, PIECE)
            verify(peer, direction, SIZE // 2, SIZE)
            assert peer.transfer(direction, SIZE, PIECE) > 0


class Faulty(Memcpy):
    def transfer(self, direction: Direction, size: int, piece: int) -> float:
        return super().transfer(direction, size - 1, piece)


def test_a_missing_byte_is_found() -> None:
    peer = Faulty(touched(SIZE))
    peer._target[SIZE - 1] = 1
    with pytest.raises(BenchError, match="arrived damaged"):
        verify(peer, Direction.PUSH, SIZE, PIECE)


def test_sizes_as_shown() -> None:
    assert [shown_bytes(n) for n in (1 << 30, 3 << 20, 1 << 16, 100)] == ["1 GiB", "3 MiB", "64 KiB", "100 B"]


def test_more_than_the_region_is_sent_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_peer, "AHEAD_BYTES", 0)
    monkeypatch.setattr(session_peer, "GROUP_BYTES", 8 * KIB)
    memory = touched(32 * KIB)
    with contextlib.closing(Sessions(memory, 2)) as session:
        verify(session, Direction.PUSH, 32 * KIB, 4 * KIB)
        assert session.transfer(Direction.PUSH, 100 * KIB, 4 * KIB) > 0
        assert session.far_digest(32 * KIB) == session_peer.digest(memory)


def test_a_wrong_seal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Sessions(touched(32 * KIB), 1)) as session:
        monkeypatch.setattr(session_peer, "seal", lambda part: bytes(16))  # of this process, the sender
        for direction in Direction:
            with pytest.raises(BenchError, match="arrived damaged"):
                session.transfer(direction, 32 * KIB, 4 * KIB)
