"""What a prefill on a given node takes: the node's queue, loading or fetching what is cached, computing the rest.

KV moves layer by layer while the node computes, and a fetch or a read from disk already while the request is
queued. So only the part of a transfer that outlasts queue and compute costs node time:
`work = max(compute, load, transfer - queue)`.
"""

from __future__ import annotations

from isthmus.conductor.copies import transfer_ns
from isthmus.conductor.events import Fetch, RequestArrived
from isthmus.conductor.index import Levels, bits
from isthmus.conductor.view import ClusterView, NodeView, Placement
from isthmus.types import NS_PER_S


class Estimator:
    """Estimates for one request at one moment. `nodes`: those that can take its prefill.

    `held[slot]`, `depths[slot]`: leading blocks a node has finished, and those it has or will have.
    """

    __slots__ = ("_times", "depths", "held", "nodes", "now", "num_tokens", "ratio", "request", "view")

    def __init__(self, view: ClusterView, request: RequestArrived, nodes: list[NodeView], now: int) -> None:
        self.view, self.request, self.nodes, self.now = view, request, nodes, now
        self.num_tokens = request.num_tokens
        self.ratio = view.calibration.ratio
        mask = 0
        for node in nodes:
            mask |= node.bit
        self.held: Levels = view.index.match(request.names, mask)
        self.depths: dict[int, int] = {}
        for depth, group in view.index.match_expected(request.names, mask):
            if depth:
                for slot in bits(group):
                    self.depths[slot] = depth
        self._times: dict[int, int] = {}

    def depth(self, node: NodeView) -> int:
        """Leading blocks this node has, or will have when its queue is done."""
        return self.depths.get(node.slot, 0)

    def cached_tokens(self, node: NodeView, num_blocks: int) -> int:
        """At least one token is left to compute: it yields the first output token."""
        return min(num_blocks * node.block_size, self.num_tokens - 1)

    def compute_ns(self, node: NodeView, num_blocks: int) -> int:
        """The cost model's prefill time with so many leading blocks cached."""
        key = num_blocks << 8 | node.kind
        found = self._times.get(key)
        if found is None:
            cached = self.cached_tokens(node, num_blocks)
            found = self._times[key] = node.cost.prefill_ns(self.num_tokens - cached, cached)
        return found

    def local(self, node: NodeView) -> Placement:
        """Prefill here with what is or will be cached here."""
        depth = self.depth(node)
        wait = node.wait_ns(self.now)
        estimate = self.compute_ns(node, depth)
        compute = estimate * self.ratio
        work = max(compute, self._load_ns(node, depth, wait)) if depth else compute
        placement = Placement(node, depth, work, wait + work)
        placement.compute_ns = estimate if work == compute else 0
        return placement

    def fetched(self, node: NodeView, source: NodeView, stop: int) -> Placement:
        """Prefill here after fetching blocks from this node's own prefix up to `stop` from another node."""
        start = self.depth(node)
        num_bytes = (stop - start) * node.block_bytes
        wait = node.wait_ns(self.now)
        transfer, _ = transfer_ns(source.link_out, node.link_in, num_bytes, self.now)
        estimate = self.compute_ns(node, stop)
        compute = estimate * self.ratio
        work = max(compute, self._load_ns(node, stop, wait), transfer - wait)
        placement = Placement(node, stop, work, wait + work)
        placement.compute_ns = estimate if work == compute else 0
        placement.held = start
        placement.fetch = Fetch(source.node, start, stop, self.now + int(transfer))
        placement.fetch_bytes, placement.source = num_bytes, source
        return placement

    def _load_ns(self, node: NodeView, num_blocks: int, wait: int) -> float:
        """From the node's DRAM to its device, and what is on its disk before that, less the time in queue."""
        paths = node.paths
        load = num_blocks * node.block_bytes * NS_PER_S / paths.memory if paths.memory else 0.0
        if paths.disk and self.view.index.uses_disk:
            on_disk = self.view.index.num_on_disk(node.bit, self.request.names[:num_blocks])
            load = max(load, on_disk * node.block_bytes * NS_PER_S / paths.disk - wait)
        return load


def can_copy(source: NodeView, target: NodeView) -> bool:
    """Both have a link, and the same KV layout."""
    return source.paths.network > 0 and target.paths.network > 0 and source.block_bytes == target.block_bytes


def least_sending(estimator: Estimator, holders: int) -> NodeView:
    """Of the nodes in a mask, the one whose link out has the fewest copies under way."""
    if holders & (holders - 1) == 0:
        return estimator.view.node_at(holders.bit_length() - 1)
    nodes = [estimator.view.node_at(slot) for slot in bits(holders)]
    return min(nodes, key=lambda node: len(node.link_out.copies))
