"""Estimates of a prefill on a given node, and the `isthmus` policy.

KV moves layer by layer while the node computes, a fetch or a read from disk already while the request is queued. Only
the part of a transfer that outlasts queue and compute costs node time: `work = max(compute, load, transfer - queue)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from isthmus.core.attempts import FetchOrder
from isthmus.core.blocks import state_names
from isthmus.core.conductor.copies import ClusterLink, expected_ns
from isthmus.core.conductor.events import RequestArrived, Rules
from isthmus.core.conductor.index import Levels, bits
from isthmus.core.conductor.view import NodeView, Placement, View
from isthmus.core.types import NS_PER_S, BlockName, Role

Matched = tuple[Levels, Levels]
"""Leading blocks that nodes (have, have or will have)."""


class Estimator:
    """Estimates for one request at one moment. `nodes`: that can prefill it; `waits`: their queues in ns.

    `held`: leading blocks that nodes have, decode nodes included, as levels; `depths[slot]`: blocks that a node has or
    will have; `deepest`: the most of any node. `foreign`: mask of nodes in other clusters to fetch from; `matched`: a
    match of all nodes, if there is one already. `memo`, `computed`: by `depth << 16 | kind`, since nodes of one kind
    take the same time.

    With a hybrid model a node's prefix ends at the deepest block whose snapshot of the recurrent state it has too.
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
        if cluster.learns_speeds:
            self.waits = [node.wait_ns(now) for node in nodes]
        else:
            self.waits = [node.free_ns - now if node.free_ns > now else 0 for node in nodes]
        mask = cluster.prefill_mask if nodes is cluster.prefills else sum([node.bit for node in nodes])
        everyone = mask | (cluster.lender_mask | foreign) & view.index.users
        if matched is None:
            self.held, expected = match(view, request, everyone)
        else:
            self.held, expected = (_restricted(levels, everyone) for levels in matched)
        self.deepest = expected[-1][0]
        self.depths = _by_slot(expected, mask, view.num_slots)
        self.memo: dict[int, float] = {}
        self.computed: dict[int, int] = {}

    def ratio_of(self, node: NodeView) -> float:
        """Measured over estimated prefill time of a node."""
        return node.ratio if self.cluster.learns_speeds else self.ratio

    def compute_ns(self, node: NodeView, num_blocks: int) -> int:
        key = num_blocks << 16 | node.kind
        found = self.computed.get(key)
        if found is None:
            found = self.computed[key] = node.prefill_ns(self.num_tokens, num_blocks)
        return found

    def work_ns(self, node: NodeView, num_blocks: int) -> float:
        """Node time with so many leading blocks in the node's memory: computing the rest, or loading them if longer."""
        key = num_blocks << 16 | node.kind
        found = self.memo.get(key)
        if found is None:
            found = self.compute_ns(node, num_blocks) * self.ratio_of(node)
            if num_blocks and node.paths.memory:
                loaded = num_blocks * node.block_bytes + node.state_bytes
                found = max(found, loaded * NS_PER_S / node.paths.memory)
            self.memo[key] = found
        return found

    def local(self, at: int) -> Placement:
        """Prefill on `nodes[at]` with the blocks that it has or will have."""
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
        """Time to read a node's first blocks, as far as they lie on its disk only, while the request is queued."""
        if not num_blocks or not self.view.index.uses_disk:
            return 0.0
        names = self.request.names[:num_blocks]
        if node.state_blocks:
            names = (*names, *state_names(names[-1], node.state_blocks))
        return self.read_ns(node, names)

    def read_ns(self, node: NodeView, names: Sequence[BlockName]) -> float:
        """Time to read the blocks of these that lie on a node's disk only."""
        if not node.paths.disk:
            return 0.0
        return self.view.index.num_on_disk(node.bit, names) * node.block_bytes * NS_PER_S / node.paths.disk

    def _note_compute(self, placement: Placement) -> None:
        estimate = self.compute_ns(placement.prefill, placement.cached)
        ratio = self.ratio_of(placement.prefill)
        placement.compute_ns = estimate if placement.work_ns <= int(estimate * ratio) else 0


