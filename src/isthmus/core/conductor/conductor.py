"""The conductor: one method for each event, and the actions that follow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from msgspec.structs import replace

from isthmus.core.attempts import (
    BlocksEvicted,
    BlocksStored,
    FetchFinished,
    Holding,
    HoldingsChanged,
    MemoryUsed,
    PrefillFinished,
    RequestFailed,
    RoleChanged,
    Route,
    num_left_out,
)
from isthmus.core.conductor import copies, lending
from isthmus.core.conductor.admission import (
    Admission,
    Overload,
    ReservedPlaces,
    limit_ns,
    to_replace,
    to_shorten,
    to_thin,
)
from isthmus.core.conductor.capacity import Capacity
from isthmus.core.conductor.control import Conversion, OffloadControl, encoded
from isthmus.core.conductor.donors import Donors
from isthmus.core.conductor.events import (
    Abort,
    Action,
    Dismiss,
    Event,
    Fail,
    FirstToken,
    Hold,
    HoldExpired,
    LinksMeasured,
    NodeDrains,
    NodeJoined,
    NodeLeft,
    NodeProbed,
    NodeStays,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    Rules,
    TimePassed,
)
from isthmus.core.conductor.eviction_cost import EvictionCost
from isthmus.core.conductor.lending import Lending
from isthmus.core.conductor.routing import Router
from isthmus.core.conductor.slowness import Slowness
from isthmus.core.conductor.view import WAITING, Kept, NodeView, Placement, RequestView, View
from isthmus.core.types import MEMORY, NodeId, RequestId, Role

LEAST_WAIT_MS, MOST_WAIT_MS = 10, 1000
"""Wait before placing a request again that found no memory: doubled each time, cut short when another request ends."""
LOOK_BEHIND = 4
"""Waiting requests to try behind one that finds no memory, whenever some is free."""
MAX_VAIN = 10
"""Attempts to find memory while no other request has any, before a request fails."""
MAX_LOSSES = 10
"""Attempts of one request that may end by the loss of a node or link without counting against `max_attempts`. A limit,
since the request itself may bring its nodes down."""


class Conductor:
    """Pure: equal events at equal times give equal actions. `now` is in ns and never decreases."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.view = View(rules.links)
        self._donors = Donors(self.view, rules)
        self._router = Router(self.view, rules, self._donors)
        self._capacity = Capacity(self.view, rules)
        self._control = OffloadControl(self.view, rules, self._router, self._capacity)
        self._conversion = Conversion(self.view, rules, self._capacity)
        self._learns_lengths = bool(rules.links) or rules.convert
        self._admission = Admission(rules)
        self._eviction_cost = EvictionCost(self.view)
        self._lending = Lending(self.view, rules)
        self._places = ReservedPlaces()
        self._leaving: dict[NodeId, bool] = {}  # nodes that drain for good, and whether they are dismissed
        self.slowness = Slowness(self.view, self._router)
        self._short: dict[RequestId, None] = {}  # requests that wait for memory, first come first
        self._handlers: dict[type, Callable[..., list[Action]]] = {
            RequestArrived: self._arrive,
            RequestEnded: self._ended,
            RequestCancelled: lambda event, now: self._forget(event.request, now),
            NodeJoined: self._node_joined,
            LinksMeasured: self._measured,
            HoldingsChanged: self._spread,
            TimePassed: self._time_passed,
        }
        self._of_attempts: dict[type, Callable[..., list[Action]]] = {
            FetchFinished: self._fetched,
            FirstToken: self._first_token,
            PrefillFinished: self._handed_over,
            RequestFailed: self._failed,
            HoldExpired: self._hold_expired,
        }
        self._of_nodes: dict[type, Callable[..., list[Action]]] = {
            NodeLeft: self._node_left,
            NodeDrains: self._node_drains,
            NodeStays: self._node_stays,
            RoleChanged: self._role_changed,
            BlocksStored: self._stored,
            BlocksEvicted: self._evicted,
            MemoryUsed: self._memory_used,
            NodeProbed: self._probed,
        }

    def on(self, event: Event, now: int) -> list[Action]:
        """Takes one event and returns the actions that follow, in order. Mutates the view. Events of attempts that are
        over, and of nodes that left, are void."""
        actions = self._handle(event, now)
        return [*actions, *self._dismiss()] if self._leaving else actions

    def _handle(self, event: Event, now: int) -> list[Action]:
        kind, facts = type(event), cast(Any, event)
        if (of_attempt := self._of_attempts.get(kind)) is not None:
            request = self._attempt(facts.request, facts.attempt)
            return [] if request is None else of_attempt(request, event, now)
        if (of_node := self._of_nodes.get(kind)) is not None:
            node = self.view.nodes.get(facts.node)
            return [] if node is None else of_node(node, event, now)
        return self._handlers[kind](event, now)

    def check(self) -> None:
        self.view.check()
        self._conversion.check()
        self._donors.check()
        for name, is_dismissed in self._leaving.items():
            node = self.view.nodes[name]
            assert node.draining and (is_dismissed or not self.view.is_idle(node)), "it has drained"

    # A request's way.

    def _arrive(self, event: RequestArrived, now: int) -> list[Action]:
        victims: list[RequestView] = []
        num_free = self.rules.max_requests - len(self.view.requests)
        num_kept = self._places.num_kept(self.view, event, now) if event.weight else 0
        if num_free <= num_kept:
            victims = to_replace(self.view, event) if num_free <= 0 else []
            if not victims:
                self._places.refused(event, now)
                reason = f"{self.rules.max_requests} requests are in progress, the limit (limits.max_requests)"
                if num_free > 0:
                    reason = "the last places (limits.max_requests) are for tenants with less than their share"
                return [Refuse(event.request, "overloaded", reason, self.rules.retry_after_ms, "prefill")]
        self._places.taken(event)
        request, placement = RequestView(event, now), self._router.place(event, now)
        if placement is None:
            return self._unplaced(request, victims, self.rules.wait_ms, now)
        return self._accept(request, placement, victims, now)

    def _accept(
        self, request: RequestView, placement: Placement, victims: list[RequestView], now: int
    ) -> list[Action]:
        """Routes a request for the first time, or refuses it, at its arrival or after it waited for a node."""
        event = request.arrived
        overload = self._admission.at_arrival(self.view, event, placement, now, now - request.arrived_ns)
        if overload is not None:
            victims = self._victims(event, placement, overload, now)
            if not victims:
                self.view.requests.pop(event.request, None)
                return [_overloaded(event.request, overload)]
        actions: list[Action] = []
        if victims:
            actions += self._turn_away(victims, event, now)
            again = self._router.place(event, now)
            assert again is not None
            placement = again
        self.view.requests[event.request] = request
        cluster = placement.prefill.cluster
        cluster.recent.accept(now)
        if self._learns_lengths:
            self._capacity.add(event.num_tokens, placement)
        self._eviction_cost.asked(event, cluster, placement.deepest, now)
        actions.append(self._route(request, placement, now))
        return [*actions, *self._donors.forget_gone()] if event.content is not None else actions

    def _route(self, request: RequestView, placement: Placement, now: int) -> Route:
        event = request.arrived
        placement.prefill.cluster.recent.insert(min(len(event.names), placement.named) - placement.own, now)
        request.attempt += 1
        limit = limit_ns(event.ttft_ms, self.rules.ttft_ms)
        deadline_ns = request.arrived_ns + int(limit * (1 - self.rules.reserve)) if limit else 0
        route, prefill = _route_of(request, placement, deadline_ns), placement.prefill
        left_out = num_left_out(route, event.num_tokens, prefill.block_size) * prefill.block_size
        kv_bytes = (event.num_tokens - left_out) * prefill.cost.kv_token_bytes
        self.view.assign(request, placement, kv_bytes, now)
        request.kept = None
        target, fetched = placement.prefill, list(placement.donated)
        if placement.source is not None:
            fetched.append((placement.source, placement.fetch_bytes))
        begun = [
            copies.begin(source.link_out, target.link_in, num_bytes, now, self.view.across(source, target))
            for source, num_bytes in fetched
        ]
        request.copies = tuple(begun)
        if not self.rules.codecs:
            return route
        fetch, codec = encoded(self.rules, request, placement, kv_bytes, now)
        return replace(route, fetch=fetch, codec=codec)

    def _fetched(self, request: RequestView, event: FetchFinished, now: int) -> list[Action]:
        self.view.end_copy(request)
        return []

    def _first_token(self, request: RequestView, event: FirstToken, now: int) -> list[Action]:
        if not event.presumed:
            request.first_attempt = request.first_attempt or event.attempt
        if request.is_presumed:  # it comes
            request.is_presumed = False
            return []
        request.is_presumed = event.presumed
        self.view.first_token(request, now, teaches=event.teaches and not event.presumed)
        if not request.answering:
            overload = self._admission.at_decode(self.view, request, now)
            if overload is not None:
                return self._withdraw(request, _overloaded(event.request, overload), now)
        request.answering = request.attempt
        return [*self._donors.remember(request)]

    def _handed_over(self, request: RequestView, event: PrefillFinished, now: int) -> list[Action]:
        self.view.first_token(request, now)  # the first token may not have been reported
        self.view.handed_over(request, now)
        return []

    def _ended(self, event: RequestEnded, now: int) -> list[Action]:
        request = self.view.requests.get(event.request)
        if request is not None and event.num_generated:
            self.view.outputs.add(event.num_generated)
            self.view.answered(request, event.num_generated, now)
        return self._forget(event.request, now)

    def _forget(self, name: RequestId, now: int) -> list[Action]:
        request = self.view.requests.pop(name, None)
        if request is None:
            return []
        actions = self._abort(request, now)
        self._short.pop(name, None)
        return [*actions, *self._admit(now)]

    def _attempt(self, request: RequestId, attempt: int) -> RequestView | None:
        """The request, if this is its current attempt."""
        view = self.view.requests.get(request)
        return view if view is not None and view.attempt == attempt else None

    # Refusals.

    def _unplaced(
        self, request: RequestView, victims: list[RequestView], wait_ms: int, now: int
    ) -> list[Action]:
        """Holds a request that cannot be placed, in place of `victims`, or refuses it. It waits for memory if nodes
        of a cluster have enough together but not free, else up to `wait_ms` for a node of a missing role."""
        event = request.arrived
        for_room, reason = self._waits_for_room(event), "no memory is free for it"
        if not for_room:
            refusal = self._refusal(event)
            if refusal.code != "unavailable" or not wait_ms:
                return [refusal]
            reason = refusal.reason
        elif not any(
            lending.leaves_room(self.view.members(each), event) for each in self.view.clusters.values()
        ):
            reason = f"no node has KV memory for an answer of {event.max_tokens} tokens"
            return [Refuse(event.request, "too_long", f"{reason}: only prompts lie on several nodes here")]
        actions = self._turn_away(victims, event, now)
        self.view.requests[event.request] = request
        if for_room:
            return [*actions, self._wait_for_room(request, reason)]
        request.reason = reason
        return [*actions, Hold(event.request, 0, reason, wait_ms)]

    def _waits_for_room(self, event: RequestArrived) -> bool:
        """Whether the nodes of some cluster together have memory for the request, if nothing else were there."""
        if event.whole:
            return False
        nodes = [node for node in self.view.nodes.values() if not node.draining]
        members = [[node for node in nodes if node.cluster is each] for each in self.view.clusters.values()]
        length = event.num_tokens + event.max_tokens
        return any(lending.longest(each) >= length for each in members)

    def _wait_for_room(self, request: RequestView, reason: str) -> Hold:
        request.reason = reason
        name = request.arrived.request
        self._short[name] = None
        wait = MOST_WAIT_MS
        if name == next(iter(self._short)):  # nobody waits before it
            wait = min(MOST_WAIT_MS, LEAST_WAIT_MS << min(request.waits, 10))
            request.waits += 1
        return Hold(name, request.attempt, reason, wait)

    def _refusal(self, event: RequestArrived) -> Refuse:
        """The refusal of a request that cannot be placed: too long for every node, or no node of a role for now."""
        length = event.num_tokens + event.max_tokens
        largest = self.view.largest(Role.DECODE, Role.MIXED)
        if 0 < largest < length:
            reason = (
                f"{length} tokens (prompt and answer) exceed the KV memory of every node ({largest} tokens)"
            )
            return Refuse(event.request, "too_long", reason)
        largest = self.view.largest(Role.PREFILL, Role.MIXED)
        if 0 < largest < length:  # a later attempt may prefill all but the last token
            reason = f"{length} tokens (prompt and answer) exceed the KV memory of every node that prefills"
            return Refuse(event.request, "too_long", reason)
        return Refuse(event.request, "unavailable", "no node can serve this now", self.rules.retry_after_ms)

    def _victims(
        self, event: RequestArrived, placement: Placement, overload: Overload, now: int
    ) -> list[RequestView]:
        """Waiting requests whose refusal makes room for an arriving one."""
        if overload.stage == "prefill":
            return to_shorten(self.view, placement.prefill, event, overload.excess)
        if not self._admission.sees_queues:
            return []  # who waits does not count there
        return to_thin(self.view, event, math.ceil(overload.excess), now + placement.ttft_ns)

    def _turn_away(self, victims: list[RequestView], event: RequestArrived, now: int) -> list[Action]:
        actions: list[Action] = []
        for victim in victims:
            name, reason = victim.arrived.request, f"a request of priority {event.priority} needs the room"
            if victim.arrived.tenant != event.tenant and victim.arrived.weight and event.weight:
                reason = "a tenant with less than its share needs the room"
            actions += self._withdraw(
                victim, Refuse(name, "overloaded", reason, self.rules.retry_after_ms, "prefill"), now
            )
        return actions

    def _withdraw(self, request: RequestView, refuse: Refuse, now: int) -> list[Action]:
        """Refuses an accepted request that has no token yet."""
        del self.view.requests[request.arrived.request]
        return [*self._abort(request, now), refuse]

    # Failures.

    def _failed(self, request: RequestView, event: RequestFailed, now: int) -> list[Action]:
        if event.no_room and request.state is not WAITING:
            request.refused += 1
            actions = self._abort(request, now)
            actions.append(self._wait_for_room(request, event.reason))
            return actions
        if not event.final or request.state is WAITING:
            return self._retry(request, event.reason, now)
        actions = self._abort(request, now)
        del self.view.requests[event.request]
        return [*actions, Fail(event.request, event.reason, final=True)]

    def _hold_expired(self, request: RequestView, event: HoldExpired, now: int) -> list[Action]:
        if request.state is not WAITING:
            return []
        if event.request not in self._short:
            if request.attempt:
                return [self._fail(request)]
            del self.view.requests[event.request]
            return self._unplaced(request, [], 0, now)
        if event.request != next(iter(self._short)):
            return [self._wait_for_room(request, request.reason)]
        actions = self._admit(now)  # a holder may have had less memory than the view says
        if request.state is WAITING and all(each.state is WAITING for each in self.view.requests.values()):
            request.refused += 1
            if request.refused > MAX_VAIN:
                return [*actions, self._fail(request)]
        if request.state is WAITING:
            actions.append(self._wait_for_room(request, request.reason))
        return actions

    def _retry(self, request: RequestView, reason: str, now: int) -> list[Action]:
        """Ends the current attempt on all its nodes; then routes another, holds the request, or fails it."""
        if request.state is WAITING:
            return []  # the second of its two nodes reports the same failure
        name = request.arrived.request
        actions = self._abort(request, now)
        request.reason = reason
        if request.attempt >= self._max_attempts(request):
            return [*actions, self._fail(request)]
        placement = self._place_again(request, now)
        if placement is not None:
            return [*actions, self._route(request, placement, now)]
        if self._waits_for_room(request.arrived):
            return [*actions, self._wait_for_room(request, reason)]
        return [*actions, Hold(name, request.attempt, reason)]

    def _place_again(self, request: RequestView, now: int) -> Placement | None:
        """Places a further attempt, if possible on KV that holders keep from the last one."""
        if request.kept is not None:
            placement = self._router.place_with(request.arrived, request.kept, now)
            if placement is not None:
                return placement
        return self._router.place(request.arrived, now, again=True)

    def _abort(self, request: RequestView, now: int) -> list[Action]:
        """Ends the attempt under way, if there is one, on all its nodes."""
        if request.state is WAITING:
            return []
        known = self.view.nodes
        nodes = tuple([node.node for node in request.nodes if known.get(node.node) is node])
        self.view.unassign(request, now)
        return [Abort(request.arrived.request, request.attempt, nodes)]

    def _lost(self, request: RequestView, reason: str, now: int) -> list[Action]:
        """Retries after the loss of a node or link, which counts as none of the request's attempts."""
        request.losses += 1
        return self._retry(request, reason, now)

    def _time_passed(self, event: TimePassed, now: int) -> list[Action]:
        """Routes requests anew that wait for a node that is late, and sets that node aside."""
        actions: list[Action] = []
        for waiting in self.slowness.late(now):
            placement = self.slowness.elsewhere(waiting, now)
            if placement is not None:
                request = waiting.request
                request.moves += 1
                request.losses += 1
                actions += [*self._abort(request, now), self._route(request, placement, now)]
        return actions

    def _probed(self, node: NodeView, event: NodeProbed, now: int) -> list[Action]:
        self.slowness.probed(node, event.num_tokens, event.took_ns)
        return []

    def _max_attempts(self, request: RequestView) -> int:
        return self.rules.max_attempts + min(request.losses, MAX_LOSSES) + request.refused

    def _resume(self, now: int) -> list[Action]:
        """Routes requests on hold, in the order of arrival, as far as the nodes now allow."""
        waiting = [request for request in self.view.requests.values() if request.state is WAITING]
        return [route for request in waiting for route in self._go_on(request, now)]

    def _admit(self, now: int) -> list[Action]:
        """Routes requests that wait for memory, in the order of arrival, until `LOOK_BEHIND` and one more find none."""
        routes: list[Action] = []
        left = 1 + LOOK_BEHIND
        for name in list(self._short):
            gone = self._go_on(self.view.requests[name], now)
            routes += gone
            left -= not gone
            if not left:
                break
        return routes

    def _go_on(self, request: RequestView, now: int) -> list[Action]:
        if not request.attempt and request.arrived.request not in self._short:
            first = self._router.place(request.arrived, now)
            return [] if first is None else self._accept(request, first, [], now)
        placement = self._place_again(request, now)
        if placement is None:
            return []
        self._short.pop(request.arrived.request, None)
        return [self._route(request, placement, now)]

    def _fail(self, request: RequestView) -> Fail:
        name = request.arrived.request
        self._short.pop(name, None)
        del self.view.requests[name]
        return Fail(name, f"{request.reason} (attempt {request.attempt} of {self._max_attempts(request)})")

    # Nodes and their caches.

    def _node_joined(self, event: NodeJoined, now: int) -> list[Action]:
        self.view.join(event)
        return self._resume(now)

    def _node_left(self, node: NodeView, event: NodeLeft, now: int) -> list[Action]:
        affected = list(self.view.requests_on(node))
        for request in affected:
            request.kept = _kept(request, node)
        requests = self.view.requests.values()
        fetching = [r for r in requests if any(copy.link_out is node.link_out for copy in r.copies)]
        self.view.leave(node)
        self._leaving.pop(event.node, None)
        self._conversion.left(node, now)
        self._lending.left(node)
        for request in fetching:  # its node computes what does not come
            self.view.end_copy(request)
        reason = f"node {event.node} is gone"
        return [action for request in affected for action in self._lost(request, reason, now)]

    def _node_drains(self, node: NodeView, event: NodeDrains, now: int) -> list[Action]:
        node.draining = True
        self._leaving.setdefault(event.node, False)
        self._conversion.left(node, now)
        self.view.sort_roles()
        return []

    def _node_stays(self, node: NodeView, event: NodeStays, now: int) -> list[Action]:
        if self._leaving.pop(event.node, None) is None:
            return []
        node.draining = False
        self.view.sort_roles()
        return self._resume(now)

    def _dismiss(self) -> list[Dismiss]:
        """Dismisses the nodes that have drained, each once."""
        nodes = self.view.nodes
        drained = [name for name, done in self._leaving.items() if not done and self.view.is_idle(nodes[name])]
        self._leaving |= dict.fromkeys(drained, True)
        return [Dismiss(name) for name in drained]

    def _role_changed(self, node: NodeView, event: RoleChanged, now: int) -> list[Action]:
        node.role = event.role
        self.view.sort_roles()
        self._conversion.role_changed(node, now)
        return self._resume(now)

    def _measured(self, event: LinksMeasured, now: int) -> list[Action]:
        actions: list[Action] = [*self._control.measured(event, now)]
        for state in event.links:
            if not state.up:
                actions += self._link_down(state.source, state.target, now)
        actions += self._resume(now)
        return [*actions, *self._conversion.measured(now)]

    def _link_down(self, source: str, target: str, now: int) -> list[Action]:
        """Ends copies over this direction of a link, and routes requests anew whose hand-over crosses it."""
        link = self.view.links.get((source, target))
        if link is None:
            return []
        actions: list[Action] = []
        for request in list(self.view.requests.values()):
            if any(copy.across is link for copy in request.copies):
                self.view.end_copy(request)  # its node computes what does not come
            if request.across is link:
                actions += self._lost(request, f"the link from {source} to {target} is down", now)
        return actions

    def _stored(self, node: NodeView, event: BlocksStored, now: int) -> list[Action]:
        put = self.view.index.store if event.tier is MEMORY else self.view.index.demote
        put(node.bit, event.names)
        return []

    def _evicted(self, node: NodeView, event: BlocksEvicted, now: int) -> list[Action]:
        gone = self.view.index.evict(node.bit, event.names)
        self._eviction_cost.evicted(node, len(event.names), gone)
        return []

    # Lent memory.

    def _memory_used(self, node: NodeView, event: MemoryUsed, now: int) -> list[Action]:
        return [*self._lending.used(node, event)]

    def _spread(self, event: HoldingsChanged, now: int) -> list[Action]:
        request = self._attempt(event.request, event.attempt)
        if request is not None:
            self._lending.spread(request, event.holdings)
        return self._admit(now)


