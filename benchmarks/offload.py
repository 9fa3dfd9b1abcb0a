"""`python -m benchmarks offload`: prefill in another datacenter, simulated with queues, bursts and a link that fails.

The case study of Prefill-as-a-Service (arXiv 2604.15039, section 5): 4 instances of 8 H200 prefill for a cluster of 8
instances of 8 H20, joined by one link. What differs between the systems is who decides which prompt crosses it, and
the baselines, which have as many instances. The limits are ours, since the paper gives none to the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from rich.table import Table

from isthmus.config import load_config
from isthmus.core.types import NS_PER_S
from isthmus.facts import PROFILES
from isthmus.lab.sim.deployment import deployment_of
from isthmus.lab.sim.faults import Faults, LinkFault
from isthmus.lab.sim.records import Result, Status
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.spread import nearest_rank
from isthmus.lab.sim.summary import threshold_use, within_limits
from isthmus.lab.sim.workloads import load

LENGTHS = "truncated_lognormal(mu=9.9,sigma=1,min=128,max=131072)"
"""The paper's prompts, in tokens; every answer has 1,024."""
PUBLISHED_RATE, PUBLISHED_THRESHOLD = 3.24, 19_400
TTFT_MS, TBT_MS = 30_000, 50
"""Our limits: a third more than the longest prompt takes on 8 H20 alone (22.6 s), so that every system can keep them,
and twice the time of a decode step (25 ms)."""
KEPT = 0.99
"""A rate is sustained when this share of the requests is inside both limits."""
FAULT_AT_S, FAULT_S, FAULT_FACTOR = 120.0, 60.0, 0.2
GBPS, SCARCE_GBPS = 100.0, 20.0

DENSE, LOCAL = PROFILES / "prfaas-1t-h200x8.yaml", PROFILES / "prfaas-1t-h20x8.yaml"
_ENGINE = {"kv_memory": "200GB", "token_budget": 65_536, "prompt_batch": 1}
_DECODE_PLACES = 20


def _two(prefill: int, decode: int, **offload: Any) -> dict[str, Any]:
    """Both clusters; `offload` as in the configuration."""
    roles = {"prefill": prefill, "decode": {"count": decode, "max_sequences": _DECODE_PLACES}}
    return {
        "clusters": {
            "dense": {"cost": str(DENSE), "hardware": "h200", "gpus": 8, "roles": {"prefill": 4}},
            "local": {"cost": str(LOCAL), "hardware": "h20", "gpus": 8, "roles": roles},
        },
        "offload": offload,
    }


_ALONE = {
    "clusters": {
        "local": {
            "cost": str(LOCAL),
            "hardware": "h20",
            "gpus": 8,
            "roles": {"prefill": 9, "decode": {"count": 3, "max_sequences": _DECODE_PLACES}},
        }
    }
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "fixed": _two(3, 5, threshold=PUBLISHED_THRESHOLD, control="none"),
    "controlled": _two(3, 5, threshold="auto", control="link"),
    "priced": _two(3, 5, routing="priced", control="link"),
    "naive": _two(0, 8, threshold=0, control="none"),
    "homogeneous": _ALONE,
}
"""`fixed`: the paper's optimum and nothing else; `controlled`: our threshold and control; `priced`: each prompt where
it costs least; `naive` and `homogeneous`: the paper's baselines."""


NARROW_GBPS, NARROW_THRESHOLD = 5.0, 42_000
"""A link that binds, and the threshold that the paper's equations give for it, with 5 nodes that prefill at home and 3
that decode."""
_NARROW: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("fixed-5/3", _two(5, 3, threshold=NARROW_THRESHOLD, control="none"), "none"),
    ("controlled-5/3", _two(5, 3, threshold="auto", control="link"), "none"),
    ("controlled-5/3", _two(5, 3, threshold="auto", control="link"), "lossless"),
    ("controlled-5/3", _two(5, 3, threshold="auto", control="link"), "int8"),
    ("controlled-4/4", _two(4, 4, threshold="auto", control="link"), "int8"),
)