def match(view: View, request: RequestArrived, nodes: int) -> Matched:
    """Leading blocks of the prompt that each of `nodes` (a mask) can use."""
    if not view.state_blocks:
        return view.index.match(request.names, nodes)
    # At least one token must follow the state.
    usable = request.names[: (request.num_tokens - 1) // view.block_size]
    return view.index.match_states(usable, nodes, view.state_blocks)


def _restricted(levels: Levels, nodes: int) -> Levels:
    """The levels of a match of `nodes` alone."""
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
    """Whether both nodes have a link, and the same KV layout."""
    return source.paths.network > 0 and target.paths.network > 0 and source.block_bytes == target.block_bytes


def least_sending(estimator: Estimator, holders: int) -> NodeView:
    """The first node of a mask that sends nothing, else the one with the fewest copies under way. Nodes of this cluster
    go before others, nodes with a link before those without."""
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


# The `isthmus` policy: lowest TTFT plus the price of the node time, cache room and link time that a request takes. For
# each node, with its own prefix, or after a fetch from another, whole or in part:
#
#     score = F + price * (w + e) + x
#
#     F      predicted TTFT: queue, then w
#     w      node time: max(compute, load, transfer - queue)
#     e      node time lost by blocks that this request's new blocks evict
#     x      time by which a fetch delays the copies it shares a link with
#     price  arrivals per node expected while the mean queue drains; on a mixed node also its decode batch
#
# A second of work delays every later request on that node by a second until its queue has drained, so a node-second
# costs others (arrival rate per node) * (mean queue) seconds: the leading term of the M/G/1 value function. At low load
# the rule is plain lowest TTFT; in overload it spends node time where the cache is. No constant is tuned.


def isthmus(estimator: Estimator, rules: Rules) -> Placement:
    """The option with the lowest score. Ties are spread over the nodes by starting at another one each time."""
    return _Pricing(estimator).cheapest()


class _Pricing:
    """The options for one request, weighed one by one."""

    __slots__ = (
        "_across", "_best", "_best_score", "_estimator", "_leaving", "_num_blocks", "_order", "_prices", "_room",
        "_shortest", "_state_bytes", "_stretch",
    )  # fmt: skip

    def __init__(self, estimator: Estimator) -> None:
        view, now, count, cluster = estimator.view, estimator.now, len(estimator.nodes), estimator.cluster
        self._estimator = estimator
        first = view.num_routed % count
        self._order = [*range(first, count), *range(first)]
        price = cluster.recent.backlog_price(estimator.waits, now)
        self._prices = [price] * count
        if cluster.has_mixed:
            self._prices = [
                price + (node.num_delayed if node.role is Role.MIXED else 0) for node in estimator.nodes
            ]
        self._room = price * cluster.recent.loss_per_block_ns(now)  # price of the room one block takes
        self._num_blocks = len(estimator.request.names)
        # The best so far: index of its node, source of its fetch, and the block up to which that goes.
        self._best: tuple[int, NodeView | None, int] = (0, None, 0)
        self._best_score = math.inf
        self._shortest = min(estimator.waits)
        self._leaving: list[float] = []  # bytes that each copy of the current source still sends
        self._stretch = 1.0
        self._state_bytes = estimator.nodes[0].state_bytes  # of the one model
        self._across: ClusterLink | None = None  # the link from the current source, if in another cluster

    def cheapest(self) -> Placement:
        estimator = self._estimator
        self._compute()
        for depth, holders in reversed(estimator.held):
            if depth and self._may_pay(depth):
                self._fetch(least_sending(estimator, holders), depth)
        at, source, stop = self._best
        return estimator.local(at) if source is None else estimator.fetched(at, source, stop)

    def _compute(self) -> None:
        """Scores prefill on each node with its own prefix."""
        estimator, prices = self._estimator, self._prices
        nodes, waits, depths = estimator.nodes, estimator.waits, estimator.depths
        reads_disk, order = estimator.view.index.uses_disk, self._order
        if estimator.cluster.prefills_alike and not reads_disk and not estimator.cluster.has_mixed:
            order = self._soonest()
        for at in order:
            node, wait = nodes[at], waits[at]
            depth = depths[node.slot]
            work = estimator.work_ns(node, depth)
            if reads_disk:
                work = max(work, estimator.disk_ns(node, depth) - wait)
            score = wait + work + prices[at] * work + self._room * (self._num_blocks - depth)
            if score < self._best_score:
                self._best, self._best_score = (at, None, 0), score

    def _soonest(self) -> list[int]:
        """Of nodes that are alike the candidates: of each depth the first with the shortest queue."""
        nodes, waits, depths = self._estimator.nodes, self._estimator.waits, self._estimator.depths
        soonest: dict[int, int] = {}
        for at in sorted(self._order, key=waits.__getitem__):
            soonest.setdefault(depths[nodes[at].slot], at)
        if len(soonest) < 2:
            return list(soonest.values())
        first, count = self._order[0], len(nodes)
        return sorted(soonest.values(), key=lambda at: (at - first) % count)

    def _may_pay(self, stop: int) -> bool:
        """Whether `stop` cached blocks could make some node the best, if the fetch took no time."""
        estimator = self._estimator
        if not estimator.cluster.prefills_alike or estimator.cluster.has_mixed:
            return True
        work = estimator.work_ns(estimator.nodes[0], stop)
        room = self._room * (self._num_blocks - stop + 1)  # a node that fetches so far has fewer blocks
        return self._shortest + work + self._prices[0] * work + room < self._best_score

    def _fetch(self, source: NodeView, stop: int) -> None:
        """Scores fetches up to block `stop` from `source`, to each node where that could be the best."""
        estimator, now = self._estimator, self._estimator.now
        targets = self._targets(source, stop)
        if not targets:
            return
        self._across = estimator.view.across(source, estimator.nodes[0])
        self._stretch = source.link_out.stretch(now)
        self._leaving = [copy.bytes_left(now) for copy in source.link_out.copies]
        crossings: dict[
            int, int
        ] = {}  # by kind of node: the block up to which fetch and compute take equally long
        for least, _, at in sorted(targets):
            if least >= self._best_score:
                return
            node, wait, price = estimator.nodes[at], estimator.waits[at], self._prices[at]
            depth, work = estimator.depths[node.slot], estimator.work_ns(node, stop)
            block_ns = node.block_bytes * NS_PER_S / min(source.paths.network, node.paths.network)
            block_ns *= self._stretch * node.link_in.stretch(now)  # without the copies under way
            crossing = crossings.get(node.kind)
            if crossing is not None:
                # A shorter fetch leaves at least `computing`, a longer one takes at least `fetching`.
                computing = wait + (1 + price) * estimator.work_ns(node, crossing)
                transfer = max(0, crossing - depth) * block_ns
                fetching = transfer + price * max(work, transfer - wait)
                room = self._room * (self._num_blocks - depth)
                if min(computing, fetching) + room >= self._best_score:
                    continue
            transfer = (stop - depth) * block_ns
            spent = max(work, transfer - wait)
            if least + (1 + price) * (spent - work) < self._best_score:
                transfer = self._offer(at, source, stop)
            if transfer > wait + work and not node.state_blocks:  # a partial prefix has no snapshot at its end
                crossings[node.kind] = self._fetch_part(at, source, stop)

    def _targets(self, source: NodeView, stop: int) -> list[tuple[float, int, int]]:
        """(score if fetching took no time, place in turn, index) of each node that lacks some of the blocks; the score
        is a lower bound for shorter fetches too. Of idle nodes that are alike only the first."""
        estimator = self._estimator
        nodes, waits, depths, best = estimator.nodes, estimator.waits, estimator.depths, self._best_score
        kind, work = -1, 0.0
        idle: set[tuple[int, int, float]] = set()
        found = []
        for turn, at in enumerate(self._order):
            node, wait, price = nodes[at], waits[at], self._prices[at]
            if node.kind != kind:
                kind, work = node.kind, estimator.work_ns(node, stop)
            depth = depths[node.slot]
            least = wait + work + price * work + self._room * (self._num_blocks - depth)
            if least >= best or depth >= stop or node is source or not can_copy(source, node):
                continue
            if not wait and not node.link_in.copies:
                if (depth, kind, price) in idle:
                    continue
                idle.add((depth, kind, price))
            found.append((least, turn, at))
        return found

    def _fetch_part(self, at: int, source: NodeView, stop: int) -> int:
        """Scores the fetch of as many blocks as arrive while the rest is computed, and of one block more, where the
        whole fetch would end last. Returns the block at which the two times cross."""
        estimator = self._estimator
        node, wait = estimator.nodes[at], estimator.waits[at]
        low = start = estimator.depths[node.slot]
        high = stop  # a fetch to `low` ends before the computing, one to `high` after it
        late_low = -wait - estimator.work_ns(node, low)
        late_high = self._transfer(node, source, high)[0] - wait - estimator.work_ns(node, high)
        while high - low > 1:
            # Both times are nearly linear, so a chord finds their crossing.
            middle = low + int((high - low) * late_low / (late_low - late_high))
            middle = min(max(middle, low + 1), high - 1)
            late = self._transfer(node, source, middle)[0] - wait - estimator.work_ns(node, middle)
            if late > 0:
                high, late_high = middle, late
            else:
                low, late_low = middle, late
        for end in (high, low):
            if start < end < stop:
                self._offer(at, source, end)
        return high

    def _transfer(self, node: NodeView, source: NodeView, stop: int) -> tuple[float, float]:
        """The time of a fetch up to `stop`, and the delay of other copies by it, in ns."""
        estimator = self._estimator
        out, into = source.link_out, node.link_in
        num_bytes = (stop - estimator.depths[node.slot]) * node.block_bytes + self._state_bytes
        if into.copies or self._across is not None:
            return expected_ns(out, into, num_bytes, estimator.now, self._across)
        before = 0.0  # as `expected_ns`, with the bytes left of the source's copies computed once for all nodes
        for left in self._leaving:
            before += left if left < num_bytes else num_bytes
        delay = before * NS_PER_S / out.bytes_per_s
        own = num_bytes * NS_PER_S / out.bytes_per_s + delay
        if into.bytes_per_s < out.bytes_per_s:
            own = max(own, num_bytes * NS_PER_S / into.bytes_per_s)
        return own * self._stretch * into.stretch(estimator.now), delay

    def _offer(self, at: int, source: NodeView, stop: int) -> float:
        """Scores one fetch; returns the time of its transfer in ns."""
        estimator = self._estimator
        node, wait = estimator.nodes[at], estimator.waits[at]
        transfer, delay = self._transfer(node, source, stop)
        work = max(estimator.work_ns(node, stop), transfer - wait)
        room = self._room * (self._num_blocks - estimator.depths[node.slot])
        score = wait + work + self._prices[at] * work + room + delay
        if score < self._best_score:
            self._best, self._best_score = (at, source, stop), score
        return transfer
