"""What crosses between clusters, how long it takes, and what is known of it: with orders written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from isthmus.core.conductor import (
    Abort,
    Action,
    Convert,
    Event,
    Fail,
    FetchFinished,
    FetchOrder,
    FirstToken,
    LinkRule,
    LinksMeasured,
    NodeJoined,
    NodeLeft,
    RequestArrived,
    RequestEnded,
    RequestFailed,
    RoleChanged,
    Route,
    Rules,
)
from isthmus.core.conductor.view import PREFILLING, RequestView
from isthmus.core.cost import Handling
from isthmus.core.node import SEVERED_NS
from isthmus.core.types import NS_PER_S, NodeId, RequestId, Role
from isthmus.facts import Rates, Sequences
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.faults import Faults, LinkFault, NodeFault
from isthmus.lab.sim.records import COMPLETED, RequestRecord, Result
from isthmus.lab.sim.workloads import Request

from .cluster import BLOCK_SIZE, CURVE, HYBRID, MS, deployment, facts, run

RATE = 10**7
"""Bytes per second of the link: a token's 1000 bytes take 0.1 ms."""
NODE = Rates(network=10**9, memory=10**9)


class Orders:
    """Stands in for the conductor: routes as written, once for each attempt, and keeps what it hears."""

    def __init__(self, routes: Sequence[Route], others: Sequence[tuple[int, Action]] = ()) -> None:
        self._routes, self._others = list(routes), list(others)
        self.heard: list[tuple[int, Event]] = []
        self.under_way: dict[RequestId, Route] = {}
        self.view, self.requests, self.block_size = self, dict[RequestId, RequestView](), BLOCK_SIZE

    def on(self, event: Event, now: int) -> list[Action]:
        self.heard.append((now, event))
        actions: list[Action] = [action for time, action in self._others if time <= now]
        self._others = [(time, action) for time, action in self._others if time > now]
        if isinstance(event, RequestArrived):
            self.requests[event.request] = RequestView(event, now)
            actions.append(self._route(event.request))
        elif isinstance(event, FirstToken):
            self.requests[event.request].answering = event.attempt
        elif isinstance(event, RequestFailed):
            actions += self._again(event.request)
        elif isinstance(event, NodeLeft):
            for request, route in list(self.under_way.items()):
                if event.node in (route.prefill, route.decode):
                    actions += self._again(request, event.node)
        elif isinstance(event, RequestEnded):
            ended = self.under_way.pop(event.request)
            del self.requests[event.request]
            actions.append(Abort(event.request, ended.attempt, (ended.prefill, ended.decode)))
        return actions

    def _again(self, request: RequestId, gone: str = "") -> list[Action]:
        before = self.under_way[request]
        nodes = tuple(node for node in (before.prefill, before.decode) if node != gone)
        return [Abort(request, before.attempt, nodes), self._route(request)]

    def _route(self, request: RequestId) -> Action:
        at = next((at for at, route in enumerate(self._routes) if route.request == request), None)
        if at is None:
            del self.under_way[request], self.requests[request]
            return Fail(request, "no more routes")
        found = self.under_way[request] = self._routes.pop(at)
        self.requests[request].attempt, self.requests[request].state = found.attempt, PREFILLING
        return found

    def check(self) -> None:
        """Nothing to check."""

    def of(self, kind: type) -> list[tuple[int, Any]]:
        return [(now, event) for now, event in self.heard if isinstance(event, kind)]


def clusters(
    *nodes: str,
    cost: Any = CURVE,
    link: int = RATE,
    rtt_ms: int = 0,
    rates: dict[str, Rates] | None = None,
    **fields: Any,
) -> Deployment:
    """Nodes written as `cluster-role`; clusters `far` and `near`, joined. `rates`: of nodes that have others."""
    specs = []
    for name in nodes:
        cluster, role = name.split("-")
        own = (rates or {}).get(name, NODE)
        specs.append(facts(name, Role(role), cost, dram_blocks=1000, rates=own, cluster=cluster))
    links = tuple(LinkRule(*ends, link, rtt_ms * MS) for ends in (("far", "near"), ("near", "far")))
    rules = Rules(max_requests=1 << 30, links=links, period_ns=10 * MS)
    return deployment(specs, rules, **{"token_budget": 10_000, "link_ns": 50 * MS, **fields})


