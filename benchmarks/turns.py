"""`python -m benchmarks turns`: a decode step whose KV lies with a holder, as one batch and as several that take turns.

The holder is a process, asked over sessions as nodes ask each other (`isthmus.bench.attention_peers`). It has this
machine's cores, so its answers are held back for as long as one that has its own would take. Beside that, nobody is
asked and zeros are the answer: a wait that takes no core and no message at all. All of these take turns within a
round on one engine, and medians count. Next to each stands what `isthmus.core.cost.turns` says of the layers' time,
measured alone for as many rows, and of the holder's; it knows nothing of what a message costs.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from isthmus.bench.attention_peers import SWITCH_S, Live, Memory
from isthmus.core.cost import turns as cost
from isthmus.core.types import Span
from isthmus.live.engine.batch import Batch
from isthmus.live.engine.engine import Engine, EngineOptions
from isthmus.live.engine.interface import Asking, Chunk, Elsewhere, Held
from isthmus.live.engine.turns import Turns

SIZE = 16
TAIL = 8
"""Tokens of each row at home."""


@dataclass(frozen=True)
class Plan:
    """`rows` of `context` tokens, and the `attention_ms` that the holder takes for a layer of one, of all together as
    many times as long; `net_ms` there and back. `threads`: of this process and of the holder."""

    rows: int = 16
    context: int = 256
    attention_ms: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)
    net_ms: float = 0.0
    batches: tuple[int, ...] = (1, 2, 3)
    threads: int = 1
    rounds: int = 7


@dataclass(frozen=True)
class Row:
    """Milliseconds of a step as so many batches, and what the cost model says. `asks`: "a process" or "nobody"."""

    attention_ms: float
    asks: str
    batches: int
    layers_ms: float
    step_ms: float
    predicted_ms: float


class Late:
    """`Elsewhere` as if the holder attended to one question at a time, in so many seconds a row, and were far away."""

    def __init__(self, inner: Elsewhere, attention_s: float, net_s: float) -> None:
        self._inner, self._attention_s, self._net_s = inner, attention_s, net_s
        self._lock, self._free_s = threading.Lock(), 0.0
        self._due_s: dict[tuple[int, Asking], float] = {}

    def ask(self, layer: int, asking: Asking, q: memoryview) -> None:
        with self._lock:
            begun = max(self._free_s, time.perf_counter())
            self._free_s = begun + self._attention_s * asking.num_rows
            self._due_s[layer, asking] = self._free_s + self._net_s
        self._inner.ask(layer, asking, q)

    def answer(self, layer: int, asking: Asking) -> memoryview:
        answer = self._inner.answer(layer, asking)
        left_s = self._due_s.pop((layer, asking)) - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        return answer


class Nobody:
    """`Elsewhere` that attends to nothing, for free."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        self._row_bytes = num_heads * (head_dim + 1) * 4

    def ask(self, layer: int, asking: Asking, q: memoryview) -> None: ...

    def answer(self, layer: int, asking: Asking) -> memoryview:
        return memoryview(bytearray(asking.num_rows * self._row_bytes))


def run(folder: Path, plan: Plan, report: Callable[[str], None] = lambda line: None) -> list[Row]:
    """All cases. Raises BenchError when a holder fails, StartError when it does not start."""
    found: list[Row] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with contextlib.ExitStack() as stack:
            bench = _Bench(folder, plan, stack)
            for attention_ms in plan.attention_ms:
                rows = bench.measure(attention_ms)
                for row in rows:
                    report(_line(row))
                found += rows
    finally:
        sys.setswitchinterval(interval)
    return found


class _Bench:
    def __init__(self, folder: Path, plan: Plan, stack: contextlib.ExitStack) -> None:
        self._plan, away = plan, plan.context // SIZE
        options = {"device": "cpu", "threads": plan.threads}
        layout = Engine(folder, EngineOptions(kv_bytes=1 << 26, **options)).layout  # type: ignore[arg-type]
        kv_bytes = plan.rows * (away + 1) * layout.block_bytes
        self._engine = Engine(folder, EngineOptions(kv_bytes=kv_bytes, **options))  # type: ignore[arg-type]
        self._turns = {each: Turns(each, time.perf_counter) for each in plan.batches}
        mixer: Any = self._engine.spec.kv_mixer
        memory = Memory(layout, 1, mixer.num_heads, plan.threads)
        memory.kv = self._engine.memory
        live = stack.enter_context(contextlib.closing(Live(memory, 1, mixer.num_heads, plan.threads)))
        live.place([[Span(row * away, (row + 1) * away)] for row in range(plan.rows)])
        self._sides: dict[str, Callable[[], Elsewhere]] = {
            "a process": live.elsewhere,
            "nobody": lambda: Nobody(mixer.num_heads, mixer.head_dim),
        }
        held = (Held(("holder-0",), away * SIZE),)
        self._tails = [[plan.rows * away + row] for row in range(plan.rows)]
        chunks = [Chunk([7], away * SIZE + TAIL, each, True, True, holdings=held) for each in self._tails]
        self._batch = self._engine.build(chunks)

    def measure(self, attention_ms: float) -> list[Row]:
        cases = [(asks, batches) for asks in self._sides for batches in self._plan.batches]
        found: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
        for turn in range(self._plan.rounds + 1):
            for (asks, batches), times in found.items():
                pair = self._home_ms(batches), self._step_ms(self._sides[asks](), batches, attention_ms)
                if turn:  # the first warms up
                    times.append(pair)
        return [self._row(attention_ms, *case, found[case]) for case in cases]

    def _home_ms(self, batches: int) -> float:
        """Of a batch as large as one of so many, whose KV is all here."""
        tails = self._tails[: -(-self._plan.rows // batches)]
        return self._timed_ms(self._engine.build([Chunk([7], TAIL, tail, True, True) for tail in tails]))

    def _step_ms(self, elsewhere: Elsewhere, batches: int, attention_ms: float) -> float:
        self._engine._turns = self._turns[batches]
        late = Late(elsewhere, attention_ms / 1e3, self._plan.net_ms / 1e3)
        return self._timed_ms(self._batch, late)

    def _timed_ms(self, batch: Batch, elsewhere: Elsewhere | None = None) -> float:
        started = time.perf_counter()
        self._engine.forward(batch, elsewhere=elsewhere)
        return (time.perf_counter() - started) * 1e3

    def _row(self, attention_ms: float, asks: str, batches: int, times: list[tuple[float, float]]) -> Row:
        layers_ms, step_ms = (statistics.median(each) for each in zip(*times, strict=True))
        num_layers, own_ms = self._engine.layout.num_layers, attention_ms * self._plan.rows / batches
        parts = [round(each * 1e9) for each in (layers_ms / (num_layers + 1), own_ms, self._plan.net_ms)]
        predicted_ms = cost.step_ps(batches, num_layers, *parts) / 1e9
        return Row(attention_ms, asks, batches, layers_ms, step_ms, predicted_ms)


def _line(row: Row) -> str:
    return (
        f"{row.attention_ms:g} ms a row and layer elsewhere, {row.asks} asked, {row.batches} batches: "
        f"{row.step_ms:.1f} ms, predicted {row.predicted_ms:.1f}"
    )


def table(rows: list[Row]) -> Table:
    found = Table("ms a row and layer", "asked", "batches", "layers of one ms", "step ms", "predicted ms")
    for row in rows:
        times = [f"{each:.1f}" for each in (row.layers_ms, row.step_ms, row.predicted_ms)]
        found.add_row(f"{row.attention_ms:g}", row.asks, str(row.batches), *times)
    return found


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
