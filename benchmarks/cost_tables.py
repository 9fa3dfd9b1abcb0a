"""Shared by the parts of `python -m benchmarks cost`: lines of the result, tables, halves, a fitted roofline."""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.bench.least_squares import least_squares


@dataclass(frozen=True)
class Finding:
    """One line of the result: mean absolute and mean signed relative error of `rows` measurements, percent.

    `kind`: "held out" (these rows fitted nothing), "fitted" (they did), "no refit" (coefficients of another
    GPU, model or engine), "fit of a fit" (the published values are themselves fitted curves).
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


@dataclass(frozen=True)
class Kernel:
    """One measured kernel: memory traffic and arithmetic as shares of a second at the data-sheet peaks."""

    read_s: float
    flop_s: float
    seconds: float


def roofline_s(kernel: Kernel, values: Sequence[float]) -> float:
    """The model's smooth maximum; `values`: fixed seconds, share of bandwidth, share of the arithmetic peak."""
    fixed_s, bandwidth, matmul = values
    return fixed_s + ((kernel.read_s / bandwidth) ** 4 + (kernel.flop_s / matmul) ** 4) ** 0.25


def fit_roofline(kernels: Sequence[Kernel]) -> list[float]:
    def residuals(values: Sequence[float]) -> list[float]:
        return [math.log(roofline_s(kernel, values) / kernel.seconds) for kernel in kernels]

    return least_squares(residuals, (5e-6, 0.7, 0.7), ((1e-7, 1e-3), (0.02, 1.0), (0.02, 1.0)))


def roofline_finding(table: str, case: str, kernels: Sequence[Kernel]) -> Finding:
    """Fitted on one half, judged on the other."""
    first, second = halves(kernels, 0)
    values = fit_roofline(first)
    errors = [roofline_s(kernel, values) / kernel.seconds - 1 for kernel in second]
    fixed_s, bandwidth, matmul = values
    note = f"{1e6 * fixed_s:.1f} us fixed, {bandwidth:.2f} of bandwidth"
    if any(kernel.flop_s for kernel in kernels):
        note += f", {matmul:.2f} of the arithmetic peak"
    return finding(table, case, "held out", errors, note)
