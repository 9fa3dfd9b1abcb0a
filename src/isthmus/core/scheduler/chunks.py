"""Cuts prompts into chunks: how many tokens an iteration takes, of which prompts, and who may overtake whom.

The token budget of an iteration is fixed, or as large as the time between tokens allows. Sarathi-Serve fixes it for the
worst iteration of a profiled deployment. Here the cost model predicts every iteration from its decodes, their contexts
and the cached tokens before each chunk, so chunks are long beside few decodes and short far into a long prompt. Decodes
never wait; where they alone exceed the target, prompts still get a minimum, or they might wait for ever.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import abc, deque
from itertools import islice

import msgspec

from isthmus.core.cost.node_cost import assembled_weight
from isthmus.core.scheduler.batch import RunningBatch
from isthmus.core.scheduler.events import Actions, Piece, SchedulerLimits
from isthmus.core.scheduler.queues import PromptQueue
from isthmus.core.scheduler.sequence import QUEUED, Sequence
from isthmus.core.types import NS_PER_MS

_LOOKAHEAD = 64
"""Most waiting prompts considered for overtaking, since that is done in every iteration."""
TILE = 128
"""Rows that a matrix multiplication on GPUs computes at once (SARATHI, on tile quantisation): a tile takes as long as
all of its rows."""
CPU_TILE = 16
"""The same for kernels on a CPU."""


StepTime = abc.Callable[[abc.Sequence[tuple[int, int]], int, int], int]
"""Picoseconds of an iteration, `NodeCost.step_ps`: chunks (tokens, cached before them), decodes, their contexts."""


class TokenBudget:
    """The prompt tokens of one iteration: `limit`, of which `chunks` have `taken` some."""

    __slots__ = ("chunks", "limit", "taken")

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0
        self.chunks: list[Piece] = []

    def fit(self, start: int, left: int) -> int:
        """The most tokens that fit, from position `start` on of a prompt that has `left`. Does not mutate."""
        rest = self.limit - self.taken
        return left if left < rest else rest

    def take(self, chunk: Piece, weight: int = 0) -> None:
        """Adds a chunk of at most `fit` tokens; or one that counts as `weight` tokens."""
        self.chunks.append(chunk)
        self.taken += weight or chunk.count


class TbtTarget(msgspec.Struct, frozen=True):
    """Longest predicted time of an iteration with decodes, in ps; chunks end with a `tile` of rows."""

    step_ps: StepTime
    limit_ps: int
    tile: int = TILE

    def minimum(self, num_decodes: int) -> int:
        """Prompt tokens taken in any case: up to the end of a tile, at least half of one. They delay decodes by little,
        since the tile that decodes begin is computed whole, and weights are read for few rows as for many.
        """
        half = self.tile // 2
        return max(1, half + -(num_decodes + half) % self.tile)


class Chunking(msgspec.Struct, frozen=True):
    """How a node cuts prompts. `partial_prefills`: as in `SchedulerLimits`; `tbt_ms`: longest iteration with decodes,
    None: the token budget alone counts; `tile`: as in `TbtTarget`."""

    partial_prefills: int = 1
    tbt_ms: int | None = None
    tile: int = TILE

    def target(self, step_ps: StepTime) -> TbtTarget | None:
        return None if self.tbt_ms is None else TbtTarget(step_ps, self.tbt_ms * NS_PER_MS * 1000, self.tile)


class TimedBudget(TokenBudget):
    """As many prompt tokens as let an iteration meet its target, and `minimum` in any case. `context`: sum over its
    `num_decodes` decodes."""

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
        # A cut chunk ends with a tile; a chunk within one tile, which is begun already, need not.
        surplus = (self._num_decodes + self.taken + fitting) % self._target.tile
        return fitting - surplus if fitting > surplus else fitting

    def take(self, chunk: Piece, weight: int = 0) -> None:
        super().take(chunk, weight)
        self._sizes.append((weight or chunk.count, chunk.start))

    def _largest(self, low: int, high: int, start: int) -> int:
        """The largest count below `high` that meets the target, else `low`."""
        return low + bisect_left(range(low + 1, high), 1, key=lambda count: not self._meets(count, start))

    def _meets(self, count: int, start: int) -> bool:
        took_ps = self._target.step_ps([*self._sizes, (count, start)], self._num_decodes, self._context)
        return took_ps <= self._target.limit_ps


class Chunks:
    """Cuts prompts of the batch, and of the queue by way of `admission`. Has no state of its own."""

    def __init__(
        self, limits: SchedulerLimits, target: TbtTarget | None, batch: RunningBatch, admission: PromptQueue
    ) -> None:
        self._limits, self._target, self._batch, self._admission = limits, target, batch, admission

    def cut(self, actions: Actions, now: int) -> list[Piece]:
        """The prompts' chunks of the next iteration; admits requests to the batch for it."""
        decoding, limits = self._batch.decoding, self._limits
        num_decodes = len(decoding.sequences)
        # At least one token, so that prompts go on beside any number of decodes.
        rest = limits.token_budget - num_decodes
        budget = TokenBudget(rest if rest > 0 else 1)
        if num_decodes and self._target is not None:
            budget = TimedBudget(self._target, budget.limit, num_decodes, decoding.context)
        if limits.partial_prefills > 1:
            self._share(budget, actions, now)
            return budget.chunks
        prompts, admission = self._batch.prompts, self._admission
        for sequence in prompts:  # each waits until the one before it is computed
            if not self._append(sequence, budget):
                return budget.chunks
        most = min(budget.limit, limits.prompt_batch)
        while budget.taken < most and admission.waiting and admission.admit(actions, now):
            if not self._append(prompts[-1], budget):
                break
        return budget.chunks

    def steps(self, chunks: list[Piece]) -> int:
        """How often a prompt's chunk may repeat while it fills the budget alone. Its last chunk is a run of its own,
        and so is the one after a cached prefix, which may have to wait for loads."""
        limits, piece = self._limits, chunks[0]
        if limits.max_chunks == 1 or limits.partial_prefills > 1 or piece.samples:
            return 1
        sequence = self._batch.prompts[0]
        passed = sequence.request != piece.request  # one that waits for room with holders
        if passed or sequence.remote.num_planned or (piece.start and piece.start == sequence.cached):
            return 1
        return min(limits.max_chunks, (sequence.length - piece.start - 1) // piece.count)

    def _share(self, budget: TokenBudget, actions: Actions, now: int) -> None:
        """Takes prompts in order of arrival; but shorter ones get half of what the first that does not fit whole would.
        So short prompts do not wait for long ones, and a prompt is computed before twice the tokens of arrival order.
        """
        prompts = deque(sorted(self._batch.prompts, key=lambda sequence: sequence.arrival))
        while budget.taken < budget.limit:
            oldest = self._next_in_order(prompts, budget, actions, now)
            if oldest is None:
                return
            if any(piece.request == oldest.request for piece in budget.chunks):
                continue  # it passed one that waits for room with holders
            left = oldest.length - oldest.computed
            count = budget.fit(oldest.computed, left)
            if count < left and oldest.assembly is None:  # an assembled one would never fit
                self._overtake(oldest, count // 2, budget, actions, now)
            if not self._append(oldest, budget):
                return

    def _next_in_order(
        self, prompts: deque[Sequence], budget: TokenBudget, actions: Actions, now: int
    ) -> Sequence | None:
        """Takes the first of `prompts`, or admits a request that arrived before it."""
        waiting = self._admission.waiting
        if (
            waiting
            and budget.taken < self._limits.prompt_batch
            and (not prompts or waiting[0].arrival < prompts[0].arrival)
            and self._num_partial(budget) < self._limits.partial_prefills
            and self._admission.admit(actions, now)
        ):
            return self._batch.prompts[-1]
        return prompts.popleft() if prompts else None

    def _overtake(self, oldest: Sequence, spare: int, budget: TokenBudget, actions: Actions, now: int) -> None:
        """Gives up to `spare` tokens to prompts that have less left than `oldest`, the shortest first."""
        served = {oldest.request, *[piece.request for piece in budget.chunks]}
        limits, longest = self._limits, oldest.length - oldest.computed
        others = [(each.length - each.computed, each.arrival, each) for each in self._batch.prompts]
        if budget.taken < limits.prompt_batch:
            heads = islice(self._admission.waiting, _LOOKAHEAD)
            others += [
                (each.length - each.num_cached * limits.block_size, each.arrival, each) for each in heads
            ]
        for left, _, sequence in sorted(others):
            if left >= longest or not spare:
                return
            if sequence.request in served or sequence.assembly is not None:
                continue  # an assembled prompt is not cut
            if sequence.remote.num_planned:
                continue  # its decode node may wait for those that it would pass
            if sequence.state is QUEUED:
                has_place = left <= spare or self._num_partial(budget) < limits.partial_prefills
                if not has_place or not self._admission.overtake(sequence, actions, now):
                    continue
            before = budget.taken
            self._append(sequence, budget, spare)
            spare -= budget.taken - before

    def _num_partial(self, budget: TokenBudget) -> int:
        """Prompts left unfinished by an iteration with these chunks. Prompts that wait for room with holders do not
        count: their decode nodes may wait for prompts that would find no place here then."""
        unfinished = [prompt for prompt in self._batch.prompts if not prompt.remote.waits]
        return len(unfinished) - sum([piece.samples for piece in budget.chunks])

    def _append(self, sequence: Sequence, budget: TokenBudget, most: int = 1 << 30) -> bool:
        """Takes the next chunk of a prompt, at most `most` tokens, if any fit. Returns whether others may follow: the
        prompt is through, or waits until holders have some of its blocks."""
        start, left = sequence.computed, sequence.length - sequence.computed
        if sequence.assembly is not None:
            return self._append_whole(sequence, budget)
        has_blocks = left
        if sequence.remote.num_planned:
            blocks = sequence.num_absent + len(sequence.blocks)
            has_blocks = 0 if sequence.remote.waits else min(left, blocks * self._limits.block_size - start)
        count = budget.fit(start, min(has_blocks, most)) if has_blocks else 0
        if count:
            budget.take(sequence.piece(start, count, count == left))
        return count == has_blocks

    def _append_whole(self, sequence: Sequence, budget: TokenBudget) -> bool:
        """Takes an assembled prompt in one piece, alone if need be, since its computed tokens are chosen among all. It
        uses as much of the budget as it computes."""
        assembly, start = sequence.assembly, sequence.computed
        assert assembly is not None
        count = sequence.length - start
        candidates = min(assembly.num_reused, count)
        weight = assembled_weight(assembly.selection, count, candidates, max(1, assembly.num_layers))
        if budget.taken and budget.fit(start, weight) < weight:
            return False
        budget.take(sequence.piece(start, count, True), min(weight, budget.limit))
        return True
