"""The thread that computes: mailbox in, a stepper in the middle.

The node's event loop owns sessions; this thread drives the stepper. They meet only in the mailbox (a
thread-safe queue), in `insert`, and in the stepper's listener, whose methods may be called from either.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from isthmus.cluster.fetches import Fetch
from isthmus.cluster.messages import Begin
from isthmus.cluster.stepper import Stepper
from isthmus.types import BlockName, RequestId, Role

Entry = Callable[[], None]


class Worker(Protocol):
    """Drives one stepper."""

    def start(self) -> None:
        """Call it in the event loop of the stepper's owner."""

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls `function` in that event loop; what is told comes in order."""

    def post(self, entry: Entry) -> None:
        """Runs `entry` at the end of the iteration under way, which is then the last of its run; at once when
        there is none. Entries run in order."""

    def insert(self, entry: Entry) -> None:
        """Runs `entry` at once, even in the middle of an iteration, which goes on as if nothing happened."""

    def stop(self) -> None: ...


class Requests:
    """The stepper's requests, from outside the worker that drives it. Not thread-safe: for the event loop."""

    def __init__(self, stepper: Stepper, worker: Worker) -> None:
        self._stepper, self._worker = stepper, worker
        self._open: set[RequestId] = set()

    def begin(self, begin: Begin, fetch: Fetch | None = None) -> None:
        self._open.add(begin.key)
        if begin.part is Role.DECODE:
            self._worker.insert(lambda: self._stepper.expect(begin))
            return
        # The budget runs from here, not from when the worker looks at its mail. 0 would mean no promise.
        budget = begin.budget_ns
        deadline_ns = 0 if budget is None else max(1, self._stepper.clock_ns() + budget)
        self._worker.post(lambda: self._stepper.begin(begin, deadline_ns, fetch))

    def fetched(self, key: RequestId, num_blocks: int) -> None:
        self._worker.post(lambda: self._stepper.fetched(key, num_blocks))

    def offered(self, names: tuple[BlockName, ...]) -> None:
        self._worker.post(lambda: self._stepper.offered(names))

    def imported(self, key: RequestId, token: int) -> None:
        self._worker.post(lambda: self._stepper.imported(key, token))

    def released(self, key: RequestId) -> None:
        self._open.discard(key)
        self._worker.post(lambda: self._stepper.released(key))

    def ended(self, key: RequestId) -> None:
        """The stepper said so."""
        self._open.discard(key)

    def forget(self, key: RequestId) -> None:
        """Nothing is done, and no run broken off, for a request that is over anyway."""
        if key in self._open:
            self._open.discard(key)
            self._worker.post(lambda: self._stepper.forget(key))


class ThreadWorker:
    """Start it once. Only `tell` is for its own thread."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._mailbox: SimpleQueue[Entry] = SimpleQueue()
        self._turn = threading.Lock()  # whoever has it may call the stepper, `compute` apart
        self._running = True
        self._thread = threading.Thread(target=self._main, name="worker", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def post(self, entry: Entry) -> None:
        self._mailbox.put(entry)

    def insert(self, entry: Entry) -> None:
        with self._turn:
            entry()

    def stop(self) -> None:
        def end() -> None:
            self._running = False

        self._mailbox.put(end)
        self._thread.join(timeout=5)

    def _main(self) -> None:
        try:
            while self._running:
                if self._stepper.run is None:
                    self._serve_mailbox(wait=True)
                else:
                    self._execute()
        except BaseException as error:
            self._stepper.died(error)
            raise

    def _serve_mailbox(self, *, wait: bool) -> None:
        """Takes entries until none waits, or a run was formed: no entry comes between forming and executing,
        so the requests of a run are all live when it starts."""
        while self._stepper.run is None:
            try:
                entry = self._mailbox.get(block=wait)
            except Empty:
                return
            with self._turn:
                entry()
            wait = False

    def _execute(self) -> None:
        """Iterates a run until it ends, a request ends or a message waits; then asks for the next one."""
        stepper = self._stepper
        stepper.await_turn()
        with self._turn:
            execution = stepper.start()
        while True:
            stepper.compute(execution)
            with self._turn:
                stepper.book(execution)
            if execution.over or not self._mailbox.empty():
                break
            stepper.advance(execution)
        self._serve_mailbox(wait=False)
        with self._turn:
            stepper.finish(execution)
