"""The cost of evictions, by blocks that are asked for soon after their last copy was evicted.

A *ghost hit* is a run of blocks behind the longest cached prefix of an arriving request, each of whose last copy left a
node within that node's latest C evictions, C its capacity. One more inserted block costs (ghost hits / insertions)
hits, since it shortens the stay of all blocks by one place.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.core.conductor.events import RequestArrived
from isthmus.core.conductor.view import Cluster, NodeView, View
from isthmus.core.types import BlockName


class EvictionCost:
    """Adds the node time lost by evictions to a cluster's `recent`.

    Keeps the names of evicted blocks (ghosts), with the node and the number of its eviction, in two generations; the
    older one is dropped when the younger has as many names as all caches together.
    """

    __slots__ = ("_older", "_view", "_younger")

    def __init__(self, view: View) -> None:
        self._view = view
        self._younger: dict[BlockName, tuple[NodeView, int]] = {}
        self._older: dict[BlockName, tuple[NodeView, int]] = {}

    def evicted(self, node: NodeView, num_evicted: int, gone: Sequence[BlockName]) -> None:
        """Notes that `num_evicted` blocks left a node; no node has `gone` any more."""
        if not node.cache_blocks:
            return
        node.evictions += num_evicted
        self._younger.update(dict.fromkeys(gone, (node, node.evictions)))
        if len(self._younger) > sum([other.cache_blocks for other in self._view.prefills]):
            self._older, self._younger = self._younger, {}

    def asked(self, request: RequestArrived, cluster: Cluster, depth: int, now: int) -> None:
        """Adds the node time in which an accepted request computes evicted blocks again; its first `depth` blocks are
        cached in the cluster."""
        run = 0
        for name in request.names[depth:]:
            ghost = self._younger.pop(name, None) or self._older.pop(name, None)
            if ghost is None or ghost[0].evictions - ghost[1] > ghost[0].cache_blocks:
                break
            run += 1
        if run:
            node = cluster.prefills[0]
            total = request.num_tokens
            lost = node.prefill_ns(total, depth) - node.prefill_ns(total, depth + run)
            cluster.recent.lose(max(0, lost) * cluster.calibration.ratio, now)
