"""Tokens a second at similar cost (Lamina, evaluation): what a roofline gives, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost import Coefficients, compile_cost, engine_coefficients
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.lamina.setup import MODELS, ROOFLINE, TRACES, batches, device, pool, vllm
from isthmus.lab.papers.table import Cell, Table

PUBLISHED = (16.1, 90.1)
"""Least and most, in percent."""
_UNPUBLISHED = "printed as a range over all models and traces"
EFFICIENCIES = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Of vLLM, as shares of the roofline: a parameter, fitted to nothing."""
_COLUMN = "throughput (% more)"


def measured() -> Coefficients:
    """An engine's shares and overheads, fitted elsewhere (docs/cost-model.md)."""
    return engine_coefficients("vllm", device("h100"), weight_dtype="bf16", kv_dtype="bf16")


def gain(model: str, trace: str, by: Coefficients = ROOFLINE, efficiency: float = 1.0) -> float:
    """Lamina's throughput over vLLM's, both with their largest batches; Lamina as one batch or two, whichever is more.
    `efficiency`: of vLLM."""
    context = TRACES[trace].context
    small, large = batches(model, context)
    fixed, slope = compile_cost(vllm(model, by)).decode_step_ps(small)
    baseline = efficiency * small / ((fixed + slope * small * context) / 1e12)
    return pool(model, by).rate(large, context)[0] / baseline


def _measure(lab: Lab) -> Iterator[Cell]:
    for model in MODELS:
        for trace in TRACES:
            row = f"{model}, {trace}"
            for column, by in ((_COLUMN, ROOFLINE), (f"{_COLUMN}, with overheads", measured())):
                yield Cell(row, column, None, _percent(gain(model, trace, by)), _UNPUBLISHED)
    for efficiency in EFFICIENCIES:
        gains = [gain(model, trace, efficiency=efficiency) for model in MODELS for trace in TRACES]
        name = f"vLLM at {efficiency:.0%} of the roofline"
        reason = "" if efficiency == 1.0 else "a parameter of ours: no reproduction"
        for which, found, figure in zip(("least", "most"), (min(gains), max(gains)), PUBLISHED, strict=True):
            published = figure if efficiency == 1.0 else None
            yield Cell(f"{which}, {name}", _COLUMN, published, _percent(found), reason)


def _percent(times: float) -> float:
    return 100 * (times - 1)


TABLE = Table(
    name="lamina-throughput",
    title="Throughput at similar cost",
    source="Lamina v2, evaluation",
    setup=(
        "Decode alone, mean lengths, largest batches. Both by one roofline (60 % of the peak, 80 % of the bandwidths), "
        "Lamina as one batch or two that take turns; the second column has overheads of vLLM as fitted elsewhere, on "
        "both sides. The range is not reproduced: its upper end lies above any of ours, for vLLM is as good here as "
        "its roofline, and the paper's measured times of operators are not printed. 70B on Azure-Conv is bound by "
        "compute, of which Lamina has half. The last rows show what a less efficient vLLM would give; none is a fit."
    ),
    measure=_measure,
)
