"""Load is shed by priority, and between tenants by their shares: whom to turn away in place of an arriving request, of
those that wait for prefill.

Nothing of them was streamed, so they are refused like an arriving request. Lower priorities go first; of one priority
the most work where a queue is too long, so that few go for one, and the newest where too many would decode, since to
take long prompts out lets more begin to decode. docs/policies.md has figures. Nobody is turned away unless that makes
room for the request it is done for.

Clients say their priorities themselves, so these rank the requests of one tenant only. Of other tenants those go that
have more requests in progress, next to their weights, than the arriving request's tenant would have, the most first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from isthmus.core.conductor.events import RequestArrived
from isthmus.core.conductor.view import NodeView, RequestView, View
from isthmus.core.types import NS_PER_S

KEPT_NS = 3 * NS_PER_S
"""Somewhat longer than refused clients are told to wait (`Rules.retry_after_ms`)."""


def newest_first(request: RequestView) -> float:
    return -request.arrived_ns


def most_work_first(request: RequestView) -> float:
    return -request.work_ns


def waiting_below(
    view: View,
    nodes: Iterable[NodeView],
    arriving: RequestArrived,
    order: Callable[[RequestView], float] = newest_first,
) -> list[RequestView]:
    """Requests in these nodes' queues that may be turned away for `arriving`, the first to go first; not those in
    service."""
    waiting = []
    for node in nodes:
        in_service = True
        for request in node.prefills.values():
            if not in_service and not request.answering:
                waiting.append(request)
            in_service = False
    waiting.reverse()  # so that of those that came at one time the last goes first
    waiting.sort(key=lambda request: (request.arrived.priority, order(request), newest_first(request)))
    above = _above_share(view, waiting, arriving) if arriving.weight else []
    return above + [request for request in waiting if _ranks_below(request.arrived, arriving)]


def _ranks_below(waiting: RequestArrived, arriving: RequestArrived) -> bool:
    """By priority, which tenants that have shares give to their own requests."""
    apart = waiting.weight and arriving.weight and waiting.tenant != arriving.tenant
    return waiting.priority < arriving.priority and not apart


def _above_share(view: View, waiting: Iterable[RequestView], arriving: RequestArrived) -> list[RequestView]:
    """Those of other tenants that have more than the arriving request's would; of each tenant, in the order given, so
    many that this stays true with one of them less. The tenant with the most goes first."""
    numbers = in_progress(view)
    level = (numbers[arriving.tenant] + 1) / arriving.weight
    ranked: list[tuple[float, RequestView]] = []
    for request in waiting:
        facts = request.arrived
        if not facts.weight or facts.tenant == arriving.tenant:
            continue
        above = numbers[facts.tenant] / facts.weight
        if above > level:
            numbers[facts.tenant] -= 1
            ranked.append((above, request))
    ranked.sort(key=lambda item: -item[0])
    return [request for _, request in ranked]


def in_progress(view: View) -> Counter[str]:
    """Requests of each tenant that has a share."""
    return Counter([each.arrived.tenant for each in view.requests.values() if each.arrived.weight])


class ReservedPlaces:
    """Kept for tenants that were refused with less than their share in progress, one for each, until it is taken or
    nobody came for it in `KEPT_NS`. Else who asks most often would get each place that becomes free."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[int, float]] = {}  # and the tenant's weight

    def num_kept(self, view: View, arriving: RequestArrived, now: int) -> int:
        """From this request: for tenants that have less, next to their weights, than its own would."""
        self._until = {name: kept for name, kept in self._until.items() if kept[0] > now}
        if not self._until or not arriving.weight:
            return 0
        numbers = in_progress(view)
        level = (numbers[arriving.tenant] + 1) / arriving.weight
        others = [(name, weight) for name, (_, weight) in self._until.items() if name != arriving.tenant]
        return sum([(numbers[name] + 1) / weight < level for name, weight in others])

    def refused(self, arriving: RequestArrived, now: int) -> None:
        if arriving.weight:
            self._until[arriving.tenant] = now + KEPT_NS, arriving.weight

    def taken(self, arriving: RequestArrived) -> None:
        self._until.pop(arriving.tenant, None)


def to_replace(view: View, request: RequestArrived) -> list[RequestView]:
    """Whom to turn away so that there is one request less; empty when nobody may be."""
    return waiting_below(view, view.prefills, request, most_work_first)[:1]


def to_shorten(view: View, node: NodeView, request: RequestArrived, excess_ns: float) -> list[RequestView]:
    """Whom to turn away so that the node's queue is `excess_ns` shorter; empty when that is not enough."""
    chosen = []
    for victim in waiting_below(view, [node], request, most_work_first):
        if excess_ns <= 0:
            break
        chosen.append(victim)
        excess_ns -= victim.work_ns
    return chosen if excess_ns <= 0 else []


def to_thin(view: View, request: RequestArrived, num_requests: int, until: int) -> list[RequestView]:
    """Whom to turn away so that at `until` `num_requests` fewer decode; empty when there are not so many."""
    waiting = waiting_below(view, view.prefills, request)
    chosen = [victim for victim in waiting if victim.expected_ns <= until][:num_requests]
    return chosen if len(chosen) == num_requests else []
