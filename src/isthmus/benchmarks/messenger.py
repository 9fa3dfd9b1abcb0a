"""`isthmus bench messenger`: bytes between two processes of one machine, beside bare sockets, memcpy, Mooncake.

All sides take turns within a round, so that a slow moment of the machine hits them alike; a figure is the median
over the rounds. Every side's bytes are compared once for each case; the messenger's are sealed and checked in
every transfer, inside its time.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from isthmus.benchmarks.session_peer import Sessions
from isthmus.benchmarks.transfer_peers import (
    Direction,
    Memcpy,
    MooncakeEngine,
    Peer,
    Sockets,
    find_mooncake,
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
    mooncake_python: str | None = None


@dataclass(frozen=True)
class Row:
    """GB/s (1e9 bytes), medians. `size`, `pieces`: bytes of a transfer, and of each of its pieces."""

    size: int
    pieces: int
    connections: int
    isthmus: float
    socket: float
    memcpy: float
    mooncake: float | None


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


def run(plan: Plan, report: Callable[[str], None] = lambda line: None) -> Result:
    """All cases, then the latency.

    Raises BenchError when bytes arrive damaged, StartError when a side does not start.
    """
    memory = touched(max(plan.sizes))
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        copy = stack.enter_context(contextlib.closing(Memcpy(memory)))
        python, mooncake = find_mooncake(plan.mooncake_python), None
        if python is not None:
            mooncake = stack.enter_context(contextlib.closing(MooncakeEngine(python, max(plan.sizes))))
        for connections in plan.connections:
            with _both(memory, connections) as (ours, bare):
                for size, piece in _cases(plan):
                    row = _measure(plan, size, piece, connections, (ours, bare, copy), mooncake)
                    rows.append(row)
                    report(_line(row))
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
    plan: Plan,
    size: int,
    piece: int,
    connections: int,
    peers: Sequence[Peer],
    mooncake: MooncakeEngine | None,
) -> Row:
    """One case: every side in turns, `rounds` times after a transfer that is compared."""
    for peer in peers:
        verify(peer, plan.direction, size, piece)
    if mooncake is not None:
        mooncake.verify(plan.direction, size, piece)
    count = max(1, SAMPLE_BYTES // size)
    found: list[list[float]] = [[] for _ in peers]
    theirs: list[float] = []
    for _ in range(plan.rounds):
        for peer, samples in zip(peers, found, strict=True):
            seconds = sum(peer.transfer(plan.direction, size, piece) for _ in range(count))
            samples.append(count * size / seconds / 1e9)
        if mooncake is not None:
            theirs.append(size / mooncake.seconds(plan.direction, size, piece, count) / 1e9)
    isthmus, socket, memcpy = map(statistics.median, found)
    return Row(size, piece, connections, isthmus, socket, memcpy, statistics.median(theirs) if theirs else None)


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
    theirs = "" if row.mooncake is None else f", mooncake {row.mooncake:.2f}"
    return (
        f"{shown_bytes(row.size)} in {shown_bytes(row.pieces)} over {row.connections}: isthmus {row.isthmus:.2f}, "
        f"socket {row.socket:.2f}, memcpy {row.memcpy:.2f}{theirs} GB/s"
    )


def tables(result: Result) -> list[Table]:
    """The rows with their ratios, and the latency."""
    names = (
        "size",
        "pieces",
        "connections",
        "isthmus",
        "socket",
        "memcpy",
        "mooncake",
        "/ socket",
        "/ mooncake",
    )
    rows = Table(*names, title=f"isthmus bench messenger: {result.direction}, GB/s")
    for row in result.rows:
        theirs = (
            ("", "") if row.mooncake is None else (f"{row.mooncake:.2f}", f"{row.isthmus / row.mooncake:.2f}")
        )
        sizes = (shown_bytes(row.size), shown_bytes(row.pieces), str(row.connections))
        speeds = (f"{row.isthmus:.2f}", f"{row.socket:.2f}", f"{row.memcpy:.1f}", theirs[0])
        rows.add_row(*sizes, *speeds, f"{row.isthmus / row.socket:.2f}", theirs[1])
    latency = Table("4 KiB message and answer", "P50 ms", "P99 ms")
    for each in result.latencies:
        latency.add_row(each.side, f"{each.p50_ms:.3f}", f"{each.p99_ms:.3f}")
    return [rows, latency]


def as_json(result: Result) -> list[dict[str, Any]]:
    """The rows; their keys are the fields of `Row`."""
    return [asdict(row) for row in result.rows]
