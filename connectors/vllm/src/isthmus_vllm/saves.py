"""Saves: one thread that copies blocks to the staging area, seals them and tells the adapter.

There is no waiting for the adapter: a block that finds no free slot is not saved, and as later blocks are of no use
without it, that ends the saving for its request. The same goes for a lost connection, which takes staged blocks along.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.live.servers.wire import FromWorker, Over, Save
from isthmus_vllm.memory import Area
from isthmus_vllm.pages import Pages
from isthmus_vllm.plans import Report, SaveOrder

log = logging.getLogger("vllm.isthmus")


class Slots:
    """Which staging slots are free, in which session. Taken by the saving thread, given back by the link's."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._lock = threading.Lock()
        self._session = 0  # none
        self._free: list[int] = []
        self._taken: set[int] = set()

    def open(self, session: int) -> None:
        """A new adapter knows nothing of what was staged for the last one."""
        with self._lock:
            self._session, self._free, self._taken = session, list(range(self._num_slots)), set()

    def close(self) -> None:
        with self._lock:
            self._session, self._free, self._taken = 0, [], set()

    def take(self, most: int) -> tuple[int, list[int]]:
        """The session, 0 if there is none, and up to `most` slots."""
        with self._lock:
            most = min(most, len(self._free))
            slots = [self._free.pop() for _ in range(most)]
            self._taken.update(slots)
            return self._session, slots

    def free(self, session: int, slots: Sequence[int]) -> None:
        """ValueError for slots that are not taken: who frees them does not know what it does."""
        with self._lock:
            if session != self._session:
                return
            if len(set(slots)) != len(slots) or not self._taken.issuperset(slots):
                raise ValueError(f"slots {slots} are freed that are not in use")
            self._taken.difference_update(slots)
            self._free.extend(slots)


@dataclass(frozen=True)
class Batch:
    """One step's saves, to be done when the model's work before `after` is; then the requests that are over."""

    saves: tuple[SaveOrder, ...]
    over: tuple[tuple[str, str], ...]
    after: object


class Saver(threading.Thread):
    def __init__(
        self, pages: Pages, staging: Area, slots: Slots, send: Callable[[int, FromWorker], bool]
    ) -> None:
        super().__init__(name="isthmus-saves", daemon=True)
        self._pages = pages
        self._staging = staging
        self._slots = slots
        self._send = send
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._sessions: dict[
            str, int
        ] = {}  # in which session a request's first block was saved; 0: it has ended
        self._lock = threading.Lock()
        self._report = Report()

    def put(self, batch: Batch) -> None:
        """Never blocks."""
        self._batches.put(batch)

    def take_report(self) -> Report:
        """What is through since the last call."""
        with self._lock:
            report, self._report = self._report, Report()
        return report

    def stop(self) -> None:
        self._batches.put(None)

    def run(self) -> None:
        while (batch := self._batches.get()) is not None:
            for order in batch.saves:
                try:
                    is_whole = self._save(order, batch.after)
                except Exception:  # a bug, and a thread that died of it would leave blocks pinned for ever
                    log.exception("isthmus: saving failed")
                    is_whole = False
                if not is_whole:
                    self._sessions[order.request] = 0
                with self._lock:
                    self._report += Report((order.job,), () if is_whole else (order.request,))
            for request, key in batch.over:
                self._sessions.pop(request, None)
                session, _ = self._slots.take(0)
                self._send(session, Over(key))

    def _save(self, order: SaveOrder, after: object) -> bool:
        """Whether all of it is with the adapter now."""
        session, slots = self._slots.take(len(order.blocks))
        if not slots or self._sessions.setdefault(order.request, session) != session:
            self._slots.free(session, slots)
            return False
        seals = self._pages.store(order.blocks[: len(slots)], self._staging, slots, after=after)
        names = order.names[: len(slots)]
        save = Save(order.key, order.first, order.parent, names, tuple(slots), tuple(seals))
        return self._send(session, save) and len(slots) == len(order.blocks)
