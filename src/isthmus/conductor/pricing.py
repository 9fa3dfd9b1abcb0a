"""The `isthmus` policy: lowest TTFT plus the price of the node time, cache room and link time it takes.

For each node, with what it has, or after a fetch from another, whole or in part:

    score = F + price * (w + e) + x

    F      predicted TTFT: queue, then w
    w      node time spent: max(compute, load, transfer - queue)
    e      node time lost by what this request's new blocks push out of the cache
    x      time by which a fetch delays the copies it shares a link with
    price  arrivals per node expected while the mean queue drains

A second of work makes every later request on that node a second later until its queue has drained, so a
node-second costs others (arrival rate per node) * (mean queue) seconds: the leading term of the M/G/1 value
function. At low load the rule is plain lowest TTFT; in overload it spends node time where the cache is. No
constant is tuned.
"""

from __future__ import annotations

from isthmus.conductor.copies import transfer_ns
from isthmus.conductor.estimates import Estimator, can_copy, least_sending
from isthmus.conductor.rules import Rules
from isthmus.conductor.view import NodeView, Placement
from isthmus.types import NS_PER_S


def isthmus(estimator: Estimator, rules: Rules) -> Placement:
    """The cheapest option. Ties are spread over the nodes by starting at another one each time."""
    return _Pricing(estimator).cheapest()


class _Pricing:
    __slots__ = ("_best", "_best_score", "_estimator", "_loss_ns", "_num_blocks", "_price")

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        view, nodes, now = estimator.view, estimator.nodes, estimator.now
        waiting = sum([node.wait_ns(now) for node in nodes]) / len(nodes)
        self._price = view.recent.rate(now) / len(nodes) * waiting / NS_PER_S
        self._loss_ns = view.recent.loss_per_block_ns(now)
        self._num_blocks = len(estimator.request.names)
        self._best: Placement | None = None
        self._best_score = 0.0

    def cheapest(self) -> Placement:
        estimator = self._estimator
        nodes = estimator.nodes
        first = estimator.view.num_routed % len(nodes)
        order = nodes[first:] + nodes[:first]
        for node in order:
            self._local(node)
        for depth, holders in reversed(estimator.held):
            if depth:
                self._fetches(order, least_sending(estimator, holders), depth)
        assert self._best is not None
        return self._best

    def _local(self, node: NodeView) -> None:
        """Whether computing with what the node has is the cheapest so far; no object is made for the others."""
        estimator = self._estimator
        wait = node.wait_ns(estimator.now)
        work = estimator.compute_ns(node, estimator.depth(node)) * estimator.ratio
        if self._best is None or wait + work + self._price * work < self._best_score:
            placement = estimator.local(node)
            self._offer(placement, 0.0)

    def _offer(self, placement: Placement, delay_ns: float) -> None:
        inserted = self._num_blocks - self._estimator.depth(placement.prefill)
        spent = placement.work_ns + self._loss_ns * inserted
        score = placement.ttft_ns + self._price * spent + delay_ns
        if self._best is None or score < self._best_score:
            self._best, self._best_score = placement, score

    def _fetches(self, order: list[NodeView], source: NodeView, depth: int) -> None:
        """Fetching up to `depth` from `source`, to every node where that could still be the cheapest."""
        estimator = self._estimator
        for node in order:
            if node is source or estimator.depth(node) >= depth:
                continue
            wait = node.wait_ns(estimator.now)
            work = estimator.compute_ns(node, depth) * estimator.ratio
            if wait + work + self._price * work >= self._best_score or not can_copy(source, node):
                continue
            self._fetch(node, source, depth)

    def _fetch(self, node: NodeView, source: NodeView, depth: int) -> None:
        """All of it; or, if the transfer would end last, as much as arrives while the rest computes."""
        estimator = self._estimator
        self._offer(*self._fetched(node, source, depth))
        start, stop = estimator.depth(node), depth
        if not self._outlasts(node, source, stop):
            return
        low, high = start, stop  # a fetch to `low` ends before the computing, one to `high` after it
        while high - low > 1:
            middle = (low + high) // 2
            if self._outlasts(node, source, middle):
                high = middle
            else:
                low = middle
        for end in (high, low):
            if start < end < stop:
                self._offer(*self._fetched(node, source, end))

    def _fetched(self, node: NodeView, source: NodeView, stop: int) -> tuple[Placement, float]:
        estimator = self._estimator
        placement = estimator.fetched(node, source, stop)
        _, delay = transfer_ns(source.link_out, node.link_in, placement.fetch_bytes, estimator.now)
        return placement, delay

    def _outlasts(self, node: NodeView, source: NodeView, stop: int) -> bool:
        estimator = self._estimator
        num_bytes = (stop - estimator.depth(node)) * node.block_bytes
        transfer, _ = transfer_ns(source.link_out, node.link_in, num_bytes, estimator.now)
        return transfer > node.wait_ns(estimator.now) + estimator.compute_ns(node, stop) * estimator.ratio