class Cell(msgspec.Struct, frozen=True):
    """One simulation. Shares of all requests; times in seconds."""

    system: str
    scenario: str
    rate: float
    requests: int
    goodput: float
    goodput_per_s: float
    failed: int
    offloaded: float
    queue_s: float
    prefill_s: float
    transfer_s: float
    ttft_s: float
    ttft_p90_s: float
    egress_gbps: float
    threshold_changes: int
    threshold_changes_per_min: float


def workload_of(rate: float, num: int, *, bursty: bool, seed: int) -> str:
    arrivals = f"gamma:rate={rate:g},cv=3" if bursty else f"poisson:rate={rate:g}"
    return f"{arrivals},num={num},input={LENGTHS},output=1024,seed={seed}"


def simulate(
    name: str,
    system: dict[str, Any],
    scenario: str,
    rate: float,
    *,
    num: int,
    bursty: bool = False,
    gbps: float = GBPS,
    fault: float | None = None,
    compression: str = "none",
    seed: int = 0,
) -> Cell:
    """`fault`: the share of its rate that the link keeps for a minute, None without; 0 is a link that is down."""
    settings: dict[str, Any] = {
        **system,
        "engine": _ENGINE,
        "slo": {"ttft_ms": TTFT_MS, "tbt_ms": TBT_MS},
        "network": {"node_gbps": 800, "compression": compression},
        "limits": {"max_requests": 1_000_000},
    }
    joined = "dense" in system["clusters"]
    if joined:
        settings["links"] = [{"between": ["dense", "local"], "gbps": gbps, "rtt_ms": 2}]
    workload = load(workload_of(rate, num, bursty=bursty, seed=seed))
    deployment = deployment_of(load_config(None, settings), workload.block_size)
    if fault is not None and joined:
        faults = Faults((LinkFault("dense", "local", FAULT_AT_S, FAULT_AT_S + FAULT_S, fault),))
        deployment = msgspec.structs.replace(deployment, faults=faults)
    return _cell(name, scenario, rate, Simulation(deployment, workload).run())


def _cell(name: str, scenario: str, rate: float, result: Result) -> Cell:
    done = [record for record in result.records if record.status is Status.COMPLETED]
    first = [record for record in result.records if record.first_token_ns >= 0]
    cluster_of = [node.cluster for node in result.nodes]
    good = sum(within_limits(record) for record in done)
    ttft = sorted(record.first_token_ns - record.arrival_ns for record in first)
    crossed = sum(link.bytes_moved for link in result.links if link.kind == "cluster")
    seconds = (result.end_ns - result.start_ns) / NS_PER_S
    use = threshold_use(result.thresholds, result.end_ns - result.start_ns)
    count = max(1, len(first))

    def mean(of: Callable[[Any], int]) -> float:
        return sum(map(of, first)) / count / NS_PER_S

    return Cell(
        system=name,
        scenario=scenario,
        rate=rate,
        requests=len(result.records),
        goodput=good / len(result.records),
        goodput_per_s=good / seconds,
        failed=sum(record.status is Status.FAILED for record in result.records),
        offloaded=sum(cluster_of[r.prefill] != cluster_of[r.decode] for r in first) / count,
        queue_s=mean(lambda r: r.prefill_start_ns - r.arrival_ns),
        prefill_s=mean(lambda r: r.prefill_ns),
        transfer_s=mean(lambda r: max(0, r.landed_ns - r.first_token_ns) if r.landed_ns >= 0 else 0),
        ttft_s=mean(lambda r: r.first_token_ns - r.arrival_ns),
        ttft_p90_s=nearest_rank(ttft, 90) / NS_PER_S if ttft else 0.0,
        egress_gbps=crossed * 8 / seconds / 1e9,
        threshold_changes=use.changes if use is not None else 0,
        threshold_changes_per_min=use.changes_per_min if use is not None else 0.0,
    )


Report = Callable[[str], None]


