"""The conductor: one object, `on(event, now)`, and the answers to everything that happens to a request."""

from __future__ import annotations

import msgspec

from isthmus.conductor.events import (
    Abort,
    Action,
    BlocksEvicted,
    BlocksStored,
    Event,
    Fail,
    Hold,
    HoldExpired,
    NodeJoined,
    NodeLeft,
    PrefillFinished,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestFailed,
    Route,
)
from isthmus.conductor.policies import POLICIES
from isthmus.conductor.view import ClusterView, NodeView, RequestView
from isthmus.types import NodeId, RequestId, Role


class Rules(msgspec.Struct, frozen=True):
    """What the operator decides. `max_requests`: accepted at once; `max_attempts`: routes of one request."""

    policy: str = "least_loaded"
    max_requests: int = 1024
    max_attempts: int = 3
    retry_after_ms: int = 1000


class Conductor:
    """Pure: the same events give the same actions, whatever the clock says.

    `now` (ns) is part of the contract for policies that predict; the present one does not use it.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.view = ClusterView()
        self._policy = POLICIES[rules.policy]

    def on(self, event: Event, now: int) -> list[Action]:
        """Takes one fact, returns what follows from it, in order. Mutates the view."""
        match event:
            case RequestArrived():
                return self._arrive(event)
            case PrefillFinished():
                request = self._attempt(event.request, event.attempt)
                if request is not None:
                    self.view.prefill_done(request)
                return []
            case RequestEnded() | RequestCancelled():
                return self._forget(event.request)
            case RequestFailed():
                request = self._attempt(event.request, event.attempt)
                return [] if request is None else self._again(request, event.reason)
            case HoldExpired():
                request = self._attempt(event.request, event.attempt)
                return [self._fail(request)] if request is not None and request.held else []
            case NodeJoined():
                self.view.nodes[event.node] = NodeView(event)
                return self._resume()
            case NodeLeft():
                return self._node_left(event)
            case BlocksStored():
                if event.node in self.view.nodes:
                    self.view.nodes[event.node].blocks.update(event.names)
                return []
            case BlocksEvicted():
                if event.node in self.view.nodes:
                    self.view.nodes[event.node].blocks.difference_update(event.names)
                return []

    def check(self) -> None:
        self.view.check()

    def _attempt(self, request: RequestId, attempt: int) -> RequestView | None:
        """The request, if this is its current attempt: what comes late from an earlier one is void."""
        view = self.view.requests.get(request)
        return view if view is not None and view.attempt == attempt else None

    def _arrive(self, event: RequestArrived) -> list[Action]:
        if len(self.view.requests) >= self.rules.max_requests:
            reason = f"{self.rules.max_requests} requests are in progress, the limit (limits.max_requests)"
            return [Refuse(event.request, "overloaded", reason, self.rules.retry_after_ms)]
        request = RequestView(event)
        route = self._route(request)
        if route is None:
            return [self._refusal(event)]
        self.view.requests[event.request] = request
        return [route]

    def _refusal(self, event: RequestArrived) -> Refuse:
        """Too long for every node here, now and later; or no node here for one of its parts, for now."""
        length = event.num_tokens + event.max_tokens
        largest = self.view.largest(Role.DECODE, Role.MIXED)
        if 0 < largest < length:
            reason = (
                f"{length} tokens (prompt and answer) exceed the KV memory of every node ({largest} tokens)"
            )
            return Refuse(event.request, "too_long", reason)
        largest = self.view.largest(Role.PREFILL, Role.MIXED)
        if 0 < largest < event.num_tokens:
            reason = f"{event.num_tokens} prompt tokens exceed the KV memory of every node ({largest} tokens)"
            return Refuse(event.request, "too_long", reason)
        return Refuse(event.request, "unavailable", "no node can serve this now", self.rules.retry_after_ms)

    def _route(self, request: RequestView) -> Route | None:
        placement = self._policy(self.view, request.arrived)
        if placement is None:
            return None
        prefill, decode = placement
        self.view.book(request, prefill, decode)
        request.attempt += 1
        return Route(request.arrived.request, request.attempt, prefill.node, decode.node)

    def _again(self, request: RequestView, reason: str) -> list[Action]:
        """Ends the current attempt everywhere; then routes another, holds the request, or fails it."""
        if request.held:
            return []  # a second report of the attempt that ended
        name, nodes = request.arrived.request, self._alive(request)
        actions: list[Action] = [Abort(name, request.attempt, nodes)] if nodes else []
        self.view.unbook(request)
        request.reason = reason
        if request.attempt >= self.rules.max_attempts:
            return [*actions, self._fail(request)]
        route = self._route(request)
        if route is not None:
            return [*actions, route]
        request.held = True
        return [*actions, Hold(name, request.attempt, reason)]

    def _resume(self) -> list[Action]:
        """Routes what is on hold, in the order of arrival, as far as the nodes now allow."""
        routes: list[Action] = []
        for request in self.view.requests.values():
            route = self._route(request) if request.held else None
            if route is not None:
                request.held = False
                routes.append(route)
        return routes

    def _fail(self, request: RequestView) -> Fail:
        name = request.arrived.request
        del self.view.requests[name]
        return Fail(name, f"{request.reason} (attempt {request.attempt} of {self.rules.max_attempts})")

    def _forget(self, name: RequestId) -> list[Action]:
        request = self.view.requests.pop(name, None)
        if request is None:
            return []
        nodes = self._alive(request)
        self.view.unbook(request)
        return [Abort(name, request.attempt, nodes)] if nodes else []

    def _node_left(self, event: NodeLeft) -> list[Action]:
        if self.view.nodes.pop(event.node, None) is None:
            return []
        return [
            action
            for request in self.view.requests_on(event.node)
            for action in self._again(request, f"node {event.node} is gone")
        ]

    def _alive(self, request: RequestView) -> tuple[NodeId, ...]:
        return tuple(node for node in request.nodes if node in self.view.nodes)
