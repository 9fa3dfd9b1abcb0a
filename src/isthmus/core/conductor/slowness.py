"""Nodes that live and are far slower than they were: requests that wait there go elsewhere, the node is set aside, and
taken back when a small prompt that is no request was computed in time.

Only of nodes that tell no cost. A fleet that is slow everywhere since it has much to do keeps its requests: one moves
only to a node that has nothing to compute, or gave a first token in time since the late one turned to what it computes;
only where half the time is expected; and `MOST_MOVES` times at most. An answer that goes on from an earlier attempt
stays: its tokens so far are computed too, in a time that nobody can expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from isthmus.core.conductor.learning import is_late
from isthmus.core.conductor.routing import Router
from isthmus.core.conductor.view import NodeView, Placement, RequestView, View

SLOWER = 2.0
"""So many times the time elsewhere is worth another attempt, and so many times the least time is worth a probe."""
MOST_MOVES = 2
"""Of one request, so that a fleet computes no prompt more than three times."""


class Waiting(NamedTuple):
    """A request that waits for a node that is late. `left_ns`: until its answer, as expected; `since_ns`: when the node
    turned to what it computes; `is_whole`: nothing comes before the end of its answer."""

    request: RequestView
    node: NodeView
    left_ns: float
    since_ns: int
    is_whole: bool


class Slowness:
    """Finds slow nodes in a view, whose nodes it sets aside and takes back."""

    def __init__(self, view: View, router: Router) -> None:
        self._view, self._router = view, router

    def is_any_late(self, now: int) -> bool:
        """Whether `TimePassed` might move a request. Mutates nothing."""
        return next(self._late(now), None) is not None

    def late(self, now: int) -> list[Waiting]:
        """Requests that wait for late nodes and may move, by node in the order of its queue. Mutates nothing."""
        return list(self._late(now))

    def elsewhere(self, waiting: Waiting, now: int) -> Placement | None:
        """Returns where a request is expected to be answered in less than half the time, and sets its node aside; None
        if nowhere."""
        node, was_aside = waiting.node, waiting.node.is_aside
        self._view.set_aside(node, is_aside=True)
        placement = self._router.place(waiting.request.arrived, now, again=True)
        if placement is not None and self._is_sooner(placement, waiting):
            return placement
        self._view.set_aside(node, is_aside=was_aside)
        return None

    def _is_sooner(self, placement: Placement, waiting: Waiting) -> bool:
        target = placement.prefill
        if target is waiting.node:
            return False
        if target.prefills and target.speed is not None and target.speed.quick_ns <= waiting.since_ns:
            return False
        expected = float(placement.ttft_ns)
        if waiting.is_whole:
            most = waiting.request.arrived.max_tokens
            expected += min(most, self._view.outputs.mean or most) * _step_ns(target)
        return expected * SLOWER <= waiting.left_ns

    def to_probe(self) -> list[NodeView]:
        """Returns nodes that a small prompt may show to be quick: those set aside, and those that have nothing to do
        and were far slower than the quickest."""
        found = []
        for node in self._view.nodes.values():
            if node.speed is None:
                continue
            is_shunned = not (node.decodes or node.prefills) and node.ratio >= SLOWER * self._least_ratio(node)
            if node.is_aside or is_shunned:
                found.append(node)
        return found

    def expected_ns(self, node: NodeView, num_tokens: int) -> float:
        """The time in which other nodes would compute a small prompt."""
        return node.cost.prefill_ns(num_tokens, 0) * self._least_ratio(node) if num_tokens else 0.0

    def probed(self, node: NodeView, num_tokens: int, took_ns: int) -> None:
        """Takes what a small prompt took in place of all that was measured of a node; one that is not late is used."""
        if node.speed is None:
            return
        expected = self.expected_ns(node, num_tokens)
        is_slower = took_ns > SLOWER * expected > 0
        node.speed.restart(took_ns, node.cost.prefill_ns(num_tokens, 0) if is_slower else 0)
        if node.is_aside and not is_late(took_ns - expected, expected):
            self._view.set_aside(node, is_aside=False)

    def _least_ratio(self, node: NodeView) -> float:
        others = [
            other.ratio
            for other in self._view.nodes.values()
            if other.cluster is node.cluster and other is not node and not other.is_aside
        ]
        return min(others, default=node.ratio)

    def _late(self, now: int) -> Iterator[Waiting]:
        for node in self._view.nodes.values():
            if node.speed is None:
                continue
            late_ns, since_ns = float(node.late_ns(now)), node.service_ns
            queue = iter(list(node.prefills.values()))
            first = next(queue, None)
            if first is not None and not first.goes_on and is_late(late_ns, first.work_ns):
                yield from _may_move(Waiting(first, node, late_ns, since_ns, is_whole=False))
                for request in queue:
                    late_ns += request.work_ns
                    yield from _may_move(Waiting(request, node, late_ns, since_ns, is_whole=False))
            for request in list(node.decodes.values()):
                if request.is_presumed:
                    expected = request.arrived.max_tokens * _step_ns(node)
                    late_ns = now - request.decode_ns - expected
                    if is_late(late_ns, expected):
                        yield from _may_move(Waiting(request, node, late_ns, request.decode_ns, is_whole=True))


def _may_move(waiting: Waiting) -> Iterator[Waiting]:
    if waiting.request.moves < MOST_MOVES and not waiting.request.goes_on:
        yield waiting


def _step_ns(node: NodeView) -> float:
    """Time between tokens on a node, as far as known."""
    return node.guessed_step_ns * node.tokens.ratio
