"""Time in which this process ran. Whoever judges a peer by its silence measures that, not the machine's time.

A process may stand still: stopped, swapped out, its virtual machine paused, its event loop blocked. What peers said
meanwhile waits in sockets, and when the process goes on its timers are due before it has read any of that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from isthmus.core.types import NS_PER_S

STEP_NS = NS_PER_S
"""Longer than this between two ticks an event loop that is only busy does not take."""
TICK_S = 0.25
EXACT_S = 0.001
"""Event loops are no more exact than that."""


class RunningClock:
    """`clock_ns`, but that from one `tick` to the next it goes on by no more than `step_ns`. `now_ns` may
    be asked from any thread."""

    def __init__(self, clock_ns: Callable[[], int], step_ns: int = STEP_NS) -> None:
        self._clock_ns, self._step_ns = clock_ns, step_ns
        self._seen = clock_ns(), 0
        """When it ticked last, and how long the process stood still before, in all."""

    def now_ns(self) -> int:
        ticked_ns, stood_ns = self._seen
        return min(self._clock_ns(), ticked_ns + self._step_ns) - stood_ns

    def tick(self) -> bool:
        """To be called several times in `step_ns`. True when the process stood still before: nobody is to be judged
        until the next tick, since what came meanwhile is read only now."""
        (ticked_ns, stood_ns), now_ns = self._seen, self._clock_ns()
        more_ns = max(0, now_ns - ticked_ns - self._step_ns)
        self._seen = now_ns, stood_ns + more_ns
        return more_ns > 0


class RunningTimer:
    """Calls `function` when the event loop has run for `delay_s`, and has read what came before."""

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
    """As `asyncio.timeout`: raises TimeoutError when the event loop has run for so long inside."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = RunningTimer(loop, delay_s, lambda: limit.reschedule(loop.time()))
        try:
            yield
        finally:
            timer.cancel()
