"""What eviction costs: blocks that were asked for soon after their last copy had been evicted.

A *ghost hit* is a run of blocks right after the best cached prefix of an arriving request whose last copy left
a node within that node's latest C evictions, C being its capacity. With a ghost list as long as the cache, one
more inserted block costs (ghost hits / insertions) hits: it shortens everyone's stay by one place for one stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from isthmus.conductor.events import RequestArrived
from isthmus.conductor.view import ClusterView, NodeView
from isthmus.types import BlockName


class Ghosts:
    """Names evicted lately, with the node and the number of its eviction."""

    __slots__ = ("_evicted", "_view")

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._evicted: OrderedDict[BlockName, tuple[NodeView, int]] = OrderedDict()

    def evicted(self, node: NodeView, names: Sequence[BlockName], gone: Sequence[BlockName]) -> None:
        """`names` left the node; no node has `gone` any more."""
        if not node.cache_blocks:
            return
        node.evictions += len(names)
        stamp = (node, node.evictions)
        ghosts = self._evicted
        for name in gone:
            ghosts[name] = stamp
        while ghosts:
            owner, at = next(iter(ghosts.values()))
            if owner.evictions - at <= owner.cache_blocks:
                break
            ghosts.popitem(last=False)

    def asked(self, request: RequestArrived, now: int) -> None:
        """An accepted request: what it computes again because it was evicted."""
        if not self._evicted:
            return
        view, ghosts = self._view, self._evicted
        everyone = 0
        for node in view.prefills:
            everyone |= node.bit
        depth = view.index.match_expected(request.names, everyone)[-1][0]
        run = 0
        for name in request.names[depth:]:
            found = ghosts.pop(name, None)
            if found is None or found[0].evictions - found[1] > found[0].cache_blocks:
                break
            run += 1
        if run:
            node = view.prefills[0]
            total, size = request.num_tokens, node.block_size
            had, would = min(depth * size, total - 1), min((depth + run) * size, total - 1)
            lost = node.cost.prefill_ns(total - had, had) - node.cost.prefill_ns(total - would, would)
            view.recent.lose(max(0, lost), now)
