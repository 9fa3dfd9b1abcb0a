"""The messenger's benchmark on transfers of a few kilobytes: rows, verified bytes, seals that bite."""

from __future__ import annotations

import contextlib

import pytest

from isthmus.bench import BenchError, session_peer
from isthmus.bench.session_peer import Sessions
from isthmus.bench.transfer_peers import Direction, touched, verify

KIB = 1024


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
