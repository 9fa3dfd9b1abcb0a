"""`isthmus bench attention`: what a layer's attention costs when the KV lies with other nodes, on one machine.

A step is the attention of some layers, one after another, for one new token of each request, whose context lies in
equal parts with the holders and whose last block lies here. All sides take turns within a round; a figure is the median
over the rounds. Sums of every side that computes them are compared with those of one memory first.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor
from typer import Option

from isthmus.bench import BenchError
from isthmus.bench.attention_peers import ECHO, SWITCH_S, Bare, Live, Memory
from isthmus.bench.options import COUNTS, Rounds, Text, one_of
from isthmus.bench.study import Columns, Outcome, Report, in_turns, medians, said, silent, table
from isthmus.core.blocks import KVLayout
from isthmus.core.types import Span
from isthmus.live.engine.batch import BatchTensors, build_batch
from isthmus.live.engine.interface import Chunk, Elsewhere, Held
from isthmus.live.engine.kernels import Scope
from isthmus.live.engine.remote import RemoteAttention

BLOCK = 16
SAMPLE_S = 0.25
"""Steps are repeated until a sample takes about so long."""
LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest difference between sums here and elsewhere."""


@dataclass(frozen=True)
class Model:
    """Heads of a layer, for queries and for KV, and how many layers are measured."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


MODELS = {
    each.name: each
    for each in (Model("smollm2-135m", 9, 3, 64), Model("llama-3.1-8b", 32, 8, 128))
}  # fmt: skip


def _known(option: str, text: str) -> tuple[str, ...]:
    return tuple(one_of(MODELS, option, name) for name in text.split(","))


_NAMES = Text(_known, ",".join)
MOST_TOKENS = 16384
"""Cases with more tokens of KV are left out."""


@dataclass(frozen=True)
class Plan:
    models: Annotated[tuple[str, ...], _NAMES, Option(help=f"Whose layers, by shape: {', '.join(MODELS)}.")] = (
        tuple(MODELS)
    )
    batches: Annotated[tuple[int, ...], COUNTS, Option(help="Requests of a step.")] = (1, 8, 32)
    contexts: Annotated[tuple[int, ...], COUNTS, Option(help="Tokens of each that lie elsewhere.")] = (
        512, 2048, 8192,
    )  # fmt: skip
    holders: Annotated[tuple[int, ...], COUNTS, Option(help="Nodes that they lie with, in equal parts.")] = (
        1,
        2,
        4,
    )
    dtype: Annotated[
        str, Text(partial(one_of, LIMITS), str), Option(help="Of the KV: float32 or bfloat16.")
    ] = "float32"
    layers: Annotated[int, Option(min=1, help="Layers of a step.")] = 8
    threads: Annotated[int, Option(min=1, help="Threads that compute, here and at each holder.")] = 1
    rounds: Rounds = 5


COLUMNS: Columns = {
    "model": "model", "batch": "batch", "context": "context", "holders": "holders", "last block": "home",
    "one memory": "local", "live": "live", "bare": "bare", "bytes alone": "echo", "added": "added", "least": "least",
    "added / least": lambda row: row["added"] / row["least"], "bytes": "payload", "on the wire": "wire",
}  # fmt: skip
"""Microseconds of one layer. `home`: attention to the last block alone; `local`: to everything, in one memory; `live`:
with the rest elsewhere; `bare`: the same over blocking sockets; `echo`: of which the bytes alone; `added`: what
attention elsewhere adds to a layer, and `least`: what it adds at least. `payload`: bytes there and back for one token
and layer and holder, `wire` with all that goes around them."""


def run(plan: Plan, report: Report = silent) -> Outcome:
    """Attention over KV that lies with other nodes, on loopback, beside bare sockets and one memory: time, bytes.

    Raises BenchError when sums differ or a holder fails, StartError when one does not start.
    """
    interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(SWITCH_S)
    rows: list[dict[str, Any]] = []
    try:
        for model in map(MODELS.__getitem__, plan.models):
            memory = _memory(plan, model)
            for holders in plan.holders:
                arguments = memory, holders, model.num_heads, plan.threads
                with contextlib.closing(Live(*arguments)) as live, contextlib.closing(Bare(*arguments)) as bare:
                    for batch, context in _cases(plan, holders):
                        case = {"model": model.name, "batch": batch, "context": context, "holders": holders}
                        rows.append(case | _measure(plan, memory, live, bare, (batch, context, holders)))
                        report(said(rows[-1]))
    finally:
        sys.setswitchinterval(interval)
        torch.set_num_threads(threads)
    title = "isthmus bench attention: us of one layer; bytes of a token, layer and holder"
    return Outcome([table(title, COLUMNS, rows)], rows)


def _cases(plan: Plan, holders: int) -> Iterator[tuple[int, int]]:
    for batch in plan.batches:
        for context in plan.contexts:
            if context >= holders * BLOCK and batch * context <= MOST_TOKENS:
                yield batch, context


def _memory(plan: Plan, model: Model) -> Memory:
    layout = KVLayout(plan.dtype, BLOCK, plan.layers, model.num_kv_heads, model.head_dim)
    num_blocks = MOST_TOKENS // BLOCK + max(plan.batches)
    memory = Memory(layout, num_blocks, model.num_heads, plan.threads)
    generator = torch.Generator().manual_seed(0)
    for layer in memory.kv.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return memory


@dataclass(frozen=True)
class _Case:
    """One step, in its three forms: everything here, the last blocks alone, and the rest elsewhere. `parts`: of each
    row, the blocks of each holder."""

    memory: Memory
    parts: list[list[Span]]
    q_THD: Tensor

    def chunks(self, context: int) -> Iterator[tuple[int, Sequence[Span], list[int]]]:
        """Of each row its last block, what lies elsewhere, and its whole table."""
        away = context // BLOCK
        for row, spans in enumerate(self.parts):
            tail = len(self.parts) * away + row
            yield tail, spans, [*range(row * away, (row + 1) * away), tail]

    def layers(self, batch: BatchTensors, elsewhere: Elsewhere | None = None) -> list[Tensor]:
        """The attention of each layer, as a layer's mixer does it."""
        found, memory = [], self.memory
        with torch.inference_mode():
            for layer, kv in enumerate(memory.kv.layers):
                remote = None
                if elsewhere is not None:
                    remote = RemoteAttention(elsewhere, batch.remote, layer, 0, memory.kernels)
                    remote.ask(self.q_THD)
                tables, lens, scale = batch.tables_RB, batch.lens_R, memory.shape.scale
                out, lse = memory.kernels.attend_paged(self.q_THD, kv, tables, lens, Scope(BLOCK, 0, scale))
                found.append(out if remote is None else remote.add(out, lse))
        return found


