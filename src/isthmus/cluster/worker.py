"""The thread that computes what a node decides.

Everything else of a node lives in its event loop. Both tell the node facts under one lock, `Turn`; only while the
engine computes nobody holds it, so a node hears of grants and arrivals in the middle of an iteration too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Protocol

from isthmus.cluster.runs import Execution, Runs
from isthmus.node.events import Missing
from isthmus.scheduler import Run, Stepped


class Owner(Protocol):
    """Whose runs are executed."""

    runs: Runs

    def stepped(self, facts: list[Missing | Stepped]) -> None:
        """A run is over. Called under the lock; may form the next one."""

    def died(self, error: BaseException) -> None:
        """The worker cannot go on."""


class Worker(Protocol):
    """Executes the runs of one node. `lock`: whoever holds it may call the node."""

    lock: Any

    def start(self) -> None:
        """Call it in the event loop of the owner."""

    def later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls `function` in that event loop, from any thread; in the order of these calls."""

    def form(self, run: Run) -> None:
        """Executes it next. Under the lock, as `cut`."""

    def cut(self) -> None:
        """Ends the run under way with the present iteration."""

    def stop(self) -> None: ...


class ThreadWorker:
    """Start it once."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.lock = threading.RLock()
        self._formed = threading.Condition(self.lock)
        self._run: Run | None = None
        self._is_cut = False
        self._running = True
        self._thread = threading.Thread(target=self._main, name="worker", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def later(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def form(self, run: Run) -> None:
        self._run, self._is_cut = run, False
        self._formed.notify()

    def cut(self) -> None:
        self._is_cut = True

    def stop(self) -> None:
        with self.lock:
            self._running, self._is_cut = False, True
            self._formed.notify()
        self._thread.join(timeout=5)

    def _main(self) -> None:
        try:
            while (run := self._next()) is not None:
                self._owner.runs.take_turn()
                self._execute(run)
        except BaseException as error:
            self._owner.died(error)
            raise

    def _next(self) -> Run | None:
        with self.lock:
            self._formed.wait_for(lambda: self._run is not None or not self._running)
            run, self._run = self._run, None
            return run if self._running else None

    def _execute(self, run: Run) -> None:
        """Iterates a run until it ends, a request ends or somebody cuts it."""
        runs = self._owner.runs
        with self.lock:
            execution: Execution = runs.start(run)
        while True:
            runs.compute(execution)
            with self.lock:
                runs.book(execution)
                if execution.over or self._is_cut:
                    self._owner.stepped(runs.finish(execution))
                    return
            runs.advance(execution)
