"""Links between clusters, as the head knows them: the processes that emulate them, at which addresses nodes reach each
other across them, and what crosses them, put together from what all nodes report."""

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
    """The link between the clusters `between`, in a process that this one starts, and again when it ends: at the same
    ports, since nodes know these, and with the same targets."""

    def __init__(self, between: tuple[str, str], spec: LinkSpec) -> None:
        self.between, self._what = between, f"the link between {' and '.join(between)}"
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._spare = [list(towards) for towards in spec.ports]
        self._targets: dict[int, str] = {}

    async def start(self) -> None:
        """For the first time, at ports that it finds. Raises StartError."""
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
        """A port that leads to `target`, in the cluster `towards`; None when there are no more."""
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
        """Starts the process again whenever it ends, until this is cancelled. It was started."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            log.error("%s ended: exit status %d; starting it again", self._what, code)
            await start_again(self._what, self._start)

    async def stop(self) -> None:
        if self._process is not None:
            await stop_child(self._process)


class _Place(msgspec.Struct, frozen=True):
    """Where a node is: its cluster, its address for the nodes of its own and of each linked one, and the ports that it
    takes up."""

    cluster: str
    addresses: dict[str, str]
    ports: list[tuple[LinkProcess, int]]


class AddressBook:
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
        self.latest: dict[NodeId, LinkState] = {}
        # Since it was last told of, but for the bytes: those of which was told.
        self._told_bytes = self._retransmits = 0
        self.busy_ns: Counter[NodeId] = Counter()
        self._heard_ns = self._told_ns = 0  # of the latest report, and of the latest that was told

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
        """Over the time since the last call."""
        return tuple([view.take(up=self._is_up(*between)) for between, view in self._views.items()])

    def views(self) -> list[LinkView]:
        return list(self._views.values())

    def _is_up(self, source: str, target: str) -> bool:
        """Any session between the two clusters works, for each carries both directions; or nobody knows better."""
        there, back = self._views[source, target], self._views[target, source]
        reports = [report.up for each in (there, back) for report in each.latest.values()]
        return any(reports) or not reports
