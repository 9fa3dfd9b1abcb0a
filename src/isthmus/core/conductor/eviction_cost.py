"""What eviction costs: blocks that were asked for soon after their last copy had been evicted.

A *ghost hit* is a run of blocks right after the best cached prefix of an arriving request whose last copy left
a node within that node's latest C evictions, C being its capacity. With a ghost list as long as the cache, one
more inserted block costs (ghost hits / insertions) hits: it shortens everyone's stay by one place for one stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.core.conductor.events import RequestArrived
from isthmus.core.conductor.view import Cluster, NodeView, View
from isthmus.core.types import BlockName


class EvictionCost:
    """Tells a cluster's `recent` what node time its evictions cost.

    Keeps the names evicted lately (ghosts), with the node and the number of its eviction, in two generations. The
    older one is dropped whole when the younger has as many names as all caches together, so nothing is kept for long
    and no name is taken out one by one; whether a ghost still counts, its number says.
    """

    __slots__ = ("_older", "_view", "_younger")

    def __init__(self, view: View) -> None:
        self._view = view
        self._younger: dict[BlockName, tuple[NodeView, int]] = {}
        self._older: dict[BlockName, tuple[NodeView, int]] = {}

    def evicted(self, node: NodeView, num_evicted: int, gone: Sequence[BlockName]) -> None:
        """So many blocks left the node; no node has `gone` any more."""
        if not node.cache_blocks:
            return
        node.evictions += num_evicted
        self._younger.update(dict.fromkeys(gone, (node, node.evictions)))
        if len(self._younger) > sum([other.cache_blocks for other in self._view.prefills]):
            self._older, self._younger = self._younger, {}

    def asked(self, request: RequestArrived, cluster: Cluster, depth: int, now: int) -> None:
        """A request accepted for a cluster where its first `depth` blocks are cached: what it computes again since it
        was evicted."""
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
