"""A batch of decodes as several that take turns: while others attend to KV of one, layers run for the next.

Which of them runs when, and on which replica of the layers, is `isthmus.cost.turns`. Its context goes from replica to
replica as the pass itself. Two take turns in the engine's thread; more have a thread for each replica. Replicas share
this engine's weights and device: on a CPU they share its cores, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from queue import SimpleQueue

import torch

from isthmus.cost.turns import jobs_of, replica_of, replicas_of
from isthmus.engine.mixers import Pass
from isthmus.engine.program import Passing, Residual, onward


class Turns:
    """`batches`: into so many a batch is split, or fewer if it has fewer rows."""

    def __init__(self, batches: int) -> None:
        self._batches = batches
        # A new thread counts on as many threads as the process was told to take once torch was asked in it.
        self._threads = [
            ThreadPoolExecutor(1, f"replica-{at}", torch.get_num_threads) for at in range(replicas_of(batches))
        ]

    def split(self, run: Pass) -> list[tuple[slice, Pass]]:
        """Rows, and the pass of these alone. None for a pass that stays whole: one that waits for nobody or computes
        prompts, and one that somebody follows layer by layer."""
        batch = run.batch
        count = min(self._batches, batch.num_rows)
        if count < 2 or not batch.remote or not batch.only_decodes or run.on_layer or run.before_layer:
            return []
        if batch.recurrence is not None and not batch.recurrence.only_steps:
            return []
        bounds = [batch.num_rows * at // count for at in range(count + 1)]
        return [
            (slice(first, stop), replace(run, batch=batch.within(first, stop)))
            for first, stop in pairwise(bounds)
        ]

    def take(self, passings: Sequence[Passing], num_slices: int) -> list[Residual]:
        """Runs all to their end. Raises HolderLost."""
        if replicas_of(len(passings)) > 1:
            return _Rotation(passings, num_slices).run(self._threads)
        found: dict[int, Residual] = {}
        for batch, _ in jobs_of(0, len(passings), num_slices):
            residual = onward(passings[batch])
            if residual is not None:
                found[batch] = residual
        return [found[batch] for batch in range(len(passings))]


class _Rotation:
    """A step of more than two. A replica takes each batch from its own inbox for it, so that none overtakes."""

    def __init__(self, passings: Sequence[Passing], num_slices: int) -> None:
        self._num_batches, self._num_slices = len(passings), num_slices
        self._replicas = replicas_of(len(passings))
        self._inboxes = [[SimpleQueue[Passing | None]() for _ in passings] for _ in range(self._replicas)]
        self._found: dict[int, Residual] = {}
        for batch, passing in enumerate(passings):
            self._inboxes[replica_of(batch, 0, len(passings))][batch].put(passing)

    def run(self, threads: Sequence[ThreadPoolExecutor]) -> list[Residual]:
        running = [threads[replica].submit(self._run, replica) for replica in range(self._replicas)]
        errors = [error for each in running if (error := each.exception()) is not None]
        if errors:
            raise errors[0]
        return [self._found[batch] for batch in range(self._num_batches)]

    def _run(self, replica: int) -> None:
        try:
            with torch.inference_mode():
                for batch, at in jobs_of(replica, self._num_batches, self._num_slices):
                    passing = self._inboxes[replica][batch].get()
                    if passing is None:
                        return
                    self._advance(batch, at, passing)
        except BaseException:
            self._stop()
            raise

    def _advance(self, batch: int, at: int, passing: Passing) -> None:
        residual = onward(passing)
        if residual is None:
            self._inboxes[replica_of(batch, at + 1, self._num_batches)][batch].put(passing)
        else:
            self._found[batch] = residual

    def _stop(self) -> None:
        """A replica failed: nobody waits for what does not come."""
        for inboxes in self._inboxes:
            for inbox in inboxes:
                inbox.put(None)
