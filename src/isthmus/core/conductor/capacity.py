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

from isthmus.core.conductor.copies import ClusterLink
from isthmus.core.conductor.events import Rules
from isthmus.core.conductor.view import Cluster, NodeView, Placement, View
from isthmus.core.cost import offload
from isthmus.core.cost.lengths import Sample
from isthmus.core.types import NS_PER_S, Role

WINDOW = 1024
"""Prompts that count: some minutes at the rates of a dozen instances, and solved in a few ms."""
ENOUGH = 64
"""With fewer prompts seen nothing is solved: the share above a threshold would be wrong by more than a tenth."""
LARGEST_BATCH = 4096


class Capacity:
    """Learns lengths, answers for the nodes and links that `view` has now."""

    def __init__(self, view: View, rules: Rules) -> None:
        self._view, self._rules = view, rules
        self._latest: deque[tuple[int, int]] = deque(maxlen=WINDOW)  # tokens uncached and cached of each prompt
        self._num_tokens = 0  # of all these

    def add(self, num_tokens: int, placement: Placement) -> None:
        """An accepted prompt. What it counts as uncached is what it was judged by; in one cluster, what it computes."""
        computed = max(1, num_tokens - placement.cached * placement.prefill.block_size)
        uncached = placement.uncached or computed
        if len(self._latest) == WINDOW:
            self._num_tokens -= sum(self._latest[0])
        self._latest.append((uncached, num_tokens - uncached))
        self._num_tokens += num_tokens

    @property
    def knows_lengths(self) -> bool:
        return len(self._latest) >= ENOUGH

    @property
    def homes(self) -> list[Cluster]:
        """Clusters that decode."""
        return [cluster for cluster in self._view.clusters.values() if cluster.decodes or cluster.mixed]

    @property
    def _inbound(self) -> list[ClusterLink]:
        """Links that work, to clusters that decode."""
        homes = {cluster.name for cluster in self.homes}
        return [link for link in self._view.links.values() if link.trusted and link.target in homes]

    @property
    def remote_nodes(self) -> list[NodeView]:
        """Of linked clusters that only prefill; where all decode too, each cluster's nodes serve the others."""
        linked, homes = {link.source for link in self._inbound}, self.homes
        remotes = [each for each in self._view.clusters.values() if each.name in linked and each.has_prefill]
        alone = [cluster for cluster in remotes if cluster not in homes]
        return [node for cluster in alone or remotes for node in cluster.senders]

    @property
    def local_nodes(self) -> list[NodeView]:
        return [node for cluster in self.homes for node in cluster.prefills]

    @property
    def egress(self) -> float:
        """Bytes per second."""
        sources = {node.cluster.name for node in self.remote_nodes}
        return float(sum(link.lasting for link in self._inbound if link.source in sources))

    def threshold(self, num_local: float) -> offload.Threshold:
        """The best one with so many prefill nodes at home. There must be prompts, and nodes elsewhere."""
        work, num_remote = self._work(), len(self.remote_nodes)
        return offload.best_threshold(
            self._uncached, work.remote_s, num_remote, work.local_s, num_local, work.kv_bytes, self.egress
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
        lengths = Sample(self._uncached)
        (classes,) = offload.expected(lengths, self._work(), [math.inf if threshold is None else threshold])
        fleet = offload.PrefillFleet(
            num_remote=len(self.remote_nodes),
            num_local=num_local + num_decodes,
            egress=self.egress,
            decode_rate=self._decode_rate(cluster.decodes[0]),
        )
        return offload.bear(classes, fleet, num_local).rate

    def largest_batch(self, node: NodeView) -> int:
        """Requests that may decode on a node at once, as long as the recent ones: as many as the node takes, its KV
        memory holds, and the time between tokens allows; at least one."""
        context = self._context
        most = min(node.max_sequences or LARGEST_BATCH, int(node.capacity_tokens / context))
        return max(1, offload.largest_batch(node.cost, context, most, self._rules.tbt_ms))

    def _decode_rate(self, node: NodeView) -> float:
        """Requests per second of one decode node, equation (5)."""
        batch = self.largest_batch(node)
        fixed, slope = node.cost.decode_step_ps(batch)
        step_s = (fixed + slope * batch * self._context) / 1000 / NS_PER_S
        return offload.decode_rate(1, batch, step_s, max(1.0, self._view.outputs.mean))

    @property
    def _uncached(self) -> list[int]:
        return [uncached for uncached, _ in self._latest]

    @property
    def _context(self) -> float:
        """Tokens of a request half way through its answer."""
        return max(1.0, self._num_tokens / max(1, len(self._latest)) + self._view.outputs.mean / 2)

    def _work(self) -> offload.RequestWork:
        """Prefill after as much cached as in the mean."""
        cached = sum([cached for _, cached in self._latest]) // len(self._latest)
        remote, local = (next(iter(nodes), None) for nodes in (self.remote_nodes, self.local_nodes))
        return offload.RequestWork(_seconds(remote, cached), _seconds(local, cached), _bytes(remote))


def _seconds(node: NodeView | None, cached: int) -> Callable[[float], float]:
    """Of a prefill on the node, as measured; where there is none, something that no node does."""
    if node is None:
        return lambda length: 1.0
    cost, ratio = node.cost, node.cluster.calibration.ratio / NS_PER_S
    return lambda length: cost.prefill_ns(round(length), cached) * ratio


def _bytes(node: NodeView | None) -> Callable[[float], float]:
    if node is None:
        return lambda length: 0.0
    cost = node.cost
    return lambda length: cost.state_bytes + cost.kv_token_bytes * length
