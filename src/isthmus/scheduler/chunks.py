"""How prompts are cut into pieces of iterations: how many tokens, whose first, and who may overtake whom."""

from __future__ import annotations

from collections import deque
from itertools import islice

from isthmus.cost.assembly import assembled_weight
from isthmus.scheduler.admission import Admission
from isthmus.scheduler.batch import Batch
from isthmus.scheduler.budget import TbtTarget, TimedBudget, TokenBudget
from isthmus.scheduler.events import Actions, Piece
from isthmus.scheduler.limits import Limits
from isthmus.scheduler.sequence import QUEUED, Sequence

_LOOKAHEAD = 64
"""Of longer queues only so many are looked through for who may overtake: that is done in every iteration."""


class Chunks:
    """Takes prompts from the batch, and further ones by `admission`. Has no state of its own."""

    def __init__(self, limits: Limits, target: TbtTarget | None, batch: Batch, admission: Admission) -> None:
        self._limits, self._target, self._batch, self._admission = limits, target, batch, admission

    def cut(self, actions: Actions, now: int) -> list[Piece]:
        """The prompts' pieces of the next iteration; who is admitted for it is in the batch afterwards."""
        decoding, limits = self._batch.decoding, self._limits
        num_decodes = len(decoding.sequences)
        # One token at least, so that prompts go on however many requests decode.
        rest = limits.token_budget - num_decodes
        budget = TokenBudget(rest if rest > 0 else 1)
        if num_decodes and self._target is not None:
            budget = TimedBudget(self._target, budget.limit, num_decodes, decoding.context)
        if limits.partial_prefills > 1:
            self._share(budget, actions, now)
            return budget.chunks
        prompts, admission = self._batch.prompts, self._admission
        for sequence in prompts:  # each waits until the one before it is through
            if not self._append(sequence, budget):
                return budget.chunks
        most = min(budget.limit, limits.prompt_batch)
        while budget.taken < most and admission.waiting and admission.admit(actions, now):
            if not self._append(prompts[-1], budget):
                break
        return budget.chunks

    def steps(self, chunks: list[Piece]) -> int:
        """How often a prompt's chunk may repeat while it fills the budget alone. Its last chunk is a run of its own,
        and so is one that follows a cached prefix: only that may have to wait for it."""
        limits, piece = self._limits, chunks[0]
        if limits.max_chunks == 1 or limits.partial_prefills > 1 or piece.samples:
            return 1
        sequence = self._batch.prompts[0]
        if (
            sequence.request != piece.request
        ):  # which goes on as soon as there is room elsewhere for what it has here
            assert sequence.num_away
            return 1
        if sequence.num_away or (piece.start and piece.start == sequence.cached):
            return 1
        return min(limits.max_chunks, (sequence.length - piece.start - 1) // piece.count)

    def _share(self, budget: TokenBudget, actions: Actions, now: int) -> None:
        """Prompts in order of arrival; but of what the first that does not fit whole would get, shorter ones get half.

        So a prompt is through when at most twice as many tokens are computed as in order of arrival, and a short one
        does not wait for a long one to end.
        """
        prompts = deque(sorted(self._batch.prompts, key=lambda sequence: sequence.arrival))
        while budget.taken < budget.limit:
            oldest = self._next_in_order(prompts, budget, actions, now)
            if oldest is None:
                return
            left = oldest.length - oldest.computed
            count = budget.fit(oldest.computed, left)
            if count < left and oldest.assembly is None:  # else it would never fit
                self._overtake(oldest, count // 2, budget, actions, now)
            if not self._append(oldest, budget):
                return

    def _next_in_order(
        self, prompts: deque[Sequence], budget: TokenBudget, actions: Actions, now: int
    ) -> Sequence | None:
        """The first of `prompts`, which it takes, or a request that arrived before it and is admitted now."""
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
                continue  # what is assembled is not cut
            if sequence.state is QUEUED:
                has_place = left <= spare or self._num_partial(budget) < limits.partial_prefills
                if not has_place or not self._admission.overtake(sequence, actions, now):
                    continue
            before = budget.taken
            self._append(sequence, budget, spare)
            spare -= budget.taken - before

    def _num_partial(self, budget: TokenBudget) -> int:
        """Prompts that will be left unfinished by an iteration with these chunks."""
        return len(self._batch.prompts) - sum([piece.samples for piece in budget.chunks])

    def _append(self, sequence: Sequence, budget: TokenBudget, most: int = 1 << 30) -> bool:
        """The next chunk of a prompt, at most `most` tokens, if there is room for any; whether others may follow: it is
        the last, or has to wait until some of its blocks are elsewhere."""
        start, left = sequence.computed, sequence.length - sequence.computed
        if sequence.assembly is not None:
            return self._append_whole(sequence, budget)
        has_blocks = left
        if sequence.num_away:
            blocks = sequence.num_held + len(sequence.blocks)
            has_blocks = 0 if sequence.waits else min(left, blocks * self._limits.block_size - start)
        count = budget.fit(start, min(has_blocks, most)) if has_blocks else 0
        if count:
            budget.take(sequence.piece(start, count, count == left))
        return count == has_blocks

    def _append_whole(self, sequence: Sequence, budget: TokenBudget) -> bool:
        """What is assembled is computed in one piece, alone if need be, for which tokens are computed is chosen among
        all of them. It takes as much of the budget as it computes."""
        assembly, start = sequence.assembly, sequence.computed
        assert assembly is not None
        count = sequence.length - start
        candidates = min(assembly.num_reused, count)
        weight = assembled_weight(assembly.selection, count, candidates, max(1, assembly.num_layers))
        if budget.taken and budget.fit(start, weight) < weight:
            return False
        budget.take(sequence.piece(start, count, True), min(weight, budget.limit))
        return True
