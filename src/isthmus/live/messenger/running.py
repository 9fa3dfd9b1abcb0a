"""Time in which this process ran: the measure for a peer's silence, instead of the machine's time.

A process may stand still: stopped, swapped out, its virtual machine paused, its event loop blocked. Meanwhile
messages of peers wait in sockets, and when the process goes on, its timers are due before it has read any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from isthmus.core.types import NS_PER_S

STEP_NS = NS_PER_S
"""Longest time between two ticks that a busy event loop needs; more means that the process stood still."""
TICK_S = 0.25
EXACT_S = 0.001
"""Precision of event loops."""


class RunningClock:
    """A clock like `clock_ns`, that advances at most `step_ns` from one `tick` to the next. `now_ns` may be called
    from any thread."""

    def __init__(self, clock_ns: Callable[[], int], step_ns: int = STEP_NS) -> None:
        self._clock_ns, self._step_ns = clock_ns, step_ns
        self._seen = clock_ns(), 0
        """Time of the last tick, and the total time for which the process stood still before."""

    def now_ns(self) -> int:
        ticked_ns, stood_ns = self._seen
        return min(self._clock_ns(), ticked_ns + self._step_ns) - stood_ns

    def tick(self) -> bool:
        """Advances the clock; call it several times in `step_ns`. Returns True when the process stood still before:
        then judge no peer until the next tick, since messages that came meanwhile are read only now."""
        (ticked_ns, stood_ns), now_ns = self._seen, self._clock_ns()
        more_ns = max(0, now_ns - ticked_ns - self._step_ns)
        self._seen = now_ns, stood_ns + more_ns
        return more_ns > 0


class RunningTimer:
    """Calls `function` when the event loop has run for `delay_s` and has read what came meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop, delay_s: float, function: Callable[[], object]) -> None:
        self._loop, self._function = loop, function
        self._clock = RunningClock(lambda: round(loop.time() * NS_PER_S))
        self._due_ns = self._clock.now_ns() + round(delay_s * NS_PER_S)
        self._handle = loop.call_later(min(delay_s, TICK_S), self._look)

    def cancel(self) -> None:
        self._handle.cancel()

    def _look(self) -> None:
        stood_still = self._clock.tick()
        left_s = (self._due_ns - self._clock.now_ns()) / NS_PER_S
        if left_s < EXACT_S and not stood_still:
            self._function()
        else:
            self._handle = self._loop.call_later(TICK_S if stood_still else min(left_s, TICK_S), self._look)


@contextlib.asynccontextmanager
async def running_timeout(delay_s: float) -> AsyncIterator[None]:
    """Raises TimeoutError when the event loop has run for `delay_s` inside, as `asyncio.timeout` does for time."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = RunningTimer(loop, delay_s, lambda: limit.reschedule(loop.time()))
        try:
            yield
        finally:
            timer.cancel()
