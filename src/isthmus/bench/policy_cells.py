"""The cells of `isthmus bench policies`: which cluster, which workload, and what each policy makes of it.

Run as a module it is the worker of the benchmark: told a `Common` and a `Task`, it answers a list of `Cell`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from isthmus.config import load_config
from isthmus.core.conductor import Rules
from isthmus.core.cost import Curve, hardware_named
from isthmus.core.errors import ConfigError
from isthmus.core.types import NodeId, Role
from isthmus.facts import NodeFacts, Rates, Sequences
from isthmus.lab.sim.deployment import FAR, Deployment, deployment_of
from isthmus.lab.sim.records import RequestStatus, Result
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.spread import spread
from isthmus.lab.sim.summary import within_limits
from isthmus.lab.sim.workloads import Replay, Workload, load, replayed
from isthmus.workers import serve

OURS = "isthmus"
POLICIES: dict[str, dict[str, Any]] = {
    "random": {"policy": "random"},
    "round_robin": {"policy": "round_robin"},
    "least_loaded": {"policy": "least_loaded"},
    "sticky": {"policy": "sticky"},
    "local_aware": {"policy": "local_aware"},
    "mooncake-1": {"policy": "mooncake", "policy_parameters": (("balancing_threshold", 1.0),)},
    "mooncake-2": {"policy": "mooncake", "policy_parameters": (("balancing_threshold", 2.0),)},
    "mooncake-4": {"policy": "mooncake", "policy_parameters": (("balancing_threshold", 4.0),)},
    OURS: {"policy": OURS},
}
"""Every competitor and its rules; each threshold of Algorithm 1 competes for itself."""
_NEVER_FETCH = ("random", "round_robin", "least_loaded", "sticky", "local_aware")

REFUSAL = {"admission": "early"}
PROMISE = {"admission": "early", "reserve": 0.1}
OVERLOAD_GOODPUT = 0.9
"""A cell is in overload when no policy alone gets this share of the requests inside their limits."""

GPUS = 8
CACHE_TOKENS = 3_000_000
KV_TOKENS = 1_400_000
HANDOVER = 100_000_000_000
MEMORY = 135_000_000_000
TTFT_MS, TBT_MS = 30_000, 100
CURVE = Curve(
    kv_token_bytes=320 * 1024,
    num_layers=80,
    prefill_token_s=1.144e-4,
    prefill_pair_s=7.21e-10,
    decode_fixed_s=26.2e-3,
    decode_context_s=3.5e-8,
    origin="Mooncake (FAST'25), Figure 14",
)
"""The cluster without `--config`: Mooncake's nodes (FAST'25, 5.1), 8 A800 each, serving a model of the shape of
LLaMA2-70B: 320 KiB of KV per token (8 KV heads of 128, 80 layers, bfloat16). `CURVE`: a fit of Figure 14's prefill
times, and its decode times, 26.5 ms a token at 8k of context and 30.8 ms at 128k. `CACHE_TOKENS`: the node cache
of the paper's scheduling experiments. `KV_TOKENS`: what 8 GPUs leave for KV beside 140 GB of weights. `MEMORY`:
bytes per second at which Figure 14's cached prefixes load. `HANDOVER`: prefill to decode, on a rail of its own.
SSDs are the hardware table's. Limits: 30 s to the first token, 100 ms between tokens (5.2)."""


class Task(msgspec.Struct, frozen=True):
    """What one worker simulates: every policy in a cluster of `nodes` prefill nodes, at every link speed.

    `links`: bytes per second; `shared`: KV is handed over on the same links; `ssd`: bytes of SSD cache per
    node, None as configured; `decode`: decode nodes.
    """

    source: str
    nodes: int
    decode: int
    speed: float
    seed: int
    links: tuple[int, ...]
    policies: tuple[str, ...]
    shared: bool = False
    config: str | None = None
    ssd: int | None = None
    limit: int | None = None


class Common(msgspec.Struct, frozen=True):
    """What all tasks of a source share. `trace`: the source as it stands, None where it is a specification, of which
    each seed makes another one; `spread`: whether a seed spreads its arrivals. `base`: one prefill node and one decode
    node with all that does not change from cell to cell."""

    trace: Workload | None
    spread: bool
    base: Deployment


class Figures(msgspec.Struct, frozen=True):
    """Of completed requests, except `goodput`, a share of all: both limits kept."""

    ttft_s_mean: float
    ttft_s_p99: float
    hit_rate: float
    goodput: float
    fetched_bytes: int = 0


class Cell(msgspec.Struct, frozen=True):
    """One cluster, load and link. `overload`: with refusal, empty where placement alone keeps up."""

    source: str
    nodes: int
    decode: int
    speed: float
    link: int
    shared: bool
    seed: int
    alone: dict[str, Figures]
    overload: dict[str, Figures]


def common_of(task: Task) -> Common:
    """What `task` has in common with all others of its source. Reads all files that any of them needs. Raises
    ConfigError for a trace or configuration that is wrong."""
    workload = load(task.source, Replay(limit=task.limit))
    for note in workload.notes:
        print(f"isthmus: {note}", file=sys.stderr)
    base = _base(task, workload.block_size)
    if _is_spec(task.source):
        return Common(None, False, base)
    return Common(workload, not workload.exact, base)


def run_task(task: Task, common: Common) -> list[Cell]:
    """The cells of a task, one for each link. Raises ConfigError when no request fits."""
    runs = _Runs(task, common)
    return [runs.cell(link) for link in task.links]


