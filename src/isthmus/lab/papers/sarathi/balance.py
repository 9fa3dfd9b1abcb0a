"""Gain by the ratio of prompt to answer tokens: its peak, and what is left away from it (SARATHI)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.sarathi.anchors import TILE, step_ps
from isthmus.lab.papers.sarathi.gain import Shape, best_gain, gain
from isthmus.lab.papers.sarathi.one_node import WHOLE
from isthmus.lab.papers.table import Cell, Table

_LENGTHS = {1024: 18, 2048: 10, 3072: 6}
"""Tokens of a request, and the largest batch of them."""

_BALANCED = {1024: 1.27, 2048: 1.25, 3072: 1.23}
_PEAKS = {256: (14, 1.27), 512: (28, 1.23)}
"""Chunk: P:D of the peak and the gain there, at 1K."""
_ORCA = 1.11
_AWAY = (5, 10, 20, 40, 80, 160)
_AWAY_GAIN = 1.10
_BUDGETS = tuple(TILE * tiles for tiles in range(1, 9))


def balanced(length: int, budget: int) -> Shape:
    """All decodes piggyback on the chunks of others, exactly: P:D = chunk / (batch - 1)."""
    batch = _LENGTHS[length]
    return Shape(length, batch, (budget - (batch - 1)) / (batch - 1))


def peak(budget: int) -> int:
    """The whole P:D with the highest gain at 1K."""
    expected = round(balanced(1024, budget).ratio)
    return max(
        range(max(1, expected - 6), expected + 7),
        key=lambda ratio: gain(Shape(1024, _LENGTHS[1024], ratio), step_ps, budget),
    )


def _measure(lab: Lab) -> Iterator[Cell]:
    for length, figure in _BALANCED.items():
        shape = balanced(length, 256)
        yield Cell(f"chunks of 256, {length} tokens", "throughput (times)", figure, gain(shape, step_ps, 256))
    for budget, (ratio, figure) in _PEAKS.items():
        found = peak(budget)
        yield Cell(f"peak of chunks of {budget}", "P:D", ratio, found)
        shape = Shape(1024, _LENGTHS[1024], found)
        yield Cell(f"peak of chunks of {budget}", "throughput (times)", figure, gain(shape, step_ps, budget))
    yield Cell("Orca at best", "throughput (times)", _ORCA, gain(balanced(1024, 256), step_ps, WHOLE))
    for ratio in _AWAY:
        shape = Shape(1024, _LENGTHS[1024], ratio)
        ours = best_gain(shape, step_ps, (*_BUDGETS, WHOLE))
        yield Cell(f"the best chunk at P:D {ratio}", "throughput (times)", _AWAY_GAIN, ours)


TABLE = Table(
    name="sarathi-balance",
    title="Gain by the ratio of prompt to answer tokens",
    source="SARATHI, figures on P:D and on Orca",
    setup=(
        "LLaMA-13B on one A6000, the largest batches (18, 10 and 6 requests); times from the printed anchors, batches "
        "formed by our scheduler. Orca at best computes a whole prompt beside the decodes in every iteration. The "
        "last rows switch, away from a chunk's peak, to the best multiple of a tile up to 1,024, to whole prompts or "
        "to separate batches; the paper says that this keeps gains of about 10 % over a wide range."
    ),
    measure=_measure,
)
