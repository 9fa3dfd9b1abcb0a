"""Coefficients of engines from measurements, by bounded least squares on relative errors, and how far a model is off.

A row is one closed-loop serving run of an engine that prefills and decodes on the same GPUs, as public
benchmark tables have it. Two measurements of a dense model are enough to move to new hardware; see
docs/cost-model.md.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from isthmus.bench.profile import least_squares
from isthmus.core.cost.analytic import Analytic, AnalyticCost
from isthmus.core.cost.hardware import EFFICIENCIES, Coefficients

SHARED = ("weight_read", "matmul", "sequence_s", "allreduce_s")
"""Free by default, one value for all engines: they belong to the GPU and to the host."""
OWN = ("kv_read", "layer_s")
"""Free by default, one value for each engine: its attention kernel and its launches."""

_FLOOR_S = 1e-7  # overheads are fitted as logarithms, so they stay above this
_MAX_OVERHEAD_S = 1e-3
_MIN_EFFICIENCY = 0.05


@dataclass(frozen=True)
class Finding:
    """One line of the result: mean absolute and mean signed relative error of `rows` measurements, percent.

    `kind`: "held out" (these rows fitted nothing), "fitted" (they did), "no refit" (coefficients of another
    GPU, model or engine).
    """

    table: str
    case: str
    kind: str
    rows: int
    mape_percent: float
    bias_percent: float
    note: str = ""


def finding(table: str, case: str, kind: str, errors: Sequence[float], note: str = "") -> Finding:
    """`errors` are relative: predicted over measured, less one."""
    absolute = 100 * statistics.fmean(map(abs, errors))
    return Finding(table, case, kind, len(errors), absolute, 100 * statistics.fmean(errors), note)


def read(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def halves(rows: Sequence[Any], seed: int) -> tuple[list[Any], list[Any]]:
    """Two random halves; the first is the smaller one when they cannot be equal."""
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    middle = len(shuffled) // 2
    return shuffled[:middle], shuffled[middle:]


class ServingRow(msgspec.Struct, frozen=True):
    """`concurrency` clients in a closed loop; lengths are mean tokens. `instance.coefficients` are not read."""

    engine: str
    instance: Analytic
    prompt_tokens: float
    output_tokens: float
    concurrency: int
    tpot_s: float


def closed_loop_tpot_s(
    instance: Analytic, prompt_tokens: float, output_tokens: float, concurrency: int
) -> float:
    """Time per output token of a closed loop on one mixed instance (docs/cost-model.md, section 1).

    Each output token waits for its decode step and for its share of the other requests' prompts.
    """
    cost = AnalyticCost(instance)
    room = instance.kv_capacity_tokens / (prompt_tokens + 0.55 * output_tokens)
    batch = max(1.0, min(concurrency, room))
    step_ps = cost.decode_ps(batch, batch * (prompt_tokens + output_tokens / 2))
    return (step_ps + (batch - 1) / output_tokens * cost.prompt_work_ps(prompt_tokens)) / 1e12


def fit_engines(
    rows: Sequence[ServingRow],
    start: Mapping[str, Coefficients],
    *,
    shared: Sequence[str] = SHARED,
    own: Sequence[str] = OWN,
) -> dict[str, Coefficients]:
    """Coefficients of the engines in `rows`, fitted together; what is not free keeps its value of `start`.

    `shared` coefficients start from the first engine's. Do not free more of them than there are rows.
    """
    engines = list(dict.fromkeys(row.engine for row in rows))
    slots = [(name, engines) for name in shared] + [(name, [engine]) for name in own for engine in engines]

    def apply(values: Sequence[float]) -> dict[str, Coefficients]:
        changes: dict[str, dict[str, float]] = {engine: {} for engine in engines}
        for (name, holders), value in zip(slots, values, strict=True):
            for engine in holders:
                changes[engine][name] = value
        return {engine: start[engine].but(**changes[engine]) for engine in engines}

    def residuals(values: Sequence[float]) -> list[float]:
        found = apply(values)
        return [math.log(predicted_tpot_s(row, found[row.engine]) / row.tpot_s) for row in rows]

    bounds = [_bounds(name) for name, _ in slots]
    first = [float(getattr(start[holders[0]], name)) for name, holders in slots]
    return apply(least_squares(residuals, first, bounds))


def fit_engine(
    rows: Sequence[ServingRow], start: Coefficients, *, free: Sequence[str] = (*SHARED, *OWN)
) -> Coefficients:
    """`fit_engines` for rows of one engine."""
    (engine,) = {row.engine for row in rows}
    return fit_engines(rows, {engine: start}, shared=free, own=())[engine]


def predicted_tpot_s(row: ServingRow, coefficients: Coefficients) -> float:
    """What the model says of a row with these coefficients."""
    instance = msgspec.structs.replace(row.instance, coefficients=coefficients)
    return closed_loop_tpot_s(instance, row.prompt_tokens, row.output_tokens, row.concurrency)


def _bounds(name: str) -> tuple[float, float]:
    return (_MIN_EFFICIENCY, 1.0) if name in EFFICIENCIES else (_FLOOR_S, _MAX_OVERHEAD_S)
