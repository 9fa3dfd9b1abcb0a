"""What a deployment of several clusters bears, from costs, measured link rates and the lengths of recent prompts.

The equations are those of `cost.offload`. Their inputs, one sample and one cost for each side:

    lengths   uncached tokens of the latest `WINDOW` accepted prompts
    remote    all prefill nodes of clusters that prefill for others; the first one's cost stands for all
    local     all prefill nodes of clusters that decode; likewise. A mixed node counts as one
    egress    the measured rates of the links from the former to the latter, together
    decode    equation (5): the largest batch that the time between tokens, the KV memory and the node allow
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from isthmus.conductor.clusters import Cluster
from isthmus.conductor.rules import Rules
from isthmus.conductor.view import NodeView, Placement, View
from isthmus.cost.lengths import Sample
from isthmus.cost.offload import (
    Fleet,
    Threshold,
    Work,
    bear,
    best_threshold,
    decode_rate,
    expected,
    largest_batch,
)
from isthmus.types import NS_PER_S, Role

WINDOW = 1024
"""Prompts that count: some minutes at the rates of a dozen instances, and solved in a few ms."""
ENOUGH = 64
"""With fewer prompts seen nothing is solved: the share above a threshold would be wrong by more than a tenth."""
LARGEST_BATCH = 4096


class Capacity:
    """Learns lengths, answers for the nodes and links that `view` has now."""

    def __init__(self, view: View, rules: Rules) -> None:
        self._view, self._rules = view, rules
        self._uncached: deque[int] = deque()  # tokens of each prompt
        self._cached: deque[int] = deque()
        self._sums = [0, 0]  # of both

    def add(self, num_tokens: int, placement: Placement) -> None:
        """An accepted prompt. What it counts as uncached is what it was judged by; in one cluster, what it computes."""
        uncached = placement.uncached
        if not uncached:
            uncached = max(1, num_tokens - placement.cached * placement.prefill.block_size)
        for at, (window, tokens) in enumerate(
            ((self._uncached, uncached), (self._cached, num_tokens - uncached))
        ):
            window.append(tokens)
            self._sums[at] += tokens
            if len(window) > WINDOW:
                self._sums[at] -= window.popleft()

    @property
    def knows_lengths(self) -> bool:
        return len(self._uncached) >= ENOUGH

    @property
    def homes(self) -> list[Cluster]:
        """Clusters that decode."""
        return [cluster for cluster in self._view.clusters.values() if cluster.decodes or cluster.mixed]

    @property
    def remotes(self) -> list[Cluster]:
        """Clusters that prefill and have a link that works to one that decodes."""
        homes = {cluster.name for cluster in self.homes}
        linked = {
            source for (source, target), link in self._view.links.items() if link.trusted and target in homes
        }
        return [
            cluster
            for cluster in self._view.clusters.values()
            if cluster.name in linked and cluster.has_prefill
        ]

    @property
    def remote_nodes(self) -> list[NodeView]:
        """Of clusters that only prefill; where all decode too, each cluster's nodes serve the others."""
        homes = self.homes
        remotes = [cluster for cluster in self.remotes if cluster not in homes]
        return [node for cluster in remotes or self.remotes for node in cluster.senders]

    @property
    def local_nodes(self) -> list[NodeView]:
        return [node for cluster in self.homes for node in cluster.prefills]

    @property
    def egress(self) -> float:
        """Bytes per second."""
        homes = {cluster.name for cluster in self.homes}
        sources = {node.cluster.name for node in self.remote_nodes}
        return float(
            sum(
                link.lasting
                for (source, target), link in self._view.links.items()
                if link.trusted and source in sources and target in homes
            )
        )

    def threshold(self, num_local: float) -> Threshold:
        """The best one with so many prefill nodes at home. There must be prompts, and nodes elsewhere."""
        work = self._work()
        return best_threshold(
            self._uncached,
            work.remote_s,
            len(self.remote_nodes),
            work.local_s,
            num_local,
            work.kv_bytes,
            self.egress,
        )

    def rate(self, cluster: Cluster, num_prefill: int) -> float:
        """Requests per second, equation (6), if so many of its prefill and decode nodes did prefill, at the fixed
        threshold or the best one then. There must be prompts."""
        here = [node for node in cluster.prefills if node.role is Role.PREFILL]
        num_local = len(self.local_nodes) - len(here) + num_prefill
        num_decodes = sum(len(home.decodes) for home in self.homes) + len(here) - num_prefill
        threshold: float | None = None
        if self.remote_nodes:
            threshold = self._rules.threshold
            if threshold is None:
                threshold = self.threshold(num_local).tokens
        (classes,) = expected(
            Sample(self._uncached),
            self._work(),
            [math.inf if threshold is None else threshold],
        )
        fleet = Fleet(
            num_remote=len(self.remote_nodes),
            num_local=num_local + num_decodes,
            egress=self.egress,
            decode_rate=self._decode_rate(cluster.decodes[0]),
        )
        return bear(classes, fleet, num_local).rate

    def largest_batch(self, node: NodeView) -> int:
        """Requests that may decode on a node at once, as long as the recent ones: as many as the node takes, its KV
        memory holds, and the time between tokens allows; at least one."""
        context = self._context
        most = min(node.max_sequences or LARGEST_BATCH, int(node.capacity_tokens / context))
        return max(1, largest_batch(node.cost, context, most, self._rules.tbt_ms))

    def _decode_rate(self, node: NodeView) -> float:
        """Requests per second of one decode node, equation (5)."""
        batch = self.largest_batch(node)
        step_s = _step_ns(node, batch, self._context) / NS_PER_S
        return decode_rate(1, batch, step_s, max(1.0, self._view.outputs.mean))

    @property
    def _context(self) -> float:
        """Tokens of a request half way through its answer."""
        prompt = sum(self._sums) / max(1, len(self._uncached))
        return max(1.0, prompt + self._view.outputs.mean / 2)

    def _work(self) -> Work:
        """Prefill after as much cached as in the mean."""
        cached = self._sums[1] // len(self._cached)
        remote = self.remote_nodes[:1]
        return Work(
            remote_s=_seconds(remote, cached),
            local_s=_seconds(self.local_nodes[:1], cached),
            kv_bytes=_bytes(remote),
        )


def _seconds(nodes: list[NodeView], cached: int) -> Callable[[float], float]:
    """Of a prefill on the one node, as measured; where there is none, something that no node does."""
    if not nodes:
        return lambda length: 1.0
    (node,) = nodes
    ratio = node.cluster.calibration.ratio / NS_PER_S
    return lambda length: node.cost.prefill_ns(round(length), cached) * ratio


def _bytes(nodes: list[NodeView]) -> Callable[[float], float]:
    if not nodes:
        return lambda length: 0.0
    cost = nodes[0].cost
    return lambda length: cost.state_bytes + cost.kv_token_bytes * length


def _step_ns(node: NodeView, batch: int, context: float) -> float:
    fixed, slope = node.cost.decode_step_ps(batch)
    return (fixed + slope * batch * context) / 1000
