"""Small deployments, workloads and faults for tests of the simulator."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import inf
from random import Random
from typing import Any

import msgspec
from hypothesis import strategies as st

from isthmus.core.conductor import Rules
from isthmus.core.cost import Cost, Curve, compile_cost
from isthmus.core.types import NS_PER_MS, NodeId, Role
from isthmus.facts import NodeFacts, Sequences
from isthmus.lab.sim.deployment import FAR, Deployment
from isthmus.lab.sim.faults import DiskFault, Drain, Faults, LinkFault, NodeFault, SessionFault
from isthmus.lab.sim.records import RequestStatus, Result
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import Request, Workload

MS = NS_PER_MS
BLOCK_SIZE = 16

CURVE = Curve(
    kv_token_bytes=1000,
    num_layers=4,
    prefill_token_s=1e-4,
    prefill_pair_s=1e-8,
    decode_fixed_s=0.01,
    decode_sequence_s=1e-4,
    decode_context_s=1e-6,
    origin="a test",
)
HYBRID = msgspec.structs.replace(CURVE, state_bytes=40_000)  # three blocks


def facts(name: str, role: Role, cost: Cost = CURVE, kv_blocks: int = 10_000, **fields: Any) -> NodeFacts:
    """One node, in blocks of BLOCK_SIZE."""
    model = compile_cost(cost)
    states = -(-model.state_bytes // (BLOCK_SIZE * model.kv_token_bytes))
    fields = {"max_steps": FAR, "max_chunks": FAR, "state_blocks": states, **fields}
    return NodeFacts(NodeId(name), role, cost, kv_blocks, BLOCK_SIZE, **fields)


def nodes(role: Role, count: int, **fields: Any) -> tuple[NodeFacts, ...]:
    return tuple(facts(f"{role}-{number}", role, **fields) for number in range(count))


def disaggregated(num_prefill: int = 1, num_decode: int = 1, **fields: Any) -> tuple[NodeFacts, ...]:
    return nodes(Role.PREFILL, num_prefill, **fields) + nodes(Role.DECODE, num_decode, **fields)


def deployment(some: Sequence[NodeFacts], rules: Rules | None = None, **fields: Any) -> Deployment:
    """`fields`: of the deployment, or of all its nodes."""
    rules = rules if rules is not None else Rules(policy="round_robin", max_requests=1 << 30)
    most = fields.pop("max_sequences", 1000)
    fields = {"token_budget": 256, "prompt_batch": 1, "sequences": Sequences(most, most, most), **fields}
    common = {name: fields.pop(name) for name in Deployment.__struct_fields__ if name in fields}
    changed = tuple(msgspec.structs.replace(each, **fields) for each in some)
    return Deployment(nodes=changed, rules=rules, **common)


def workload(requests: Sequence[Request]) -> Workload:
    return Workload("test", BLOCK_SIZE, sorted(requests, key=lambda request: request.arrival_ns))


def shared_prompts(seed: int, count: int, span_ms: int) -> Workload:
    """Prompts of a few families, each beginning alike; some answers of one token; some priorities and own limits."""
    rng = Random(seed)
    requests = []
    for number in range(count):
        family, shared, own = rng.randrange(3), rng.randrange(12), rng.randrange(1, 6)
        blocks = [family * 1000 + depth for depth in range(shared)]
        blocks += [10**6 + number * 100 + depth for depth in range(own)]
        length = len(blocks) * BLOCK_SIZE - rng.randrange(BLOCK_SIZE)
        arrival = rng.randrange(max(1, span_ms)) * MS
        output = rng.choice([1, 1, 2, 5, 30, 100])
        limit = rng.choice([None, None, 500])
        requests.append(
            Request(arrival, length, output, tuple(blocks), "", rng.choice([0, 0, 0, 1]), limit, limit)
        )
    return workload(requests)


def run(
    cluster: Deployment, requests: Sequence[Request] | Workload, *, check: bool = True, **fields: Any
) -> Result:
    load = requests if isinstance(requests, Workload) else workload(requests)
    return Simulation(cluster, load, check=check, **fields).run()


def statuses(result: Result) -> set[RequestStatus]:
    return {record.status for record in result.records}


def digest(result: Result) -> str:
    """Of everything a run leaves behind."""
    parts = (result.records, result.nodes, result.links, sorted(result.bytes_moved.items()), result.num_events)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@st.composite
def faults(
    draw: st.DrawFn,
    names: Sequence[str],
    *,
    links: Sequence[tuple[str, str]] = (),
    disks: bool = False,
    lasting: Sequence[float] = (0.1, 0.5, 2.0, inf),
) -> Faults:
    """Faults of nodes (or clusters) and of their sessions, of links, and of disks. They may overlap and touch."""

    def span() -> tuple[float, float]:
        start = draw(st.integers(0, 60)) / 10
        return start, start + draw(st.sampled_from(lasting))

    def times(most: int) -> range:
        return range(draw(st.integers(0, most)))

    name = st.sampled_from(names)
    pair = st.lists(name, min_size=2, max_size=2, unique=True)
    return Faults(
        tuple(LinkFault(*ends, *span(), draw(st.sampled_from([0.0, 0.3]))) for ends in links for _ in times(2)),
        tuple(NodeFault(draw(name), *span()) for _ in times(3)),
        tuple(SessionFault(*draw(pair), *span(), draw(st.sampled_from([0.01, inf]))) for _ in times(2)),
        tuple(DiskFault(draw(name), *span()) for _ in times(2)) if disks else (),
        tuple(Drain(draw(name), *span()) for _ in times(2)),
    )
