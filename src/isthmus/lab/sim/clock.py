"""Virtual time and the heap of future events.

At equal times arrivals come first, then ends of prefills, then of transfers, then of decode runs, then all others;
then nodes' own timers, by the number of the node: those of two nodes have no common order; then in the order in which
they were set.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush

from isthmus.lab.sim.node import SimNode

PREFILL_ENDS, TRANSFER_ENDS, STEP_ENDS, OTHERS, WAKES = 1, 2, 3, 4, 5
"""Priorities at equal times. Ends of flows come from the network, those of other transfers from the heap."""

Call = Callable[[], None]


class Clock:
    """The present time, set by the event loop, and the heap of later events."""

    __slots__ = ("_num_set", "heap", "now")

    def __init__(self) -> None:
        self.now = 0  # ns
        # End of a run: (time, priority, number, node, version of the node's run, None). Call: (time, priority, number,
        # None, 0, call). A node's own timer: (time, priority, number of the node, None, number, call).
        self.heap: list[tuple[int, int, int, SimNode | None, int, Call | None]] = []
        self._num_set = 0

    def run_ends(self, time: int, priority: int, node: SimNode) -> None:
        """Schedules the end of the node's present run; void if the run is cut or replaced before."""
        self._num_set += 1
        heappush(self.heap, (time, priority, self._num_set, node, node.version, None))

    def call(self, time: int, priority: int, call: Call) -> None:
        self._num_set += 1
        heappush(self.heap, (time, priority, self._num_set, None, 0, call))

    def wake(self, time: int, node: SimNode, call: Call) -> None:
        """Schedules a node's own timer."""
        self._num_set += 1
        heappush(self.heap, (time, WAKES, node.slot, None, self._num_set, call))
