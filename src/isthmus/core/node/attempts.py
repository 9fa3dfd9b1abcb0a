"""The attempts of one node, by key: each begins once, may be given up, and fails with one report."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Generic, Protocol, TypeVar

from isthmus.core.attempts import RequestFailed
from isthmus.core.node.events import StartAttempt, Wake
from isthmus.core.scheduler import Actions
from isthmus.core.types import NS_PER_MS, NodeId, RequestId

SEVERED_NS = 250 * NS_PER_MS
"""Grace period before a node reports a lost peer. The head usually notices first; without the period one node's death
would use up two attempts."""
MAX_EARLY = 4096
"""Letters of attempts that have not begun; more are of attempts that never will."""


class Begun(Protocol):
    """What every attempt knows. `due_ns`: when it is given up for `reason`, or goes on; 0 for never."""

    begin: StartAttempt
    due_ns: int
    reason: str


A = TypeVar("A", bound=Begun)


class Attempts(dict[RequestId, A], Generic[A]):
    """Of the node that is called `node`."""

    def __init__(self, node: NodeId) -> None:
        super().__init__()
        self._node = node
        self._early: OrderedDict[tuple[NodeId, RequestId], Any] = OrderedDict()

    def add(self, attempt: A) -> None:
        key = attempt.begin.key
        assert key not in self, f"{key} began twice"
        self[key] = attempt

    def give_up(self, attempt: A, peer: NodeId, reason: str, now: int, actions: Actions) -> None:
        """Its peer is gone: it fails after a while, unless the head has decided otherwise."""
        attempt.due_ns, attempt.reason = now + SEVERED_NS, f"the session with {peer} ended: {reason}"
        actions.append(Wake(attempt.due_ns))

    def due(self, now: int) -> list[A]:
        return [attempt for attempt in self.values() if 0 < attempt.due_ns <= now]

    def failure(self, attempt: A, reason: str, *, final: bool = False, no_room: bool = False) -> RequestFailed:
        """What the conductor hears, who may try again. `final`: the reason lies in the request, not in this node."""
        route = attempt.begin.route
        reason = reason if final else f"{self._node}: {reason}"
        return RequestFailed(route.request, route.attempt, reason, final=final, no_room=no_room)

    # Letters that came before the head's word of their attempt: two sessions have no common order.

    def put_early(self, peer: NodeId, letter: Any) -> None:
        self._early[peer, letter.key] = letter
        if len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)

    def take_early(self, peer: NodeId, key: RequestId) -> Any | None:
        """What `peer` said of an attempt that begins or ends now."""
        return self._early.pop((peer, key), None)
