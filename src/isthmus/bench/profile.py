"""`isthmus profile`: measures this machine's engine on a model and fits a cost curve to it.

An iteration is measured as a node's worker runs it: lay out the batch, step the engine, which samples, and move
the batch on. Every case is run in turns with the others, and its median counts, so that a passing disturbance
hits no case alone.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from isthmus.bench.handling import measure_handling
from isthmus.bench.least_squares import least_squares
from isthmus.bench.study import Report, in_turns, medians, silent
from isthmus.core.cost import Curve, NodeCost, compile_cost
from isthmus.core.cost.transfer import Handling
from isthmus.core.types import Sampling
from isthmus.live.engine.interface import Chunk, OnLayer, Row

if TYPE_CHECKING:
    from isthmus.live.engine.engine import Engine, EngineOptions

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
CACHED = (0, 512, 2048)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 512, 1024, 2048)
DECODE_STEPS = 8
"""Iterations timed together in a decode case: one alone is too short for the clock's noise."""
SLOW_S = 4.0
"""Cases whose first run takes longer are left out, with all longer ones of their kind."""
_GREEDY = Row(Sampling(temperature=0.0), ())
_BOUNDS_S = (1e-12, 100.0)
_Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Case:
    """One iteration: a chunk `(num_tokens, cached)` or none, and decodes of one context."""

    num_tokens: int = 0
    cached: int = 0
    num_decodes: int = 0
    context: int = 0
    seconds: float = 0.0

    def tokens(self) -> int:
        """Positions of KV memory the case needs."""
        return self.cached + self.num_tokens + self.num_decodes * (self.context + DECODE_STEPS)

    def predicted_s(self, cost: NodeCost) -> float:
        chunks = [(self.num_tokens, self.cached)] if self.num_tokens else []
        return cost.step_ps(chunks, self.num_decodes, self.num_decodes * self.context) / 1e12


@dataclass(frozen=True)
class Profile:
    """The fitted curve, its mean absolute relative errors in percent, and what was measured.

    Mixed iterations fit nothing: their error is that of a prediction.
    """

    curve: Curve
    prefill_error_percent: float
    decode_error_percent: float
    mixed_error_percent: float | None
    cases: tuple[Case, ...]


def profile_engine(
    folder: Path, options: EngineOptions, *, rounds: int = 5, budget_s: float = 90.0, report: Report = silent
) -> Profile:
    """Measures prefill, decode and mixed iterations and fits a curve. At least one full round is measured.

    After that no new round begins once `budget_s` seconds have passed.
    """
    from isthmus.live.engine.engine import Engine
    from isthmus.live.engine.remote import shapes_of

    engine = Engine(folder, options)
    bench = _Bench(engine)
    cases = affordable(bench.seconds, cases_of(engine.max_length, engine.num_blocks * engine.layout.block_size))
    report(f"{len(cases)} cases, {engine.kernels.name} kernels, {bench.num_threads} threads")
    found = measured(bench.seconds, cases, rounds, budget_s)
    layout = engine.layout
    origin = f"isthmus profile: {folder.name}, {layout.dtype}, {engine.kernels.name} kernels"
    profile = fit_profile(found, layout.num_layers * layout.token_bytes, layout.num_layers, origin)
    shapes = shapes_of(engine.spec, (0, engine.spec.num_layers))
    beside = {
        "query_elements": sum([shape.num_heads * shape.head_dim for shape in shapes]),
        "query_heads": sum([shape.num_heads for shape in shapes]),
        "handling": bench.handling(),
    }
    return replace(profile, curve=msgspec.structs.replace(profile.curve, **beside))


def cases_of(max_length: int, kv_tokens: int) -> list[Case]:
    """What is measured for a model of this length in so much KV memory (one block in every row is lost)."""
    prefill = [Case(n, p) for p in CACHED for n in LENGTHS if n + p <= max_length]
    decode = [
        Case(num_decodes=b, context=c) for c in CONTEXTS for b in BATCHES if c + DECODE_STEPS <= max_length
    ]
    mixed = [Case(n, 0, b, 512) for n in (128, 512) for b in (4, 16) if max_length >= 512 + DECODE_STEPS]
    return [
        case for case in (*prefill, *decode, *mixed) if case.tokens() + 64 * (1 + case.num_decodes) <= kv_tokens
    ]