def _kept(request: RequestView, gone: NodeView) -> Kept | None:
    """KV that holders keep of a request when one of its nodes goes. None for a hybrid model, whose recurrent state is
    lost with the home, and for a prompt without names that is not yet computed."""
    kept = Kept(request.attempt, request.held, request.growth)
    is_known = request.arrived.names or request.answering
    if not is_known or gone.state_blocks or not kept.holders or gone in kept.holders:
        return None
    return kept


def _route_of(request: RequestView, placement: Placement, deadline_ns: int) -> Route:
    """The route of a placement, codecs not yet chosen."""
    holdings = [
        Holding(tuple([node.node for node in held.holders]), held.num_blocks) for held in placement.held
    ]
    return Route(
        request.arrived.request,
        request.attempt,
        placement.prefill.node,
        placement.decode.node,
        placement.fetch,
        placement.cached,
        placement.work_ns,
        deadline_ns,
        handover_start=placement.handover_start,
        recall=placement.recall,
        holdings=tuple(holdings),
        growth=tuple([node.node for node in placement.growth]),
        taken=placement.taken,
        assembly=placement.assembly,
    )


def _overloaded(request: RequestId, overload: Overload) -> Refuse:
    return Refuse(request, "overloaded", str(overload), overload.retry_after_ms, overload.stage)
