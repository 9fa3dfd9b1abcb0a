"""Loads: one thread that copies pages from the adapter's arena to blocks of vLLM.

Only this thread writes to those blocks. A load's outcome is reported after its last write: afterwards vLLM may give the
blocks to another request.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.live.servers.wire import Done, FromWorker, Load, Ready, Short
from isthmus_vllm.pages import Area, Pages
from isthmus_vllm.plans import LoadOrder

log = logging.getLogger("vllm.isthmus")


@dataclass(frozen=True)
class Opened:
    session: int
    arena: Area


@dataclass(frozen=True)
class Lost:
    session: int


@dataclass(frozen=True)
class Abort:
    load: int


@dataclass
class _Running:
    order: LoadOrder
    deadline: float  # of the next block
    num_ready: int = 0


class Loader(threading.Thread):
    """The thread that loads. A load that gets no block for `timeout_s` fails."""

    def __init__(self, pages: Pages, send: Callable[[int, FromWorker], bool], timeout_s: float) -> None:
        super().__init__(name="isthmus-loads", daemon=True)
        self._pages = pages
        self._send = send
        self._timeout_s = timeout_s
        self._events: queue.SimpleQueue[Opened | Lost | Abort | LoadOrder | Ready | Short | None] = (
            queue.SimpleQueue()
        )
        self._running: dict[int, _Running] = {}
        self._aborted: set[int] = set()  # written by others, so that a copy in progress sees it
        self._now: Opened | None = None
        self._lock = threading.Lock()
        self._outcomes: dict[str, bool] = {}

    def put(self, event: Opened | Lost | Abort | LoadOrder | Ready | Short) -> None:
        """Queues an event, from any thread."""
        if isinstance(event, Abort):
            self._aborted.add(event.load)
        self._events.put(event)

    def take_outcomes(self) -> dict[str, bool]:
        """Returns requests whose load ended since the last call, each with whether all its blocks are in place."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, {}
        return outcomes

    def stop(self) -> None:
        self._events.put(None)

    def run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._wait_s())
            except queue.Empty:
                self._end_late_ones()
                continue
            if event is None:
                return
            try:
                self._on(event)
            except Exception:  # a bug, and a thread that died of it would leave requests waiting for ever
                log.exception("isthmus: loading failed")
                for load in list(self._running):
                    self._end(load, whole=False)
            self._end_late_ones()

    def _on(self, event: Opened | Lost | Abort | LoadOrder | Ready | Short) -> None:
        if isinstance(event, Opened):
            self._now = event
        elif isinstance(event, Lost):
            self._now = None
            for load in list(self._running):
                self._end(load, whole=False)
        elif isinstance(event, LoadOrder):
            self._start(event)
        elif isinstance(event, Abort):
            if event.load in self._running:
                self._end(event.load, whole=False)
            self._aborted.discard(event.load)
        elif event.load not in self._running:
            pass  # it has ended meanwhile
        elif isinstance(event, Short):
            log.info("isthmus: a load ended early: the adapter has no more blocks of it")
            self._end(event.load, whole=False)
        else:
            self._copy(event)

    def _start(self, order: LoadOrder) -> None:
        self._running[order.load] = _Running(order, time.monotonic() + self._timeout_s)
        session = self._now.session if self._now is not None else 0
        if not self._send(session, Load(order.load, order.key, order.names)):
            self._end(order.load, whole=False)

    def _copy(self, ready: Ready) -> None:
        running = self._running[ready.load]
        assert self._now is not None  # no connection, no running load
        blocks = running.order.blocks[running.num_ready :]
        if not len(ready.slots) == len(ready.seals) <= len(blocks) or not self._is_sound(ready):
            log.warning("isthmus: the adapter sent more blocks than were asked for, or not all of their seals")
            self._end(ready.load, whole=False)
            return
        for slot, seals, block in zip(ready.slots, ready.seals, blocks, strict=False):
            if ready.load in self._aborted:
                self._end(ready.load, whole=False)
                return
            if not self._pages.fetch(self._now.arena, slot, block, seals):
                log.warning("isthmus: a block's bytes do not fit their seals; the request computes all itself")
                self._end(ready.load, whole=False, damaged=running.num_ready)
                return
            running.num_ready += 1
        running.deadline = time.monotonic() + self._timeout_s
        if running.num_ready == len(running.order.blocks):
            self._end(ready.load, whole=True)

    def _is_sound(self, ready: Ready) -> bool:
        assert self._now is not None
        num_slots = self._now.arena.arena.num_slots
        return all(len(seals) == self._pages.num_layers for seals in ready.seals) and all(
            0 <= slot < num_slots for slot in ready.slots
        )

    def _end(self, load: int, *, whole: bool, damaged: int | None = None) -> None:
        running = self._running.pop(load)
        self._pages.settle()
        if self._now is not None:
            self._send(self._now.session, Done(load, damaged))
        with self._lock:
            self._outcomes[running.order.request] = whole

    def _wait_s(self) -> float | None:
        if not self._running:
            return None
        first = min(running.deadline for running in self._running.values())
        return max(0.0, first - time.monotonic())

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for load in [load for load, running in self._running.items() if running.deadline <= now]:
            log.warning("isthmus: a load got no block for %g s and is given up", self._timeout_s)
            self._end(load, whole=False)
