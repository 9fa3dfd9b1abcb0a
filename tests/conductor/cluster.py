"""A cluster that does what the conductor says, and checks that it may."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from isthmus.conductor import (
    Abort,
    Action,
    BlocksStored,
    Conductor,
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
    Rules,
)
from isthmus.types import BlockName, NodeId, RequestId, Role

BLOCK_SIZE = 4


class Cluster:
    """Every request, by name: its current route while it lives, and how it ended."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.conductor = Conductor(rules or Rules())
        self.roles: dict[NodeId, Role] = {}
        self.routes: dict[RequestId, Route] = {}
        self.ended: dict[RequestId, str] = {}
        self.held: set[RequestId] = set()
        self.holders: dict[
            tuple[RequestId, int], set[NodeId]
        ] = {}  # nodes told of an attempt, not yet to forget
        self.log: list[tuple[Event, tuple[Action, ...]]] = []

    def on(self, event: Event) -> list[Action]:
        actions = self.conductor.on(event, len(self.log))
        self.conductor.check()
        self.log.append((event, tuple(actions)))
        for action in actions:
            self._act(action)
        return actions

    def join(self, node: str, role: Role, capacity_tokens: int = 1000) -> None:
        self.roles[NodeId(node)] = role
        held = set(self.held)
        for action in self.on(NodeJoined(NodeId(node), role, capacity_tokens, BLOCK_SIZE)):
            assert isinstance(action, Route) and action.request in held, "only what is held resumes"

    def leave(self, node: str) -> list[Action]:
        self.roles.pop(NodeId(node), None)
        for holders in self.holders.values():
            holders.discard(NodeId(node))
        actions = self.on(NodeLeft(NodeId(node)))
        assert all(
            NodeId(node) not in (route.prefill, route.decode) or self.prefilled(route)
            for route in self.routes.values()
        )
        return actions

    def arrive(
        self, request: str, num_tokens: int = 8, max_tokens: int = 10, names: Sequence[BlockName] = ()
    ) -> Action:
        (action,) = self.on(RequestArrived(RequestId(request), "", num_tokens, max_tokens, tuple(names)))
        return action

    def route(self, request: str, *arguments: int, names: Sequence[BlockName] = ()) -> tuple[str, str]:
        """Where an arriving request goes: prefill node, decode node."""
        action = self.arrive(request, *arguments, names=names)
        assert isinstance(action, Route), action
        return action.prefill, action.decode

    def refusal(self, request: str, *arguments: int) -> Refuse:
        action = self.arrive(request, *arguments)
        assert isinstance(action, Refuse), action
        return action

    def store(self, node: str, *names: BlockName) -> None:
        assert self.on(BlocksStored(NodeId(node), names)) == []

    def prefilled(self, route: Route) -> bool:
        return not self.conductor.view.requests[route.request].prefilling

    def finish_prefill(self, request: str, attempt: int = 1) -> None:
        assert self.on(PrefillFinished(RequestId(request), attempt)) == []

    def end(self, request: str) -> list[Action]:
        self._end(RequestId(request), "ended")
        return self.on(RequestEnded(RequestId(request)))

    def cancel(self, request: str) -> list[Action]:
        self._end(RequestId(request), "cancelled")
        return self.on(RequestCancelled(RequestId(request)))

    def fail(self, request: str, attempt: int) -> list[Action]:
        return self.on(RequestFailed(RequestId(request), attempt, "it broke"))

    def expire(self, request: str) -> list[Action]:
        """The wait of a request on hold is over."""
        return self.on(HoldExpired(RequestId(request), self.routes[RequestId(request)].attempt))

    def loads(self) -> dict[str, tuple[int, int]]:
        """Tokens to prefill and tokens held, by node."""
        nodes = self.conductor.view.nodes.values()
        return {str(node.node): (node.prefill_tokens, node.decode_tokens) for node in nodes}

    def encoded_log(self) -> bytes:
        return msgspec.json.encode(self.log)

    def drain(self) -> None:
        """Ends what lives, and checks that nothing of it stays anywhere."""
        for request in list(self.routes):
            self.end(request)
        assert set(self.loads().values()) <= {(0, 0)}
        assert not any(self.holders.values()), "a node was never told to forget a request"
        assert not self.conductor.view.requests

    def _end(self, request: RequestId, how: str) -> None:
        self.held.discard(request)
        if self.routes.pop(request, None) is not None:
            assert request not in self.ended
            self.ended[request] = how

    def _act(self, action: Action) -> None:
        match action:
            case Route():
                self._on_route(action)
            case Refuse():
                assert action.request not in self.routes and action.request not in self.ended
                self.ended[action.request] = "refused"
            case Abort():
                assert action.nodes and len(set(action.nodes)) == len(action.nodes)
                assert set(action.nodes) <= set(self.roles), "a node that left was told something"
                assert self.holders[action.request, action.attempt] <= set(action.nodes)
                self.holders[action.request, action.attempt] = set()
            case Hold():
                assert action.request in self.routes and action.request not in self.held
                assert action.attempt == self.routes[action.request].attempt
                self.held.add(action.request)
            case Fail():
                assert action.request in self.routes, "a request failed that does not live"
                self._end(action.request, "failed")

    def _on_route(self, route: Route) -> None:
        before = self.routes.get(route.request)
        assert route.attempt == (1 if before is None else before.attempt + 1)
        assert route.attempt <= self.conductor.rules.max_attempts
        assert {route.prefill, route.decode} <= set(self.roles), "a route leads to a node that left"
        assert self.roles[route.prefill] is not Role.DECODE
        assert route.prefill == route.decode or self.roles[route.decode] is Role.DECODE
        assert not self.holders.get((route.request, route.attempt - 1)), "two attempts are under way"
        self.held.discard(route.request)
        self.routes[route.request] = route
        self.holders[route.request, route.attempt] = {route.prefill, route.decode}
