"""Bounded least squares over positive values."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from isthmus.bench.child import Loop
from isthmus.bench.handling import measure_handling
from isthmus.bench.study import Report, in_turns, medians, silent
from isthmus.core.blocks import KVLayout
from isthmus.core.cost import Curve, NodeCost, compile_cost
from isthmus.core.cost.transfer import Handling
from isthmus.core.errors import StartError
from isthmus.core.types import Sampling
from isthmus.live.engine.interface import Chunk, OnLayer, Row
from isthmus.live.servers.client import Client, EngineError, body_of

_STEP = 1e-5
"""Of the logarithms, for differences; they move by at most `_STRIDE` at once."""
_STRIDE = 2.0


def least_squares(
    residuals: Callable[[Sequence[float]], list[float]],
    start: Sequence[float],
    bounds: Sequence[tuple[float, float]],
    *,
    max_iterations: int = 60,
) -> list[float]:
    """Positive values that minimise the sum of squared residuals: Levenberg-Marquardt on their logarithms.

    Values stay within `bounds` by projection; one that rests on a bound and would leave is held there for the step.
    """
    low, high = np.log(np.array(bounds)).T
    point = np.clip(np.log(np.maximum(start, 1e-300)), low, high)

    def at(logs: np.ndarray) -> np.ndarray:
        return np.array(residuals(np.exp(logs).tolist()))

    current, damping = at(point), 1e-3
    for _ in range(max_iterations):
        steps = np.diag(np.where(point + _STEP <= high, _STEP, -_STEP))
        jacobian = np.column_stack([(at(point + step) - current) / step.sum() for step in steps])
        gradient = jacobian.T @ current
        free = ~((point <= low) & (gradient > 0) | (point >= high) & (gradient < 0))
        if not free.any():
            break
        normal, before = jacobian[:, free].T @ jacobian[:, free], current @ current
        while damping < 1e9:
            damped = normal + damping * np.diag(normal.diagonal() + 1e-9)
            step, trial = np.linalg.solve(damped, -gradient[free]), point.copy()
            trial[free] = np.clip(point[free] + np.clip(step, -_STRIDE, _STRIDE), low[free], high[free])
            found = at(trial)
            if found @ found < before:
                point, current, damping = trial, found, max(damping / 5, 1e-9)
                break
            damping *= 4
        if before - current @ current <= 1e-10 * before:
            break
    return np.exp(point).tolist()


# `isthmus profile`: measures this machine's engine on a model and fits a cost curve to it.
#
# An iteration is measured as a node's worker runs it: lay out the batch, step the engine, which samples, and move
# the batch on. Every case is run in turns with the others, and its median counts, so that a passing disturbance
# hits no case alone.


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
_GREEDY_PROFILE = Row(Sampling(temperature=0.0), ())
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
    bench = _BenchProfile(engine)
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


class _BenchProfile:
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
        rows = [_GREEDY_PROFILE] * len(chunks)
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
            engine.step(engine.build([chunk]), [_GREEDY_PROFILE], on_layer)

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


# `isthmus profile --vllm`: the cost curve of a vLLM server, from what its clients see.
#
# Prompts are measured alone: until their only token is there. Decodes are measured together: the time between tokens
# of one answer while all of them are being generated. So HTTP and vLLM's own scheduling count, as they do for a node.
# Every case is run in turns with the others, and its median counts, as of an engine of ours (`profile.py`); mixed
# iterations cannot be told apart from outside, and are left out.


_GREEDY_PROFILE_SERVER = Sampling(temperature=0.0)
_STEPS = 4 * DECODE_STEPS
"""Tokens of an answer: they begin one after the other, and all run together for a part of it."""
FIRST_TOKEN = 3
"""Lower ids may be special."""


def profile_server(
    client: Callable[[], Client],
    layout: KVLayout,
    *,
    vocab_size: int,
    max_length: int,
    kv_tokens: int,
    max_sequences: int,
    origin: str,
    rounds: int = 5,
    budget_s: float = 90.0,
    report: Report = silent,
) -> Profile:
    """`client`: makes one, in the event loop; `kv_tokens`: that its KV memory holds; `max_sequences`: it runs at once.
    Raises StartError where the server does not answer."""
    cases = [
        case
        for case in cases_of(max_length, kv_tokens)
        if not (case.num_tokens and case.num_decodes) and case.num_decodes <= max_sequences
        if case.context + _STEPS <= max_length
    ]

    with contextlib.closing(_BenchProfileServer(client, layout.block_size, vocab_size)) as bench:
        try:
            bench.seconds(Case(num_tokens=64))  # what is compiled or allocated once
            kept = affordable(bench.seconds, cases)
            report(f"{len(kept)} cases at {bench.url}")
            found = measured(bench.seconds, kept, rounds, budget_s)
        except EngineError as error:
            raise StartError(f"vLLM at {bench.url}: {error}") from None
    return fit_profile(found, layout.num_layers * layout.token_bytes, layout.num_layers, origin)


class _BenchProfileServer:
    """Runs cases on one server. No prompt comes twice, but for what is to be cached."""

    def __init__(self, client: Callable[[], Client], block_size: int, vocab_size: int) -> None:
        self._loop = Loop()
        self._client, self._block_size = self._loop.run(_made(client)), block_size
        self.url = self._client.url
        self._draws = random.Random(0)
        self._span = range(FIRST_TOKEN, vocab_size)
        self._number = 0

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()

    def seconds(self, case: Case) -> float:
        return self._loop.run(self._decode(case) if case.num_decodes else self._prefill(case))

    async def _prefill(self, case: Case) -> float:
        before = self._drawn(case.cached // self._block_size * self._block_size)
        if before:
            await self._compute([*before, *self._drawn(1)])
        prompt = [*before, *self._drawn(case.num_tokens)]
        started_s = time.perf_counter()
        await self._compute(prompt)
        return time.perf_counter() - started_s

    async def _decode(self, case: Case) -> float:
        """The prompts begin alike, so that their answers begin together."""
        prompt = self._drawn(max(1, case.context - _STEPS // 2))
        await self._compute(prompt)
        times = await asyncio.gather(*[self._times(prompt) for _ in range(case.num_decodes)])
        first, last = max(each[0] for each in times), min(each[-1] for each in times)
        gaps = [gap for each in times if (gap := _mean_gap(each, first, last)) is not None]
        if gaps:
            return statistics.median(gaps)
        return statistics.median([(each[-1] - each[0]) / max(1, len(each) - 1) for each in times])

    async def _compute(self, prompt: Sequence[int]) -> None:
        await self._client.compute(self._key(), body_of(_GREEDY_PROFILE_SERVER, prompt, len(prompt), 1))

    async def _times(self, prompt: Sequence[int]) -> list[float]:
        body, found = body_of(_GREEDY_PROFILE_SERVER, prompt, len(prompt), _STEPS), list[float]()
        async for tokens in self._client.answer(self._key(), body, None):
            found += [time.perf_counter()] * len(tokens)
        return found

    def _drawn(self, count: int) -> list[int]:
        return self._draws.choices(self._span, k=count)

    def _key(self) -> str:
        self._number += 1
        return f"profile-{self._number}"


async def _made(client: Callable[[], Client]) -> Client:
    return client()


def _mean_gap(times: Sequence[float], first: float, last: float) -> float | None:
    """Between the tokens of one answer that came while all were being generated."""
    inside = [at for at in times if first <= at <= last]
    return (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else None
