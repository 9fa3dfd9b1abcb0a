"""How many of something a step takes: as many as make it the quickest, which only a clock tells.

Steps are timed: now and then one is taken with twice or half as many, and once most such trials were good, that is the
number. What is right differs by machine and by the hour, so trials go on, more rarely.
"""

from __future__ import annotations

from collections import deque
from statistics import median

TRIALS = 5
"""So many decide: their median, since any step may be disturbed."""
MORE, FEWER = 0.92, 1.0
"""Twice as many are taken where a step then takes at most so many times as long, half as many where it takes no longer:
what brings next to nothing is better left."""
SELDOM, RARELY = 16, 128
"""One step in so many is a trial: often at first, half as often after every series that changed nothing."""


class Choice:
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
