"""What it costs to cut a prompt: tiles that are not full, weights and KV that are read again (SARATHI)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.sarathi.anchors import step_ps
from isthmus.lab.papers.sarathi.one_node import WHOLE, Asked, BatchLimits, serve
from isthmus.lab.papers.table import Cell, Table

_LENGTH = 1024
_PUBLISHED = {64: 5.0, 128: 2.0, 256: 1.2, 512: 1.1}
"""In words: about 5 times, more than 2 times, within 20 %, within 10 %."""


def _prefill_ps(budget: int) -> int:
    return serve([Asked(_LENGTH, 1)], step_ps, BatchLimits(budget, 1)).worked_ps


def _measure(lab: Lab) -> Iterator[Cell]:
    whole = _prefill_ps(WHOLE)
    for size, figure in _PUBLISHED.items():
        yield Cell(f"chunks of {size}", "prefill, times that of one piece", figure, _prefill_ps(size) / whole)


TABLE = Table(
    name="sarathi-chunks",
    title="Prefill time by chunk size",
    source="SARATHI, chunking overhead",
    setup=(
        "One prompt of 1,024 tokens, LLaMA-13B on one A6000, times from the printed anchors. Published in words, for "
        "all lengths: about 5, more than 2, at most 1.2, at most 1.1. Reading KV again is not in the anchors."
    ),
    measure=_measure,
)
