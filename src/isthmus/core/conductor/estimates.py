"""What a prefill on a given node takes: the node's queue, loading or fetching what is cached, computing the rest.

KV moves layer by layer while the node computes, and a fetch or a read from disk already while the request is
queued. So only the part of a transfer that outlasts queue and compute costs node time:
`work = max(compute, load, transfer - queue)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from isthmus.core.attempts import FetchOrder
from isthmus.core.blocks import state_names
from isthmus.core.conductor.copies import expected_ns
from isthmus.core.conductor.events import RequestArrived
from isthmus.core.conductor.index import Levels, bits
from isthmus.core.conductor.view import NodeView, Placement, View
from isthmus.core.types import NS_PER_S, BlockName

Matched = tuple[Levels, Levels]
"""(what nodes have, what they have or will have)."""


class Estimator:
    """Estimates for one request at one moment. `nodes`: those that can take its prefill; `waits`: their queues, ns.

    `held`: leading blocks that nodes have finished, those that only decode included, as levels; `depths[slot]`:
    those a node has or will have; `deepest`: the most that any will. `memo`: answers of `work_ns`, by
    `depth << 16 | kind`. `cluster`: of the nodes; `foreign`: mask of nodes in other clusters to fetch from;
    `matched`: a match of all nodes, if there was one already.

    Of a hybrid model a node has a prefix up to the deepest block whose snapshot of the recurrent state it has too.
    """

    __slots__ = (
        "cluster", "computed", "deepest", "depths", "foreign", "held", "memo", "nodes", "now", "num_tokens", "ratio",
        "request", "view", "waits",
    )  # fmt: skip

    def __init__(
        self,
        view: View,
        request: RequestArrived,
        nodes: list[NodeView],
        now: int,
        foreign: int = 0,
        matched: Matched | None = None,
    ) -> None:
        self.view, self.request, self.nodes, self.now, self.foreign = view, request, nodes, now, foreign
        self.num_tokens = request.num_tokens
        self.cluster = cluster = nodes[0].cluster
        self.ratio = cluster.calibration.ratio
        self.waits = [node.free_ns - now if node.free_ns > now else 0 for node in nodes]
        mask = cluster.prefill_mask if nodes is cluster.prefills else sum([node.bit for node in nodes])
        # Of others, those that have anything.
        everyone = mask | (cluster.lender_mask | foreign) & view.index.users
        if matched is None:
            self.held, expected = match(view, request, everyone)
        else:
            self.held, expected = (_restricted(levels, everyone) for levels in matched)
        self.deepest = expected[-1][0]
        self.depths = _by_slot(expected, mask, view.num_slots)
        # By blocks and kind of node: nodes of one kind answer alike.
        self.memo: dict[int, float] = {}
        self.computed: dict[int, int] = {}

    def compute_ns(self, node: NodeView, num_blocks: int) -> int:
        key = num_blocks << 16 | node.kind
        found = self.computed.get(key)
        if found is None:
            found = self.computed[key] = node.prefill_ns(self.num_tokens, num_blocks)
        return found

    def work_ns(self, node: NodeView, num_blocks: int) -> float:
        """Node time with so many leading blocks in the node's memory: computing, or loading them."""
        key = num_blocks << 16 | node.kind
        found = self.memo.get(key)
        if found is None:
            found = self.compute_ns(node, num_blocks) * self.ratio
            if num_blocks and node.paths.memory:
                loaded = num_blocks * node.block_bytes + node.state_bytes
                found = max(found, loaded * NS_PER_S / node.paths.memory)
            self.memo[key] = found
        return found

    def local(self, at: int) -> Placement:
        """Prefill on `nodes[at]` with what is or will be cached there."""
        node, wait = self.nodes[at], self.waits[at]
        depth = self.depths[node.slot]
        work = max(self.work_ns(node, depth), self.disk_ns(node, depth) - wait)
        placement = Placement(node, depth, depth, int(work), int(wait + work))
        self._note_compute(placement)
        return placement

    def fetched(self, at: int, source: NodeView, stop: int) -> Placement:
        """Prefill on `nodes[at]` after fetching blocks from its own prefix up to `stop` from another node."""
        node, wait = self.nodes[at], self.waits[at]
        start = self.depths[node.slot]
        num_bytes = (stop - start) * node.block_bytes + node.state_bytes
        across = self.view.across(source, node)
        transfer, _ = expected_ns(source.link_out, node.link_in, num_bytes, self.now, across)
        work = max(self.work_ns(node, stop), self.disk_ns(node, start) - wait, transfer - wait)
        placement = Placement(node, stop, start, int(work), int(wait + work))
        self._note_compute(placement)
        placement.fetch = FetchOrder(source.node, start, stop, self.now + int(transfer))
        placement.fetch_bytes, placement.source, placement.across = num_bytes, source, across
        return placement

    def disk_ns(self, node: NodeView, num_blocks: int) -> float:
        """Reading what of a node's first blocks lies on its disk only; it begins while the request is queued."""
        if not num_blocks or not self.view.index.uses_disk:
            return 0.0
        names = self.request.names[:num_blocks]
        if node.state_blocks:
            names = (*names, *state_names(names[-1], node.state_blocks))
        return self.read_ns(node, names)

    def read_ns(self, node: NodeView, names: Sequence[BlockName]) -> float:
        """Reading what of these blocks lies on a node's disk only."""
        if not node.paths.disk:
            return 0.0
        return self.view.index.num_on_disk(node.bit, names) * node.block_bytes * NS_PER_S / node.paths.disk

    def _note_compute(self, placement: Placement) -> None:
        estimate = self.compute_ns(placement.prefill, placement.cached)
        placement.compute_ns = estimate if placement.work_ns <= int(estimate * self.ratio) else 0


