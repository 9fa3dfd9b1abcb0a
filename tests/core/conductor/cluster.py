"""A cluster that does what the conductor says, and judges every action by books of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from isthmus.core.blocks import state_names
from isthmus.core.conductor import (
    Abort,
    Action,
    BlocksEvicted,
    BlocksStored,
    Conductor,
    Convert,
    Dismiss,
    Event,
    Fail,
    FetchFinished,
    FirstToken,
    Hold,
    HoldExpired,
    LinksMeasured,
    LinkState,
    NodeDrains,
    NodeJoined,
    NodeLeft,
    NodeStays,
    Paths,
    PrefillFinished,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestFailed,
    RoleChanged,
    Route,
    Rules,
    ThresholdSet,
)
from isthmus.core.conductor.conductor import MAX_LOSSES
from isthmus.core.conductor.view import WAITING
from isthmus.core.types import BlockName, NodeId, RequestId, Role, Tier

from .views import BLOCK_SIZE, CURVE, LINK, MS, arrival


def comes_back(event: Event, actions: Sequence[Action]) -> None:
    """What is said travels between processes and lies in recordings: it is read as it was written."""
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(event), type=Event) == event
        assert codec.decode(codec.encode(actions), type=list[Action]) == list(actions)


class Cluster:
    """Every request, by name: its current route while it lives, and how it ended."""

    def __init__(self, rules: Rules | None = None, paths: Paths = LINK, step_ns: int = MS) -> None:
        self.conductor = Conductor(rules or Rules())
        self.rules, self.paths, self.step_ns = self.conductor.rules, paths, step_ns
        self.now = 0
        self.joined: dict[NodeId, NodeJoined] = {}
        self.stored: dict[NodeId, dict[BlockName, Tier]] = {}
        self.arrived: dict[RequestId, tuple[RequestArrived, int]] = {}
        self.routes: dict[RequestId, Route] = {}
        self.prefilling: dict[RequestId, Route] = {}  # in the order in which they were routed
        self.waited: list[Route] = []  # those of them before the last event
        self.streaming: set[RequestId] = set()
        self.handed_over: set[RequestId] = set()
        self.held: set[RequestId] = set()
        self.waiting: set[RequestId] = set()  # for a first attempt
        self.failures: Counter[RequestId] = Counter()
        self.ended: dict[RequestId, str] = {}
        self.converting: dict[NodeId, Role] = {}
        self.draining: dict[NodeId, bool] = {}  # nodes that are to leave, and whether they are dismissed
        self.links_up = {(link.source, link.target): True for link in self.rules.links}
        self.thresholds: list[tuple[int, int | None]] = []
        self.told: dict[tuple[RequestId, int], set[NodeId]] = {}  # nodes with an attempt they are to forget
        self.log: list[tuple[int, Event, tuple[Action, ...]]] = []

    # What happens.

    def on(self, event: Event) -> list[Action]:
        self.now += self.step_ns
        if isinstance(event, RequestArrived):
            self.arrived[event.request] = event, self.now
        self.waited = list(self.prefilling.values())
        actions = self._decide(event)
        comes_back(event, actions)
        self.log.append((self.now, event, tuple(actions)))
        for action in actions:
            self._act(action, event)
        self._check_books()
        return actions

    def _decide(self, event: Event) -> list[Action]:
        actions = self.conductor.on(event, self.now)
        self.conductor.check()
        return actions

    def join(self, node: str, role: Role, capacity_tokens: int = 1000, **about: Any) -> None:
        """`about`: the other fields of a `NodeJoined`."""
        name, held = NodeId(node), self.held | self.waiting
        about = {"cost": CURVE, "paths": self.paths, "cache_blocks": 8, "lends": False} | about
        joined = NodeJoined(name, role, capacity_tokens, BLOCK_SIZE, **about)
        self.joined[name], self.stored[name] = joined, {}
        for action in self.on(joined):
            assert isinstance(action, Route | Refuse) and action.request in held, "only what is held resumes"

    def leave(self, node: str) -> list[Action]:
        name = NodeId(node)
        for books in (self.joined, self.stored, self.converting, self.draining):
            books.pop(name, None)
        for nodes in self.told.values():
            nodes.discard(name)
        before = {request: route for request, route in self.routes.items() if request not in self.held}
        needed = {request for request, route in before.items() if self._needs(route, name)}
        actions = self.on(NodeLeft(name))
        for request, old in before.items():
            assert request in needed or self.routes.get(request) is old, "one that had no need of it moved"
        for route in self.routes.values():
            assert route.request in self.held or not self._needs(route, name), (
                "a request stays on a node that left"
            )
        return actions

    def drains(self, node: str) -> list[Action]:
        self.draining.setdefault(NodeId(node), False)
        return self.on(NodeDrains(NodeId(node)))

    def stays(self, node: str) -> None:
        del self.draining[NodeId(node)]
        for action in self.on(NodeStays(NodeId(node))):
            assert isinstance(action, Route | Refuse), "only what is held resumes"

    def _needs(self, route: Route, node: NodeId) -> bool:
        """Whether an attempt cannot go on without this node."""
        holders = [holder for holding in route.holdings for holder in holding.holders]
        comes_from = [route.prefill] if route.recall is None else [route.prefill, route.recall.source]
        arrives = route.request not in self.handed_over and node in comes_from
        return arrives or node in (route.decode, *route.growth, *holders)

    def links_measured(self, *links: LinkState) -> list[Action]:
        for link in links:
            self.links_up[link.source, link.target] = link.up
        requests = self.conductor.view.requests
        copying = [(request, copy, request.attempt) for request in requests.values() for copy in request.copies]
        actions = self.on(LinksMeasured(links))
        for request, copy, attempt in copying:
            if requests.get(request.arrived.request) is request and request.attempt == attempt:
                cut = request.state is WAITING or (copy.across is not None and not copy.across.up)
                assert (copy not in request.copies) == cut, (
                    "a fetch goes on over a link that is down, or is given up"
                )
        return actions

    def convert(self, node: str) -> list[Action]:
        """A node does what it was asked: no request needs it."""
        name = NodeId(node)
        role = self.converting.pop(name)
        for route in self.routes.values():
            handing = name == route.prefill and route.request in self.prefilling
            assert route.request in self.held or (name != route.decode and not handing)
        self.joined[name] = msgspec.structs.replace(self.joined[name], role=role)
        return self.on(RoleChanged(name, role))

    def arrives(
        self,
        request: str,
        num_tokens: int = 8,
        max_tokens: int = 10,
        *,
        names: Sequence[BlockName] = (),
        **told: Any,
    ) -> list[Action]:
        """`told`: the rest of an `arrival`."""
        return self.on(arrival(num_tokens, names, request=request, max_tokens=max_tokens, **told))

    def routed(self, request: str, *lengths: int, names: Sequence[BlockName] = ()) -> Route:
        (action,) = self.arrives(request, *lengths, names=names)
        assert isinstance(action, Route), action
        return action

    def route(self, request: str, *lengths: int, names: Sequence[BlockName] = ()) -> tuple[str, str]:
        """Where an arriving request goes: prefill node, decode node."""
        route = self.routed(request, *lengths, names=names)
        return route.prefill, route.decode

    def refusal(self, request: str, *lengths: int, priority: int = 0) -> Refuse:
        (action,) = self.arrives(request, *lengths, priority=priority)
        assert isinstance(action, Refuse), action
        return action

    def store(self, node: str, *names: BlockName, tier: Tier = Tier.MEMORY) -> None:
        if NodeId(node) in self.stored:
            self.stored[NodeId(node)].update(dict.fromkeys(names, tier))
        assert self.on(BlocksStored(NodeId(node), names, tier)) == []

    def evict(self, node: str, *names: BlockName) -> None:
        for name in names:
            self.stored.get(NodeId(node), {}).pop(name, None)
        assert self.on(BlocksEvicted(NodeId(node), names)) == []

    def first_token(self, request: str, attempt: int = 1) -> list[Action]:
        """Its prompt's blocks are in the cache then."""
        name = RequestId(request)
        route = self.routes.get(name)
        if route is not None and route.attempt == attempt and name in self.prefilling:
            self.store(route.prefill, *self._stores(route))
            del self.prefilling[name]
            self.streaming.add(name)
        return self.on(FirstToken(name, attempt))

    def fetch_finished(self, request: str, attempt: int = 1) -> None:
        self._no_more_than_dismiss(FetchFinished(RequestId(request), attempt))

    def finish_prefill(self, request: str, attempt: int = 1) -> None:
        route = self.routes.get(RequestId(request))
        if route is not None and route.attempt == attempt and route.request not in self.held:
            self.prefilling.pop(route.request, None)
            self.handed_over.add(route.request)
        self._no_more_than_dismiss(PrefillFinished(RequestId(request), attempt))

    def _no_more_than_dismiss(self, event: Event) -> None:
        assert all(isinstance(action, Dismiss) for action in self.on(event))

    def end(self, request: str, num_generated: int = 1) -> list[Action]:
        self._end(RequestId(request), "ended")
        return self.on(RequestEnded(RequestId(request), num_generated))

    def cancel(self, request: str) -> list[Action]:
        self._end(RequestId(request), "cancelled")
        return self.on(RequestCancelled(RequestId(request)))

    def fail(self, request: str, attempt: int, *, no_room: bool = False) -> list[Action]:
        name = RequestId(request)
        if name in self.routes and name not in self.held and not no_room:
            self.failures[name] += self.routes[name].attempt == attempt
        return self.on(RequestFailed(name, attempt, "it broke", no_room=no_room))

    def expire(self, request: str) -> list[Action]:
        """The wait of a request on hold is over."""
        route = self.routes.get(RequestId(request))
        return self.on(HoldExpired(RequestId(request), route.attempt if route else 0))

    # What is to be seen.

    def encoded_log(self) -> bytes:
        return msgspec.json.encode(self.log)

    def drain(self) -> None:
        """Ends what lives, and checks that nothing of it stays anywhere."""
        while self.routes:  # others may take the place of one that ends
            self.end(next(iter(self.routes)))
        for request in sorted(self.waiting):
            self.cancel(request)
        view = self.conductor.view
        assert not self.told, "an attempt never ended"
        assert not view.requests
        assert all(self.draining.values()), "a node that nobody needs never leaves"
        for node in view.nodes.values():
            assert not (node.prefills or node.decodes or node.link_in.copies or node.link_out.copies)
            assert (node.work_ns, node.batch, node.context) == (0, 0, 0)
        mask = sum(node.bit for node in view.prefills)
        for name in {name for facts, _ in self.arrived.values() for name in facts.names}:
            held, expected = view.index.match([name], mask)
            assert held == expected, "blocks are promised that nobody computes"

    # The judge.

    def _end(self, request: RequestId, how: str) -> None:
        self.held.discard(request)
        self.streaming.discard(request)
        self.prefilling.pop(request, None)
        if self.routes.pop(request, None) is not None or request in self.waiting:
            self.waiting.discard(request)
            assert request not in self.ended
            self.ended[request] = how

    def _act(self, action: Action, event: Event) -> None:
        match action:
            case Route():
                self._on_route(action)
            case Refuse():
                self._on_refuse(action, event)
            case Abort():
                assert len(set(action.nodes)) == len(action.nodes)
                left = self.told.pop((action.request, action.attempt))  # once, each attempt
                assert left == set(action.nodes), "somebody is not told, or has left"
            case Hold() if action.attempt == 0:
                assert action.request not in self.routes
                if not self._lend:
                    assert action.request not in self.waiting and action.wait_ms == self.rules.wait_ms > 0
                    assert not self._fits(self.arrived[action.request][0]), "it waits though there is room"
                self.waiting.add(action.request)
            case Hold():
                assert action.request in self.routes and (self._lend or action.request not in self.held)
                assert action.attempt == self.routes[action.request].attempt
                self.held.add(action.request)
                self.prefilling.pop(action.request, None)
            case Convert():
                node = self.joined[action.node]
                assert {node.role, action.role} == {Role.PREFILL, Role.DECODE}
                assert not self.converting, "one at a time"
                self.converting[action.node] = action.role
                rest = [o for o in self.joined.values() if o.cluster == node.cluster and o.node != action.node]
                assert any(other.role is node.role for other in rest), "the last node of its role"
            case Dismiss():
                assert not self.draining[action.node], "once"
                self.draining[action.node] = True
                living = [route for name, route in self.routes.items() if name not in self.held]
                assert not any(self._needs(route, action.node) for route in living), "it is needed"
            case ThresholdSet():
                assert self.rules.links and isinstance(event, LinksMeasured)
                assert not self.thresholds or self.thresholds[-1][1] != action.threshold
                self.thresholds.append((self.now, action.threshold))
            case Fail():
                assert action.request in self.routes, "a request failed that does not live"
                attempt, waits = self.routes[action.request].attempt, isinstance(event, HoldExpired)
                failed = self.failures[action.request] == self.rules.max_attempts
                assert failed or waits or action.final or attempt > MAX_LOSSES, (
                    "what it lost used up its attempts"
                )
                self._end(action.request, "failed")

    def _on_route(self, route: Route) -> None:
        before, (facts, at) = self.routes.get(route.request), self.arrived[route.request]
        assert route.attempt == (1 if before is None else before.attempt + 1)
        assert self.failures[route.request] < self.rules.max_attempts, "an attempt too many"
        assert route.attempt <= self.rules.max_attempts + MAX_LOSSES
        prefill, decode = self.joined[route.prefill], self.joined[route.decode]  # alive, then
        assert prefill.role is not Role.DECODE
        assert not {route.prefill, route.decode} & self._busy, "a node about to change its role, or to leave"
        if prefill.cluster != decode.cluster:
            assert self.links_up[prefill.cluster, decode.cluster], "over a link that is down"
            assert decode.role is not Role.PREFILL and prefill.role is Role.PREFILL, (
                "mixed nodes send in no order"
            )
            self._judge_recall(route, facts)
        elif prefill is not decode:
            assert prefill.role is Role.PREFILL and decode.role is Role.DECODE
            assert not route.handover_start and route.recall is None
        else:
            assert prefill.role is Role.MIXED or facts.max_tokens == 1
        self._judge_memory(route, facts)
        assert (route.request, route.attempt - 1) not in self.told, "two attempts are under way"
        self._judge_cached(route, facts)
        ttft_ms = self.rules.ttft_ms if facts.ttft_ms is None else facts.ttft_ms
        promised = 0 if ttft_ms is None else at + int(ttft_ms * MS * (1 - self.rules.reserve))
        assert route.deadline_ns == promised
        assert route.work_ns > 0
        self.held.discard(route.request)
        self.handed_over.discard(route.request)
        self.waiting.discard(route.request)
        self.routes[route.request] = route
        self.prefilling.pop(route.request, None)
        self.prefilling[route.request] = route
        self.told[route.request, route.attempt] = {route.prefill, route.decode}

    @property
    def _busy(self) -> set[NodeId]:
        """Nodes that get no more work."""
        return {*self.converting, *self.draining}

    @property
    def _lend(self) -> bool:
        return any(joined.lends for joined in self.joined.values())

    def _judge_memory(self, route: Route, facts: RequestArrived) -> None:
        """What stays with its nodes fits there; what lies elsewhere lies once, and no memory is lent twice."""
        homes = {route.prefill, route.decode}
        names = [holder for holding in route.holdings for holder in holding.holders]
        assert len(set(names)) == len(names) and not homes & set(names)
        away = sum(holding.num_blocks for holding in route.holdings)
        assert all(holding.num_blocks > 0 for holding in route.holdings)
        needed = facts.num_tokens + facts.max_tokens - away * BLOCK_SIZE
        fits = all(needed <= self.joined[home].capacity_tokens for home in homes)
        assert fits or route.growth, "what stays there does not fit"
        assert away <= (facts.num_tokens - 1) // BLOCK_SIZE
        if route.growth:
            assert away == (facts.num_tokens - 1) // BLOCK_SIZE, "what follows does not follow"
            assert not away or route.holdings[-1].holders == route.growth or len(route.growth) == 1
        others = [each for each in self.routes.values() if each.request not in self.held | {route.request}]
        for name in names:
            holdings = [h for each in (route, *others) for h in each.holdings if name in h.holders]
            lent = sum(-(-h.num_blocks // len(h.holders)) for h in holdings)
            assert lent * BLOCK_SIZE <= self.joined[name].capacity_tokens, "more is lent than there is"

    def _judge_cached(self, route: Route, facts: RequestArrived) -> None:
        """What a route counts on is on its node, or another request computes or fetches it there, or it is fetched."""
        mine = set(self.stored[route.prefill])
        for other in self.prefilling.values():
            if other.prefill == route.prefill and other.request != route.request:
                mine |= set(self._stores(other))
        fetch = route.fetch
        at_hand = route.num_cached if fetch is None else fetch.start
        node = self.joined[route.prefill]
        assert set(_prefix(facts, at_hand, node)) <= mine, "it counts on blocks that are nowhere"
        assert not node.state_blocks or route.num_cached * BLOCK_SIZE < facts.num_tokens
        if fetch is not None:
            assert fetch.source != route.prefill and 0 <= fetch.start < fetch.stop == route.num_cached
            assert set(_prefix(facts, fetch.stop, node)) <= set(self.stored[fetch.source]), (
                "a fetch of unfinished blocks"
            )
            source = self.joined[fetch.source]
            if source.cluster != node.cluster:
                assert self.rules.cache_mode != "scarce" and self.links_up[source.cluster, node.cluster]
            assert self.joined[fetch.source].paths.network and self.joined[route.prefill].paths.network
            assert fetch.until_ns > self.now

    def _stores(self, route: Route) -> tuple[BlockName, ...]:
        """What its prefill node has of a prompt in the end: of an assembled one what it had of it."""
        facts, node = self.arrived[route.request][0], self.joined[route.prefill]
        return _chain(facts, node) if route.assembly is None else _prefix(facts, route.num_cached, node)

    def _judge_recall(self, route: Route, facts: RequestArrived) -> None:
        """What is not handed over is at the decode node, or comes to it within its cluster; a token always crosses."""
        assert 0 <= route.handover_start * BLOCK_SIZE < facts.num_tokens
        recall = route.recall
        if recall is None:
            assert not route.handover_start
            return
        assert 0 <= recall.start < recall.stop == route.handover_start
        assert set(facts.names[: recall.start]) <= set(self.stored[route.decode])
        assert set(facts.names[: recall.stop]) <= set(self.stored[recall.source])
        assert self.joined[recall.source].cluster == self.joined[route.decode].cluster
        assert recall.source != route.decode or not recall.start

    def _on_refuse(self, refuse: Refuse, event: Event) -> None:
        request = refuse.request
        assert request not in self.ended
        facts, _ = self.arrived[request]
        if isinstance(event, RequestArrived) and request != event.request:
            self._judge_victim(request, event)
        elif refuse.code == "overloaded":
            full = len(self.routes) + len(self.waiting) >= self.rules.max_requests
            limits = (self.rules.ttft_ms, self.rules.tbt_ms, facts.ttft_ms, facts.tbt_ms)
            refused = [self.arrived[name][0].tenant for name, how in self.ended.items() if how == "refused"]
            kept = facts.weight and len(self.routes) + len(set(refused)) >= self.rules.max_requests
            assert full or kept or (self.rules.admission != "none" and any(limits)), "refused for no reason"
            assert refuse.stage in ("prefill", "decode")
        elif not self._lend:
            assert not self._fits(facts), "refused though there is room"
            length = facts.num_tokens + facts.max_tokens
            sizes = [self._largest(role) for role in (Role.PREFILL, Role.DECODE)]
            if refuse.code == "too_long":
                assert any(0 < size < length for size in sizes) and not refuse.retry_after_ms
            else:
                assert refuse.code == "unavailable" and refuse.retry_after_ms == self.rules.retry_after_ms
                parts = not all(sizes) or not all(self.links_up.values())
                assert parts, "only a missing part is a matter of time"
        if refuse.code == "overloaded":
            assert refuse.retry_after_ms >= min(1000, self.rules.retry_after_ms)
        if request in self.routes or request in self.waiting:
            self._end(request, "refused")
        else:
            self.ended[request] = "refused"

    def _judge_victim(self, victim: RequestId, event: RequestArrived) -> None:
        assert victim in self.routes and victim not in self.streaming
        facts = self.arrived[victim][0]
        if facts.weight and event.weight and facts.tenant != event.tenant:
            assert self._num_of(facts.tenant) / facts.weight > (self._num_of(event.tenant) + 1) / event.weight
        else:
            assert facts.priority < event.priority
        queue = [route.request for route in self.waited if route.prefill == self.routes[victim].prefill]
        assert victim in queue[1:], "a request in service was turned away"
        assert isinstance(self.log[-1][2][-1], Route | Hold), "turned away in vain"

    def _num_of(self, tenant: str) -> int:
        return sum(self.arrived[request][0].tenant == tenant for request in self.routes)

    def _fits(self, facts: RequestArrived) -> bool:
        length = facts.num_tokens + facts.max_tokens
        fit = {
            (joined.cluster, joined.role)
            for joined in self.joined.values()
            if joined.capacity_tokens >= length and joined.node not in self._busy
        }
        prefills = {cluster for cluster, role in fit if role is not Role.DECODE}
        reach = {
            *[pair for pair, is_up in self.links_up.items() if is_up],
            *[(each, each) for each in prefills],
        }
        for cluster, role in fit:
            here = (cluster, Role.PREFILL) in fit
            served = any((other, cluster) in reach and (other != cluster or here) for other in prefills)
            if role is Role.MIXED or (role is Role.DECODE and served):
                return True
        return False

    def _largest(self, role: Role) -> int:
        fit = [
            joined.capacity_tokens
            for joined in self.joined.values()
            if joined.role in (role, Role.MIXED) and joined.node not in self._busy
        ]
        return max(fit, default=0)

    def _check_books(self) -> None:
        """The conductor's loads are the sums over what lives, as its own actions told it."""
        view = self.conductor.view
        assert set(view.requests) == set(self.routes) | self.waiting
        for name, node in view.nodes.items():
            queue = [route for route in self.prefilling.values() if route.prefill == name]
            assert node.work_ns == sum(route.work_ns for route in queue)
            assert list(node.prefills) == [route.request for route in queue]
            living = [r for r in self.routes.values() if r.decode == name and r.request not in self.held]
            assert node.batch == len(living)
            assert node.context == sum(self.arrived[route.request][0].num_tokens for route in living)


def _prefix(facts: RequestArrived, num_blocks: int, node: NodeJoined) -> tuple[BlockName, ...]:
    """Blocks that make so many leading ones of use on a node: those, and of a hybrid model the state at their end."""
    names = facts.names[:num_blocks]
    return (*names, *state_names(names[-1], node.state_blocks)) if names and node.state_blocks else names


def _chain(facts: RequestArrived, node: NodeJoined) -> tuple[BlockName, ...]:
    """What a node stores of a prompt: its blocks, and the state at the end of the last one with a token after it."""
    last = min(len(facts.names), (facts.num_tokens - 1) // BLOCK_SIZE)
    return (*facts.names, *_prefix(facts, last, node)[last:])
