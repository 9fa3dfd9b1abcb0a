"""What one iteration takes: prompts, decodes, both together, and one row more than a tile (SARATHI, Table 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.sarathi.anchors import attention_ms, linear_ms
from isthmus.lab.papers.table import Cell, Table

_CONTEXT = 1024

_PUBLISHED: dict[str, tuple[Sequence[tuple[int, int]], int, tuple[float, float, float]]] = {
    "prompt of 1,024": ([(1024, 0)], 0, (224.8, 10.0, 234.8)),
    "4 decodes": ([], 4, (44.28, 5.68, 49.96)),
    "1,021 of a prompt and 3 decodes": ([(1021, 0)], 3, (223.2, 15.2, 238.4)),
}
"""Chunks, decodes; linear operators, attention, all."""

_PER_DECODE = (12.49, 1.2)
_TILES = {128: 55.0, 256: 69.8, 257: 92.33}


def _measure(lab: Lab) -> Iterator[Cell]:
    totals = []
    for row, (chunks, decodes, published) in _PUBLISHED.items():
        rows = decodes + sum([count for count, _ in chunks])
        linear = linear_ms(rows, decodes_only=not chunks)
        attention = attention_ms(chunks, decodes * _CONTEXT)
        totals.append(linear + attention)
        ours = (linear, attention, linear + attention)
        for column, figure, value in zip(("linear", "attention", "all"), published, ours, strict=True):
            yield Cell(row, f"{column} (ms)", figure, value)
    prompt, decodes_only, both = totals
    alone, added = decodes_only / 4, (both - prompt) / 3
    yield Cell("a decode in a batch of 4", "all (ms)", _PER_DECODE[0], alone)
    yield Cell("a decode beside the prompt", "all (ms)", _PER_DECODE[1], added)
    yield Cell("the former over the latter", "times", 10.0, alone / added)
    for rows, figure in _TILES.items():
        yield Cell(f"{rows} tokens", "all (ms)", figure, linear_ms(rows))


TABLE = Table(
    name="sarathi-iterations",
    title="Time of one iteration",
    source="SARATHI, Table 2 and tile quantisation",
    setup=(
        "LLaMA-13B on one A6000. Our times are interpolated between the printed ones, so rows of prompts only or of "
        "decodes only agree by construction; those with both do not. The paper's 10 times is a marginal cost: what a "
        "decode adds to an iteration that runs anyway."
    ),
    measure=_measure,
)
