"""Load is shed by priority: whom to turn away in place of a request of higher priority, of those that wait for prefill.

Nothing of them was streamed, so they are refused like an arriving request. Lower priorities go first; of one priority
the most work where a queue is too long, so that few go for one, and the newest where too many would decode, since to
take long prompts out lets more begin to decode. docs/policies.md has figures. Nobody is turned away unless that makes
room for the request it is done for.
"""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.conductor.events import RequestArrived
from isthmus.conductor.view import NodeView, RequestView, View


def waiting_below(nodes: Iterable[NodeView], priority: int) -> list[RequestView]:
    """Requests of a lower priority in these nodes' queues, the first to go first; not those in service."""
    found = []
    for node in nodes:
        in_service = True
        for request in node.prefills.values():
            if not in_service and request.arrived.priority < priority and not request.streaming:
                found.append(request)
            in_service = False
    found.reverse()  # so that of those that came at one time the last goes first
    found.sort(key=lambda request: (request.arrived.priority, -request.arrived_ns))
    return found


def _most_work_first(found: list[RequestView]) -> list[RequestView]:
    return sorted(found, key=lambda request: (request.arrived.priority, -request.work_ns))


def to_replace(view: View, request: RequestArrived) -> list[RequestView]:
    """Whom to turn away so that there is one request less; empty when nobody may be."""
    return _most_work_first(waiting_below(view.prefills, request.priority))[:1]


def to_shorten(node: NodeView, request: RequestArrived, excess_ns: float) -> list[RequestView]:
    """Whom to turn away so that the node's queue is `excess_ns` shorter; empty when that is not enough."""
    chosen = []
    for victim in _most_work_first(waiting_below([node], request.priority)):
        if excess_ns <= 0:
            break
        chosen.append(victim)
        excess_ns -= victim.work_ns
    return chosen if excess_ns <= 0 else []


def to_thin(view: View, request: RequestArrived, num_requests: int, until: int) -> list[RequestView]:
    """Whom to turn away so that at `until` `num_requests` fewer decode; empty when there are not so many."""
    waiting = waiting_below(view.prefills, request.priority)
    chosen = [victim for victim in waiting if victim.expected_ns <= until][:num_requests]
    return chosen if len(chosen) == num_requests else []
