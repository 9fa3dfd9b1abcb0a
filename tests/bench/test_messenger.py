"""The messenger's benchmark on transfers of a few kilobytes: rows, verified bytes, seals that bite."""

from __future__ import annotations

import contextlib

import pytest

from isthmus.bench import BenchError, session_peer
from isthmus.bench.session_peer import Sessions
from isthmus.bench.transfer_peers import Direction, touched

KIB = 1024


def test_a_wrong_seal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Sessions(touched(32 * KIB), 1)) as session:
        monkeypatch.setattr(session_peer, "seal", lambda part: bytes(16))  # of this process, the sender
        for direction in Direction:
            with pytest.raises(BenchError, match="arrived damaged"):
                session.transfer(direction, 32 * KIB, 4 * KIB)
