"""Clusters in a given state, seen by the conductor: for tests of estimates, policies and admission."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from isthmus.core.conductor import NodeJoined, Paths, RequestArrived
from isthmus.core.conductor.copies import begin
from isthmus.core.conductor.estimates import Estimator
from isthmus.core.conductor.view import NodeView, Placement, RequestView, View
from isthmus.core.cost import Curve
from isthmus.core.types import NS_PER_MS, NS_PER_S, BlockName, NodeId, RequestId, Role

BLOCK_SIZE = 4
MS = NS_PER_MS
CURVE = Curve(
    kv_token_bytes=250,
    num_layers=1,
    prefill_token_s=1e-3,
    decode_fixed_s=10e-3,
    decode_sequence_s=1e-3,
    decode_context_s=1e-6,
)
"""1 ms per prompt token; a decode step of B sequences with C tokens takes 10 ms + B ms + C us."""
SLOW = Curve(kv_token_bytes=250, num_layers=1, prefill_token_s=2e-3, prefill_pair_s=1e-6, decode_fixed_s=20e-3)
LINK = Paths(network=1_000_000, handover=1_000_000)
"""One block takes 1 ms from node to node, and 4 ms to compute."""


def view_of(*roles: Role, cost: Curve = CURVE, paths: Paths = LINK, capacity_tokens: int = 100_000) -> View:
    view = View()
    for number, role in enumerate(roles):
        view.join(NodeJoined(NodeId(f"n{number}"), role, capacity_tokens, BLOCK_SIZE, cost, paths, 50))
    return view


def queue_up(view: View, *waits_ms: float, now: int = 0) -> None:
    """Makes the nodes' queues so long."""
    for node, wait_ms in zip(view.nodes.values(), waits_ms, strict=False):
        node.free_ns = now + int(wait_ms * MS)


def arrival(
    num_tokens: int,
    names: Sequence[BlockName] = (),
    *,
    request: str = "r",
    max_tokens: int = 10,
    priority: int = 0,
    ttft_ms: int | None = None,
    tbt_ms: int | None = None,
    tenant: str = "",
    weight: float = 0.0,
) -> RequestArrived:
    return RequestArrived(
        RequestId(request),
        tenant,
        num_tokens,
        max_tokens,
        tuple(names),
        priority,
        ttft_ms,
        tbt_ms,
        weight=weight,
    )


def accept(
    view: View, request: RequestArrived, prefill: NodeView, decode: NodeView, work_ms: float, now: int = 0
) -> RequestView:
    """Books a request by hand: at the end of the prefill node's queue."""
    wait = max(0, prefill.free_ns - now)
    placement = Placement(prefill, 0, 0, work_ms * MS, wait + work_ms * MS)
    placement.decode = decode
    accepted = RequestView(request, now)
    view.requests[request.request] = accepted
    view.assign(accepted, placement, request.num_tokens * prefill.cost.kv_token_bytes, now)
    accepted.attempt += 1
    return accepted


def random_view(random: Random, now: int) -> tuple[View, RequestArrived]:
    """Nodes of several kinds, some without a link; queues, caches, promises and copies under way."""
    view = View()
    costs, paths = [CURVE, CURVE, SLOW], [LINK, LINK, Paths(network=150_000), Paths(), Paths(network=5_000_000)]
    alike, count = random.random() < 0.4, random.randint(1, 6)
    for number in range(count):
        role = Role.MIXED if random.random() < 0.2 else Role.PREFILL
        cost, path = (CURVE, LINK) if alike else (random.choice(costs), random.choice(paths))
        view.join(NodeJoined(NodeId(f"n{number}"), role, 10**6, BLOCK_SIZE, cost, path, 50))
    view.join(NodeJoined(NodeId("d"), Role.DECODE, 10**6, BLOCK_SIZE, CURVE))
    names = list(range(100, 100 + random.randint(0, 30)))
    load = random.choice([0, 50, 400])
    for node in view.prefills:
        node.free_ns = now + random.randint(-20, load) * MS
        held = random.choice([0, 0, random.randint(0, len(names)), len(names)])
        view.index.store(node.bit, names[:held])
        if random.random() < 0.3:
            view.index.expect(node.bit, names[held : random.randint(held, len(names))])
        if node.role is Role.MIXED:
            node.batch = random.randint(0, 3)
    linked = [node for node in view.prefills if node.paths.network]
    for _ in range(random.choice([0, 0, 4]) if len(linked) > 1 else 0):
        source, target = random.sample(linked, 2)
        begin(source.link_out, target.link_in, random.randint(1, 40_000), now - random.randint(0, 5 * MS))
    for _ in range(random.randint(0, 50)):
        view.clusters[""].recent.accept(now - random.randint(0, 10) * NS_PER_S // 10)
    view.clusters[""].recent.insert(100, now)
    view.clusters[""].recent.lose(random.choice([0, 0, 10**9, 10**10]), now)
    view.clusters[""].calibration.add(random.choice([10, 10, 7, 20]), 10)
    view.num_routed = random.randint(0, 100)
    return view, arrival(len(names) * BLOCK_SIZE + random.randint(1, 60), names)


def estimator(view: View, request: RequestArrived, now: int = 0) -> Estimator:
    return Estimator(view, request, view.prefills, now)
