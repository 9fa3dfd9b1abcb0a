"""Recordings as `isthmus route` writes them, of servers in virtual time whose speed is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isthmus.bench.learning import Recorded, deployment
from isthmus.config import load_config
from isthmus.core.conductor import (
    Action,
    Event,
    FirstToken,
    NodeJoined,
    RequestArrived,
    RequestEnded,
    Route,
    Rules,
)
from isthmus.core.conductor.events import RECORDING_FORMAT
from isthmus.core.cost import Curve
from isthmus.core.types import MIXED, NodeId, RequestId
from isthmus.lab.sim.deployment import deployment_of
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import load
from isthmus.live.cluster.recorder import Recorder, RecordingHeader

RULES = Rules(policy="isthmus")
NODES = tuple(
    NodeJoined(NodeId(f"http://10.0.0.{number}:8000"), MIXED, 1 << 40, 16, cache_blocks=4096)
    for number in (1, 2)
)
TRUTH = Curve(
    kv_token_bytes=1,
    num_layers=1,
    prefill_fixed_s=0.02,
    prefill_token_s=7e-4,
    decode_fixed_s=0.03,
    decode_sequence_s=3e-3,
    decode_context_s=4e-6,
)
SOME_LENGTHS = (
    "input=truncated_lognormal(mu=5.2,sigma=0.8,min=16,max=2000),output=truncated_lognormal(mu=3,sigma=0.5,min=2,max=99),"
    "prefixes=6,prefix_tokens=256,block_size=16"
)


def record(
    path: Path, rate: float, num: int, seed: int, *, rules: Rules = RULES, streamed: bool = True
) -> Path:
    """A recording of so many requests a second before two servers of speed `TRUTH`."""
    workload = load(f"poisson:rate={rate},num={num},seed={seed},{SOME_LENGTHS}")
    servers = {joined.node: joined for joined in NODES}
    values = deployment(Recorded("", RULES, servers, ()), TRUTH)
    result = Simulation(deployment_of(load_config(None, values), 16), workload).run()
    lines: list[tuple[int, Event, Sequence[Action]]] = [(0, joined, ()) for joined in NODES]
    for each in result.records:
        name, request, node = RequestId(str(each.index)), each.request, NODES[each.prefill].node
        names = tuple([b"%16d" % block for block in request.blocks[: request.num_tokens // 16]])
        route = Route(name, 1, node, node, num_cached=each.cached_tokens // 16)
        arrived = RequestArrived(name, "", request.num_tokens, 256, names)
        lines.append((each.arrival_ns, arrived, (route,)))
        lines.append((each.first_token_ns, FirstToken(name, 1), ()))
        tbt_ns = round(each.tbt_ns) if streamed else 0
        lines.append((each.end_ns, RequestEnded(name, request.output_tokens, tbt_ns), ()))
    recorder = Recorder(path, RecordingHeader(RECORDING_FORMAT, rules))
    for at_ns, event, actions in sorted(lines, key=lambda line: line[0]):
        recorder.record(at_ns, event, actions)
    recorder.close()
    return path
