"""`isthmus bench messenger`: bytes between two processes of one machine, beside bare sockets and memcpy.

All sides take turns within a round, so that a slow moment of the machine hits them alike; a figure is the median
over the rounds. Every side's bytes are compared once for each case; the messenger's are sealed and checked in
every transfer, inside its time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol

from typer import Option

from isthmus.bench.options import COUNTS, SIZES, Rounds, Text, one_of
from isthmus.bench.session_peer import Sessions
from isthmus.bench.study import Outcome, Report, in_turns, medians, over, said, silent, table
from isthmus.bench.transfer_peers import Direction, Memcpy, Peer, Sockets, shown_bytes, touched, verify
from isthmus.lab.sim.spread import nearest_rank

KIB, MIB = 1 << 10, 1 << 20
SAMPLE_BYTES = 64 * MIB
"""Small transfers are repeated, one after another, until this much has moved: one sample."""
PING_BYTES = 4 * KIB
PING_PAUSE_S = 0.001


def _direction(option: str, text: str) -> Direction:
    return Direction(one_of(tuple(Direction), option, text))


@dataclass(frozen=True)
class Plan:
    """Pieces larger than a size are left out for it."""

    direction: Annotated[
        Direction, Text(_direction, str), Option(help="push, or pull: a request answered by a push.")
    ] = Direction.PUSH
    sizes: Annotated[tuple[int, ...], SIZES, Option(help="Bytes of a transfer.")] = (MIB, 16 * MIB, 1024 * MIB)
    pieces: Annotated[tuple[int, ...], SIZES, Option(help="Bytes of each piece of it.")] = (
        64 * KIB, 256 * KIB, MIB, 2 * MIB,
    )  # fmt: skip
    connections: Annotated[tuple[int, ...], COUNTS, Option(help="Connections of a session.")] = (1, 2, 4)
    rounds: Rounds = 5
    pings: Annotated[int, Option(min=1, help="4 KiB messages for the latency.")] = 2000


class Other(Protocol):
    """A side that is timed from elsewhere, with memory of its own."""

    def verify(self, direction: Direction, size: int, piece: int) -> None:
        """Raises BenchError if other bytes arrive than were sent."""

    def seconds(self, direction: Direction, size: int, piece: int, count: int) -> float:
        """Of one of `count` transfers after another."""


def run(plan: Plan, report: Report = silent, others: Mapping[str, Other] | None = None) -> Outcome:
    """Sealed bytes between two processes over loopback, beside bare sockets and memcpy: GB/s, latency.

    All cases, then the latency. `others` take their turns with the sides of this machine. A row has `size` and
    `pieces` in bytes, `connections`, and GB/s (1e9 bytes) by side.

    Raises BenchError when bytes arrive damaged, StartError when a side does not start.
    """
    memory, rows = touched(max(plan.sizes)), list[dict[str, Any]]()
    with contextlib.closing(Memcpy(memory)) as copy:
        for connections in plan.connections:
            with _both(memory, connections) as (ours, bare):
                peers: dict[str, Peer] = {"isthmus": ours, "socket": bare, "memcpy": copy}
                for size, piece in _cases(plan):
                    case = {"size": size, "pieces": piece, "connections": connections}
                    rows.append(case | _speeds(plan, size, piece, peers, others or {}))
                    report(said(_shown(rows[-1]), "GB/s"))
    sides = ["isthmus", "socket", "memcpy", *(others or {})]
    names = {name: name for name in ("size", "pieces", "connections", *sides)}
    columns = names | over("isthmus", ["socket", *(others or {})])
    shown = table(f"isthmus bench messenger: {plan.direction}, GB/s", columns, map(_shown, rows))
    heads = {"4 KiB message and answer": "side", "P50 ms": "p50_ms", "P99 ms": "p99_ms"}
    return Outcome([shown, table("latency, idle in between", heads, _latencies(memory, plan.pings))], rows)


@contextlib.contextmanager
def _both(memory: memoryview, connections: int) -> Iterator[tuple[Sessions, Sockets]]:
    with (
        contextlib.closing(Sessions(memory, connections)) as ours,
        contextlib.closing(Sockets(memory, connections)) as bare,
    ):
        yield ours, bare


def _cases(plan: Plan) -> list[tuple[int, int]]:
    return [(size, piece) for size in plan.sizes for piece in plan.pieces if piece <= size]


def _speeds(
    plan: Plan, size: int, piece: int, peers: Mapping[str, Peer], others: Mapping[str, Other]
) -> dict[str, float]:
    """One case, after a transfer of each side that is compared."""
    for peer in peers.values():
        verify(peer, plan.direction, size, piece)
    for other in others.values():
        other.verify(plan.direction, size, piece)
    count = max(1, SAMPLE_BYTES // size)

    def of_peer(peer: Peer) -> float:
        return count * size / sum(peer.transfer(plan.direction, size, piece) for _ in range(count)) / 1e9

    def of_other(other: Other) -> float:
        return size / other.seconds(plan.direction, size, piece, count) / 1e9

    sides: dict[str, Callable[[], float]] = {side: partial(of_peer, peer) for side, peer in peers.items()}
    sides |= {side: partial(of_other, other) for side, other in others.items()}
    return medians(in_turns(sides, plan.rounds, warm_up=False))


def _latencies(memory: memoryview, pings: int) -> list[dict[str, Any]]:
    """From sending a message until its answer is here, one at a time."""

    def ping(echo: Callable[[int], float]) -> float:
        time.sleep(PING_PAUSE_S)
        return 1000 * echo(min(PING_BYTES, len(memory)))

    with _both(memory, 1) as (ours, bare):
        sides = {"isthmus": partial(ping, ours.echo), "socket": partial(ping, bare.echo)}
        found = {side: sorted(times) for side, times in in_turns(sides, pings, warm_up=False).items()}
    return [
        {"side": side, "p50_ms": nearest_rank(times, 50), "p99_ms": nearest_rank(times, 99)}
        for side, times in found.items()
    ]


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "size": shown_bytes(row["size"]), "pieces": shown_bytes(row["pieces"])}
