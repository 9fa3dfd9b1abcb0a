"""How many threads a decode step takes: all that the node has, or fewer where these are quicker.

A step has a hundred loops, and a thread's share of one may be less than what its coming and going costs, above all
where another process has its core; from which number of rows on it pays differs by machine and by the hour. So steps
are timed: now and then one is taken with twice or half as many threads, and once most such trials were good, that is
the number. Prompts are worth all threads always, and are not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from isthmus.live.engine.choice import Choice


class Team:
    """`threads`: the most. `set_threads` is told the number for what follows, whenever it is another one."""

    def __init__(self, threads: int, set_threads: Callable[[int], None], clock_s: Callable[[], float]) -> None:
        self._threads, self._set_threads, self._clock_s = threads, set_threads, clock_s
        self._set, self._choices = threads, dict[int, Choice]()

    @contextmanager
    def step(self, num_rows: int) -> Iterator[None]:
        """Takes a decode step of so many rows with the number of threads that is right, and times it."""
        choice = self._choices.setdefault(num_rows.bit_length(), Choice(self._threads, self._threads))
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
