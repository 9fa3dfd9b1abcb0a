"""The published case study (arXiv 2604.15039) in the simulator: the conductor's controllers are judged by what they
lead to with two clusters, a link and time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from isthmus.core.conductor import LinkRule, Rules
from isthmus.core.cost import Curve
from isthmus.core.types import NS_PER_S, NodeId, Role
from isthmus.facts import NodeFacts, Rates, Sequences
from isthmus.lab.sim.deployment import FAR, Deployment
from isthmus.lab.sim.faults import Faults
from isthmus.lab.sim.records import Result
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import Request, Workload

BLOCK_SIZE = 64
H200 = Curve(
    kv_token_bytes=17_280,
    num_layers=15,
    state_bytes=182_353_920,
    prefill_token_s=0,
    prefill_points=((1024, 0.44), (8192, 0.72), (32_768, 1.84), (131_072, 7.40)),
    decode_fixed_s=0.025,
)
"""Prefill of the published case study (arXiv 2604.15039, table 5); a token of each sequence in 25 ms."""
H20 = Curve(
    kv_token_bytes=17_280,
    num_layers=15,
    state_bytes=182_353_920,
    prefill_fixed_s=0.46899,
    prefill_token_s=1.300173e-4,
    prefill_pair_s=2.943848e-10,
    decode_fixed_s=0.025,
)
"""As its table 6 implies."""
GBPS = 10**9 // 8
P, D = Role.PREFILL, Role.DECODE
NOTHING = Faults()


def both_ways(gbps: float) -> tuple[LinkRule, ...]:
    rate = int(gbps * GBPS)
    return LinkRule("far", "near", rate, 4_000_000), LinkRule("near", "far", rate, 4_000_000)


def study(
    rules: Rules,
    load: Sequence[tuple[float, int]],
    num_prefill: int = 3,
    num_decode: int = 5,
    num_far: int = 4,
    faults: Faults = NOTHING,
) -> Result:
    """H20 instances at home, and H200 instances that prefill for them. `load`: (second of arrival, tokens) of each."""
    sizes = (("near", P, num_prefill, H20), ("near", D, num_decode, H20), ("far", P, num_far, H200))
    places, rates = Sequences(20, 20, 20), Rates(network=10**11, handover=10**11)
    nodes = [
        NodeFacts(
            NodeId(f"{cluster}-{role}-{number}"), role, cost, 10**7 // BLOCK_SIZE, BLOCK_SIZE, rates=rates,
            cluster=cluster, sequences=places, token_budget=FAR, prompt_batch=1, max_steps=FAR, max_chunks=FAR,
        )
        for cluster, role, count, cost in sizes
        for number in range(count)
    ]  # fmt: skip
    requests = [Request(int(at_s * NS_PER_S), num_tokens, 1024) for at_s, num_tokens in load]
    return Simulation(Deployment(tuple(nodes), rules, faults=faults), Workload("", BLOCK_SIZE, requests)).run()


def thresholds(result: Result, until_s: float) -> list[tuple[float, int | None]]:
    """(seconds, what)."""
    found = [(each.at_ns / NS_PER_S, each.threshold) for each in result.thresholds]
    return [each for each in found if each[0] <= until_s]


def prompts(rate: Callable[[float], float] | float, until_s: float, seed: int = 1) -> list[tuple[float, int]]:
    """Poisson arrivals, lengths log-normal (9.9, 1) on [128, 131072], as in the case study."""
    random, at, found = Random(seed), 0.0, []
    while True:
        at += random.expovariate(rate(at) if callable(rate) else rate)
        if at > until_s:
            return found
        length = 0
        while not 128 <= length <= 131_072:
            length = int(random.lognormvariate(9.9, 1.0))
        found.append((at, length))
