"""What the conductor hears of the links between clusters: the reports of all nodes, put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from isthmus.cluster.messages import Crossing
from isthmus.cluster.offload import LinkView
from isthmus.conductor import LinkRule, LinkState
from isthmus.types import NS_PER_S, NodeId


@dataclass
class _Direction:
    """Of one link. `sent_bytes`, `retransmits`, `busy_ns`: since it was last told of; `total_bytes`: in all; `up` and
    `bytes_per_s`: as it was told; `heard_ns`, `told_ns`: of the latest report, and of the latest that was told."""

    rule: LinkRule
    sent_bytes: int = 0
    retransmits: int = 0
    total_bytes: int = 0
    bytes_per_s: int = 0
    up: bool = True
    heard_ns: int = 0
    told_ns: int = 0
    busy_ns: dict[NodeId, int] = field(default_factory=dict)
    latest: dict[NodeId, Crossing] = field(default_factory=dict)

    def heard(self, node: NodeId, crossing: Crossing, now_ns: int) -> None:
        self.heard_ns = now_ns
        before = self.latest.get(node, Crossing(crossing.target, False))
        sent = crossing.sent_bytes - before.sent_bytes
        self.sent_bytes += sent
        self.total_bytes += sent
        self.retransmits += crossing.retransmits - before.retransmits
        self.busy_ns[node] = self.busy_ns.get(node, 0) + crossing.busy_ns - before.busy_ns
        self.latest[node] = crossing

    @property
    def queued_bytes(self) -> int:
        return sum([crossing.queued_bytes for crossing in self.latest.values()])

    @property
    def rtt_ns(self) -> int:
        return min([crossing.rtt_ns for crossing in self.latest.values() if crossing.rtt_ns], default=0)

    def take(self, *, up: bool) -> LinkState:
        """Now, and over the time since the last one, which ends here.

        Nodes are busy at the same time or not; that the busiest of them says how long the link was is exact where it
        matters, when it cannot carry what they send.
        """
        found = LinkState(
            source=self.rule.source,
            target=self.rule.target,
            up=up,
            sent_bytes=max(0, self.sent_bytes),
            busy_ns=max(self.busy_ns.values(), default=0),
            queued_bytes=self.queued_bytes,
            retransmits=max(0, self.retransmits),
            rtt_ns=self.rtt_ns,
        )
        self.up = up
        # Reports do not come exactly so many a period: they are what the bytes are from.
        self.bytes_per_s = found.sent_bytes * NS_PER_S // max(1, self.heard_ns - self.told_ns)
        self.told_ns = self.heard_ns
        self.sent_bytes = self.retransmits = 0
        self.busy_ns.clear()
        return found

    def view(self) -> LinkView:
        return LinkView(
            source=self.rule.source,
            target=self.rule.target,
            up=self.up,
            rated_bytes_per_s=self.rule.bytes_per_s,
            sent_bytes=self.total_bytes,
            bytes_per_s=self.bytes_per_s,
            queued_bytes=self.queued_bytes,
            rtt_ns=self.rtt_ns,
        )


class Measures:
    """For the head's event loop."""

    def __init__(self, links: Iterable[LinkRule]) -> None:
        self._directions = {(link.source, link.target): _Direction(link) for link in links}

    def heard(self, node: NodeId, cluster: str, crossings: Sequence[Crossing], now_ns: int) -> None:
        for crossing in crossings:
            direction = self._directions.get((cluster, crossing.target))
            if direction is not None:
                direction.heard(node, crossing, now_ns)

    def left(self, node: NodeId) -> None:
        for direction in self._directions.values():
            direction.latest.pop(node, None)
            direction.busy_ns.pop(node, None)

    def take(self) -> tuple[LinkState, ...]:
        """Over the time since the last call."""
        return tuple([each.take(up=self._is_up(*between)) for between, each in self._directions.items()])

    def views(self) -> list[LinkView]:
        """As operators see them; whether they are up, and their rates, as the last `take` told."""
        return [direction.view() for direction in self._directions.values()]

    def _is_up(self, source: str, target: str) -> bool:
        """Any session between the two clusters works, for each carries both directions; or nobody knows better."""
        there, back = self._directions[source, target], self._directions[target, source]
        reports = [crossing.up for each in (there, back) for crossing in each.latest.values()]
        return any(reports) or not reports
