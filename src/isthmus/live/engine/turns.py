"""How many of something a step takes: as many as make it the quickest, which only a clock tells.

Steps are timed: now and then one is taken with twice or half as many, and once most such trials were good, that is the
number. What is right differs by machine and by the hour, so trials go on, more rarely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from queue import SimpleQueue
from statistics import median

import torch
from torch import Tensor

from isthmus.core.cost.pooled import jobs_of, replica_of, replicas_of
from isthmus.live.engine.mixers import Pass
from isthmus.live.engine.program import Passing, Program, Residual, onward, through

TRIALS = 5
"""So many decide: their median, since any step may be disturbed."""
MORE, FEWER = 0.92, 1.0
"""Twice as many are taken where a step then takes at most so many times as long, half as many where it takes no longer:
what brings next to nothing is better left."""
SELDOM, RARELY = 16, 128
"""One step in so many is a trial: often at first, half as often after every series that changed nothing."""


class StepChoice:
    """For steps that are alike, with 1 to `most`. `number`: the one that most are taken with, `first` in the beginning.
    `offset`: trials come so many steps earlier, so that two choices do not try at once."""

    def __init__(self, most: int, first: int, offset: int = 0) -> None:
        self._most, self.number, self._offset = most, first, offset
        self._begin(SELDOM)

    def next(self) -> int:
        """Of the next step. Trials take turns: with half as many, with twice as many."""
        self._steps += 1
        trial, between = divmod(self._steps + self._offset, self._every)
        if between or len(self._usual_s) < TRIALS:
            return self.number
        others = self._others()
        return others[trial % len(others)] if others else self.number

    def took(self, number: int, seconds: float) -> None:
        if number == self.number:
            self._usual_s.append(seconds)
            return
        ratios = self._ratios.setdefault(number, [])
        ratios.append(seconds / median(self._usual_s))
        if len(ratios) < TRIALS:
            return
        if median(ratios) <= (MORE if number > self.number else FEWER):
            self.number = number
            self._begin(SELDOM)
        elif all(len(self._ratios.get(other, ())) >= TRIALS for other in self._others()):
            self._begin(min(2 * self._every, RARELY))

    def _begin(self, every: int) -> None:
        """A new series of trials."""
        self._steps, self._every = 0, every
        self._usual_s: deque[float] = deque(maxlen=TRIALS)
        self._ratios: dict[int, list[float]] = {}

    def _others(self) -> list[int]:
        near = {max(1, self.number // 2), min(2 * self.number, self._most)}
        return sorted(near - {self.number})


# How many threads a decode step takes: all that the node has, or fewer where these are quicker.
#
# A step has a hundred loops, and a thread's share of one may be less than what its coming and going costs, above all
# where another process has its core; from which number of rows on it pays differs by machine and by the hour. So steps
# are timed: now and then one is taken with twice or half as many threads, and once most such trials were good, that is
# the number. Prompts are worth all threads always, and are not timed.


class Team:
    """`threads`: the most. `set_threads` is told the number for what follows, whenever it is another one."""

    def __init__(self, threads: int, set_threads: Callable[[int], None], clock_s: Callable[[], float]) -> None:
        self._threads, self._set_threads, self._clock_s = threads, set_threads, clock_s
        self._set, self._choices = threads, dict[int, StepChoice]()

    @contextmanager
    def step(self, num_rows: int) -> Iterator[None]:
        """Takes a decode step of so many rows with the number of threads that is right, and times it."""
        choice = self._choices.setdefault(num_rows.bit_length(), StepChoice(self._threads, self._threads))
        threads = choice.next()
        self._take(threads)
        started_s = self._clock_s()
        try:
            yield
            choice.took(threads, self._clock_s() - started_s)
        finally:
            self.all()  # what else runs in this process counts on its number

    def all(self) -> None:
        """All threads, for anything else."""
        self._take(self._threads)

    def _take(self, threads: int) -> None:
        if threads != self._set:
            self._set_threads(threads)
            self._set = threads


# A batch of decodes as several that take turns: while others attend to KV of one, layers run for the next.
#
# Which of them runs when, and on which replica of the layers, is `isthmus.core.cost.pooled`. Its context goes from
# replica to replica as the pass itself. Two take turns in the engine's thread; more have a thread for each replica.
# Replicas share this engine's weights and device: on a CPU they share its cores, too.


MOST_UNASKED = 2
"""More need replicas of the layers on other devices, to be of use."""


class BatchTurns:
    """`batches`: into so many a batch is split, or fewer if it has fewer rows; None: into two where steps are quicker
    then. Whether they are depends on how long others take, and is tried now and then."""

    def __init__(self, batches: int | None, clock_s: Callable[[], float]) -> None:
        self._batches, self._clock_s = batches, clock_s
        self._choices: dict[int, StepChoice] = {}
        # A new thread counts on as many threads as the process was told to take once torch was asked in it.
        self._threads = [
            ThreadPoolExecutor(1, f"replica-{at}", torch.get_num_threads)
            for at in range(replicas_of(batches or MOST_UNASKED))
        ]

    def splits(self, run: Pass) -> bool:
        """Not if a pass waits for nobody or computes prompts, and not if somebody follows it layer by layer."""
        batch = run.batch
        if (
            not batch.remote
            or not batch.only_decodes
            or run.on_layer is not None
            or run.before_layer is not None
        ):
            return False
        return batch.num_rows > 1 and (batch.recurrence is None or batch.recurrence.only_steps)

    def run(self, program: Program, x_TN: Tensor, run: Pass) -> Residual:
        """`program` for a pass that splits. Raises HolderLost."""
        if self._batches is not None:
            return self._run(program, x_TN, run, self._batches)
        choice = self._choices.setdefault(
            run.batch.num_rows.bit_length(), StepChoice(MOST_UNASKED, 1, SELDOM // 2)
        )
        batches, started_s = choice.next(), self._clock_s()
        residual = self._run(program, x_TN, run, batches)
        choice.took(batches, self._clock_s() - started_s)
        return residual

    def _run(self, program: Program, x_TN: Tensor, run: Pass, batches: int) -> Residual:
        if batches == 1:
            return through(program.passing(x_TN, run))
        passings = [
            program.passing(x_TN[at], replace(run, batch=run.batch.within(at.start, at.stop)))
            for at in rows_of(run.batch.num_rows, batches)
        ]
        deltas = [delta for _, delta in self._take(passings, program.num_slices)]
        return x_TN, torch.cat(deltas)  # each has changed its own rows of x

    def _take(self, passings: Sequence[Passing], num_slices: int) -> list[Residual]:
        if replicas_of(len(passings)) > 1:
            return _Rotation(passings, num_slices).run(self._threads)
        found: dict[int, Residual] = {}
        for batch, _ in jobs_of(0, len(passings), num_slices):
            residual = onward(passings[batch])
            if residual is not None:
                found[batch] = residual
        return [found[batch] for batch in range(len(passings))]


def rows_of(num_rows: int, batches: int) -> list[slice]:
    """As even as can be, and none empty."""
    batches = min(batches, num_rows)
    bounds = [num_rows * at // batches for at in range(batches + 1)]
    return [slice(first, stop) for first, stop in pairwise(bounds)]


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
