"""Two clusters, a link and time: enough of a world for the conductor's controllers to be judged by what they lead to.

Prefill nodes work in order of arrival, a link sends in order of arrival at a rate that may change, a decode node has
so many places and makes a token for each in every step. Nothing fails but what a test makes fail.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random

from isthmus.conductor import (
    Abort,
    Action,
    Conductor,
    Convert,
    Event,
    FirstToken,
    LinkRule,
    LinksMeasured,
    LinkState,
    NodeJoined,
    Paths,
    PrefillFinished,
    RequestArrived,
    RequestEnded,
    RoleChanged,
    Route,
    Rules,
    ThresholdSet,
)
from isthmus.cost import Cost, Curve, NodeCost, compile_cost
from isthmus.types import NS_PER_S, NodeId, RequestId, Role

BLOCK_SIZE = 64
H200 = Curve(
    kv_token_bytes=17_280,
    num_layers=15,
    state_bytes=182_353_920,
    prefill_token_s=0,
    prefill_points=((1024, 0.44), (8192, 0.72), (32_768, 1.84), (131_072, 7.40)),
    decode_fixed_s=0.025,
)
"""Prefill of the published case study (arXiv 2604.15039, table 5); a token of each sequence in 25 ms."""
H20 = Curve(
    kv_token_bytes=17_280,
    num_layers=15,
    state_bytes=182_353_920,
    prefill_fixed_s=0.46899,
    prefill_token_s=1.300173e-4,
    prefill_pair_s=2.943848e-10,
    decode_fixed_s=0.025,
)
"""As its table 6 implies."""
GBPS = 10**9 // 8
TURN_NS = 5 * NS_PER_S
"""What it takes a node to change its role."""


class Wire:
    """One direction of a link: what is handed over to it leaves in order, at `rates[k][1]` from `rates[k][0]` ns on."""

    def __init__(self, rule: LinkRule) -> None:
        self.rule = rule
        self.rates: list[tuple[int, float]] = [(0, float(rule.bytes_per_s))]
        self._free = self._told = 0.0
        self._busy: deque[tuple[float, float]] = deque()

    def rate_at(self, at: float) -> float:
        return [rate for start, rate in self.rates if start <= at][-1]

    def send(self, num_bytes: float, now: int) -> float:
        """When it is out."""
        begin = at = max(float(now), self._free)
        while num_bytes > 0:
            rate = self.rate_at(at)
            until = next((start for start, _ in self.rates if start > at), float("inf"))
            room = rate * (until - at) / NS_PER_S
            if room >= num_bytes:
                at += num_bytes * NS_PER_S / rate
                break
            num_bytes, at = num_bytes - room, until
        self._free = at
        self._busy.append((begin, at))
        return at

    def state(self, now: int) -> LinkState:
        """Since the last time it was asked."""
        sent = busy = 0.0
        for begin, end in self._busy:
            sent += self._sent(max(begin, self._told), min(end, now))
            busy += max(0.0, min(end, now) - max(begin, self._told))
        queued = self._sent(now, self._free)
        while self._busy and self._busy[0][1] <= now:
            self._busy.popleft()
        self._told = now
        rule, up = self.rule, self.rate_at(now) > 0
        if not up:  # sessions broke, and nobody wants the rest
            self._free = min(self._free, now)
        return LinkState(rule.source, rule.target, up, int(sent), int(busy), int(queued))

    def _sent(self, begin: float, end: float) -> float:
        """Bytes that leave in this time if something is there to send."""
        total = 0.0
        starts = [*(start for start, _ in self.rates), float("inf")]
        for (start, rate), stop in zip(self.rates, starts[1:], strict=True):
            total += rate * max(0.0, min(end, stop) - max(begin, start)) / NS_PER_S
        return total


class Node:
    def __init__(self, name: NodeId, cost: NodeCost, places: int) -> None:
        self.name, self.cost, self.places = name, cost, places
        self.queue: deque[Route] = deque()
        self.serving: Route | None = None
        self.decoding = 0
        self.waiting: deque[Route] = deque()


class World:
    """`ttft_s`: of each request that has its first token; `ready_s`: until its KV was where it decodes.

    `thresholds`, `conversions`: (seconds, what).
    """

    def __init__(self, rules: Rules, output_tokens: int = 1024) -> None:
        self.conductor = Conductor(rules)
        self.now, self.output_tokens = 0, output_tokens
        self.nodes: dict[NodeId, Node] = {}
        self.wires = {(rule.source, rule.target): Wire(rule) for rule in rules.links}
        self.arrived: dict[RequestId, tuple[RequestArrived, int]] = {}
        self.current: dict[RequestId, int] = {}
        self.ttft_s: dict[RequestId, float] = {}
        self.ready_s: dict[RequestId, float] = {}
        self.ended: set[RequestId] = set()
        self.offloaded: list[tuple[float, RequestId, bool]] = []
        self.thresholds: list[tuple[float, int | None]] = []
        self.conversions: list[tuple[float, NodeId]] = []
        self._clusters: dict[NodeId, str] = {}
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def join(self, name: str, role: Role, cost: Cost, *, cluster: str = "", places: int = 20) -> None:
        node = NodeId(name)
        self.nodes[node] = Node(node, compile_cost(cost), places)
        self._clusters[node] = cluster
        paths = Paths(network=10**11, handover=10**11)
        joined = NodeJoined(node, role, 10**7, BLOCK_SIZE, cost, paths, cluster=cluster, max_sequences=places)
        self.hear(joined)

    def run(self, prompts: Sequence[tuple[float, int]], until_s: float, *, measures: bool = True) -> None:
        """`prompts`: (second of arrival, tokens) of each."""
        for number, (at_s, num_tokens) in enumerate(prompts):
            request = RequestArrived(RequestId(f"r{number}"), "", num_tokens, self.output_tokens, ())
            self._at(int(at_s * NS_PER_S), lambda request=request: self._arrive(request))  # type: ignore[misc]
        if measures:
            for second in range(1, int(until_s) + 1):
                self._at(second * NS_PER_S, self._measure)
        while self._heap and self._heap[0][0] <= until_s * NS_PER_S:
            self.now, _, then = heappop(self._heap)
            then()
        self.conductor.check()

    def hear(self, event: Event) -> None:
        for action in self.conductor.on(event, self.now):
            self._act(action)

    def _at(self, time: float, then: Callable[[], None]) -> None:
        heappush(self._heap, (max(self.now, int(time)), next(self._numbers), then))

    def _arrive(self, request: RequestArrived) -> None:
        self.arrived[request.request] = request, self.now
        self.hear(request)

    def _measure(self) -> None:
        self.hear(LinksMeasured(tuple(wire.state(self.now) for wire in self.wires.values())))

    def _act(self, action: Action) -> None:
        if isinstance(action, Route):
            self.current[action.request] = action.attempt
            away = self._clusters[action.prefill] != self._clusters[action.decode]
            self.offloaded.append((self.now / NS_PER_S, action.request, away))
            node = self.nodes[action.prefill]
            node.queue.append(action)
            self._serve(node)
        elif isinstance(action, Abort):
            self.current[action.request] = -1
        elif isinstance(action, Convert):
            self.conversions.append((self.now / NS_PER_S, action.node))
            changed = RoleChanged(action.node, action.role)
            self._at(self.now + TURN_NS, lambda: self.hear(changed))
        elif isinstance(action, ThresholdSet):
            self.thresholds.append((self.now / NS_PER_S, action.threshold))

    def _lives(self, route: Route) -> bool:
        return self.current[route.request] == route.attempt

    def _serve(self, node: Node) -> None:
        while node.serving is None and node.queue:
            route = node.queue.popleft()
            if not self._lives(route):
                continue
            node.serving = route
            self._begin(node, route)

    def _begin(self, node: Node, route: Route) -> None:
        num_tokens = self.arrived[route.request][0].num_tokens
        done = self.now + node.cost.prefill_ns(num_tokens, 0)
        whole = float(done)
        source, target = self._clusters[route.prefill], self._clusters[route.decode]
        if source != target:  # it streams while it is computed; the state comes last
            wire, state_bytes = self.wires[source, target], node.cost.state_bytes
            out = wire.send(num_tokens * node.cost.kv_token_bytes + state_bytes, self.now)
            tail = state_bytes * NS_PER_S / max(1.0, wire.rate_at(done))
            whole = max(out, done + tail) + wire.rule.rtt_ns / 2
        self._at(done, lambda: self._computed(node, route))
        self._at(whole, lambda: self._handed_over(route))

    def _computed(self, node: Node, route: Route) -> None:
        node.serving = None
        if self._lives(route):
            at = self.arrived[route.request][1]
            self.ttft_s.setdefault(route.request, (self.now - at) / NS_PER_S)
            self.hear(FirstToken(route.request, route.attempt))
        self._serve(node)

    def _handed_over(self, route: Route) -> None:
        if self._lives(route):
            self.ready_s[route.request] = (self.now - self.arrived[route.request][1]) / NS_PER_S
            self.hear(PrefillFinished(route.request, route.attempt))
            self.nodes[route.decode].waiting.append(route)
            self._decode(self.nodes[route.decode])

    def _decode(self, node: Node) -> None:
        while node.waiting and node.decoding < node.places:
            route = node.waiting.popleft()
            if not self._lives(route):
                continue
            node.decoding += 1
            step_ns = node.cost.decode_step_ps(node.places)[0] // 1000
            self._at(self.now + self.output_tokens * step_ns, lambda route=route: self._end(node, route))  # type: ignore[misc]

    def _end(self, node: Node, route: Route) -> None:
        node.decoding -= 1
        if self._lives(route):
            self.ended.add(route.request)
            self.hear(RequestEnded(route.request, self.output_tokens))
        self._decode(node)


def both_ways(gbps: float) -> tuple[LinkRule, ...]:
    rate = int(gbps * GBPS)
    return LinkRule("far", "near", rate, 4_000_000), LinkRule("near", "far", rate, 4_000_000)


def case_study(rules: Rules, num_prefill: int = 3, num_decode: int = 5, num_far: int = 4) -> World:
    """H20 instances at home, and H200 instances that prefill for them."""
    world = World(rules)
    for number in range(num_prefill):
        world.join(f"near-p{number}", Role.PREFILL, H20, cluster="near")
    for number in range(num_decode):
        world.join(f"near-d{number}", Role.DECODE, H20, cluster="near")
    for number in range(num_far):
        world.join(f"far-p{number}", Role.PREFILL, H200, cluster="far")
    return world


def prompts(rate: Callable[[float], float] | float, until_s: float, seed: int = 1) -> list[tuple[float, int]]:
    """Poisson arrivals, lengths log-normal (9.9, 1) on [128, 131072], as in the case study."""
    random, at, found = Random(seed), 0.0, []
    while True:
        at += random.expovariate(rate(at) if callable(rate) else rate)
        if at > until_s:
            return found
        length = 0
        while not 128 <= length <= 131_072:
            length = int(random.lognormvariate(9.9, 1.0))
        found.append((at, length))
