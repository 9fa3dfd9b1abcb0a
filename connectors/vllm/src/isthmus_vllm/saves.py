"""Saves: one thread that copies blocks to the staging area, seals them and tells the adapter.

The thread never waits for the adapter. A block without a free slot is not saved, which ends the saving of its request,
since later blocks are of no use without it. A lost connection ends it too: staged blocks are lost with it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from isthmus.live.servers.wire import FromWorker, Over, Save
from isthmus_vllm.pages import Area, Pages
from isthmus_vllm.plans import Plan, Report, SaveOrder

log = logging.getLogger("vllm.isthmus")


class Slots:
    """Free staging slots of the present session: the saving thread takes them, the link's thread frees them."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._lock = threading.Lock()
        self._session = 0  # none
        self._free: list[int] = []
        self._taken: set[int] = set()

    def open(self, session: int) -> None:
        """Begins a session with all slots free: the new adapter has been told of none."""
        with self._lock:
            self._session, self._free, self._taken = session, list(range(self._num_slots)), set()

    def close(self) -> None:
        with self._lock:
            self._session, self._free, self._taken = 0, [], set()

    def take(self, most: int) -> tuple[int, list[int]]:
        """Returns the session (0: none) and up to `most` slots."""
        with self._lock:
            most = min(most, len(self._free))
            slots = [self._free.pop() for _ in range(most)]
            self._taken.update(slots)
            return self._session, slots

    def free(self, session: int, slots: Sequence[int]) -> None:
        """Raises ValueError for slots that are not taken: the adapter is broken then."""
        with self._lock:
            if session != self._session:
                return
            if len(set(slots)) != len(slots) or not self._taken.issuperset(slots):
                raise ValueError(f"slots {slots} are freed that are not in use")
            self._taken.difference_update(slots)
            self._free.extend(slots)


class Saver(threading.Thread):
    """The thread that saves. `send(session, message)` returns False when that session is over."""

    def __init__(
        self, pages: Pages, staging: Area, slots: Slots, send: Callable[[int, FromWorker], bool]
    ) -> None:
        super().__init__(name="isthmus-saves", daemon=True)
        self._pages = pages
        self._staging = staging
        self._slots = slots
        self._send = send
        self._plans: queue.SimpleQueue[tuple[Plan, object] | None] = queue.SimpleQueue()
        self._sessions: dict[str, int] = {}
        """Session in which a request's first block was saved, by request; 0: its saving has ended."""
        self._lock = threading.Lock()
        self._report = Report()

    def put(self, plan: Plan, after: object) -> None:
        """Queues the saves of one step, which wait for the model's work before `after`; then its ended requests."""
        self._plans.put((plan, after))

    def take_report(self) -> Report:
        """Returns jobs and requests that ended since the last call."""
        with self._lock:
            report, self._report = self._report, Report()
        return report

    def stop(self) -> None:
        self._plans.put(None)

    def run(self) -> None:
        while (entry := self._plans.get()) is not None:
            plan, after = entry
            for order in plan.saves:
                try:
                    is_whole = self._save(order, after)
                except Exception:  # a bug, and a thread that died of it would leave blocks pinned for ever
                    log.exception("isthmus: saving failed")
                    is_whole = False
                if not is_whole:
                    self._sessions[order.request] = 0
                with self._lock:
                    self._report += Report((order.job,), () if is_whole else (order.request,))
            for request, key in plan.over:
                self._sessions.pop(request, None)
                session, _ = self._slots.take(0)
                self._send(session, Over(key))

    def _save(self, order: SaveOrder, after: object) -> bool:
        """Stages and announces blocks; returns whether all of them found a slot and the adapter was told."""
        session, slots = self._slots.take(len(order.blocks))
        if not slots or self._sessions.setdefault(order.request, session) != session:
            self._slots.free(session, slots)
            return False
        seals = self._pages.store(order.blocks[: len(slots)], self._staging, slots, after=after)
        names = order.names[: len(slots)]
        save = Save(order.key, order.first, order.parent, names, tuple(slots), tuple(seals))
        return self._send(session, save) and len(slots) == len(order.blocks)
