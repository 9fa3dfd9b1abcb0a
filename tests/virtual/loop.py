"""An event loop in virtual time."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from contextvars import Context
from itertools import count
from typing import Any

from isthmus.core.types import NS_PER_S

MESSAGE, ARRIVAL, PREFILL_ENDS, TRANSFER, FLOWS, STEP_ENDS, OTHERS, WAKES = range(8)
"""Whose timer comes first at equal times; of the same kind, the one that was set first."""


class ManualLoop(asyncio.BaseEventLoop):
    """An event loop without sockets whose clock moves only from one timer to the next. Raises RuntimeError when
    it is run and nothing can ever happen again."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self._timers: list[tuple[int, int, int, asyncio.TimerHandle]] = []
        self._sequence = count()

    def clock_ns(self) -> int:
        return self.now_ns

    def stand_still(self, delay_s: float) -> None:
        """Time passes, and no timer is heard before that."""
        self.now_ns += round(delay_s * NS_PER_S)

    def time(self) -> float:
        """Seconds. Below 2**50 ns, which is 13 days, nanoseconds survive the way through a float."""
        return self.now_ns / NS_PER_S

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._set(round(when * NS_PER_S), OTHERS, timer)
        return timer

    def set(self, when_ns: int, priority: int, callback: Callable[..., Any], *args: Any) -> None:
        """Calls it then."""
        self._set(when_ns, priority, asyncio.TimerHandle(when_ns / NS_PER_S, callback, args, self))

    def wake(self, when_ns: int, slot: int, callback: Callable[..., Any], *args: Any) -> None:
        """A timer of the node number `slot`: at equal times those of lower numbers come first."""
        timer = asyncio.TimerHandle(when_ns / NS_PER_S, callback, args, self)
        self._set(when_ns, WAKES, timer, slot)

    def turn(self) -> int:
        """Whose timer comes first of those of one kind at one instant: a lower one."""
        return next(self._sequence)

    def _set(self, when_ns: int, priority: int, timer: asyncio.TimerHandle, turn: int | None = None) -> None:
        entry = (max(when_ns, self.now_ns), priority, self.turn() if turn is None else turn, timer)
        heapq.heappush(self._timers, entry)

    async def sleep_until(self, when_ns: int, priority: int = OTHERS) -> None:
        over = self.create_future()
        timer = asyncio.TimerHandle(when_ns / NS_PER_S, over.set_result, (None,), self)
        self._set(when_ns, priority, timer)
        try:
            await over
        finally:
            timer.cancel()

    async def settle(self) -> None:
        """Returns when all that follows without time passing is done."""
        await self.sleep_until(self.now_ns)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Here and now: there are no threads."""
        done = self.create_future()
        done.set_result(func(*args))
        return done

    # What asyncio's own loop is made of, in as far as there is no selector.

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        if not ready:
            ready.append(self._next_timer())
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _next_timer(self) -> asyncio.Handle:
        while self._timers:
            when_ns, _, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self.now_ns = max(self.now_ns, when_ns)
                return timer
        raise RuntimeError("nothing is left that could happen: what is waited for never comes")

    def _write_to_self(self) -> None:
        """There is no selector to wake."""
