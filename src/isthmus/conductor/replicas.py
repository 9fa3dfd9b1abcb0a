"""Copies of prefixes whose holders are congested, made ahead while the links are idle.

A placement away from the holders makes one more holder by itself. But requests may wait at a holder again and
again because each of them alone pays less that way. What they pay adds up here, prefix by prefix, until a placement
makes a further holder; and once a prefix was asked for twice or more and the sum exceeds the price of a copy, the
copy is made. To rent until the rent paid equals the price to buy costs at most twice what foresight would (ski
rental, Karlin et al. 1988), and needs no constant.

    paid    what the request would have been spared, in waiting and priced node time, had the node that would have
            served it best had the prefix
    price   node time lost by what the copy pushes out of the cache, as the `isthmus` policy prices it, and the
            time by which it delays fetches: so many begin on its two links while it lasts, each half of it later;
            and all this for each holder there will be, since a new one serves only its share of the requests
"""

from __future__ import annotations

from isthmus.blocks import state_names
from isthmus.conductor import copies
from isthmus.conductor.estimates import Estimator, can_copy
from isthmus.conductor.events import Replicate
from isthmus.conductor.index import bits
from isthmus.conductor.learning import WINDOW_NS, Decaying
from isthmus.conductor.view import ClusterView, NodeView, Placement
from isthmus.types import NS_PER_S, BlockName

REMEMBERED = 1024
"""Prefixes whose requests pay; of more, the one asked for longest ago is forgotten."""


class _Asked:
    """One prefix that requests pay for. `paid_ns` fades like all that is learned."""

    __slots__ = ("last_ns", "num_asks", "paid_ns")

    def __init__(self) -> None:
        self.num_asks = self.last_ns = 0
        self.paid_ns = Decaying()


class Replicas:
    """A prefix is known by the name of its last block. At most one copy of a prefix, and on a link, is under way."""

    __slots__ = ("_asked", "_fetches", "_view")

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._asked: dict[BlockName, _Asked] = {}  # in the order of the last ask
        self._fetches = Decaying()

    def consider(self, estimator: Estimator, placement: Placement) -> Replicate | None:
        """A request was placed: what it paid for want of copies; a copy, booked, if it is time for one."""
        now = estimator.now
        if placement.source is not None:
            self._fetches.add(1, now)
        for last, copy in list(self._view.replicas.items()):
            if copy.until_ns <= now:
                self._end(last)  # perhaps there was no room for all of it
        longest, holders = estimator.held[-1]
        if not longest:
            return None
        least = min(estimator.waits) + estimator.work_ns(estimator.nodes[0], longest)
        if placement.ttft_ns <= least and estimator.pool.prefills_alike:
            return None  # as good as it could be: no need to look closer
        return self._look_closer(estimator, placement, longest, holders)

    def stored(self, node: NodeView, names: tuple[BlockName, ...]) -> None:
        """Ends the copies to a node that are complete now."""
        under_way = self._view.replicas
        for last, copy in list(under_way.items()):
            if copy.link_in is node.link_in and last in names:
                self._end(last)

    def left(self, node: NodeView) -> None:
        for last, copy in list(self._view.replicas.items()):
            if copy.link_in is node.link_in or copy.link_out is node.link_out:
                self._end(last)

    def _end(self, last: BlockName) -> None:
        copies.end(self._view.replicas.pop(last))

    def _look_closer(
        self, estimator: Estimator, placement: Placement, longest: int, holders: int
    ) -> Replicate | None:
        now = estimator.now
        paid, target = self._paid(estimator, placement, longest)
        if target is None:
            return None
        names = estimator.request.names[:longest]
        if target.state_blocks:
            names = (*names, *state_names(names[-1], target.state_blocks))
        last = names[-1]
        if placement.held < longest:  # it makes a holder where there was none
            self._asked.pop(last, None)
            return None
        asked = self._ask(last, paid, now)
        if asked.num_asks < 2 or last in self._view.replicas or target.link_in.copies:
            return None
        source = self._source(holders, target)
        if source is None:
            return None
        num_bytes = (longest - estimator.depths[target.slot]) * target.block_bytes + target.state_bytes
        num_holders = 1 + holders.bit_count()
        if asked.paid_ns.at(now) <= num_holders * self._price(estimator, target, longest, num_bytes, source):
            return None
        del self._asked[last]
        copy = copies.begin(source.link_out, target.link_in, num_bytes, now)
        self._view.replicas[last] = copy
        estimator.pool.recent.insert(longest - estimator.depths[target.slot], now)
        return Replicate(names, source.node, target.node)

    def _paid(self, estimator: Estimator, placement: Placement, longest: int) -> tuple[float, NodeView | None]:
        """What a copy on the best node without one would have spared this request, and that node."""
        price = estimator.pool.recent.backlog_price(estimator.waits, estimator.now)
        best, target = placement.ttft_ns + price * placement.work_ns, None
        least = best
        for at, node in enumerate(estimator.nodes):
            if estimator.depths[node.slot] < longest and node is not placement.prefill and node.paths.network:
                work = estimator.work_ns(node, longest)
                cost = estimator.waits[at] + work + price * work
                if cost < least:
                    least, target = cost, node
        return best - least, target

    def _ask(self, last: BlockName, paid_ns: float, now: int) -> _Asked:
        asked = self._asked.pop(last, None)
        if asked is None or now - asked.last_ns > WINDOW_NS:
            asked = _Asked()
        self._asked[last] = asked
        if len(self._asked) > REMEMBERED:
            del self._asked[next(iter(self._asked))]
        asked.num_asks += 1
        asked.last_ns = now
        asked.paid_ns.add(paid_ns, now)
        return asked

    def _source(self, holders: int, target: NodeView) -> NodeView | None:
        """The first holder in the cluster whose link is idle."""
        for slot in bits(holders):
            node = self._view.node_at(slot)
            if node.pool is target.pool and not node.link_out.copies and can_copy(node, target):
                return node
        return None

    def _price(
        self, estimator: Estimator, target: NodeView, longest: int, num_bytes: int, source: NodeView
    ) -> float:
        """Of the room in the cache and of the time on the links, in ns of node time and waiting."""
        now = estimator.now
        num_blocks = longest - estimator.depths[target.slot]
        price = estimator.pool.recent.backlog_price(estimator.waits, estimator.now)
        room = (1 + price) * estimator.pool.recent.loss_per_block_ns(now) * num_blocks
        lasts = num_bytes * NS_PER_S / min(source.paths.network, target.paths.network)
        fetches_per_ns = self._fetches.at(now) / WINDOW_NS / len(estimator.nodes)
        return room + fetches_per_ns * lasts * lasts
