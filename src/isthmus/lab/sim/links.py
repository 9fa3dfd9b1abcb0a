"""Links of a deployment: of each node and between clusters, and the paths of KV across them."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.core.conductor import LinkRule
from isthmus.core.types import Role
from isthmus.facts import NodeFacts
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.network import ROUNDING, Flow, FlowNetwork
from isthmus.lab.sim.records import LinkRecord


class SerialLink:
    """A link with one transfer after the other, so each one's end is known when it begins."""

    __slots__ = ("_bytes_per_s", "_free_ns", "_record")

    def __init__(self, record: LinkRecord) -> None:
        self._record, self._bytes_per_s, self._free_ns = record, record.bytes_per_s, 0

    def take(self, num_bytes: int, now: int) -> int:
        """Queues a transfer; returns its end in ns."""
        duration = int(num_bytes * 1e9 / self._bytes_per_s + ROUNDING)
        begin = self._free_ns if self._free_ns > now else now
        self._free_ns = begin + duration
        self._record.bytes_moved += num_bytes
        self._record.busy_ns += duration
        return self._free_ns


@dataclass(slots=True)
class NodeLinks:
    """One node's links: their numbers in the network, or a serial link.

    `from_device`, `to_device`: links that a hand-over crosses beside `handover_out` and `handover_in`.
    """

    net_in: int
    net_out: int
    handover_in: int
    handover_out: int
    disk_read: int
    disk_write: SerialLink
    load: SerialLink | None
    from_device: tuple[int, ...]
    to_device: tuple[int, ...]


@dataclass(slots=True)
class SimulatedLink:
    """One direction of a link between two clusters, at `factor` of its rate since `since_ns`.
    `number`: in the network."""

    rule: LinkRule
    number: int
    record: LinkRecord
    factor: float = 1.0
    since_ns: int = 0

    @property
    def latency_ns(self) -> int:
        return self.rule.rtt_ns // 2

    @property
    def ends(self) -> frozenset[str]:
        return frozenset((self.rule.source, self.rule.target))


class Wiring:
    """All links; `between` clusters, in the order of `Rules.links`."""

    def __init__(self, deployment: Deployment) -> None:
        self.network = FlowNetwork()
        self.between: list[SimulatedLink] = []
        self._deployment = deployment
        self._records: list[LinkRecord] = []
        self._numbers: list[tuple[int, LinkRecord]] = []  # of the links in the network
        self._paths: dict[tuple[str, str], SimulatedLink] = {}
        for rule in deployment.rules.links:
            number = self._link(f"{rule.source} > {rule.target}", "cluster", rule.bytes_per_s)
            link = SimulatedLink(rule, number, self._records[-1])
            self.between.append(link)
            self._paths[rule.source, rule.target] = link

    def connect(self, facts: NodeFacts) -> NodeLinks:
        """Makes the links of a node."""
        rates, name = facts.rates, facts.node
        net_in = handover_in = self._link(f"{name} in", "network", rates.network)
        net_out = handover_out = self._link(f"{name} out", "network", rates.network)
        serial: SerialLink | None = None
        beside_out: tuple[int, ...] = ()
        beside_in: tuple[int, ...] = ()
        changes = self._deployment.rules.convert  # then it needs the links of every role
        decodes, loads = changes or facts.role is Role.DECODE, changes or facts.role is not Role.DECODE
        to_device, from_device = f"{name} to device", f"{name} from device"
        if rates.handover:
            # From the device goes a hand-over alone, so it and the rail are one link, as wide as the narrower.
            width = min(rates.handover, rates.memory)
            handover_in = self._link(f"{name} handover in", "handover", rates.handover, width)
            handover_out = self._link(f"{name} handover out", "handover", rates.handover, width)
            self._same_link(from_device, rates.memory, handover_out)
            if decodes:  # to its device comes nothing else
                self._same_link(to_device, rates.memory, handover_in)
        else:
            beside_out = (self._link(from_device, "memory", rates.memory, behind=handover_out),)
            if decodes:
                beside_in = (self._link(to_device, "memory", rates.memory, behind=handover_in),)
        if loads:  # to its device comes what it loads from its own memory
            serial = self._serial(f"{name} load" if decodes else to_device, "memory", rates.memory)
        read = self._link(f"{name} disk read", "disk", rates.disk_read)
        write = self._serial(f"{name} disk write", "disk", rates.disk_write)
        return NodeLinks(net_in, net_out, handover_in, handover_out, read, write, serial, beside_out, beside_in)

    def load_link(self, links: NodeLinks, facts: NodeFacts) -> SerialLink:
        """The node's link from DRAM to the device; a node that only decodes gets one with its first load."""
        if links.load is None:
            links.load = self._serial(f"{facts.node} load", "memory", facts.rates.memory)
        return links.load

    def link_between(self, source: NodeFacts, target: NodeFacts) -> SimulatedLink | None:
        """The link between the clusters of two nodes; None inside one."""
        return None if source.cluster == target.cluster else self._paths[source.cluster, target.cluster]

    def trunk(self, source: NodeFacts, target: NodeFacts) -> tuple[int, ...]:
        """Numbers of the links between two nodes' own links."""
        link = self.link_between(source, target)
        return () if link is None else (link.number,)

    def set_factor(self, link: SimulatedLink, factor: float, now: int) -> None:
        """Gives the link this share of its rate from now on."""
        link.factor, link.since_ns = factor, now
        self.network.set_rate(link.number, link.rule.bytes_per_s * factor, now)

    def flows_on(self, link: SimulatedLink) -> list[Flow]:
        """Transfers under way on a link, in order of start."""
        return self.network.flows_on(link.number)

    def records(self, now: int) -> list[LinkRecord]:
        for number, link in self._numbers:
            link.bytes_moved = self.network.bytes_moved(number, now)
            link.busy_ns = self.network.busy_ns(number, now)
        return self._records

    def _link(self, name: str, kind: str, bytes_per_s: int, width: int = 0, behind: int | None = None) -> int:
        """A link of the network, there `width` wide if that is given."""
        number = self.network.add_link(name, width or bytes_per_s, behind)
        self._same_link(name, bytes_per_s, number, kind)
        return number

    def _same_link(self, name: str, bytes_per_s: int, number: int, kind: str = "memory") -> None:
        """Records a link under a network link's number: traffic of one is traffic of the other."""
        self._numbers.append((number, self._record(name, kind, bytes_per_s)))

    def _serial(self, name: str, kind: str, bytes_per_s: int) -> SerialLink:
        return SerialLink(self._record(name, kind, bytes_per_s))

    def _record(self, name: str, kind: str, bytes_per_s: int) -> LinkRecord:
        self._records.append(LinkRecord(name, kind, bytes_per_s))
        return self._records[-1]
