"""Long-term control: nodes of a cluster change between prefill and decode, one at a time.

Prefill-as-a-Service (arXiv 2604.15039) restores equations (7) and (8) so: too little prefill for decode, and a decode
node is turned into a prefill node; too much, and one is turned back. Here a node is turned when three things hold:

1. its new stage is *pressed*: over about `WINDOW_NS` its nodes were busy for `PRESSED` of the time (prefill), or full
   to that share of the largest batch that the limits allow (decode);
2. by equation (6), with measured prefill times, link rates, lengths and answers, the deployment then bears more
   requests by `GAIN`, the threshold solved anew. Turning it back would have to promise as much again, so of two
   splits one is kept;
3. another node of its role, no smaller, stays; and `cool_down_s` have passed since the last one turned.

The node then gets nothing new (`draining`), and is asked to turn when nothing needs it any more: what it computes,
hands over, decodes or sends.
"""

from __future__ import annotations

from isthmus.core.attempts import Convert
from isthmus.core.conductor.capacity import Capacity
from isthmus.core.conductor.clusters import Cluster
from isthmus.core.conductor.rules import Rules
from isthmus.core.conductor.view import DECODING, NodeView, View
from isthmus.core.types import NS_PER_S, Role

WINDOW_NS = 30 * NS_PER_S
PAUSE_NS = 5 * NS_PER_S
"""Between two looks at what a turned node would bring: it takes ms, and seconds change little."""
PRESSED = 0.8
GAIN = 1.1
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class Conversion:
    """At most one node drains, or has been asked to turn, at a time."""

    def __init__(self, view: View, rules: Rules, capacity: Capacity) -> None:
        self._view, self._rules, self._capacity = view, rules, capacity
        self._node: NodeView | None = None
        self._asked = False
        self._rest_until, self._measured_ns = 0, -1
        self._pressure: dict[tuple[Cluster, Role], float] = {}

    def measured(self, now: int) -> list[Convert]:
        """To be called with every `LinksMeasured`. Returns what a drained node is asked."""
        if not self._rules.convert:
            return []
        self._sample(now)
        if self._node is None and now >= self._rest_until and self._capacity.knows_lengths:
            self._begin(self._choose())
            self._rest_until = max(self._rest_until, now + PAUSE_NS)
        return self._ask()

    def role_changed(self, node: NodeView, now: int) -> None:
        """A node has the other role now. If meanwhile nothing else was left of its old one, it turns back."""
        if node is not self._node:
            return
        self._end(now)
        if not self._others(node, OTHER[node.role]) and self._others(node, node.role):
            self._begin(node)

    def left(self, node: NodeView, now: int) -> None:
        """A node left. The one that drains stays as it is if that was the last beside it that is no smaller."""
        drained = self._node
        if drained is node:
            self._end(now)
        elif drained is not None and not self._asked and not self._others(drained, drained.role, drained):
            drained.draining = False
            self._view.sort_roles()
            self._end(now)

    def check(self) -> None:
        draining = [node for node in self._view.nodes.values() if node.draining]
        assert draining == ([] if self._node is None else [self._node])

    def _sample(self, now: int) -> None:
        passed_ns = now - self._measured_ns if self._measured_ns >= 0 else self._rules.period_ns
        self._measured_ns = now
        weight = min(1.0, passed_ns / WINDOW_NS)
        for cluster in self._view.clusters.values():
            busy = [bool(node.prefills) for node in cluster.senders]
            shares = {Role.PREFILL: sum(busy) / len(busy) if busy else 0.0}
            if self._capacity.knows_lengths:
                shares[Role.DECODE] = self._filled(cluster.decodes)
            for role, share in shares.items():
                before = self._pressure.get((cluster, role), 0.0)
                self._pressure[cluster, role] = before + (share - before) * weight

    def _filled(self, nodes: list[NodeView]) -> float:
        """Of the largest batches; more than 1 where requests wait for their place. What is on its way fills none."""
        batches = sum(self._capacity.largest_batch(node) for node in nodes)
        there = sum(request.state is DECODING for node in nodes for request in node.decodes.values())
        return there / batches if batches else 0.0

    def _choose(self) -> NodeView | None:
        """The node to turn, if any: the least loaded of its role in the first cluster where turning one helps."""
        for cluster in self._view.clusters.values():
            for role in (Role.DECODE, Role.PREFILL):  # what is short of nodes
                if self._pressure.get((cluster, role), 0.0) >= PRESSED:
                    node = self._spare(cluster, OTHER[role])
                    if node is not None and self._helps(cluster, role):
                        return node
        return None

    def _helps(self, cluster: Cluster, role: Role) -> bool:
        num_prefill = len(cluster.senders)
        if not num_prefill or not cluster.decodes:
            return False
        then = num_prefill + (1 if role is Role.PREFILL else -1)
        return self._capacity.rate(cluster, then) >= GAIN * self._capacity.rate(cluster, num_prefill)

    def _spare(self, cluster: Cluster, role: Role) -> NodeView | None:
        """Of the nodes of a role the one soonest drained, if another one, no smaller, stays."""
        nodes = cluster.decodes if role is Role.DECODE else cluster.senders
        for node in sorted(nodes, key=lambda node: (node.batch, node.work_ns)):
            if any(other.capacity_tokens >= node.capacity_tokens for other in nodes if other is not node):
                return node
        return None

    def _others(self, node: NodeView, role: Role, least: NodeView | None = None) -> bool:
        """Whether another node of its cluster has this role, and is no smaller than `least`."""
        return any(
            other.cluster is node.cluster and other.role is role and other is not node
            for other in self._view.nodes.values()
            if least is None or other.capacity_tokens >= least.capacity_tokens
        )

    def _begin(self, node: NodeView | None) -> None:
        if node is not None:
            node.draining, self._node, self._asked = True, node, False
            self._view.sort_roles()

    def _ask(self) -> list[Convert]:
        node = self._node
        if node is None or self._asked or node.link_in.copies or node.link_out.copies:
            return []
        if node.prefills or node.decodes or any(True for _ in self._view.requests_on(node)):
            return []
        self._asked = True
        return [Convert(node.node, OTHER[node.role])]

    def _end(self, now: int) -> None:
        self._node, self._asked = None, False
        self._rest_until = now + int(self._rules.cool_down_s * NS_PER_S)
        self._pressure.clear()  # of the nodes as they were
