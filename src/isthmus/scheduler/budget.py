"""How many prompt tokens fit into one iteration: a fixed budget, or as many as keep the time between tokens.

Sarathi-Serve (section 4.3) profiles a deployment once and fixes the budget for the worst iteration it may meet. Here
the cost model is asked in every iteration, with the decodes, their contexts and what is cached before each chunk: the
chunk is long while little decodes, and short far into a long prompt, whose attention takes longer.

Decodes are not cut and never wait, so the target cannot be kept when they alone exceed it. Prompts then still get the
minimum, for a prompt that waits until fewer requests decode may wait for ever.
"""

from __future__ import annotations

from isthmus.cost import NodeCost

TILE = 128
"""Rows that a matrix multiplication on GPUs computes at once (SARATHI, section 4.4): one more row begins a tile, which
takes as long as all of its rows."""


class Room:
    """What prompts may take of one iteration: `budget` tokens together, of which `taken` are."""

    __slots__ = ("budget", "taken")

    def __init__(self, budget: int) -> None:
        self.budget, self.taken = budget, 0

    def fit(self, start: int, left: int) -> int:
        """The most tokens from position `start` on of a prompt that has `left`; 0 for none. Does not mutate."""
        rest = self.budget - self.taken
        return left if left < rest else rest

    def take(self, start: int, count: int) -> None:
        """Gives a chunk of so many tokens, at most `fit`."""
        self.taken += count


class TimedRoom(Room):
    """Room for as many tokens as the iteration meets its target with, and for `minimum` even if it does not."""

    __slots__ = ("_chunks", "_context", "_num_decodes", "_target", "minimum")

    def __init__(self, target: TbtTarget, budget: int, num_decodes: int, context: int) -> None:
        super().__init__(budget)
        self._target, self._num_decodes, self._context = target, num_decodes, context
        self._chunks: list[tuple[int, int]] = []
        self.minimum = min(budget, target.minimum(num_decodes))

    def fit(self, start: int, left: int) -> int:
        most = super().fit(start, left)
        least = min(most, max(0, self.minimum - self.taken))
        fitting = most if most <= least or self._meets(most, start) else self._largest(least, most, start)
        if fitting == left:
            return fitting
        # A cut chunk ends with a tile. If none ends in it, its tile has been begun, and the rest of it is free.
        surplus = (self._num_decodes + self.taken + fitting) % self._target.tile
        return fitting - surplus if fitting > surplus else fitting

    def take(self, start: int, count: int) -> None:
        super().take(start, count)
        self._chunks.append((count, start))

    def _largest(self, low: int, high: int, start: int) -> int:
        """The largest count that meets the target, from `low`, which need not, to below `high`, which does not."""
        while high - low > 1:
            middle = (low + high) // 2
            if self._meets(middle, start):
                low = middle
            else:
                high = middle
        return low

    def _meets(self, count: int, start: int) -> bool:
        chunks = [*self._chunks, (count, start)]
        target = self._target
        return target.cost.step_ps(chunks, self._num_decodes, self._context) <= target.limit_ps


class TbtTarget:
    """No iteration with decodes is to take longer than `limit_ps`, as `cost` predicts; chunks end with a `tile`."""

    __slots__ = ("cost", "limit_ps", "tile")

    def __init__(self, cost: NodeCost, limit_ps: int, tile: int = TILE) -> None:
        assert limit_ps > 0 and tile > 0
        self.cost, self.limit_ps, self.tile = cost, limit_ps, tile

    def room(self, budget: int, num_decodes: int, context: int) -> TimedRoom:
        """Of an iteration in which so many requests decode, whose contexts sum to `context`."""
        return TimedRoom(self, budget, num_decodes, context)

    def minimum(self, num_decodes: int) -> int:
        """Prompt tokens that are taken in any case: to the end of a tile, and at least half of one.

        The tile that the decodes begin is computed whole anyway, and weights are read whether few rows use them or
        many, so this delays the decodes by little.
        """
        half = self.tile // 2
        return max(1, half + -(num_decodes + half) % self.tile)
