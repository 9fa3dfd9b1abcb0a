"""What nodes say to each other: heard at once, unless a fault makes it late or ends the session."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from isthmus.sim.clock import TRANSFER_ENDS, Clock
from isthmus.sim.faults import Faults
from isthmus.sim.node import SimNode

Pair = frozenset[int]


class _Late:
    """A message that is heard later. `lost`: what its end in a cut session brings about."""

    __slots__ = ("heard", "lost")

    def __init__(self, heard: Callable[[], None], lost: Callable[[], None] | None) -> None:
        self.heard, self.lost = heard, lost


class Sessions:
    """`cut` hears of two nodes whose sessions just ended."""

    def __init__(self, faults: Faults, clock: Clock, cut: Callable[[SimNode, SimNode], None]) -> None:
        self.are_at_risk = bool(faults.sessions)
        self._faults, self._clock, self._on_cut = faults, clock, cut
        self._cut: set[Pair] = set()
        self._late: dict[Pair, list[_Late]] = {}
        self._latest: dict[tuple[int, int], int] = {}

    def are_cut(self, one: SimNode, other: SimNode) -> bool:
        return frozenset((one.slot, other.slot)) in self._cut

    def carry(
        self,
        source: SimNode,
        target: SimNode,
        heard: Callable[[], None],
        lost: Callable[[], None] | None = None,
    ) -> None:
        """Calls `heard` when it is heard, after all that was said before; or `lost` when it never will be."""
        if not self.are_at_risk:
            heard()
            return
        now = self._clock.now
        delay_ns = self._faults.delay_ns(_names(source), _names(target), now)
        if delay_ns is None:
            if lost is not None:
                lost()
            return
        way = source.slot, target.slot
        at_ns = self._latest[way] = max(self._latest.get(way, 0), now + delay_ns)
        if at_ns == now:
            heard()
            return
        message, pair = _Late(heard, lost), frozenset(way)
        self._late.setdefault(pair, []).append(message)
        self._clock.call(at_ns, TRANSFER_ENDS, lambda: self._heard(pair, message))

    def _heard(self, pair: Pair, message: _Late) -> None:
        if message in self._late.get(pair, ()):
            self._late[pair].remove(message)
            message.heard()

    def change(self, nodes: list[SimNode]) -> None:
        """A fault begins or ends."""
        if not self.are_at_risk:
            return
        for one, other in combinations(nodes, 2):
            pair = frozenset((one.slot, other.slot))
            is_cut = self._faults.delay_ns(_names(one), _names(other), self._clock.now) is None
            if is_cut and pair not in self._cut:
                self._cut.add(pair)
                self._on_cut(one, other)
                for message in self._late.pop(pair, ()):
                    if message.lost is not None:
                        message.lost()
            elif not is_cut:
                self._cut.discard(pair)


def _names(node: SimNode) -> tuple[str, str]:
    return node.facts.node, node.facts.cluster
