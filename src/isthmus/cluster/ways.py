"""What the head knows of clusters and the links between them: how nodes reach each other, and what crosses the links.

In their own cluster nodes are reached at their own addresses, in another one over a link, which is as it is or emulated
by a process. What crosses it all nodes report; put together, it is for the conductor and for operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from isthmus.cluster.launcher import LinkProcess
from isthmus.cluster.messages import Crossing, Neighbours
from isthmus.conductor import LinkRule, LinkState
from isthmus.errors import UnavailableError
from isthmus.types import NS_PER_S, NodeId


class _Place(msgspec.Struct, frozen=True):
    """Where a node is: its cluster, its address for the nodes of its own and of each linked one, and the ports that it
    takes up."""

    cluster: str
    addresses: dict[str, str]
    ports: list[tuple[LinkProcess, int]]


class Ways:
    """For the head. `clusters`: the names of all of them."""

    def __init__(self, clusters: Sequence[str] = ("",), links: Iterable[LinkRule] = ()) -> None:
        self.clusters = tuple(clusters)
        self._linked: dict[str, list[str]] = {cluster: [] for cluster in clusters}
        for link in links:
            self._linked[link.target].append(link.source)
        self._processes: dict[frozenset[str], LinkProcess] = {}
        self._places: dict[NodeId, _Place] = {}

    def emulate(self, link: LinkProcess) -> None:
        """From now on nodes on both sides of this link reach each other through its process."""
        self._processes[frozenset(link.between)] = link

    def linked(self, cluster: str) -> Sequence[str]:
        """The clusters that a link joins to this one."""
        return self._linked[cluster]

    def open(self, node: NodeId, cluster: str, address: str) -> None:
        """A node is there. Raises UnavailableError when an emulated link cannot take one more."""
        place = self._places[node] = _Place(cluster, {cluster: address}, [])
        for other in self._linked[cluster]:
            process = self._processes.get(frozenset((cluster, other)))
            if process is None:
                place.addresses[other] = address
                continue
            port = process.open(cluster, address)
            if port is None:
                self.close(node)
                raise UnavailableError(f"the link between {cluster} and {other} has no port left for it")
            place.ports.append((process, port))
            place.addresses[other] = f"127.0.0.1:{port}"

    def close(self, node: NodeId) -> None:
        """It is gone: nobody reaches it any more."""
        place = self._places.pop(node, None)
        if place is not None:
            for process, port in place.ports:
                process.close(place.cluster, port)

    def crosses(self, node: NodeId, target: NodeId) -> bool:
        """Whether they are in different clusters."""
        return self._places[node].cluster != self._places[target].cluster

    def view(self, cluster: str, other: str) -> Neighbours:
        """The nodes of `cluster` as its own see them, or those of a linked one."""
        places = [(node, place) for node, place in self._places.items() if place.cluster == cluster]
        return Neighbours(cluster, {node: place.addresses[other] for node, place in places})


class LinkView:
    """One direction of a link. `sent_bytes` since the head started; `up` and `bytes_per_s` as the conductor was told;
    the rest as of now."""

    def __init__(self, rule: LinkRule) -> None:
        self.source, self.target, self.rated_bytes_per_s = rule.source, rule.target, rule.bytes_per_s
        self.up = True
        self.bytes_per_s = self.sent_bytes = 0
        self.latest: dict[NodeId, Crossing] = {}
        # Since it was last told of, but for the bytes: those of which was told.
        self._told_bytes = self._retransmits = 0
        self.busy_ns: Counter[NodeId] = Counter()
        self._heard_ns = self._told_ns = 0  # of the latest report, and of the latest that was told

    def heard(self, node: NodeId, crossing: Crossing, now_ns: int) -> None:
        self._heard_ns = now_ns
        before = self.latest.get(node, Crossing(crossing.target, False))
        self.sent_bytes += crossing.sent_bytes - before.sent_bytes
        self._retransmits += crossing.retransmits - before.retransmits
        self.busy_ns[node] += crossing.busy_ns - before.busy_ns
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


class Measures:
    """For the head's event loop."""

    def __init__(self, links: Iterable[LinkRule]) -> None:
        self._views = {(link.source, link.target): LinkView(link) for link in links}

    def heard(self, node: NodeId, cluster: str, crossings: Sequence[Crossing], now_ns: int) -> None:
        for crossing in crossings:
            view = self._views.get((cluster, crossing.target))
            if view is not None:
                view.heard(node, crossing, now_ns)

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
        reports = [crossing.up for each in (there, back) for crossing in each.latest.values()]
        return any(reports) or not reports
