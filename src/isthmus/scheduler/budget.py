"""How many prompt tokens fit into one iteration: a fixed budget, or as many as keep the time between tokens.

Sarathi-Serve profiles a deployment once and fixes the budget for the worst iteration it may meet. Here
the cost model is asked in every iteration, with the decodes, their contexts and what is cached before each chunk: the
chunk is long while little decodes, and short far into a long prompt, whose attention takes longer.

Decodes are not cut and never wait, so the target cannot be kept when they alone exceed it. Prompts then still get the
minimum, for a prompt that waits until fewer requests decode may wait for ever.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec

from isthmus.scheduler.events import Piece
from isthmus.types import NS_PER_MS

TILE = 128
"""Rows that a matrix multiplication on GPUs computes at once (SARATHI, on tile quantisation): one more begins a tile,
which takes as long as all of its rows."""
CPU_TILE = 16
"""The same on a CPU, whose kernels work on a few rows at a time."""


StepTime = Callable[[Sequence[tuple[int, int]], int, int], int]
"""Picoseconds of an iteration, `NodeCost.step_ps`: chunks (tokens, cached before them), decodes, their contexts."""


class TokenBudget:
    """What prompts may take of one iteration: `limit` tokens, of which the `chunks` have `taken` so many."""

    __slots__ = ("chunks", "limit", "taken")

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0
        self.chunks: list[Piece] = []

    def fit(self, start: int, left: int) -> int:
        """The most tokens from position `start` on of a prompt that has `left`; 0 for none. Does not mutate."""
        rest = self.limit - self.taken
        return left if left < rest else rest

    def take(self, chunk: Piece, weight: int = 0) -> None:
        """Adds a chunk, of at most `fit` tokens; or one that comes to `weight` tokens."""
        self.chunks.append(chunk)
        self.taken += weight or chunk.count


class TbtTarget:
    """No iteration with decodes is to take longer than `limit_ps`, as `step_ps` predicts; chunks end with a `tile`."""

    __slots__ = ("limit_ps", "step_ps", "tile")

    def __init__(self, step_ps: StepTime, limit_ps: int, tile: int = TILE) -> None:
        assert limit_ps > 0 and tile > 0
        self.step_ps, self.limit_ps, self.tile = step_ps, limit_ps, tile

    def minimum(self, num_decodes: int) -> int:
        """Prompt tokens that are taken in any case: to the end of a tile, and at least half of one.

        The tile that the decodes begin is computed whole anyway, and weights are read whether few rows use them or
        many, so this delays the decodes by little.
        """
        half = self.tile // 2
        return max(1, half + -(num_decodes + half) % self.tile)


class Chunking(msgspec.Struct, frozen=True):
    """How a node cuts prompts. `partial_prefills`: as in `Limits`; `tbt_ms`: what an iteration with decodes may take,
    None: the token budget alone counts; `tile`: as in `TbtTarget`."""

    partial_prefills: int = 1
    tbt_ms: int | None = None
    tile: int = TILE

    def target(self, step_ps: StepTime) -> TbtTarget | None:
        return None if self.tbt_ms is None else TbtTarget(step_ps, self.tbt_ms * NS_PER_MS * 1000, self.tile)


class TimedBudget(TokenBudget):
    """As many tokens as the iteration meets its target with, and `minimum` even if it does not.

    In it `num_decodes` requests decode, whose contexts sum to `context`.
    """

    __slots__ = ("_context", "_num_decodes", "_sizes", "_target", "minimum")

    def __init__(self, target: TbtTarget, limit: int, num_decodes: int, context: int) -> None:
        super().__init__(limit)
        self._target, self._num_decodes, self._context = target, num_decodes, context
        self._sizes: list[tuple[int, int]] = []
        self.minimum = min(limit, target.minimum(num_decodes))

    def fit(self, start: int, left: int) -> int:
        most = super().fit(start, left)
        least = min(most, max(0, self.minimum - self.taken))
        fitting = most if most <= least or self._meets(most, start) else self._largest(least, most, start)
        if fitting == left:
            return fitting
        # A cut chunk ends with a tile. If none ends in it, its tile has been begun, and the rest of it is free.
        surplus = (self._num_decodes + self.taken + fitting) % self._target.tile
        return fitting - surplus if fitting > surplus else fitting

    def take(self, chunk: Piece, weight: int = 0) -> None:
        super().take(chunk, weight)
        self._sizes.append((weight or chunk.count, chunk.start))

    def _largest(self, low: int, high: int, start: int) -> int:
        """The largest count that meets the target, from `low`, which need not, to below `high`, which does not."""
        return low + bisect_left(range(low + 1, high), 1, key=lambda count: not self._meets(count, start))

    def _meets(self, count: int, start: int) -> bool:
        took_ps = self._target.step_ps([*self._sizes, (count, start)], self._num_decodes, self._context)
        return took_ps <= self._target.limit_ps
