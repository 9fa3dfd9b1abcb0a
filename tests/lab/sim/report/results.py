"""Made-up simulation results: hand-written records, and a seeded result with every kind of ending."""

from __future__ import annotations

import random
from typing import Any

from isthmus.core.types import NS_PER_S, NodeId, Role
from isthmus.lab.sim.records import LinkRecord, NodeRecord, RequestRecord, RequestStatus, Result
from isthmus.lab.sim.workloads import Request

MS = NS_PER_S // 1000


def record(index: int = 0, *, output_tokens: int = 11, **fields: Any) -> RequestRecord:
    """A completed request: arrived at 1 s, prefilled from 2 s to 4 s, joined at 5 s, done at 9 s."""
    request = Request(
        arrival_ns=NS_PER_S,
        num_tokens=fields.pop("num_tokens", 1000),
        output_tokens=output_tokens,
        blocks=fields.pop("blocks", (1, 2)),
        tenant=fields.pop("tenant", ""),
        priority=fields.pop("priority", 0),
    )
    times = {"arrival": 1.0, "prefill_start": 2.0, "first_token": 4.0, "landed": 4.5, "joined": 5.0, "end": 9.0}
    times |= fields.pop("times_s", {})
    values: dict[str, Any] = {
        "status": RequestStatus.COMPLETED,
        "prefill": 0,
        "decode": 1,
        "prefill_ns": 2 * NS_PER_S,
    }
    values |= {f"{name}_ns": round(time * NS_PER_S) if time >= 0 else -1 for name, time in times.items()}
    return RequestRecord(index=index, request=request, **(values | fields))


def result(records: list[RequestRecord], **fields: Any) -> Result:
    values: dict[str, Any] = {
        "workload": "by hand", "policy": "isthmus", "admission": "none", "order": "fcfs", "records": records,
        "nodes": [NodeRecord(NodeId("p0"), Role.PREFILL), NodeRecord(NodeId("d0"), Role.DECODE)],
        "links": [], "start_ns": 0, "end_ns": 10 * NS_PER_S, "bytes_moved": {},
    }  # fmt: skip
    return Result(**(values | fields))


def replayed(num_requests: int, *, seed: int = 0, prefill_nodes: int = 8, decode_nodes: int = 8) -> Result:
    """A result with the shape of an hour's overload: queues that grow and shrink, refusals at both stages."""
    rng = random.Random(seed)
    free_ns = [0] * prefill_nodes
    busy_ns = [0] * (prefill_nodes + decode_nodes)
    records: list[RequestRecord] = []
    arrival_ns = 0
    for index in range(num_requests):
        rush = 1.9 if (index // max(1, num_requests // 6)) % 2 else 0.9
        arrival_ns += round(rng.expovariate(4.4 * rush) * NS_PER_S)
        made = _one(rng, index, arrival_ns, free_ns)
        if made.prefill_start_ns >= 0:
            busy_ns[made.prefill] += made.prefill_ns
        if made.joined_ns >= 0:
            made.decode += prefill_nodes
            busy_ns[made.decode] += (made.end_ns - made.joined_ns) // 20
        records.append(made)
    end_ns = max((each.end_ns for each in records), default=0)
    nodes = [
        NodeRecord(
            NodeId(f"{role.value}-{index}"), role, min(busy, end_ns), min(busy, end_ns) // 9, 1000, 5000, 7000
        )
        for index, (role, busy) in enumerate(
            zip([Role.PREFILL] * prefill_nodes + [Role.DECODE] * decode_nodes, busy_ns, strict=True)
        )
    ]
    links = [LinkRecord(f"{node.node}.nic", "network", 1e11, rng.randrange(10**14), 0) for node in nodes]
    links += [LinkRecord(f"{node.node}.ssd", "disk", 3e9, rng.randrange(10**12), 0) for node in nodes]
    links.append(LinkRecord("spine", "spine", float("inf"), 10**15, 0))
    moved = {"handover": 7 * 10**14, "fetch": 2 * 10**14, "disk_read": 4 * 10**12}
    return Result(
        workload="conversation_trace.jsonl, speed 1.4",
        policy="isthmus",
        admission="baseline",
        order="promise",
        records=records,
        nodes=nodes,
        links=links,
        start_ns=0,
        end_ns=end_ns,
        bytes_moved=moved,
        wall_s=0.8,
        num_events=10 * num_requests,
    )


def _one(rng: random.Random, index: int, arrival_ns: int, free_ns: list[int]) -> RequestRecord:
    tokens = min(126_000, max(1, round(rng.lognormvariate(8.8, 1.1))))
    request = Request(
        arrival_ns=arrival_ns,
        num_tokens=tokens,
        output_tokens=min(2000, max(1, round(rng.lognormvariate(5.7, 0.7)))),
        blocks=tuple(range(-(-tokens // 512))),
        tenant=("alpha", "beta <b>", "gamma & co")[index % 3],
        priority=(0, 0, 0, 5)[index % 4],
    )
    made = RequestRecord(
        index, request, arrival_ns=arrival_ns, ttft_limit_ns=30 * NS_PER_S, tbt_limit_ns=100 * MS
    )
    node = min(range(len(free_ns)), key=free_ns.__getitem__)
    if free_ns[node] - arrival_ns > 28 * NS_PER_S:
        made.status, made.stage, made.end_ns = (
            RequestStatus.REFUSED,
            "prefill",
            arrival_ns + rng.randrange(4 * NS_PER_S),
        )
        return made
    hit = rng.choice((0.0, 0.0, 0.3, 0.9))
    made.prefill = node
    made.cached_tokens = int(tokens * hit)
    made.fetched_tokens = made.cached_tokens // 3
    made.disk_tokens = made.cached_tokens // 5
    made.cached_blocks = made.cached_tokens // 512
    made.prefill_ns = (tokens - made.cached_tokens) * 90_000 + 20 * MS
    made.prefill_start_ns = max(arrival_ns, free_ns[node])
    made.first_token_ns = made.prefill_start_ns + made.prefill_ns + rng.randrange(1, 600) * MS
    free_ns[node] = made.first_token_ns
    made.landed_ns = made.first_token_ns + rng.randrange(1, 80) * MS
    if rng.random() < 0.03:
        made.status, made.stage, made.end_ns = RequestStatus.REFUSED, "decode", made.landed_ns
        return made
    made.decode = index % 8
    made.joined_ns = made.landed_ns + rng.randrange(40) * MS
    made.tbt_ns = rng.lognormvariate(3.7, 0.35) * MS if request.output_tokens > 1 else 0.0
    made.end_ns = made.joined_ns + (request.output_tokens - 1) * int(made.tbt_ns * 0.8)
    made.status = RequestStatus.FAILED if rng.random() < 0.002 else RequestStatus.COMPLETED
    return made