Play = Callable[..., Result]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Play:
    def play(cluster: Deployment, requests: Sequence[Request], orders: Orders) -> Result:
        monkeypatch.setattr("isthmus.lab.sim.simulation.Conductor", lambda rules: orders)
        return run(cluster, requests)

    return play


def route(
    request: int = 0, attempt: int = 1, prefill: str = "far-prefill", decode: str = "near-decode", **fields: Any
) -> Route:
    return Route(RequestId(str(request)), attempt, NodeId(prefill), NodeId(decode), **fields)


PREFILL_NS = 160 * 100_000 + 160 * 160 * 10
"""Of 160 tokens with nothing cached."""


def test_a_hand_over_takes_the_link_and_half_a_round_trip_once(played: Play) -> None:
    """The last of four layers leaves after the prefill: 40,000 bytes, 4 ms; the first three took 12 ms of its 16."""
    cluster = clusters("far-prefill", "near-decode", rtt_ms=6)
    result = played(cluster, [Request(0, 160, 2)], Orders([route()]))
    (record,) = result.records
    assert record.first_token_ns == PREFILL_NS
    assert record.landed_ns == record.joined_ns == PREFILL_NS + 4 * MS + 3 * MS
    assert [link.bytes_moved for link in result.links if link.kind == "cluster"] == [160_000, 0]


HANDLED = msgspec.structs.replace(
    CURVE,
    handling=Handling(
        send_layer_s=1e-3, send_byte_s=1e-8, receive_layer_s=5e-4, receive_byte_s=2e-8, message_s=2e-4
    ),
)


def test_kv_is_of_use_when_both_ends_have_done_with_its_last_layer(played: Play) -> None:
    """To send 160,000 bytes takes 4 + 1.6 ms, to receive them 2 + 3.2 ms; of that a quarter, and a message."""
    cluster = clusters("far-prefill", "near-decode", cost=HANDLED)
    (record,) = played(cluster, [Request(0, 160, 2)], Orders([route()])).records
    assert record.first_token_ns == PREFILL_NS  # the client does not wait for it
    assert record.joined_ns == PREFILL_NS + 4 * MS + 2_700_000 + 200_000


def test_the_recurrent_state_leaves_last_and_whole(played: Play) -> None:
    cluster = clusters("far-prefill", "near-decode", cost=HYBRID)
    result = played(cluster, [Request(0, 160, 2)], Orders([route()]))
    (record,) = result.records
    assert record.landed_ns == PREFILL_NS + 4 * MS + 4 * MS  # 40,000 bytes of state
    assert result.bytes_moved["handover"] == 160_000 + 40_000


FETCH_8 = FetchOrder(NodeId("near-prefill"), 0, 8)
NAMES = tuple(range(10))


