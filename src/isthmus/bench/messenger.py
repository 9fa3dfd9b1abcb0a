"""`isthmus bench messenger`: bytes between two processes of one machine, beside bare sockets and memcpy.

All sides take turns within a round, so that a slow moment of the machine hits them alike; a figure is the median
over the rounds. Every side's bytes are compared once for each case; the messenger's are sealed and checked in
every transfer, inside its time.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.table import Table

from isthmus.bench.session_peer import Sessions
from isthmus.bench.transfer_peers import (
    Direction,
    Memcpy,
    Peer,
    Sockets,
    shown_bytes,
    touched,
    verify,
)

KIB, MIB = 1 << 10, 1 << 20
SAMPLE_BYTES = 64 * MIB
"""Small transfers are repeated, one after another, until this much has moved: one sample."""
PING_BYTES = 4 * KIB
PING_PAUSE_S = 0.001


@dataclass(frozen=True)
class Plan:
    """What is measured. Pieces larger than a size are left out for it."""

    direction: Direction = Direction.PUSH
    sizes: tuple[int, ...] = (MIB, 16 * MIB, 1024 * MIB)
    pieces: tuple[int, ...] = (64 * KIB, 256 * KIB, MIB, 2 * MIB)
    connections: tuple[int, ...] = (1, 2, 4)
    rounds: int = 5
    pings: int = 2000


@dataclass(frozen=True)
class Row:
    """`size`, `pieces`: bytes of a transfer and of each of its pieces. `speeds`: GB/s (1e9 bytes), medians, by side."""

    size: int
    pieces: int
    connections: int
    speeds: dict[str, float]


@dataclass(frozen=True)
class Latency:
    """Milliseconds from sending a 4 KiB message until its answer is here, one at a time, idle in between."""

    side: str
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Result:
    direction: Direction
    rows: list[Row]
    latencies: list[Latency]


class Other(Protocol):
    """A side that is timed from elsewhere, with memory of its own."""

    def verify(self, direction: Direction, size: int, piece: int) -> None:
        """Raises BenchError if other bytes arrive than were sent."""

    def seconds(self, direction: Direction, size: int, piece: int, count: int) -> float:
        """Of one of `count` transfers after another."""


def run(
    plan: Plan, report: Callable[[str], None] = lambda line: None, others: Mapping[str, Other] | None = None
) -> Result:
    """All cases, then the latency. `others` take their turns with the sides of this machine.

    Raises BenchError when bytes arrive damaged, StartError when a side does not start.
    """
    memory = touched(max(plan.sizes))
    rows: list[Row] = []
    with contextlib.closing(Memcpy(memory)) as copy:
        for connections in plan.connections:
            with _both(memory, connections) as (ours, bare):
                peers: dict[str, Peer] = {"isthmus": ours, "socket": bare, "memcpy": copy}
                for size, piece in _cases(plan):
                    speeds = _measure(plan, size, piece, peers, others or {})
                    rows.append(Row(size, piece, connections, speeds))
                    report(_line(rows[-1]))
    return Result(plan.direction, rows, _latencies(memory, plan.pings))


@contextlib.contextmanager
def _both(memory: memoryview, connections: int) -> Iterator[tuple[Sessions, Sockets]]:
    with (
        contextlib.closing(Sessions(memory, connections)) as ours,
        contextlib.closing(Sockets(memory, connections)) as bare,
    ):
        yield ours, bare


def _cases(plan: Plan) -> list[tuple[int, int]]:
    return [(size, piece) for size in plan.sizes for piece in plan.pieces if piece <= size]


def _measure(
    plan: Plan, size: int, piece: int, peers: Mapping[str, Peer], others: Mapping[str, Other]
) -> dict[str, float]:
    """One case: every side in turns, `rounds` times after a transfer that is compared; medians in GB/s."""
    for peer in peers.values():
        verify(peer, plan.direction, size, piece)
    for other in others.values():
        other.verify(plan.direction, size, piece)
    count = max(1, SAMPLE_BYTES // size)
    found: dict[str, list[float]] = {side: [] for side in (*peers, *others)}
    for _ in range(plan.rounds):
        for side, peer in peers.items():
            seconds = sum(peer.transfer(plan.direction, size, piece) for _ in range(count))
            found[side].append(count * size / seconds / 1e9)
        for side, other in others.items():
            found[side].append(size / other.seconds(plan.direction, size, piece, count) / 1e9)
    return {side: statistics.median(samples) for side, samples in found.items()}


def _latencies(memory: memoryview, pings: int) -> list[Latency]:
    with _both(memory, 1) as (ours, bare):
        sides = {"isthmus": ours.echo, "socket": bare.echo}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(pings):
            for name, echo in sides.items():
                times[name].append(1000 * echo(min(PING_BYTES, len(memory))))
                time.sleep(PING_PAUSE_S)
    return [Latency(name, _rank(each, 50), _rank(each, 99)) for name, each in times.items()]


def _rank(values: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _line(row: Row) -> str:
    speeds = ", ".join(f"{side} {speed:.2f}" for side, speed in row.speeds.items())
    return f"{shown_bytes(row.size)} in {shown_bytes(row.pieces)} over {row.connections}: {speeds} GB/s"


def tables(result: Result) -> list[Table]:
    """The rows, with our speed over each other way of sending; and the latency."""
    sides = list(result.rows[0].speeds)
    rivals = [side for side in sides if side not in ("isthmus", "memcpy")]
    names = ("size", "pieces", "connections", *sides, *(f"/ {side}" for side in rivals))
    rows = Table(*names, title=f"isthmus bench messenger: {result.direction}, GB/s")
    for row in result.rows:
        speeds = row.speeds
        ratios = [speeds["isthmus"] / speeds[side] for side in rivals]
        shown = [f"{value:.2f}" for value in (*speeds.values(), *ratios)]
        rows.add_row(shown_bytes(row.size), shown_bytes(row.pieces), str(row.connections), *shown)
    latency = Table("4 KiB message and answer", "P50 ms", "P99 ms")
    for each in result.latencies:
        latency.add_row(each.side, f"{each.p50_ms:.3f}", f"{each.p99_ms:.3f}")
    return [rows, latency]


def as_json(result: Result) -> list[dict[str, Any]]:
    """The rows; their keys are the fields of `Row`, and every side instead of `speeds`."""
    return [
        {"size": row.size, "pieces": row.pieces, "connections": row.connections, **row.speeds}
        for row in result.rows
    ]