class _Runs:
    """The simulations of one task. `_linkless`: outcomes that hold for every link, by policy and knobs."""

    def __init__(self, task: Task, common: Common) -> None:
        self._task, self._base = task, common.base
        self._workload = workload_of(task, common)
        self._linkless: dict[str, Figures] = {}

    def cell(self, link: int) -> Cell:
        """Placement alone; where that is not enough also with refusal, and ours in promise order as well."""
        task = self._task
        alone = self._all(link, {})
        overload: dict[str, Figures] = {}
        if max(outcome.goodput for outcome in alone.values()) < OVERLOAD_GOODPUT:
            overload = self._all(link, REFUSAL)
            overload[f"{OURS}, promise"] = self._outcome(link, OURS, PROMISE)
        return Cell(
            task.source, task.nodes, task.decode, task.speed, link, task.shared, task.seed, alone, overload
        )

    def _all(self, link: int, knobs: dict[str, Any]) -> dict[str, Figures]:
        return {name: self._outcome(link, name, knobs) for name in POLICIES if name in self._task.policies}

    def _outcome(self, link: int, name: str, knobs: dict[str, Any]) -> Figures:
        """One simulation. A policy that never fetches uses no link: one run stands for every speed."""
        key = f"{name} {knobs}"
        if key in self._linkless:
            return self._linkless[key]
        rules = msgspec.structs.replace(self._base.rules, max_requests=1 << 40, **POLICIES[name], **knobs)
        deployment = msgspec.structs.replace(
            self._base,
            nodes=_nodes(self._task, self._base, link, "promise" if knobs is PROMISE else "fcfs"),
            rules=rules,
        )
        outcome = outcome_of(Simulation(deployment, self._workload).run())
        if name in _NEVER_FETCH and not self._task.shared and not outcome.fetched_bytes:
            self._linkless[key] = outcome
        return outcome


def outcome_of(result: Result) -> Figures:
    """A simulation's figures. Raises ConfigError when no request was completed."""
    served = [record for record in result.records if record.status is RequestStatus.COMPLETED]
    ttft = spread([record.first_token_ns - record.arrival_ns for record in served])
    if ttft is None:
        raise ConfigError(f"{result.workload}: no request fits the memory of these nodes; take larger nodes")
    return Figures(
        ttft_s_mean=ttft.mean,
        ttft_s_p99=ttft.p99,
        hit_rate=sum(r.cached_tokens for r in served) / sum(r.request.num_tokens for r in served),
        goodput=sum(map(within_limits, result.records)) / len(result.records),
        fetched_bytes=result.bytes_moved["fetch"],
    )


def workload_of(task: Task, common: Common) -> Workload:
    """The seed spreads the arrivals of a Mooncake trace inside its 3 s steps; it is the seed of a generated
    workload; a trace with exact times has nothing to draw."""
    if common.trace is not None:
        return replayed(common.trace, Replay(task.speed, task.seed if common.spread else None))
    plain = re.sub(r",seed=[0-9]+", "", task.source)
    return load(f"{plain},seed={task.seed}", Replay(task.speed, limit=task.limit))


def _is_spec(source: str) -> bool:
    return ":" in source and not Path(source).exists()


def _base(task: Task, block_size: int) -> Deployment:
    if task.config is not None:
        config = load_config(Path(task.config), {"roles": {"prefill": 1, "decode": 1}, "cache.ssd": task.ssd})
        if config.slo.ttft_ms is None:
            raise ConfigError(f"{task.config}: slo.ttft_ms: goodput needs a limit; give one, e.g. 30000")
        return deployment_of(config, block_size, Path(task.config).parent)
    hardware = hardware_named("a800")
    rates = Rates(
        handover=HANDOVER,
        memory=MEMORY,
        disk_read=int(GPUS * hardware.ssd_read_bw),
        disk_write=int(GPUS * hardware.ssd_write_bw),
    )
    ssd_blocks = (task.ssd or 0) // (CURVE.kv_token_bytes * block_size)
    prefill = msgspec.structs.replace(prefill_node(block_size, rates), ssd_blocks=ssd_blocks)
    decode = msgspec.structs.replace(prefill, role=Role.DECODE, dram_blocks=0, ssd_blocks=0)
    return Deployment((prefill, decode), Rules(ttft_ms=TTFT_MS, tbt_ms=TBT_MS))


def prefill_node(block_size: int, rates: Rates) -> NodeFacts:
    """Of the cluster without `--config`, with no name yet and no SSD."""
    return NodeFacts(
        NodeId(""),
        Role.PREFILL,
        CURVE,
        KV_TOKENS // block_size,
        block_size,
        dram_blocks=CACHE_TOKENS // block_size,
        rates=rates,
        token_budget=8192,
        prompt_batch=1,
        sequences=Sequences(256, 256, 256),
        max_steps=FAR,
        max_chunks=FAR,
    )


def _nodes(task: Task, base: Deployment, link: int, order: str) -> tuple[NodeFacts, ...]:
    nodes = []
    for facts, count in zip(base.nodes, (task.nodes, task.decode), strict=True):
        handover = 0 if task.shared else facts.rates.handover or HANDOVER
        rates = msgspec.structs.replace(facts.rates, network=link, handover=handover)
        nodes += [
            msgspec.structs.replace(facts, node=NodeId(f"{facts.role}-{number}"), rates=rates, order=order)
            for number in range(count)
        ]
    return tuple(nodes)


def answer(shared: bytes, own: bytes) -> bytes:
    task = msgspec.msgpack.decode(own, type=Task)
    return msgspec.msgpack.encode(run_task(task, msgspec.msgpack.decode(shared, type=Common)))


if __name__ == "__main__":
    serve(answer)
