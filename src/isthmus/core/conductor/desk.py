"""The desk: turns the conductor's actions into orders to nodes and ends of requests, for live head and simulator.

Owns which requests are open. Pure; must not know tokens, sessions or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from isthmus.core.attempts import Convert, DropAttempt, Lend, Order, Repay, Route, StartAttempt, key_of
from isthmus.core.conductor.conductor import Conductor
from isthmus.core.conductor.events import (
    Abort,
    Action,
    Dismiss,
    Event,
    Fail,
    FirstToken,
    Hold,
    Refuse,
    Remember,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    ThresholdSet,
    Unremember,
)
from isthmus.core.conductor.view import WAITING, RequestView
from isthmus.core.types import DECODE, MIXED, PREFILL, NodeId, RequestId, sharing


class SendOrder(msgspec.Struct, frozen=True):
    """An order to a node, which may have left."""

    node: NodeId
    order: Order


End = Refuse | Fail | RequestEnded | RequestCancelled
"""Each request ends with exactly one of these."""

Answer = Route | Abort | SendOrder | Hold | End | Dismiss | ThresholdSet | Remember | Unremember


class Desk:
    """`on` takes an event and returns answers to carry out in order: a `Route` begins an attempt, whose nodes get its
    `parts`; after an `Abort` anything that still comes of the attempt is void; an `End` ends the request.

    `rejoin_ms`: how long a request waits for a node to come back; `log` hears each event with the conductor's actions.
    """

    def __init__(
        self,
        conductor: Conductor,
        rejoin_ms: int,
        log: Callable[[int, Event, list[Action]], None] | None = None,
    ) -> None:
        self.conductor, self._rejoin_ms, self.log = conductor, rejoin_ms, log
        self._open: dict[RequestId, RequestArrived] = {}

    def on(self, event: Event, now: int) -> Sequence[Answer]:
        """Keeps void events from the conductor: the end of a request that is over, and a first token that is not the
        first of an attempt under way."""
        end: RequestEnded | RequestCancelled | None = None
        match event:
            case RequestArrived():
                assert event.request not in self._open, "two requests of one name"
                self._open[event.request] = event
            case RequestEnded() | RequestCancelled():
                end = event
                if event.request not in self._open:
                    return ()
            case FirstToken():
                request = self.under_way(event.request, event.attempt)
                is_first = request is not None and (request.is_silent or request.is_presumed > event.presumed)
                if not is_first:
                    return ()
        actions = self.conductor.on(event, now)
        if self.log is not None:
            self.log(now, event, actions)
        if not actions and end is None:
            return ()
        answers = [answer for action in actions for answer in self._follow(action)]
        return answers if end is None else [*answers, *self._over(end)]

    def _follow(self, action: Action) -> list[Answer]:
        match action:
            case Abort():
                return self._stopped(action)
            case Hold():
                return [action if action.wait_ms else replace(action, wait_ms=self._rejoin_ms)]
            case Refuse() | Fail():
                return self._over(action)
            case Convert():
                return [SendOrder(action.node, action)]
            case Lend() | Repay():
                return [SendOrder(action.home, action)]
        return [action]

    def parts(self, route: Route, num_generated: int) -> list[tuple[NodeId, StartAttempt]]:
        """Orders to the nodes of a route; empty if its request is already over. `num_generated` tokens, which the
        client has, are prefilled too. The decode node comes first, so that it finds room while the prompt waits."""
        arrived = self._open.get(route.request)
        if arrived is None:
            return []
        names = arrived.names
        if num_generated:  # the block that the prompt leaves unfinished is another one with tokens behind it
            names = names[: arrived.num_tokens // self.conductor.view.block_size]
        parts = [(route.decode, DECODE), (route.prefill, PREFILL)]
        if route.prefill == route.decode:
            parts = [(route.prefill, MIXED)]
        key, length = key_of(route.request, route.attempt), arrived.num_tokens
        stop = length + max(1, arrived.max_tokens)  # where the prompt alone is scored, one token ends that
        tenant = sharing(arrived.tenant, arrived.weight)
        return [
            (node, StartAttempt(key, part, route, length + num_generated, stop, names, tenant))
            for node, part in parts
        ]

    def under_way(self, name: RequestId, attempt: int) -> RequestView | None:
        """The request, if this attempt is under way."""
        request = self.conductor.view.requests.get(name)
        if request is None or request.attempt != attempt or request.state is WAITING:
            return None
        return request

    def check(self) -> None:
        """Asserts that open requests are those that the conductor serves."""
        self.conductor.check()
        assert self._open.keys() == self.conductor.view.requests.keys(), (
            "a request was forgotten, or never ends"
        )

    def _stopped(self, abort: Abort) -> list[Answer]:
        forget = DropAttempt(key_of(abort.request, abort.attempt))
        return [abort, *[SendOrder(node, forget) for node in abort.nodes]]

    def _over(self, end: End) -> list[Answer]:
        del self._open[end.request]
        return [end]
