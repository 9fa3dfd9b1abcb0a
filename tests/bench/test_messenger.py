"""The messenger's benchmark on transfers of a few kilobytes: rows, verified bytes, seals that bite."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from rich.console import Console

from isthmus.bench import BenchError, session_peer
from isthmus.bench.messenger import Latency, Plan, Result, Row, as_json, run, tables
from isthmus.bench.session_peer import Sessions
from isthmus.bench.transfer_peers import Direction, touched, verify

KIB = 1024
SMALL = Plan(sizes=(64 * KIB,), pieces=(4 * KIB, 48 * KIB, 128 * KIB), connections=(1, 2), rounds=1, pings=3)


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


def test_another_side_takes_its_turns() -> None:
    other = Elsewhere()
    result = run(
        Plan(sizes=(64 * KIB,), pieces=(48 * KIB,), connections=(1,), rounds=1, pings=1),
        others={"other": other},
    )
    assert [row.speeds["other"] for row in result.rows] == [pytest.approx(1.0)]
    assert other.verified == [(64 * KIB, 48 * KIB)]


@pytest.mark.parametrize("direction", Direction)
def test_rows_have_every_side(direction: Direction) -> None:
    lines: list[str] = []
    result = run(Plan(direction, SMALL.sizes, SMALL.pieces, SMALL.connections, 1, 3), lines.append)
    cases = [(row.size, row.pieces, row.connections) for row in result.rows]
    assert cases == [(64 * KIB, piece * KIB, n) for n in (1, 2) for piece in (4, 48)]
    assert all(list(row.speeds) == ["isthmus", "socket", "memcpy"] for row in result.rows)
    assert all(min(row.speeds.values()) > 0 for row in result.rows)
    assert [each.side for each in result.latencies] == ["isthmus", "socket"]
    assert all(0 < each.p50_ms <= each.p99_ms for each in result.latencies)
    assert len(lines) == len(cases) and lines[0].startswith("64 KiB in 4 KiB over 1: isthmus ")


def test_json_has_exactly_the_promised_keys() -> None:
    row = Row(1, 1, 1, {"isthmus": 1.0, "socket": 1.0, "memcpy": 1.0})
    [found] = as_json(_result([row]))
    assert list(found) == ["size", "pieces", "connections", "isthmus", "socket", "memcpy"]
    assert json.loads(json.dumps(found)) == found


def test_table_shows_ratios() -> None:
    rows = [
        Row(1 << 30, 1 << 20, 4, {"isthmus": 3.0, "socket": 4.0, "memcpy": 10.0, "other": 1.5}),
        Row(1 << 20, 1 << 16, 1, {"isthmus": 2.0, "socket": 4.0, "memcpy": 20.0, "other": 1.25}),
    ]
    console = Console(file=io.StringIO(), width=150, record=True)
    for table in tables(_result(rows)):
        console.print(table)
    text = console.export_text()
    assert (
        "1 GiB" in text
        and "0.75" in text
        and "2.00" in text
        and "1.60" in text
        and "0.50" in text
        and "0.125" in text
    )


def _result(rows: list[Row]) -> Result:
    return Result(Direction.PUSH, rows, [Latency("isthmus", 0.125, 0.5)])


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
        with pytest.raises(BenchError, match="arrived damaged"):
            session.transfer(Direction.PUSH, 32 * KIB, 4 * KIB)
        with pytest.raises(BenchError, match="arrived damaged"):
            session.transfer(Direction.PULL, 32 * KIB, 4 * KIB)