def _case_of(memory: Memory, batch: int, context: int, holders: int) -> _Case:
    away = context // BLOCK
    parts = [[_share(row * away, away, at, holders) for at in range(holders)] for row in range(batch)]
    dtype = memory.kernels.activation_dtype(memory.kv.layers[0].dtype)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(batch, memory.shape.num_heads, memory.shape.head_dim, generator=generator)
    return _Case(memory, parts, q.to(dtype))


def _measure(plan: Plan, memory: Memory, live: Live, bare: Bare, at: tuple[int, int, int]) -> dict[str, float]:
    """`at`: batch, context and holders of the case."""
    case, context = _case_of(memory, *at), at[1]
    live.place(case.parts)
    bare.place(case.parts)
    rows = list(case.chunks(context))
    whole = _batch([Chunk([0], context, table, True) for _, _, table in rows])
    home = _batch([Chunk([0], 0, [tail], True) for tail, _, _ in rows])
    split = _batch([Chunk([0], context, [tail], True, holdings=_held(spans)) for tail, spans, _ in rows])
    sides: dict[str, Callable[[], list[Tensor]]] = {
        "home": lambda: case.layers(home),
        "local": lambda: case.layers(whole),
        "live": lambda: case.layers(split, live.elsewhere()),
        "bare": lambda: case.layers(split, bare.elsewhere()),
        "echo": lambda: case.layers(split, bare.elsewhere(ECHO)),
    }
    _verify(LIMITS[plan.dtype], *[sides[side]() for side in ("local", "live", "bare")])
    payload, wire = _count(live, sides["live"], plan.layers * at[0] * at[2])
    steps = {side: partial(_seconds, step) for side, step in sides.items()}
    found = medians(in_turns(steps, plan.rounds, warm_up=False))
    us = {side: seconds / plan.layers * 1e6 for side, seconds in found.items()}
    differences = {"added": us["live"] - us["home"], "least": us["bare"] - us["home"]}
    return us | {"payload": payload, "wire": wire} | differences


def _count(live: Live, step: Callable[[], object], parts: int) -> tuple[float, float]:
    """Bytes of one part of a step: queries and sums, and all bytes on the wire."""
    payload, wire = live.payload_bytes(), live.wire_bytes()
    step()
    return (live.payload_bytes() - payload) / parts, (live.wire_bytes() - wire) / parts


def _share(first: int, count: int, at: int, holders: int) -> Span:
    """Of `count` blocks from `first` on, those of one holder."""
    return Span(first + count * at // holders, first + count * (at + 1) // holders)


def _held(spans: Sequence[Span]) -> tuple[Held, ...]:
    return tuple([Held((f"holder-{at}",), len(span) * BLOCK) for at, span in enumerate(spans)])


def _batch(chunks: Sequence[Chunk]) -> BatchTensors:
    return build_batch(chunks, BLOCK, torch.device("cpu"))


def _verify(limit: float, expected: list[Tensor], *others: list[Tensor]) -> None:
    for found in others:
        worst = max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))
        if not worst < limit:
            raise BenchError(f"attention elsewhere is not attention: a difference of {worst:g}")


def _seconds(step: Callable[[], object]) -> float:
    """Of one step, in the mean of a sample."""
    count, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < SAMPLE_S or not count:
        step()
        count += 1
    return took / count
