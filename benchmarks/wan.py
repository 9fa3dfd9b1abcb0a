"""`python -m benchmarks wan`: one session over a long path, with one connection and with several.

The path is the proxy of `cluster.shaper` in a process of its own: delay, a rate that all connections share, and
at most a window of bytes on the way for each connection, which is what holds a single connection back over a long
path. Every piece is sealed and checked, as in `isthmus bench messenger`.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from rich.table import Table

from isthmus.bench.child import Child, Pipe
from isthmus.bench.session_peer import Sessions
from isthmus.bench.transfer_peers import Direction, Sockets, touched
from isthmus.core.errors import ConfigError
from isthmus.live.cluster.shaper import Port, Proxy, Shape

MIB = 1 << 20
REGION_BYTES = 256 * MIB
"""Sent again and again: more than can be on the way at once."""
PIECE_BYTES = MIB


@dataclass(frozen=True)
class Plan:
    """`seconds`: how long a transfer would take at the full rate. `window`: bytes on the way of one connection."""

    rates_gbps: tuple[float, ...] = (1.0, 2.0, 5.0)
    connections: tuple[int, ...] = (1, 4, 8, 16)
    delay_ms: float = 30.0
    jitter_ms: float = 2.0
    stall_s: float = 1.0
    window: int = 4 * MIB
    seconds: float = 4.0
    rounds: int = 3

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured."""
        if min(self.rates_gbps) <= 0 or self.seconds <= 0 or min(self.connections) < 1 or self.rounds < 1:
            raise ConfigError("rates, seconds, connections and rounds must be positive")
        if min(self.delay_ms, self.jitter_ms, self.stall_s) < 0 or self.window < 1 << 16:
            raise ConfigError("delay, jitter and stall must not be negative, the window at least 64KiB")

    def size(self, rate_gbps: float) -> int:
        """Bytes of a transfer, in whole pieces."""
        return max(1, round(self.seconds * rate_gbps * 1e9 / 8 / PIECE_BYTES)) * PIECE_BYTES

    def shape(self, rate_gbps: float, stalled: bool) -> Shape:
        return Shape(
            delay_s=self.delay_ms / 1000,
            rate=rate_gbps * 1e9 / 8,
            window=self.window,
            jitter_s=self.jitter_ms / 1000,
            stall_s=self.stall_s if stalled else 0.0,
            stall_after=self.size(rate_gbps) // (4 * max(self.connections)),
        )


@dataclass(frozen=True)
class Row:
    """`stalled`: the first connection stood still for a while. `gbps`: bits of payload a second / 1e9, median."""

    rate_gbps: float
    delay_ms: float
    connections: int
    stalled: bool
    gbps: float
    share_of_rate: float


@dataclass(frozen=True)
class Result:
    """`ceiling_gbps`: what bare sockets get through the proxy of this machine without a rate and a delay."""

    plan: Plan
    ceiling_gbps: float
    rows: list[Row]


def run(plan: Plan, report: Callable[[str], None] = lambda line: None) -> Result:
    """Every rate with every number of connections, and with a stall where there are several of them."""
    plan.check()
    region = touched(min(REGION_BYTES, plan.size(max(plan.rates_gbps))))
    ceiling = _ceiling_gbps(region)
    report(f"bare sockets through the unbounded proxy: {ceiling:.1f} Gbit/s")
    rows = []
    for rate in plan.rates_gbps:
        for connections in plan.connections:
            for stalled in (False, True) if connections > 1 and plan.stall_s else (False,):
                row = _measure(plan, region, rate, connections, stalled)
                rows.append(row)
                report(f"{row.gbps:.2f} of {rate:g} Gbit/s over {connections}{', one stalled' * stalled}")
    return Result(plan, ceiling, rows)


def _measure(plan: Plan, region: memoryview, rate: float, connections: int, stalled: bool) -> Row:
    size = plan.size(rate)
    found = [_once(plan.shape(rate, stalled), region, connections, size) for _ in range(plan.rounds)]
    gbps = statistics.median(found)
    return Row(rate, plan.delay_ms, connections, stalled, gbps, gbps / rate)


def _once(shape: Shape, region: memoryview, connections: int, size: int) -> float:
    """A new session for each: a stall happens once. Raises BenchError if a seal does not match."""
    with contextlib.ExitStack() as stack:

        def through(port: int) -> int:
            return int(stack.enter_context(contextlib.closing(Child(serve, shape, port))).hello)

        session = stack.enter_context(contextlib.closing(Sessions(region, connections, through)))
        return 8 * size / session.transfer(Direction.PUSH, size, PIECE_BYTES) / 1e9


def serve(pipe: Pipe, shape: dict[str, Any], port: int) -> None:
    """In a process of its own: says its port, runs until the pipe is closed. `shape`: fields of a Shape."""
    entry = Port(0, ("127.0.0.1", port))
    proxy = Proxy(msgspec.convert(shape, Shape), [entry])
    proxy.watch(pipe.fileno(), lambda: False)
    pipe.send(entry.number)
    proxy.run()


def _ceiling_gbps(region: memoryview) -> float:
    with contextlib.ExitStack() as stack:

        def through(port: int) -> int:
            return int(stack.enter_context(contextlib.closing(Child(serve, Shape(delay_s=0.0), port))).hello)

        bare = stack.enter_context(contextlib.closing(Sockets(region, 4, through)))
        best = min(bare.transfer(Direction.PUSH, len(region), PIECE_BYTES) for _ in range(4))
        return 8 * len(region) / best / 1e9


def table(result: Result) -> Table:
    plan = result.plan
    title = (
        f"python -m benchmarks wan: {plan.delay_ms:g} ms each way, jitter {plan.jitter_ms:g} ms, window "
        f"{plan.window / MIB:g} MiB a connection; the proxy passes at most {result.ceiling_gbps:.1f} Gbit/s here"
    )
    found = Table("rate Gbit/s", "connections", "stalled", "Gbit/s", "share of rate", title=title)
    for row in result.rows:
        stalled = f"1 for {plan.stall_s:g} s" if row.stalled else ""
        found.add_row(
            f"{row.rate_gbps:g}", str(row.connections), stalled, f"{row.gbps:.2f}", f"{row.share_of_rate:.2f}"
        )
    return found


def as_json(result: Result) -> list[dict[str, Any]]:
    """The rows; their keys are the fields of `Row`."""
    return [asdict(row) for row in result.rows]
