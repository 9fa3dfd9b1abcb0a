"""`python -m benchmarks wan`: one session over a long path, with one connection and with several.

The path is the proxy of `cluster.shaper` in a process of its own: delay, a rate that all connections share, and
at most a window of bytes on the way for each connection, which is what holds a single connection back over a long
path. Every piece is sealed and checked, as in `isthmus bench messenger`.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from typer import Option

from isthmus.bench.child import Child, Pipe
from isthmus.bench.options import COUNTS, NUMBERS, SIZE, Rounds
from isthmus.bench.session_peer import Sessions
from isthmus.bench.study import Columns, Outcome, Report, said, silent, table
from isthmus.bench.transfer_peers import Direction, Peer, Sockets, Through, touched
from isthmus.core.errors import ConfigError
from isthmus.live.cluster.shaper import LinkPort, LinkShape, Proxy

MIB = 1 << 20
REGION_BYTES = 256 * MIB
"""Sent again and again: more than can be on the way at once."""
PIECE_BYTES = MIB


@dataclass(frozen=True)
class Plan:
    rates: Annotated[tuple[float, ...], NUMBERS, Option(help="Rates of the path, Gbit/s.")] = (1.0, 2.0, 5.0)
    connections: Annotated[tuple[int, ...], COUNTS, Option(help="Connections of the session.")] = (1, 4, 8, 16)
    delay_ms: Annotated[float, Option(min=0, help="Delay each way.")] = 30.0
    jitter_ms: Annotated[float, Option(min=0, help="Each chunk is late by up to this.")] = 2.0
    stall_s: Annotated[
        float,
        Option(min=0, help="How long one connection stands still, in rows of their own; 0: no such rows."),
    ] = 1.0
    window: Annotated[int, SIZE, Option(help="Bytes on the way of one connection, as an untuned kernel's.")] = (
        4 * MIB
    )
    seconds: Annotated[float, Option(help="Length of a transfer, at the full rate.")] = 4.0
    rounds: Rounds = 3

    def __post_init__(self) -> None:
        if min(self.rates) <= 0 or self.seconds <= 0:
            raise ConfigError("--rates and --seconds: must be above 0")
        if self.window < 1 << 16:
            raise ConfigError("--window: at least 64KiB")

    def size(self, rate_gbps: float) -> int:
        """Bytes of a transfer, in whole pieces."""
        return max(1, round(self.seconds * rate_gbps * 1e9 / 8 / PIECE_BYTES)) * PIECE_BYTES

    def shape(self, rate_gbps: float, stalled: bool) -> LinkShape:
        return LinkShape(
            delay_s=self.delay_ms / 1000,
            rate=rate_gbps * 1e9 / 8,
            window=self.window,
            jitter_s=self.jitter_ms / 1000,
            stall_s=self.stall_s if stalled else 0.0,
            stall_after=self.size(rate_gbps) // (4 * max(self.connections)),
        )


def run(plan: Plan, report: Report = silent) -> Outcome:
    """One session over a long path (a TCP proxy in user space): one connection against several.

    A row for every rate and number of connections, and one with a stall where there are several of them. `stalled`:
    the first connection stood still for a while; `gbps`: bits of payload a second / 1e9, median.
    """
    region = touched(min(REGION_BYTES, plan.size(max(plan.rates))))
    with _through(LinkShape(delay_s=0.0)) as through, contextlib.closing(Sockets(region, 4, through)) as bare:
        ceiling = max(_gbps(bare, len(region)) for _ in range(4))
    report(f"bare sockets through the unbounded proxy: {ceiling:.1f} Gbit/s")
    rows: list[dict[str, Any]] = []
    for rate, connections, stalled in itertools.product(plan.rates, plan.connections, (False, True)):
        if stalled and (connections == 1 or not plan.stall_s):
            continue
        shape, size = plan.shape(rate, stalled), plan.size(rate)
        gbps = statistics.median([_once(shape, region, connections, size) for _ in range(plan.rounds)])
        row = {"rate_gbps": rate, "delay_ms": plan.delay_ms, "connections": connections, "stalled": stalled}
        rows.append(row | {"gbps": gbps, "share_of_rate": gbps / rate})
        report(said(rows[-1]))
    title = (
        f"python -m benchmarks wan: {plan.delay_ms:g} ms each way, jitter {plan.jitter_ms:g} ms, window "
        f"{plan.window / MIB:g} MiB a connection; the proxy passes at most {ceiling:.1f} Gbit/s here"
    )
    columns: Columns = {
        "rate Gbit/s": "rate_gbps",
        "connections": "connections",
        "stalled": lambda row: f"1 for {plan.stall_s:g} s" if row["stalled"] else "",
        "Gbit/s": "gbps",
        "share of rate": "share_of_rate",
    }
    return Outcome([table(title, columns, rows)], rows)


def _once(shape: LinkShape, region: memoryview, connections: int, size: int) -> float:
    """A new session for each: a stall happens once. Raises BenchError if a seal does not match."""
    with _through(shape) as through, contextlib.closing(Sessions(region, connections, through)) as session:
        return _gbps(session, size)


def _gbps(peer: Peer, size: int) -> float:
    return 8 * size / peer.transfer(Direction.PUSH, size, PIECE_BYTES) / 1e9


@contextlib.contextmanager
def _through(shape: LinkShape) -> Iterator[Through]:
    with contextlib.ExitStack() as stack:

        def through(port: int) -> int:
            return int(stack.enter_context(contextlib.closing(Child(serve, shape, port))).hello)

        yield through


def serve(pipe: Pipe, shape: dict[str, Any], port: int) -> None:
    """In a process of its own: says its port, runs until the pipe is closed. `shape`: fields of a Shape."""
    entry = LinkPort(0, ("127.0.0.1", port))
    proxy = Proxy(msgspec.convert(shape, LinkShape), [entry])
    proxy.watch(pipe.fileno(), lambda: False)
    pipe.send(entry.number)
    proxy.run()
