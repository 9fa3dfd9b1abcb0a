"""What crosses the links between clusters, put together from what all nodes report: for the conductor and operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isthmus.cluster.messages import LinkReport
from isthmus.conductor import LinkRule, LinkState
from isthmus.types import NS_PER_S, NodeId


class LinkView:
    """One direction of a link. `sent_bytes` since the head started; `up` and `bytes_per_s` as the conductor was told;
    the rest as of now."""

    def __init__(self, rule: LinkRule) -> None:
        self.source, self.target, self.rated_bytes_per_s = rule.source, rule.target, rule.bytes_per_s
        self.up = True
        self.bytes_per_s = self.sent_bytes = 0
        self.latest: dict[NodeId, LinkReport] = {}
        # Since it was last told of, but for the bytes: those of which was told.
        self._told_bytes = self._retransmits = 0
        self.busy_ns: Counter[NodeId] = Counter()
        self._heard_ns = self._told_ns = 0  # of the latest report, and of the latest that was told

    def heard(self, node: NodeId, report: LinkReport, now_ns: int) -> None:
        self._heard_ns = now_ns
        before = self.latest.get(node, LinkReport(report.target, False))
        self.sent_bytes += report.sent_bytes - before.sent_bytes
        self._retransmits += report.retransmits - before.retransmits
        self.busy_ns[node] += report.busy_ns - before.busy_ns
        self.latest[node] = report

    @property
    def queued_bytes(self) -> int:
        return sum([report.queued_bytes for report in self.latest.values()])

    @property
    def rtt_ns(self) -> int:
        return min([report.rtt_ns for report in self.latest.values() if report.rtt_ns], default=0)

    def take(self, *, up: bool) -> LinkState:
        """Now, and over the time since the last one, which ends here.

        Nodes are busy at the same time or not; that the busiest of them says how long the link was is exact where it
        matters, when it cannot carry what they send.
        """
        self.up = up
        sent, busy_ns = max(0, self.sent_bytes - self._told_bytes), max(self.busy_ns.values(), default=0)
        retransmits = max(0, self._retransmits)
        # Reports do not come exactly so many a period: they are what the bytes are from.
        self.bytes_per_s = sent * NS_PER_S // max(1, self._heard_ns - self._told_ns)
        self._told_ns = self._heard_ns
        self._told_bytes, self._retransmits = self.sent_bytes, 0
        self.busy_ns.clear()
        return LinkState(
            self.source, self.target, up, sent, busy_ns, self.queued_bytes, retransmits, self.rtt_ns
        )


@dataclass
class Offload:
    """What the head tells operators of several clusters. `threshold`: in tokens, None: nothing is prefilled in another
    cluster; `reason`: for the latest change; `requests`: attempts sent to another cluster's prefill nodes;
    `conversions`: nodes that took another role."""

    threshold: int | None = None
    reason: str = ""
    changes: int = 0
    requests: int = 0
    conversions: int = 0
    links: Sequence[LinkView] = ()


class LinkStats:
    """For the head's event loop."""

    def __init__(self, links: Iterable[LinkRule]) -> None:
        self._views = {(link.source, link.target): LinkView(link) for link in links}

    def heard(self, node: NodeId, cluster: str, link_reports: Sequence[LinkReport], now_ns: int) -> None:
        for report in link_reports:
            view = self._views.get((cluster, report.target))
            if view is not None:
                view.heard(node, report, now_ns)

    def left(self, node: NodeId) -> None:
        for view in self._views.values():
            view.latest.pop(node, None)
            view.busy_ns.pop(node, None)

    def take(self) -> tuple[LinkState, ...]:
        """Over the time since the last call."""
        return tuple([view.take(up=self._is_up(*between)) for between, view in self._views.items()])

    def views(self) -> list[LinkView]:
        return list(self._views.values())

    def _is_up(self, source: str, target: str) -> bool:
        """Any session between the two clusters works, for each carries both directions; or nobody knows better."""
        there, back = self._views[source, target], self._views[target, source]
        reports = [report.up for each in (there, back) for report in each.latest.values()]
        return any(reports) or not reports
