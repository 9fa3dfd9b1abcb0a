"""The conductor: one object, `on(event, now)`, and the answers to everything that happens to a request."""

from __future__ import annotations

import math
from collections.abc import Callable

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
    Event,
    Fail,
    FirstToken,
    Hold,
    HoldExpired,
    LinksMeasured,
    NodeJoined,
    NodeLeft,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    Rules,
)
from isthmus.core.conductor.eviction_cost import EvictionCost
from isthmus.core.conductor.lending import Lending
from isthmus.core.conductor.routing import Router
from isthmus.core.conductor.view import WAITING, HeldBlocks, Kept, NodeView, Placement, RequestView, View
from isthmus.core.types import MEMORY, RequestId, Role

LEAST_WAIT_MS, MOST_WAIT_MS = 10, 1000
"""Before a node that had no memory for an attempt is asked again, unless another request ends: each time twice as long.
It may have had some that was on its way back."""
LOOK_BEHIND = 4
"""So many behind one that finds no memory are tried when some is free."""
MAX_VAIN = 10
"""So often a request finds no memory while no other has any."""
MAX_LOSSES = 10
"""Nodes and links that may go from under one request, which says nothing of it; one that brings each of its nodes down
has to end."""


class Conductor:
    """Pure: the same events at the same times give the same actions. `now` is in ns and never goes back."""

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
        self._short: dict[RequestId, None] = {}  # on hold until memory is free, of holders too
        self._handlers: dict[type, Callable[..., list[Action]]] = {
            RequestArrived: self._arrive,
            FetchFinished: self._fetched,
            FirstToken: self._first_token,
            PrefillFinished: self._handed_over,
            RequestEnded: self._ended,
            RequestCancelled: self._cancelled,
            RequestFailed: self._failed,
            HoldExpired: self._hold_expired,
            NodeJoined: self._node_joined,
            NodeLeft: self._node_left,
            BlocksStored: self._stored,
            BlocksEvicted: self._evicted,
            RoleChanged: self._role_changed,
            LinksMeasured: self._measured,
            HoldingsChanged: self._spread,
            MemoryUsed: self._memory_used,
        }

    def on(self, event: Event, now: int) -> list[Action]:
        """Takes one fact, returns what follows from it, in order. Mutates the view."""
        return self._handlers[type(event)](event, now)

    def check(self) -> None:
        self.view.check()
        self._conversion.check()
        self._donors.check()

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
        """Routes a request for the first time, at its arrival or after it waited for a node; or refuses it."""
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
        request.copies = tuple(
            [
                copies.begin(source.link_out, target.link_in, num_bytes, now, self.view.across(source, target))
                for source, num_bytes in fetched
            ]
        )
        if not self.rules.codecs:
            return route
        fetch, codec = encoded(self.rules, request, placement, kv_bytes, now)
        return replace(route, fetch=fetch, codec=codec)

    def _fetched(self, event: FetchFinished, now: int) -> list[Action]:
        request = self._attempt(event.request, event.attempt)
        if request is not None:
            self.view.end_copy(request)
        return []

    def _first_token(self, event: FirstToken, now: int) -> list[Action]:
        request = self._attempt(event.request, event.attempt)
        if request is None:
            return []
        self.view.first_token(request, now)
        if not request.answering:
            overload = self._admission.at_decode(self.view, request, now)
            if overload is not None:
                return self._withdraw(request, _overloaded(event.request, overload), now)
        request.answering = request.attempt
        return [*self._donors.remember(request)]

    def _handed_over(self, event: PrefillFinished, now: int) -> list[Action]:
        request = self._attempt(event.request, event.attempt)
        if request is not None:
            self.view.first_token(request, now)  # if nobody said so before
            self.view.handed_over(request, now)
        return []

    def _ended(self, event: RequestEnded, now: int) -> list[Action]:
        if event.request in self.view.requests and event.num_generated:
            self.view.outputs.add(event.num_generated)
        return self._forget(event.request, now)

    def _cancelled(self, event: RequestCancelled, now: int) -> list[Action]:
        return self._forget(event.request, now)

    def _forget(self, name: RequestId, now: int) -> list[Action]:
        request = self.view.requests.pop(name, None)
        if request is None:
            return []
        actions = self._abort(request, now)
        self._short.pop(name, None)
        return [*actions, *self._admit(now)]

    def _attempt(self, request: RequestId, attempt: int) -> RequestView | None:
        """The request, if this is its current attempt: what comes late from an earlier one is void."""
        view = self.view.requests.get(request)
        return view if view is not None and view.attempt == attempt else None

    # Refusals.

    def _unplaced(
        self, request: RequestView, victims: list[RequestView], wait_ms: int, now: int
    ) -> list[Action]:
        """It waits, in place of others if need be: for memory, where nodes have enough together and not now, or for a
        node of a kind of which there is none, which may take `wait_ms`."""
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
        """Whether nodes of a cluster have memory for it, together and with nothing else there."""
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
        """Too long for every node here, now and later; or no node here for one of its parts, for now."""
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
        """Waiting requests of lower priority whose refusal makes room for this one."""
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
        """Refuses a request that was accepted and has got no token yet."""
        del self.view.requests[request.arrived.request]
        return [*self._abort(request, now), refuse]

    # Failures.

    def _failed(self, event: RequestFailed, now: int) -> list[Action]:
        request = self._attempt(event.request, event.attempt)
        if request is None:
            return []
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

    def _hold_expired(self, event: HoldExpired, now: int) -> list[Action]:
        request = self._attempt(event.request, event.attempt)
        if request is None or request.state is not WAITING:
            return []
        if event.request not in self._short:
            if request.attempt:
                return [self._fail(request)]
            del self.view.requests[event.request]
            return self._unplaced(request, [], 0, now)
        if event.request != next(iter(self._short)):
            return [self._wait_for_room(request, request.reason)]
        actions = self._admit(now)  # a holder may have had less than is known here
        if request.state is WAITING and all(each.state is WAITING for each in self.view.requests.values()):
            request.refused += 1
            if request.refused > MAX_VAIN:
                return [*actions, self._fail(request)]
        if request.state is WAITING:
            actions.append(self._wait_for_room(request, request.reason))
        return actions

    def _retry(self, request: RequestView, reason: str, now: int) -> list[Action]:
        """Ends the current attempt everywhere; then routes another, holds the request, or fails it."""
        if request.state is WAITING:
            return []  # a second report of the attempt that ended
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
        """Where KV is kept of it, so that only the rest is computed."""
        if request.kept is not None:
            placement = self._router.place_with(request.arrived, request.kept, now)
            if placement is not None:
                return placement
        return self._router.place(request.arrived, now, again=True)

    def _abort(self, request: RequestView, now: int) -> list[Action]:
        """Ends the attempt under way, if there is one, everywhere."""
        if request.state is WAITING:
            return []
        known = self.view.nodes
        nodes = tuple([node.node for node in request.nodes if known.get(node.node) is node])
        self.view.unassign(request, now)
        return [Abort(request.arrived.request, request.attempt, nodes)]

    def _lost(self, request: RequestView, reason: str, now: int) -> list[Action]:
        """What it stood on is gone: that costs it none of its attempts."""
        request.losses += 1
        return self._retry(request, reason, now)

    def _max_attempts(self, request: RequestView) -> int:
        return self.rules.max_attempts + min(request.losses, MAX_LOSSES) + request.refused

    def _resume(self, now: int) -> list[Action]:
        """Routes what is on hold, in the order of arrival, as far as the nodes now allow."""
        waiting = [request for request in self.view.requests.values() if request.state is WAITING]
        return [route for request in waiting for route in self._go_on(request, now)]

    def _admit(self, now: int) -> list[Action]:
        """Routes those that wait for memory, as far as there is any: who came first, and few of those behind it."""
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

    def _node_left(self, event: NodeLeft, now: int) -> list[Action]:
        node = self.view.nodes.get(event.node)
        if node is None:
            return []
        affected = list(self.view.requests_on(node))
        for request in affected:
            request.kept = _kept(request, node)
        fetching = [
            r for r in self.view.requests.values() if any(copy.link_out is node.link_out for copy in r.copies)
        ]
        self.view.leave(node)
        self._conversion.left(node, now)
        self._lending.left(node)
        for request in fetching:  # its node computes what does not come
            self.view.end_copy(request)
        return [
            action for request in affected for action in self._lost(request, f"node {event.node} is gone", now)
        ]

    def _role_changed(self, event: RoleChanged, now: int) -> list[Action]:
        node = self.view.nodes.get(event.node)
        if node is None:
            return []
        node.role, node.draining = event.role, False
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
        """Nothing crosses this direction of a link any more: what is on its way over it begins again elsewhere."""
        link = self.view.links.get((source, target))
        actions: list[Action] = []
        for request in list(self.view.requests.values()):
            if link is None:
                break
            if any(copy.across is link for copy in request.copies):
                self.view.end_copy(request)  # its node computes what does not come
            if request.across is link:
                actions += self._lost(request, f"the link from {source} to {target} is down", now)
        return actions

    def _stored(self, event: BlocksStored, now: int) -> list[Action]:
        node = self.view.nodes.get(event.node)
        if node is not None:
            if event.tier is MEMORY:
                self.view.index.store(node.bit, event.names)
            else:
                self.view.index.demote(node.bit, event.names)
        return []

    # Lent memory.

    def _memory_used(self, event: MemoryUsed, now: int) -> list[Action]:
        node = self.view.nodes.get(event.node)
        return [*self._lending.used(node, event)] if node is not None else []

    def _spread(self, event: HoldingsChanged, now: int) -> list[Action]:
        request = self._attempt(event.request, event.attempt)
        if request is not None:
            self._lending.spread(request, event.holdings)
        return self._admit(now)

    def _evicted(self, event: BlocksEvicted, now: int) -> list[Action]:
        node = self.view.nodes.get(event.node)
        if node is not None:
            gone = self.view.index.evict(node.bit, event.names)
            self._eviction_cost.evicted(node, len(event.names), gone)
        return []


def _kept(request: RequestView, gone: NodeView) -> Kept | None:
    """What holders keep of a request when one of its nodes goes. A model's recurrent state went with its home, and then
    all is computed; so is a prompt without names, unless it was."""
    kept = Kept(request.attempt, request.held, request.growth)
    is_known = request.arrived.names or request.answering
    if not is_known or gone.state_blocks or not kept.holders or gone in kept.holders:
        return None
    return kept


def _route_of(request: RequestView, placement: Placement, deadline_ns: int) -> Route:
    """Without the codecs of what travels."""
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
        holdings=tuple([_holding(held) for held in placement.held]),
        growth=tuple([node.node for node in placement.growth]),
        taken=placement.taken,
        assembly=placement.assembly,
    )


def _holding(held: HeldBlocks) -> Holding:
    return Holding(tuple([node.node for node in held.holders]), held.num_blocks)


def _overloaded(request: RequestId, overload: Overload) -> Refuse:
    return Refuse(request, "overloaded", str(overload), overload.retry_after_ms, overload.stage)
