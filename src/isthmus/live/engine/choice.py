"""How many of something a step takes: as many as make it the quickest, which only a clock tells.

Steps are timed: now and then one is taken with twice or half as many, and once most such trials were good, that is the
number. What is right differs by machine and by the hour, so trials go on, more rarely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

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
