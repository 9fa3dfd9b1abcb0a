"""Small deployments and workloads for tests of the simulator."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from isthmus.core.conductor import Rules
from isthmus.core.cost import Cost, Curve, compile_cost
from isthmus.core.types import NodeId, Role
from isthmus.facts import NodeFacts, Rates, Sequences
from isthmus.lab.sim.deployment import FAR, Deployment
from isthmus.lab.sim.records import Result
from isthmus.lab.sim.workloads import Request, Workload

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


def facts(name: str, role: Role, cost: Cost = CURVE, kv_blocks: int = 10_000, **fields: Any) -> NodeFacts:
    """One node, in blocks of BLOCK_SIZE."""
    model = compile_cost(cost)
    states = -(-model.state_bytes // (BLOCK_SIZE * model.kv_token_bytes))
    fields = {"max_steps": FAR, "max_chunks": FAR, "state_blocks": states, **fields}
    return NodeFacts(NodeId(name), role, cost, kv_blocks, BLOCK_SIZE, **fields)


def node(role: Role, number: int, **fields: Any) -> NodeFacts:
    return facts(f"{role}-{number}", role, **fields)


def nodes(role: Role, count: int, **fields: Any) -> tuple[NodeFacts, ...]:
    return tuple(node(role, number, **fields) for number in range(count))


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


def digest(result: Result) -> str:
    """Of everything a run leaves behind."""
    parts = (result.records, result.nodes, result.links, sorted(result.bytes_moved.items()), result.num_events)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def rates(network: int, **others: int) -> Rates:
    return Rates(network=network, **others)
