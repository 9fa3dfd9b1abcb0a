"""Small deployments and workloads for tests of the simulator."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from isthmus.conductor import Rules
from isthmus.cost import Curve
from isthmus.deploy import Rates
from isthmus.sim.deployment import Deployment, NodeSpec
from isthmus.sim.records import Result
from isthmus.sim.workloads import Request, Workload
from isthmus.types import NodeId, Role

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


def node(role: Role, number: int, **fields: Any) -> NodeSpec:
    fields = {"cost": CURVE, "kv_blocks": 10_000, **fields}
    return NodeSpec(node=NodeId(f"{role}-{number}"), role=role, **fields)


def nodes(role: Role, count: int, **fields: Any) -> tuple[NodeSpec, ...]:
    return tuple(node(role, number, **fields) for number in range(count))


def deployment(specs: Sequence[NodeSpec], rules: Rules | None = None, **fields: Any) -> Deployment:
    rules = rules if rules is not None else Rules(policy="round_robin", max_requests=1 << 30)
    fields = {"block_size": BLOCK_SIZE, "token_budget": 256, "prompt_batch": 1, "max_sequences": 1000, **fields}
    return Deployment(nodes=tuple(specs), rules=rules, **fields)


def workload(requests: Sequence[Request]) -> Workload:
    return Workload("test", BLOCK_SIZE, sorted(requests, key=lambda request: request.arrival_ns))


def digest(result: Result) -> str:
    """Of everything a run leaves behind."""
    parts = (result.records, result.nodes, result.links, sorted(result.bytes_moved.items()), result.num_events)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def rates(network: int, **others: int) -> Rates:
    return Rates(network=network, **others)
