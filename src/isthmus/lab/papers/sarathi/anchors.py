"""Iteration times of LLaMA-13B on one A6000 as SARATHI prints them, and nothing else.

Linear operators work on tiles of 128 rows. Between the printed sizes their time is linear in tiles, beyond 1,024 rows
proportional. The first three are whole iterations, so their small attention part is counted twice; 92.33 ms, printed
for 257 rows, holds to the end of that tile. Attention of a prompt grows with the square of what it has seen (10 ms at
1,024 tokens), that of decodes with their contexts (5.68 ms for four of 1,024).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

TILE = 128
_ROWS_MS = ((128, 55.0), (256, 69.8), (384, 92.33), (1024, 224.8))
_DECODES_MS = 44.28
_MAX_DECODES = 18  # the largest batch that fits: up to there an iteration takes as long as its weights are read
_PAIR_MS = 10 / 1024**2
_CONTEXT_MS = 5.68 / 4 / 1024
_PS_PER_MS = 1e9


def linear_ms(rows: int, *, decodes_only: bool = False) -> float:
    """All operators but attention, of so many tokens; 0 for none."""
    if not rows:
        return 0.0
    if decodes_only and rows <= _MAX_DECODES:
        return _DECODES_MS
    rows = -(-rows // TILE) * TILE
    if rows <= _ROWS_MS[0][0]:
        return _ROWS_MS[0][1]
    for (below, fewer), (above, more) in pairwise(_ROWS_MS):
        if rows <= above:
            return fewer + (more - fewer) * (rows - below) / (above - below)
    return _ROWS_MS[-1][1] * rows / _ROWS_MS[-1][0]


def attention_ms(chunks: Sequence[tuple[int, int]], context: int) -> float:
    pairs = sum([(start + count) ** 2 - start**2 for count, start in chunks])
    return _PAIR_MS * pairs + _CONTEXT_MS * context


def step_ps(chunks: Sequence[tuple[int, int]], num_decodes: int, context: int) -> int:
    """A `StepTime`."""
    rows = num_decodes + sum([count for count, _ in chunks])
    linear = linear_ms(rows, decodes_only=not chunks)
    return round(_PS_PER_MS * (linear + attention_ms(chunks, context)))