def affordable(seconds: Callable[[Case], float], cases: Sequence[Case]) -> list[Case]:
    """The cases that are not too slow, each run once, which also warms everything up."""
    kept: list[Case] = []
    slow: list[Case] = []
    for case in sorted(
        cases, key=lambda case: (case.num_tokens * (case.num_tokens + 2 * case.cached), case.tokens())
    ):
        if any(case.num_tokens >= other.num_tokens and case.tokens() >= other.tokens() for other in slow):
            continue
        (slow if seconds(case) > SLOW_S and kept else kept).append(case)
    return kept


def measured(
    seconds: Callable[[Case], float], cases: Sequence[Case], rounds: int, budget_s: float
) -> list[Case]:
    """With the median of their seconds. At least one full round is measured."""
    sides = {case: partial(seconds, case) for case in cases}
    found = medians(in_turns(sides, rounds, warm_up=False, budget_s=budget_s))
    return [replace(case, seconds=found[case]) for case in cases]


def fit_profile(cases: Sequence[Case], kv_token_bytes: int, num_layers: int, origin: str) -> Profile:
    """The non-negative curve of least relative error. Pure: the cases carry their seconds."""
    prefill = [case for case in cases if not case.num_decodes]
    decode = [case for case in cases if not case.num_tokens]
    mixed = [case for case in cases if case.num_tokens and case.num_decodes]
    fixed_s, token_s, pair_s = _fit_prefill(prefill)
    points, context_points = _fit_decode(decode)
    curve = Curve(
        kv_token_bytes=kv_token_bytes,
        num_layers=num_layers,
        prefill_fixed_s=fixed_s,
        prefill_token_s=token_s,
        prefill_pair_s=pair_s,
        decode_points=points,
        decode_context_points=context_points,
        origin=origin,
        measured_batch=max(case.num_decodes for case in decode),
        measured_tokens=max(case.num_tokens + case.cached + case.context for case in cases),
    )
    cost = compile_cost(curve)
    curve = msgspec.structs.replace(curve, error=round(_error(cost, [*prefill, *decode]) / 100, 4))
    return Profile(
        curve=curve,
        prefill_error_percent=_error(cost, prefill),
        decode_error_percent=_error(cost, decode),
        mixed_error_percent=_error(cost, mixed) if mixed else None,
        cases=tuple(cases),
    )


def _error(cost: NodeCost, cases: Sequence[Case]) -> float:
    return 100 * statistics.fmean(abs(case.predicted_s(cost) / case.seconds - 1) for case in cases)


def _fit_prefill(cases: Sequence[Case]) -> tuple[float, float, float]:
    """Seconds per iteration, per token and per pair."""

    def residuals(values: Sequence[float]) -> list[float]:
        fixed_s, token_s, pair_s = values
        points = [(case.num_tokens, case.cached, case.seconds) for case in cases]
        return [math.log((fixed_s + n * (token_s + pair_s * (n + 2 * p))) / took) for n, p, took in points]

    shortest, longest = min(case.seconds for case in cases), max(cases, key=lambda case: case.num_tokens)
    start = (shortest / 2, longest.seconds / longest.num_tokens, 1e-4 * longest.seconds / longest.num_tokens)
    fixed_s, token_s, pair_s = least_squares(residuals, start, (_BOUNDS_S, _BOUNDS_S, (1e-15, 1.0)))
    return fixed_s, token_s, pair_s


def _fit_decode(cases: Sequence[Case]) -> tuple[_Points, _Points]:
    """(batch, seconds at no context) and (batch, seconds per token of context): a line for each batch size."""
    fixed, per_context = [], []
    for size in sorted({case.num_decodes for case in cases}):
        here = [case for case in cases if case.num_decodes == size]

        def residuals(values: Sequence[float], here: Sequence[Case] = here, size: int = size) -> list[float]:
            return [math.log((values[0] + values[1] * size * case.context) / case.seconds) for case in here]

        start = (min(case.seconds for case in here), 1e-8)
        fixed_s, context_s = least_squares(residuals, start, (_BOUNDS_S, _BOUNDS_S))
        fixed.append((size, fixed_s))
        per_context.append((size, context_s))
    return _rising(fixed), _rising(per_context)


