"""`python -m benchmarks conductor`: how long the conductor takes for one decision, `RequestArrived` to `Route`.

The simulator plays a cluster, and what its conductor hears is written down: queues drain, copies arrive, answers end,
caches fill and evict. Then a new conductor hears the same facts at the same times, and answers alike, since it is pure.
Only the decisions of the last requests, which find the index full, are timed one by one; what it takes to hear the
rest is summed apart. Block names are 16 bytes, as live, and new objects in every event, as a decoder makes them. Time
is this thread's CPU time, so that what else runs on the machine does not count.

Python's garbage collector is enabled with its usual thresholds, and its pauses are in the figures. Only the facts that
are still to come are frozen (`gc.freeze`): they are many times larger than all that the collector sees of a conductor.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from typer import Option

from benchmarks.options import Seed
from isthmus.bench.policy_cells import CURVE, MEMORY, prefill_node
from isthmus.bench.study import Columns, Outcome, Report, percent, silent, table
from isthmus.core.conductor import BlocksEvicted, BlocksStored, Conductor, Event, RequestArrived, Route, Rules
from isthmus.core.conductor.policies import POLICIES
from isthmus.core.cost import compile_cost
from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S, NodeId, Role
from isthmus.facts import Rates
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.spread import nearest_rank
from isthmus.lab.sim.workloads import Workload, load

BLOCK_SIZE, NAME_BYTES = 16, 16
OUTPUT_TOKENS = 300
SHARED, BEGINNINGS = 0.35, 2000
"""Share of each prompt that is a common beginning, and how many there are; chosen in proportion to 1 / rank."""
LOAD = 0.85
"""Share of the prefill nodes' time that the requests take if a fifth of each prompt is cached, about what is."""
RATES = Rates(network=3_000_000_000, handover=100_000_000_000, memory=MEMORY)
"""Links slow enough that copies overlap and every decision has to weigh some."""

Facts = list[tuple[int, Event]]


@dataclass(frozen=True)
class Plan:
    nodes: Annotated[int, Option(min=2, help="Nodes of the cluster.")] = 100
    blocks: Annotated[int, Option(min=1000, help="Distinct blocks in the prefix index.")] = 1_000_000
    prompt_blocks: Annotated[int, Option(min=10, help="Blocks of each prompt.")] = 250
    decisions: Annotated[int, Option(min=1, help="Requests placed.")] = 20_000
    policy: Annotated[str, Option(help="How requests are placed.")] = "isthmus"
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"--policy {self.policy}: known are {', '.join(POLICIES)}")
        if self.blocks < 10 * self.prompt_blocks:
            raise ConfigError(f"--blocks {self.blocks}: at least ten prompts, {10 * self.prompt_blocks}")

    @property
    def warm(self) -> int:
        """Requests that fill the caches with `blocks` blocks, and some more."""
        return round(1.2 * self.blocks / ((1 - SHARED) * self.prompt_blocks))


def run(plan: Plan, report: Report = silent) -> Outcome:
    """How long the conductor takes to place a request, on one core: decisions a second, P50, P99 and longest.

    Half of the nodes prefill and half decode; then all nodes are mixed. Times in microseconds; `follow_up_us`: hearing
    all that follows from one request, in the mean; `queued`, `copying`: requests in prefill and copies under way.
    """
    half = plan.nodes // 2
    rows = []
    for cluster, roles in (
        (
            f"{half} prefill, {plan.nodes - half} decode",
            [Role.PREFILL] * half + [Role.DECODE] * (plan.nodes - half),
        ),
        (f"{plan.nodes} mixed", [Role.MIXED] * plan.nodes),
    ):
        report(f"{cluster}: simulating {plan.warm + plan.decisions:,} requests")
        facts = played(plan, roles)
        report(f"{cluster}: deciding")
        rows.append({"cluster": cluster, "policy": plan.policy} | measured(plan, facts))
    columns: Columns = {
        "cluster": "cluster", "indexed blocks": "indexed_blocks", "decisions/s": "decisions_per_s",
        "mean µs": "mean_us",
        "P50": "p50_us", "P99": "p99_us", "max": "max_us", "follow-up µs": "follow_up_us", "in prefill": "queued",
        "copying": "copying", "fetches": "fetches", "matched": lambda row: percent(row["matched_share"]),
    }  # fmt: skip
    title = f"python -m benchmarks conductor: {plan.policy}, {plan.decisions:,} decisions each"
    return Outcome([table(title, columns, rows)], rows)


