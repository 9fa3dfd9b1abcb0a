"""Links between clusters, for the head: processes that emulate them, addresses at which nodes reach each other across
them, and their traffic, summed over the nodes' reports."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from isthmus.core.conductor import LinkRule, LinkState
from isthmus.core.errors import StartError, UnavailableError
from isthmus.core.types import NS_PER_S, NodeId
from isthmus.live.cluster.launcher import start_again, start_child, stop_child, tell_child
from isthmus.live.cluster.shaper import LinkSpec, Point
from isthmus.live.peers.messages import Neighbours

log = logging.getLogger(__name__)

LINK_START_S = 30.0


class LinkProcess:
    """An emulated link between two clusters, as a child process. When it ends it is started again, with the same ports,
    which nodes know, and the same targets."""

    def __init__(self, between: tuple[str, str], spec: LinkSpec) -> None:
        self.between, self._what = between, f"the link between {' and '.join(between)}"
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._spare = [list(towards) for towards in spec.ports]
        self._targets: dict[int, str] = {}

    async def start(self) -> None:
        """Starts the process for the first time, at free ports. Raises StartError."""
        await self._start()
        self._spare = [list(towards) for towards in self._spec.ports]

    async def _start(self) -> None:
        process = await start_child("link", "--name", "-".join(self.between), threads=1, spec=self._spec)
        self._process = process
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), LINK_START_S)
            self._spec = msgspec.json.decode(line, type=LinkSpec)
        except (msgspec.DecodeError, TimeoutError):
            await stop_child(process)
            raise StartError(f"{self._what} did not start") from None
        for port, target in self._targets.items():
            tell_child(process, Point(port, target))

    def open(self, towards: str, target: str) -> int | None:
        """Returns a port that leads to `target`, in the cluster `towards`; None if all are taken."""
        spare = self._spare[self.between.index(towards)]
        if not spare:
            return None
        port = spare.pop(0)
        self.point(Point(port, target))
        return port

    def close(self, towards: str, port: int) -> None:
        self.point(Point(port, ""))
        self._spare[self.between.index(towards)].append(port)

    def point(self, point: Point) -> None:
        self._targets[point.port] = point.target
        if self._process is not None:
            tell_child(self._process, point)

    async def watch(self) -> None:
        """Restarts the process whenever it ends, until cancelled."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            log.error("%s ended: exit status %d; starting it again", self._what, code)
            await start_again(self._what, self._start)

    async def stop(self) -> None:
        if self._process is not None:
            await stop_child(self._process)


class _Place(msgspec.Struct, frozen=True):
    """A node's cluster, its address for nodes of each cluster that reaches it, and its ports of emulated links."""

    cluster: str
    addresses: dict[str, str]
    ports: list[tuple[LinkProcess, int]]


class AddressBook:
    """Addresses of all nodes, by the clusters that reach them."""

    def __init__(self, clusters: Sequence[str] = ("",), links: Iterable[LinkRule] = ()) -> None:
        self.clusters = tuple(clusters)
        self._linked: dict[str, list[str]] = {cluster: [] for cluster in clusters}
        for link in links:
            self._linked[link.target].append(link.source)
        self._processes: dict[frozenset[str], LinkProcess] = {}
        self._places: dict[NodeId, _Place] = {}

    def emulate(self, link: LinkProcess) -> None:
        """Routes sessions between the clusters of this link through its process."""
        self._processes[frozenset(link.between)] = link

    def linked(self, cluster: str) -> Sequence[str]:
        """Returns the clusters linked to this one."""
        return self._linked[cluster]

    def open(self, node: NodeId, cluster: str, address: str) -> None:
        """Adds a node. Raises UnavailableError if an emulated link has no port left."""
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
        """Removes a node and frees its ports."""
        place = self._places.pop(node, None)
        if place is not None:
            for process, port in place.ports:
                process.close(place.cluster, port)

    def crosses(self, node: NodeId, target: NodeId) -> bool:
        """Whether two nodes are in different clusters."""
        return self._places[node].cluster != self._places[target].cluster

    def view(self, cluster: str, other: str) -> Neighbours:
        """Returns the nodes of `cluster` with their addresses for nodes of the cluster `other`."""
        places = [(node, place) for node, place in self._places.items() if place.cluster == cluster]
        return Neighbours(cluster, {node: place.addresses[other] for node, place in places})


class LinkView:
    """One direction of a link. `sent_bytes`: since the head started; `up`, `bytes_per_s`: as last reported to the
    conductor; the rest as of now."""

    def __init__(self, rule: LinkRule) -> None:
        self.source, self.target, self.rated_bytes_per_s = rule.source, rule.target, rule.bytes_per_s
        self.up = True
        self.bytes_per_s = self.sent_bytes = 0
        self.latest: dict[NodeId, LinkState] = {}
        # `_told_*`: as of the last report to the conductor; `_retransmits`, `busy_ns`: since then.
        self._told_bytes = self._retransmits = 0
        self.busy_ns: Counter[NodeId] = Counter()
        self._heard_ns = self._told_ns = 0

    def heard(self, node: NodeId, report: LinkState, now_ns: int) -> None:
        self._heard_ns = now_ns
        before = self.latest.get(node, LinkState("", report.target, False))
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
        """Returns the present state, with counters since the last call. The link counts as busy as long as its busiest
        node, which is exact when the link is the bottleneck."""
        self.up = up
        sent, busy_ns = max(0, self.sent_bytes - self._told_bytes), max(self.busy_ns.values(), default=0)
        retransmits = max(0, self._retransmits)
        # The rate is over the time between nodes' reports: their number in a period varies.
        self.bytes_per_s = sent * NS_PER_S // max(1, self._heard_ns - self._told_ns)
        self._told_ns = self._heard_ns
        self._told_bytes, self._retransmits = self.sent_bytes, 0
        self.busy_ns.clear()
        return LinkState(
            self.source, self.target, up, sent, busy_ns, self.queued_bytes, retransmits, self.rtt_ns
        )


@dataclass
class Offload:
    """Offloading between clusters, as operators see it."""

    threshold: int | None = None  # tokens from which prompts are offloaded; None: never
    reason: str = ""  # for the latest change
    changes: int = 0
    requests: int = 0  # attempts with a prefill node in another cluster
    conversions: int = 0  # nodes that took another role
    links: Sequence[LinkView] = ()


class LinkStats:
    """Both directions of all links, summed over the nodes' reports."""

    def __init__(self, links: Iterable[LinkRule]) -> None:
        self._views = {(link.source, link.target): LinkView(link) for link in links}

    def heard(self, node: NodeId, cluster: str, links: Sequence[LinkState], now_ns: int) -> None:
        for report in links:
            view = self._views.get((cluster, report.target))
            if view is not None:
                view.heard(node, report, now_ns)

    def left(self, node: NodeId) -> None:
        for view in self._views.values():
            view.latest.pop(node, None)
            view.busy_ns.pop(node, None)

    def take(self) -> tuple[LinkState, ...]:
        """Returns the state of each direction, with counters since the last call."""
        return tuple([view.take(up=self._is_up(*between)) for between, view in self._views.items()])

    def views(self) -> list[LinkView]:
        return list(self._views.values())

    def _is_up(self, source: str, target: str) -> bool:
        """Whether any session between two clusters works, in either direction, or there is no report."""
        there, back = self._views[source, target], self._views[target, source]
        reports = [report.up for each in (there, back) for report in each.latest.values()]
        return any(reports) or not reports