def run(num: int, seed: int, *, capacity: bool, report: Report) -> list[Cell]:
    """All scenarios, then, with `capacity`, the highest rate that each system sustains."""
    load_80 = 0.8 * PUBLISHED_RATE
    two = [name for name in SYSTEMS if name != "homogeneous"]
    losing: dict[str, Any] = {"gbps": SCARCE_GBPS, "fault": FAULT_FACTOR}
    scenarios: list[tuple[str, Iterable[str], dict[str, Any]]] = [
        ("Poisson", SYSTEMS, {}),
        ("bursty", SYSTEMS, {"bursty": True}),
        ("loses 80 %", two, {"fault": FAULT_FACTOR}),
        ("loses 80 %, bursty", two, {"fault": FAULT_FACTOR, "bursty": True}),
        ("20 Gbps", two, {"gbps": SCARCE_GBPS}),
        ("20 Gbps, bursty", two, {"gbps": SCARCE_GBPS, "bursty": True}),
        ("20 Gbps, loses 80 %", two, losing),
        ("20 Gbps, loses 80 %, bursty", two, {**losing, "bursty": True}),
        *[
            (f"20 Gbps, loses 80 %{bursts}, {codec}", ("controlled", "priced"), {**how, "compression": codec})
            for codec in ("lossless", "int8")
            for bursts, how in (("", losing), (", bursty", {**losing, "bursty": True}))
        ],
        ("link down", two, {"fault": 0.0}),
        ("link down, bursty", two, {"fault": 0.0, "bursty": True}),
    ]
    cells = []
    for scenario, names, how in scenarios:
        for name in names:
            cells.append(simulate(name, SYSTEMS[name], scenario, load_80, num=num, seed=seed, **how))
            report(f"{scenario}: {name}: {100 * cells[-1].goodput:.1f} % inside the limits")
    if capacity:
        for scenario, bursty in (("highest rate", False), ("highest rate, bursty", True)):
            for name, system in SYSTEMS.items():
                cells.append(highest(name, system, scenario, num=num, seed=seed, bursty=bursty))
                report(f"{scenario}: {name}: {cells[-1].rate:.2f} requests/s")
        for name, system, codec in _NARROW:
            scenario, how = (
                f"highest rate, {NARROW_GBPS:g} Gbps, {codec}",
                {"gbps": NARROW_GBPS, "compression": codec},
            )
            cells.append(highest(name, system, scenario, num=num, seed=seed, bursty=False, **how))
            report(f"{scenario}: {name}: {cells[-1].rate:.2f} requests/s")
    return cells


def highest(
    name: str, system: dict[str, Any], scenario: str, *, num: int, seed: int, bursty: bool, **how: Any
) -> Cell:
    """The highest rate, to 0.02 requests/s, that is sustained; the cell of that rate. Where even the lowest tried is
    not, its cell: `goodput` then says so."""

    def at(rate: float) -> Cell:
        return simulate(name, system, scenario, rate, num=num, seed=seed, bursty=bursty, **how)

    low, high = 0.5, 4.0
    best = at(low)
    while high - low > 0.02:
        middle = (low + high) / 2
        cell = at(middle)
        if cell.goodput >= KEPT:
            low, best = middle, cell
        else:
            high = middle
    return best


def table(cells: list[Cell]) -> Table:
    found = Table(title="Prefill in another datacenter, simulated")
    for column in (
        "scenario",
        "system",
        "rate (1/s)",
        "goodput (%)",
        "(1/s)",
        "failed",
        "offloaded (%)",
        "TTFT (s)",
        "queue",
        "prefill",
        "transfer",
        "P90",
        "egress (Gbps)",
        "threshold changes",
        "a minute",
    ):
        found.add_column(column, justify="left" if column in ("scenario", "system") else "right")
    for cell in cells:
        found.add_row(
            cell.scenario,
            cell.system,
            f"{cell.rate:.2f}",
            f"{100 * cell.goodput:.1f}",
            f"{cell.goodput_per_s:.2f}",
            str(cell.failed),
            f"{100 * cell.offloaded:.1f}",
            f"{cell.ttft_s:.2f}",
            f"{cell.queue_s:.2f}",
            f"{cell.prefill_s:.2f}",
            f"{cell.transfer_s:.3f}",
            f"{cell.ttft_p90_s:.2f}",
            f"{cell.egress_gbps:.2f}",
            str(cell.threshold_changes),
            f"{cell.threshold_changes_per_min:.1f}",
        )
    return found