def played(plan: Plan, roles: Sequence[Role]) -> Facts:
    """All events that the conductor of a simulated cluster gets."""
    prefills = sum(role is not Role.DECODE for role in roles)
    prefill = msgspec.structs.replace(
        prefill_node(BLOCK_SIZE, RATES),
        kv_blocks=100 * plan.prompt_blocks,
        dram_blocks=-(-plan.blocks // prefills) + plan.prompt_blocks,
    )
    decode = msgspec.structs.replace(prefill, dram_blocks=0)
    nodes = [
        msgspec.structs.replace(decode if role is Role.DECODE else prefill, node=NodeId(f"n{at}"), role=role)
        for at, role in enumerate(roles)
    ]
    facts: Facts = []
    deployment = Deployment(tuple(nodes), _rules(plan))
    heard = Simulation(
        deployment, _workload(plan, prefills), log=lambda now, event, _: facts.append((now, event))
    )
    heard.run()
    return facts


def _rules(plan: Plan) -> Rules:
    return Rules(policy=plan.policy, max_requests=1 << 40)


def _workload(plan: Plan, prefills: int) -> Workload:
    tokens, beginning = plan.prompt_blocks * BLOCK_SIZE, round(SHARED * plan.prompt_blocks) * BLOCK_SIZE
    prefill_s = compile_cost(CURVE).prefill_ns(tokens * 4 // 5, tokens // 5) / NS_PER_S
    return load(
        f"poisson:rate={LOAD * prefills / prefill_s:.3f},num={plan.warm + plan.decisions},input={tokens - beginning},"
        f"output={OUTPUT_TOKENS},prefixes={BEGINNINGS},prefix_tokens={beginning},block_size={BLOCK_SIZE},"
        f"seed={plan.seed}"
    )


def measured(plan: Plan, facts: Facts) -> dict[str, Any]:
    conductor, clock = Conductor(_rules(plan)), time.thread_time_ns
    view, times = conductor.view, list[int]()
    follow_ns = arrived = num_events = fetches = cached = queued = copying = 0
    gc.collect()
    gc.freeze()
    for now, fact in facts:
        event = _decoded(fact)
        begin = clock()
        actions = conductor.on(event, now)
        took_ns = clock() - begin
        arrived += type(event) is RequestArrived
        if arrived <= plan.warm:
            continue
        if type(event) is not RequestArrived:
            follow_ns, num_events = follow_ns + took_ns, num_events + 1
            continue
        times.append(took_ns)
        (route,) = [action for action in actions if isinstance(action, Route)]
        fetches += route.fetch is not None
        cached += route.num_cached
        queued += sum([len(node.prefills) for node in view.prefills])
        copying += sum([len(node.link_in.copies) for node in view.prefills])
    gc.unfreeze()
    times.sort()
    count = len(times)
    return {
        "nodes": plan.nodes,
        "indexed_blocks": view.index.num_blocks,
        "decisions": count,
        "decisions_per_s": count * NS_PER_S / sum(times),
        "mean_us": sum(times) / count / 1000,
        "p50_us": nearest_rank(times, 50) / 1000,
        "p99_us": nearest_rank(times, 99) / 1000,
        "max_us": times[-1] / 1000,
        "follow_up_us": follow_ns / count / 1000,
        "events": num_events,
        "queued": queued / count,
        "copying": copying / count,
        "fetches": fetches,
        "matched_share": cached / count / plan.prompt_blocks,
    }


def _decoded(event: Event) -> Event:
    """The event with names as a decoder makes them: new objects, without cached hashes."""
    if isinstance(event, RequestArrived | BlocksStored | BlocksEvicted):
        names = tuple([name.to_bytes(NAME_BYTES, "big") for name in event.names if isinstance(name, int)])
        return msgspec.structs.replace(event, names=names)
    return event