def match(view: View, request: RequestArrived, nodes: int) -> Matched:
    """How much of the prompt each of `nodes` (a mask) can use: (has, has or will have)."""
    if not view.state_blocks:
        return view.index.match(request.names, nodes)
    # At least one token must follow the state.
    usable = request.names[: (request.num_tokens - 1) // view.block_size]
    return view.index.match_states(usable, nodes, view.state_blocks)


def _restricted(levels: Levels, nodes: int) -> Levels:
    """What a match of these nodes alone would say."""
    return [(depth, group & nodes) for depth, group in levels if group & nodes]


def _by_slot(levels: Levels, nodes: int, num_slots: int) -> list[int]:
    """Depth of each of `nodes` (a mask). Most nodes are alike, so the largest group is not unpacked."""
    if len(levels) == 1:
        return [levels[0][0]] * num_slots
    common, most = 0, 0
    for depth, group in levels:
        size = (group & nodes).bit_count()
        if size > most:
            common, most = depth, size
    depths = [common] * num_slots
    for depth, group in levels:
        if depth != common:
            group &= nodes
            while group:
                low = group & -group
                depths[low.bit_length() - 1] = depth
                group ^= low
    return depths


def can_copy(source: NodeView, target: NodeView) -> bool:
    """Both have a link, and the same KV layout."""
    return source.paths.network > 0 and target.paths.network > 0 and source.block_bytes == target.block_bytes


def least_sending(estimator: Estimator, holders: int) -> NodeView:
    """Of the nodes in a mask, the first that sends nothing, else the one with the fewest copies under way.

    A node without a link is the answer only where all are; one in another cluster only where none is in this.
    """
    holders = holders & ~estimator.foreign or holders
    best, fewest = estimator.view.node_at(holders.bit_length() - 1), math.inf
    for slot in bits(holders):
        node = estimator.view.node_at(slot)
        if not node.paths.network:
            continue
        copies = len(node.link_out.copies)
        if not copies:
            return node
        if copies < fewest:
            best, fewest = node, copies
    return best
