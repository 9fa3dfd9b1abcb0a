"""Messages between nodes: delivered at once, unless a fault delays them or ends the session."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from isthmus.lab.sim.clock import TRANSFER_ENDS, Call, Clock
from isthmus.lab.sim.faults import Faults
from isthmus.lab.sim.node import SimNode


class SimulatedSessions:
    """Delivers messages in order. `cut` is called with two nodes whose session has just ended."""

    def __init__(self, faults: Faults, clock: Clock, cut: Callable[[SimNode, SimNode], None]) -> None:
        self.are_at_risk = bool(faults.sessions)
        self._faults, self._clock, self._on_cut = faults, clock, cut
        self._cut: set[frozenset[int]] = set()
        self._late: dict[frozenset[int], dict[Call, None]] = {}
        """Delayed messages between two nodes, which the end of their session drops."""
        self._latest: dict[tuple[int, int], int] = {}

    def are_cut(self, one: SimNode, other: SimNode) -> bool:
        return frozenset((one.slot, other.slot)) in self._cut

    def carry(self, source: SimNode, target: SimNode, heard: Call) -> None:
        """Calls `heard` at delivery, after all earlier messages; never, if the session ends before."""
        if not self.are_at_risk:
            heard()
            return
        now = self._clock.now
        delay_ns = self._faults.delay_ns(source.names, target.names, now)
        if delay_ns is None:
            return
        way = source.slot, target.slot
        at_ns = self._latest[way] = max(self._latest.get(way, 0), now + delay_ns)
        if at_ns == now:
            heard()
            return
        late = self._late.setdefault(frozenset(way), {})
        late[heard] = None
        self._clock.call(at_ns, TRANSFER_ENDS, lambda: heard() if late.pop(heard, heard) is None else None)

    def change(self, nodes: list[SimNode]) -> None:
        """Cuts and restores sessions when a fault begins or ends."""
        for one, other in combinations(nodes, 2) if self.are_at_risk else ():
            pair = frozenset((one.slot, other.slot))
            is_cut = self._faults.delay_ns(one.names, other.names, self._clock.now) is None
            if is_cut and pair not in self._cut:
                self._cut.add(pair)
                self._on_cut(one, other)
                self._late.get(pair, {}).clear()
            elif not is_cut:
                self._cut.discard(pair)
