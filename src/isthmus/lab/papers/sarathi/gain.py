"""What chunked prefills with piggybacked decodes gain over batches of prompts only and of decodes only.

Both are runs of the same node: requests of one shape queue for `batch` places, the scheduler forms the batches. The
baseline computes prompts whole and each of its batches as two, one of prompts and one of decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from isthmus.lab.papers.sarathi.one_node import WHOLE, Asked, BatchLimits, Iteration, Served, StepTime, serve

_ROUNDS = 8
"""How often each place is taken."""


class Shape(msgspec.Struct, frozen=True):
    """`batch` requests at once of `length` tokens each, `ratio` (P:D) times as many in the prompt as in the answer."""

    length: int
    batch: int
    ratio: float

    @property
    def prompt(self) -> int:
        return round(self.length * self.ratio / (self.ratio + 1))


@lru_cache(maxsize=16)
def apart(step_ps: StepTime) -> StepTime:
    """The same work as two batches, of the prompts and of the decodes."""

    def separate(chunks: Sequence[tuple[int, int]], num_decodes: int, context: int) -> int:
        together = 0
        if chunks:
            together += step_ps(chunks, 0, 0)
        if num_decodes:
            together += step_ps((), num_decodes, context)
        return together

    return separate


def run(shape: Shape, step_ps: StepTime, budget: int, rounds: int = _ROUNDS) -> Served:
    """A queue of requests through `batch` places. Each decodes as many iterations as it has tokens beyond its prompt,
    as in the paper's formulas; the prompt's own token comes on top."""
    asked = Asked(shape.prompt, shape.length - shape.prompt + 1)
    return serve([asked] * (rounds * shape.batch), step_ps, BatchLimits(budget, shape.batch, prompt_batch=1))


@lru_cache(maxsize=1024)
def steady_ps(shape: Shape, step_ps: StepTime, budget: int) -> int:
    """Time of `_ROUNDS` rounds between filling the places and emptying them, which take longer."""
    once, twice = (run(shape, step_ps, budget, rounds).worked_ps for rounds in (_ROUNDS, 2 * _ROUNDS))
    return twice - once


def gain(shape: Shape, step_ps: StepTime, budget: int) -> float:
    """Throughput with iterations of `budget` tokens, over the baseline's."""
    return steady_ps(shape, apart(step_ps), WHOLE) / steady_ps(shape, step_ps, budget)


def best_gain(shape: Shape, step_ps: StepTime, budgets: Sequence[int]) -> float:
    """With whichever of the budgets is best for this shape, or with the baseline's batches if none is better."""
    return max(1.0, *[gain(shape, step_ps, budget) for budget in budgets])


def decode_speed_up(shape: Shape, step_ps: StepTime, budget: int) -> float:
    """Time of a decode in a batch of decodes, over what it adds to a batch with a chunk."""
    hybrid = [batch for batch in run(shape, step_ps, budget).batches if batch.chunks and batch.num_decodes]
    alone = [
        batch for batch in run(shape, apart(step_ps), WHOLE).batches if not batch.chunks and batch.num_decodes
    ]

    def added_ps(batch: Iteration) -> int:
        return batch.took_ps - step_ps(batch.chunks, 0, 0)

    return _per_decode(alone, [batch.took_ps for batch in alone]) / _per_decode(
        hybrid, [*map(added_ps, hybrid)]
    )


def _per_decode(batches: Sequence[Iteration], times_ps: Sequence[int]) -> float:
    return sum(times_ps) / sum([batch.num_decodes for batch in batches])
