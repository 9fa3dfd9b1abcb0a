"""The desk: what follows from the conductor's answers, for whoever carries them out.

Owns which requests have somebody who waits for their end. Pure, as the conductor behind it; it knows neither tokens nor
sessions nor clocks: the live head and the simulator are carriers and timers around it, and say what came of that.
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
    """To a node, which need not be there any more."""

    node: NodeId
    order: Order


End = Refuse | Fail | RequestEnded | RequestCancelled
"""Each request ends with one of them, once."""

Answer = Route | Abort | SendOrder | Hold | End | ThresholdSet | Remember | Unremember


class Desk:
    """`on` takes a fact, and returns what is to be done, in this order. With a `Route` an attempt begins, and its nodes
    are told its `parts`; with `Abort`, what still comes of it is nobody's; with an `End` the request is over.

    `rejoin_ms`: so long a request waits for a node to come back; `log` hears each event of the conductor with its
    actions.
    """

    def __init__(
        self,
        conductor: Conductor,
        rejoin_ms: int,
        log: Callable[[int, Event, list[Action]], None] | None = None,
    ) -> None:
        self.conductor, self._rejoin_ms, self.log = conductor, rejoin_ms, log
        self._open: dict[RequestId, RequestArrived] = {}
        self._follow: dict[type, Callable[..., list[Answer]]] = {
            Abort: self._stopped,
            Hold: lambda hold: [hold if hold.wait_ms else replace(hold, wait_ms=self._rejoin_ms)],
            Refuse: self._over,
            Fail: self._over,
            Convert: lambda order: [SendOrder(order.node, order)],
            **dict.fromkeys((Lend, Repay), lambda order: [SendOrder(order.home, order)]),
            **dict.fromkeys((Route, ThresholdSet, Remember, Unremember), lambda action: [action]),
        }

    def on(self, event: Event, now: int) -> Sequence[Answer]:
        """Void, and not for the conductor to hear: the end of a request that is over, and a first token that is not the
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
                if request is None or not request.is_silent:
                    return ()
        actions = self.conductor.on(event, now)
        if self.log is not None:
            self.log(now, event, actions)
        if not actions and end is None:
            return ()
        answers = [answer for action in actions for answer in self._follow[type(action)](action)]
        return answers if end is None else [*answers, *self._over(end)]

    def parts(self, route: Route, num_generated: int) -> list[tuple[NodeId, StartAttempt]]:
        """What each node of a route is told when the client has `num_generated` tokens, which are part of what is
        prefilled now. The decode node comes first: it is asked for room while the prompt waits. Nobody is told of an
        attempt that was over at once."""
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
        """The request, if this attempt at it is under way."""
        request = self.conductor.view.requests.get(name)
        if request is None or request.attempt != attempt or request.state is WAITING:
            return None
        return request

    def check(self) -> None:
        """Who waits for the end of a request, and whom the conductor serves, are the same."""
        self.conductor.check()
        assert self._open.keys() == self.conductor.view.requests.keys(), (
            "a request was forgotten, or never ends"
        )

    # What follows.

    def _stopped(self, abort: Abort) -> list[Answer]:
        forget = DropAttempt(key_of(abort.request, abort.attempt))
        return [abort, *[SendOrder(node, forget) for node in abort.nodes]]

    def _over(self, end: End) -> list[Answer]:
        del self._open[end.request]
        return [end]