def second(
    played: Play, later: Route, blocks: tuple[int, ...] = (*NAMES[:8], 98, 99), first: int = 130, **fields: Any
) -> tuple[Result, RequestRecord]:
    """A prompt of eight or ten blocks was computed at `near-prefill`; a second later one comes that shares blocks."""
    requests = [Request(0, first, 1, NAMES[: -(-(first - 2) // BLOCK_SIZE)]), Request(NS_PER_S, 160, 2, blocks)]
    cluster = clusters("far-prefill", "near-prefill", "near-decode", **fields)
    result = played(cluster, requests, Orders([route(prefill="near-prefill"), later]))
    return result, result.records[1]


def test_what_is_fetched_is_of_use_when_both_ends_have_done_with_it(played: Play) -> None:
    """128,000 bytes: 12.8 ms on the link, then a quarter of 4 + 1.28 ms and 2 + 2.56 ms, and a message."""
    _, record = second(played, route(1, fetch=FETCH_8, num_cached=8), cost=HANDLED)
    assert record.first_token_ns == NS_PER_S + 12_800_000 + 2_460_000 + 200_000


def test_a_fetch_between_clusters_brings_the_state_too(played: Play) -> None:
    """Abundant bandwidth: eight blocks that `near` has computed go to `far`, with the state at their end."""
    result, record = second(played, route(1, fetch=FETCH_8, num_cached=8), cost=HYBRID, rtt_ms=2)
    assert result.bytes_moved["fetch"] == 8 * BLOCK_SIZE * 1000 + 40_000
    assert record.fetched_tokens == record.cached_tokens == 128
    assert record.first_token_ns == NS_PER_S + 12_800_000 + 4 * MS + MS  # longer than the computing
    assert record.stalled_ns > 0


def test_only_what_the_decode_side_lacks_crosses(played: Play) -> None:
    """The first request leaves its blocks at `near-prefill`, from where the second one's home takes them."""
    result, _ = second(played, route(1, handover_start=8, recall=FETCH_8), first=160, cost=HYBRID)
    crossed = [link.bytes_moved for link in result.links if link.kind == "cluster"]
    assert crossed == [2 * BLOCK_SIZE * 1000 + 40_000, 0]
    assert result.bytes_moved["recall"] == 8 * BLOCK_SIZE * 1000


def test_a_decode_waits_for_what_is_recalled(played: Play) -> None:
    """The node's own link is slow: recalling takes longer than prefill and hand-over together."""
    slow = {"near-prefill": Rates(network=10**6, memory=10**9)}
    _, record = second(played, route(1, handover_start=8, recall=FETCH_8), NAMES, first=160, rates=slow)
    assert record.joined_ns == NS_PER_S + 128 * MS


def test_what_is_not_kept_any_more_cannot_be_recalled(played: Play) -> None:
    cluster = clusters("far-prefill", "near-prefill", "near-decode")
    first = route(handover_start=8, recall=FETCH_8)
    orders = Orders([first, route(attempt=2)])
    result = played(cluster, [Request(0, 160, 2, tuple(range(10)))], orders)
    assert [event.attempt for _, event in orders.of(RequestFailed)] == [1]
    assert (result.records[0].status, result.records[0].attempts) == (COMPLETED, 2)


@pytest.mark.parametrize(
    ("stop_s", "factor", "landed_ms"),
    [
        (1.0, 0.2, 4 + 60),  # the 80,000 bytes of three layers that are still to go, and the last layer
        (0.05, 0.0, 50 + 12),  # it comes back in time
    ],
)
def test_a_link_that_loses_its_rate_slows_what_is_on_it(
    played: Play, stop_s: float, factor: float, landed_ms: int
) -> None:
    faults = Faults((LinkFault("far", "near", 0.004, stop_s, factor),))
    cluster = clusters("far-prefill", "near-decode", faults=faults)
    (record,) = played(cluster, [Request(0, 160, 2)], orders := Orders([route()])).records
    assert not orders.of(RequestFailed)
    assert record.landed_ns == landed_ms * MS


def test_a_link_that_is_down_too_long_fails_the_attempt(played: Play) -> None:
    faults = Faults((LinkFault("far", "near", 0.004, 1.0, 0.0),))
    cluster = clusters("far-prefill", "near-prefill", "near-decode", faults=faults)
    orders = Orders([route(), route(attempt=2, prefill="near-prefill")])
    result = played(cluster, [Request(0, 160, 3)], orders)
    ((time, failed),) = orders.of(RequestFailed)
    # Its nodes give the conductor time to find out itself.
    gives_up = 54 * MS + SEVERED_NS
    assert (time, failed.reason) == (
        gives_up,
        "far-prefill: the session with near-decode ended: nothing crossed far > near for 0.05 s",
    )
    record = result.records[0]
    assert (record.status, record.attempts, record.prefill) == (COMPLETED, 2, 1)
    # The first token was out already, the second came from the other prefill.
    assert record.first_token_ns == PREFILL_NS and record.joined_ns > gives_up + PREFILL_NS


def test_a_request_goes_on_elsewhere_with_the_tokens_it_has(played: Play) -> None:
    """Its decode node dies in the midst of the 20 tokens; each comes once, and the pause is one gap."""
    faults = Faults(nodes=(NodeFault("near-decode", 0.1, 0.2),))
    cluster = clusters("far-prefill", "near-decode", "near-mixed", faults=faults)
    orders = Orders([route(), route(attempt=2, prefill="near-mixed", decode="near-mixed")])
    result = played(cluster, [Request(0, 160, 20)], orders)
    (record,) = result.records
    decoded = {str(node.node): node.tokens_decoded for node in result.nodes}
    assert record.status is COMPLETED
    # One token of each prefill, the others of the iterations that were over.
    assert decoded["near-decode"] == 7 and decoded["near-mixed"] == 20 - 2 - 7
    assert record.tbt_ns > 15 * MS  # the mean of the two longest gaps, the pause and another
    assert [event.node for _, event in orders.of(NodeJoined)][3:] == ["near-decode"]


@pytest.mark.parametrize(
    ("faults", "known_ns"),
    [
        (Faults(nodes=(NodeFault("near-prefill", 1.01, 2.0),)), 10 * MS),
        (Faults((LinkFault("near", "far", 1.01, 1.5),)), 60 * MS),  # for 50 ms it stood still
    ],
)
def test_what_cannot_be_fetched_after_all_is_computed(played: Play, faults: Faults, known_ns: int) -> None:
    """`far` fetches eight blocks over 12.8 ms for a prompt of which it computes two, which takes less."""
    cluster = clusters("far-prefill", "far-decode", "near-prefill", "near-decode", faults=faults)
    later = route(1, decode="far-decode", fetch=FETCH_8, num_cached=8)
    orders = Orders([route(prefill="near-prefill"), later])
    requests = [Request(0, 128, 1, NAMES[:8]), Request(NS_PER_S, 160, 2, (*NAMES[:8], 98, 99))]
    record = played(cluster, requests, orders).records[1]
    assert not orders.of(RequestFailed)
    assert [time for time, _ in orders.of(FetchFinished)] == [NS_PER_S + known_ns]
    assert (record.status, record.attempts, record.cached_tokens) == (COMPLETED, 1, 0)
    assert record.first_token_ns == NS_PER_S + known_ns + PREFILL_NS


def test_links_are_measured_while_requests_are_left(played: Play) -> None:
    """Three layers leave in 12 ms; then the prefill goes on, and the last layer follows."""
    orders = Orders([route(work_ns=PREFILL_NS)])
    result = played(clusters("far-prefill", "near-decode", rtt_ms=6), [Request(0, 160, 2)], orders)
    times, events = zip(*orders.of(LinksMeasured), strict=True)
    assert times == tuple(range(10 * MS, result.end_ns + 1, 10 * MS))
    forth = [event.links[0] for event in events]
    assert [state.sent_bytes for state in forth][:3] == [100_000, 57_440, 2_560]
    assert sum(state.busy_ns for state in forth) == 16 * MS
    assert all(state.up and state.rtt_ns == 6 * MS for state in forth)
    assert all(state.sent_bytes == state.busy_ns == 0 for event in events for state in event.links[1:])


def test_only_what_is_computed_can_wait_to_be_sent(played: Play) -> None:
    """On a link ten times slower: after 10 ms of 16 the KV of three layers is there to 10/16, and 10,000 bytes left."""
    orders = Orders([route(work_ns=16 * MS)])
    played(clusters("far-prefill", "near-decode", link=RATE // 10), [Request(0, 160, 2)], orders)
    first = orders.of(LinksMeasured)[0][1].links[0]
    assert (first.sent_bytes, first.queued_bytes) == (10_000, 75_000 - 10_000)


def test_a_converted_node_keeps_its_cache_and_does_its_new_work(played: Play) -> None:
    cluster = clusters("near-prefill", "near-decode")
    rules = msgspec.structs.replace(cluster.rules, convert=True, links=())
    limits = Sequences(prefill=1000, decode=1)
    nodes = tuple(msgspec.structs.replace(node, sequences=limits) for node in cluster.nodes)
    cluster = msgspec.structs.replace(cluster, rules=rules, nodes=nodes)
    names = tuple(range(10))
    others: list[tuple[int, Action]] = [
        (NS_PER_S, Convert(NodeId("near-prefill"), Role.DECODE)),
        (NS_PER_S, Convert(NodeId("near-decode"), Role.PREFILL)),
    ]
    back = FetchOrder(NodeId("near-prefill"), 0, 9)
    turned = route(1, prefill="near-decode", decode="near-prefill", fetch=back, num_cached=9)
    orders = Orders([route(0, prefill="near-prefill"), turned], others)
    requests = [Request(0, 160, 2, names), Request(2 * NS_PER_S, 160, 2, names)]
    result = played(cluster, requests, orders)
    changes = [("near-prefill", Role.DECODE), ("near-decode", Role.PREFILL)]
    assert [(event.node, event.role) for _, event in orders.of(RoleChanged)] == changes
    assert [(change.node, change.role) for change in result.conversions] == changes
    assert result.records[1].fetched_tokens == 144  # from the decode node that was a prefill node
