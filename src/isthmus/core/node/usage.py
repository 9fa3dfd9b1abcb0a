"""What a node says of its memory while memory is lent: what changed, once in a while (Infinite-LLM, heartbeats).

The next report is due a period after the one before, and then comes by itself if anything happened since. Where nothing
happens there is none.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.core.attempts import MemoryEntry, MemoryUsed
from isthmus.core.node import events
from isthmus.core.node.attempt import Attempt
from isthmus.core.scheduler import Actions, Scheduler
from isthmus.core.scheduler.sequence import DECODING
from isthmus.core.types import RequestId


class MemoryUsage:
    """What was said, and when the next is due."""

    def __init__(self, scheduler: Scheduler, period_ns: int) -> None:
        self._scheduler, self._period_ns = scheduler, period_ns
        self._due_ns, self._is_due = 0, False
        self._told: dict[RequestId, MemoryEntry] = {}
        self._told_node = self._node()  # which follows from its capacity

    def tell(self, attempts: Mapping[RequestId, Attempt], now: int, actions: Actions) -> None:
        """After each event."""
        if now < self._due_ns:
            if not self._is_due:
                self._is_due = True
                actions.append(events.Wake(self._due_ns))
            return
        entries = {key: _entry(attempt) for key, attempt in attempts.items()}
        changed = [entry for key, entry in entries.items() if self._told.get(key) != entry]
        gone = [
            MemoryEntry(each.request, each.attempt) for key, each in self._told.items() if key not in entries
        ]
        node = self._node()
        if not (changed or gone or node != self._told_node):
            return
        self._told, self._told_node = entries, node
        actions.append(MemoryUsed(self._scheduler.node, *node, (*gone, *changed)))
        self._due_ns, self._is_due = now + self._period_ns, False

    def _node(self) -> tuple[int, int, int, int]:
        scheduler = self._scheduler
        return scheduler.pool.available, scheduler.num_spare, scheduler.num_wanted, scheduler.num_waiting


def _entry(attempt: Attempt) -> MemoryEntry:
    route = attempt.begin.route
    movable = attempt.state is DECODING and attempt.packing is None
    remote = attempt.remote
    moving = remote.num_planned - remote.num_there
    num_blocks = len(attempt.blocks) + len(attempt.scratch)
    return MemoryEntry(route.request, route.attempt, num_blocks, moving, movable, remote.planned)
