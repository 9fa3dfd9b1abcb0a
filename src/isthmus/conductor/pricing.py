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

import math

from isthmus.conductor.copies import transfer_ns
from isthmus.conductor.estimates import Estimator, can_copy, least_sending
from isthmus.conductor.rules import Rules
from isthmus.conductor.view import NodeView, Placement
from isthmus.types import NS_PER_S


def isthmus(estimator: Estimator, rules: Rules) -> Placement:
    """The cheapest option. Ties are spread over the nodes by starting at another one each time."""
    return _Pricing(estimator).cheapest()


class _Pricing:
    """`_best`: the cheapest option so far: (index of its node, whom it fetches from, up to which block)."""

    __slots__ = ("_best", "_best_score", "_estimator", "_num_blocks", "_order", "_price", "_room", "_shortest")

    def __init__(self, estimator: Estimator) -> None:
        view, now, count = estimator.view, estimator.now, len(estimator.nodes)
        self._estimator = estimator
        first = view.num_routed % count
        self._order = [*range(first, count), *range(first)]
        mean_wait = sum(estimator.waits) / count
        self._price = view.recent.rate(now) / count * mean_wait / NS_PER_S
        self._room = self._price * view.recent.loss_per_block_ns(now)  # price of the room one block takes
        self._num_blocks = len(estimator.request.names)
        self._best: tuple[int, NodeView | None, int] = (0, None, 0)
        self._best_score = math.inf
        self._shortest = min(estimator.waits)

    def cheapest(self) -> Placement:
        estimator = self._estimator
        self._compute()
        for depth, holders in reversed(estimator.held):
            if depth and self._may_pay(depth):
                self._fetch(least_sending(estimator, holders), depth)
        at, source, stop = self._best
        return estimator.local(at) if source is None else estimator.fetched(at, source, stop)

    def _compute(self) -> None:
        """Computing on each node with what it has."""
        estimator, price = self._estimator, self._price
        nodes, waits, depths = estimator.nodes, estimator.waits, estimator.depths
        reads_disk = estimator.view.index.uses_disk
        memo = estimator.memo
        for at in self._order:
            node, wait = nodes[at], waits[at]
            depth = depths[node.slot]
            work = memo.get(depth << 8 | node.kind)
            if work is None:
                work = estimator.work_ns(node, depth)
            if reads_disk:
                work = max(work, estimator.disk_ns(node, depth) - wait)
            score = wait + work + price * work + self._room * (self._num_blocks - depth)
            if score < self._best_score:
                self._best, self._best_score = (at, None, 0), score

    def _may_pay(self, stop: int) -> bool:
        """Whether so many cached blocks could make some node the cheapest, if to fetch them took no time."""
        estimator = self._estimator
        if not estimator.one_kind:
            return True
        work = estimator.work_ns(estimator.nodes[0], stop)
        return self._shortest + work + self._price * work < self._best_score

    def _fetch(self, source: NodeView, stop: int) -> None:
        """Fetching up to block `stop` from `source`, to each node where that could still be the cheapest."""
        estimator, price = self._estimator, self._price
        nodes, waits, depths = estimator.nodes, estimator.waits, estimator.depths
        kind, work, floor = -1, 0.0, 0.0
        for at in self._order:
            node = nodes[at]
            if node.kind != kind:
                kind, work = node.kind, estimator.work_ns(node, stop)
                floor = work + price * work
            if (
                waits[at] + floor < self._best_score
                and depths[node.slot] < stop
                and node is not source
                and can_copy(source, node)
            ):
                transfer = self._offer(at, source, stop)
                if transfer > waits[at] + work:
                    self._fetch_part(at, source, stop)

    def _fetch_part(self, at: int, source: NodeView, stop: int) -> None:
        """The whole fetch would end last: as much as arrives while the rest is computed, and one block more."""
        estimator = self._estimator
        node, wait = estimator.nodes[at], estimator.waits[at]
        low = start = estimator.depths[node.slot]
        high = stop  # a fetch up to `low` ends before the computing, one up to `high` after it
        while high - low > 1:
            middle = (low + high) // 2
            num_bytes = (middle - start) * node.block_bytes
            transfer, _ = transfer_ns(source.link_out, node.link_in, num_bytes, estimator.now)
            if transfer > wait + estimator.work_ns(node, middle):
                high = middle
            else:
                low = middle
        for end in (high, low):
            if start < end < stop:
                self._offer(at, source, end)

    def _offer(self, at: int, source: NodeView, stop: int) -> float:
        """Considers one fetch; returns how long its transfer takes, in ns."""
        estimator = self._estimator
        node, wait = estimator.nodes[at], estimator.waits[at]
        depth = estimator.depths[node.slot]
        num_bytes = (stop - depth) * node.block_bytes
        transfer, delay = transfer_ns(source.link_out, node.link_in, num_bytes, estimator.now)
        work = max(estimator.work_ns(node, stop), transfer - wait)
        score = wait + work + self._price * work + self._room * (self._num_blocks - depth) + delay
        if score < self._best_score:
            self._best, self._best_score = (at, source, stop), score
        return transfer