def _rising(points: Sequence[tuple[int, float]]) -> _Points:
    """The nearest values that never fall: neighbours out of order take their mean (pool adjacent violators)."""
    pools: list[list[float]] = []
    for _, value in points:
        pools.append([value])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    values = [statistics.fmean(pool) for pool in pools for _ in pool]
    return tuple((size, value) for (size, _), value in zip(points, values, strict=True))


class _Bench:
    """Runs cases on one engine. Every row has blocks of its own, filled with real KV."""

    def __init__(self, engine: Engine) -> None:
        import torch

        self._engine, self.num_threads = engine, torch.get_num_threads()
        self._prompt = torch.randint(
            0, engine.vocab_size, (engine.max_length,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        self._filled = 0

    def seconds(self, case: Case) -> float:
        """One iteration of a case; of decodes alone, the mean of some that follow each other."""
        chunks = self._chunks(case)
        rows = [_GREEDY] * len(chunks)
        started_s = time.perf_counter()
        batch = self._engine.build(chunks)
        tokens, _ = self._engine.step(batch, rows)
        if case.num_tokens:
            return time.perf_counter() - started_s
        for _ in range(DECODE_STEPS - 1):
            batch.advance(tokens)
            tokens, _ = self._engine.step(batch, rows)
        return (time.perf_counter() - started_s) / DECODE_STEPS

    def handling(self) -> Handling:
        """What moving KV takes, on the cores that this process may use."""
        engine = self._engine
        size, on_host = engine.layout.block_size, engine.device.type == "cpu"
        shares_core = on_host and self.num_threads >= len(os.sched_getaffinity(0))

        def compute(num_blocks: int, on_layer: OnLayer) -> None:
            chunk = Chunk(self._prompt[: num_blocks * size], 0, range(num_blocks), True)
            engine.step(engine.build([chunk]), [_GREEDY], on_layer)

        most = engine.max_length // size
        return measure_handling(engine.memory, compute, most=most, shares_core=shares_core)

    def _chunks(self, case: Case) -> list[Chunk]:
        chunks, first = list[Chunk](), 0
        for _ in range(case.num_decodes):
            blocks = self._blocks(first, case.context + DECODE_STEPS)
            # Timed iterations lie around the context asked for, so that their mean is at it.
            start = max(case.context - DECODE_STEPS // 2, 0)
            chunks.append(
                Chunk(self._prompt[start : start + 1], start, blocks, True, decodes=True, slot=len(chunks))
            )
            first = blocks.stop
        if case.num_tokens:
            blocks = self._blocks(first, case.cached + case.num_tokens)
            tokens = self._prompt[case.cached : case.cached + case.num_tokens]
            chunks.append(Chunk(tokens, case.cached, blocks, True, slot=len(chunks)))
            first = blocks.stop
        self._fill(first)
        return chunks

    def _blocks(self, first: int, num_tokens: int) -> range:
        return range(first, first + self._engine.layout.blocks_for(num_tokens))

    def _fill(self, num_blocks: int) -> None:
        """Real KV in blocks up to `num_blocks`: of one prompt, computed once and copied on."""
        size, memory = self._engine.layout.block_size, self._engine.memory
        source = min(len(self._prompt), 512, self._engine.num_blocks * size) // size * size
        if not self._filled:
            chunk = Chunk(self._prompt[:source], 0, range(source // size), False)
            self._engine.step(self._engine.build([chunk]), [])
            self._filled = source // size
        while self._filled < num_blocks:
            count = min(num_blocks - self._filled, source // size, self._filled)
            for layer in range(self._engine.layout.num_layers):
                first, stop = self._filled * size, (self._filled + count) * size
                landing = memory.landing(layer, first, stop)
                landing[:] = memory.export(layer, 0, count * size)
                memory.land(layer, first, stop, landing)
            self._filled += count
