"""More memory devices bring more throughput until the compute devices are full (Lamina, evaluation)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost.pooled import is_compute_bound
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.lamina.setup import TRACES, instance, pool
from isthmus.lab.papers.table import Cell, Table

_MODEL, _TRACE = "70B", "Azure-Conv"
DEVICES = (1, 2, 4, 8)
_UNPUBLISHED = "no figure is printed"


def at(memory: int, trace: str = _TRACE) -> tuple[int, float, bool]:
    """Of 70B on two H100 and so many H20: batch, tokens a second, whether compute binds."""
    context = TRACES[trace].context
    batch = int(instance(_MODEL, "h20", memory).lent_capacity_tokens // context)
    found = pool(_MODEL, memory=memory)
    rate, turns = found.rate(batch, context)
    return batch, rate, is_compute_bound(found.model, batch // turns)


def _measure(lab: Lab) -> Iterator[Cell]:
    for trace in (_TRACE, "Kimi-Conv"):
        before = 0.0
        for memory in DEVICES:
            batch, rate, bound = at(memory, trace)
            row, printed = f"{trace}, {memory} H20", (trace, memory) == (_TRACE, 4)
            reason = "" if printed else _UNPUBLISHED
            yield Cell(row, "batch", 800 if printed else None, batch, reason)
            yield Cell(row, "tokens/s", None, rate, _UNPUBLISHED)
            yield Cell(row, "compute-bound", 1 if printed else None, int(bound), reason)
            if before:
                yield Cell(row, "% more than half as many", None, 100 * (rate / before - 1), _UNPUBLISHED)
            before = rate


TABLE = Table(
    name="lamina-saturation",
    title="70B on two H100 and more and more H20",
    source="Lamina v2, evaluation",
    setup=(
        "In words: with (2, 4) the batch reaches 800 and compute is saturated, so that more memory brings little. "
        "Compute-bound (1) is where twice the batch would take more than half as long again. By the roofline, with "
        "half of the batch at a time where two take turns."
    ),
    measure=_measure,
)
