"""The planner's answer: plain values, which are also the JSON; docs/plan.md explains every field.

Rates are requests per second, every number is finite, None is a figure that does not exist. A threshold of None
offloads nothing.
"""

from __future__ import annotations

import msgspec

from isthmus.lab.sim.spread import Percentiles


class PlanFigures(msgspec.Struct, frozen=True):
    """Equations (3) to (8) for one plan, by one method."""

    rate: float
    remote: float
    local: float
    decode: float
    binds: str
    share: float
    egress_gbps: float
    threshold_residual: float | None
    split_residual: float | None


class IdleTtft(msgspec.Struct, frozen=True):
    """Time to first token on an idle fleet: prefill alone."""

    mean_s: float
    p90_s: float
    remote_mean_s: float | None
    local_mean_s: float | None
    wire_s: float | None


class DeploymentPlan(msgspec.Struct, frozen=True):
    """A threshold and a split of the home cluster."""

    name: str
    threshold: int | None
    remote: dict[str, int]
    prefill: int
    decode: int
    codec: str
    exact: PlanFigures
    representative: PlanFigures
    mean_above: float | None
    mean_below: float | None
    service: IdleTtft
    cost: float | None

    @property
    def nodes(self) -> int:
        return self.prefill + self.decode + sum(self.remote.values())


class Needs(msgspec.Struct, frozen=True):
    """The cheapest fleet for a rate; without prices, the smallest."""

    rate: float
    threshold: int | None
    remote: dict[str, int]
    prefill: int
    decode: int
    egress_gbps: float
    cost: float
    attention: int = 0


class BandwidthPoint(msgspec.Struct, frozen=True):
    gbps: float
    rate: float
    representative: float
    int8: float
    threshold: int | None
    prefill: int
    decode: int
    egress_gbps: float
    binds: str


class ThresholdPoint(msgspec.Struct, frozen=True):
    threshold: int | None
    remote: float | None
    link: float | None
    local: float | None
    decode: float
    rate: float
    representative: float


class SplitPoint(msgspec.Struct, frozen=True):
    prefill: int
    decode: int
    rate_at_best: float
    representative_at_best: float
    rate: float
    representative: float
    threshold: int | None


class LinkFailure(msgspec.Struct, frozen=True):
    as_planned: float
    resplit: float
    prefill: int
    decode: int
    needed: Needs


class WhatIf(msgspec.Struct, frozen=True):
    bandwidth: list[BandwidthPoint]
    threshold: list[ThresholdPoint]
    split: list[SplitPoint]
    link_failure: LinkFailure | None
    twice: Needs


class Trial(msgspec.Struct, frozen=True):
    """One simulation of a plan at a fraction of its exact rate."""

    plan: str
    arrivals: str
    fraction: float
    rate: float
    requests: int
    goodput: float
    offloaded: float
    ttft: Percentiles | None
    queue: Percentiles | None
    prefill: Percentiles | None
    transfer: Percentiles | None
    egress_gbps: float


class Sustained(msgspec.Struct, frozen=True):
    """The highest simulated rate with goodput at the target."""

    plan: str
    arrivals: str
    rate: float
    formula: float
    representative: float
    optimism: float | None


class Simulated(msgspec.Struct, frozen=True):
    goodput: float
    requests: int
    trials: list[Trial]
    sustained: list[Sustained]
    best: str | None


class DecodeBatch(msgspec.Struct, frozen=True):
    size: int
    step_ms: float
    binds: str


class BudgetSide(msgspec.Struct, frozen=True):
    """Decoding with or without attention nodes, for the same money."""

    nodes: str
    price: float
    batch: int
    step_ms: float
    rate: float
    per_price: float
    binds: str
    turns: int
    compute_bound: bool


class AttentionOffload(msgspec.Struct, frozen=True):
    elsewhere: BudgetSide
    alone: BudgetSide
    ratio: float
    reason: str


class DemandFacts(msgspec.Struct, frozen=True):
    source: str
    mean_uncached: float
    mean_cached: float
    p50_uncached: float
    p90_uncached: float
    output_tokens: float
    rate: float | None


class PlannedCluster(msgspec.Struct, frozen=True):
    name: str
    nodes: int
    home: bool
    gbps: float | None
    price: float | None
    attention: int = 0


class PlanAnswer(msgspec.Struct, frozen=True):
    demand: DemandFacts
    clusters: list[PlannedCluster]
    batch: DecodeBatch
    plans: list[DeploymentPlan]
    paper: DeploymentPlan
    baselines: list[DeploymentPlan]
    what_if: WhatIf
    simulated: Simulated | None
    notes: list[str]
    attention: AttentionOffload | None = None

    def distinct(self) -> list[tuple[DeploymentPlan, str]]:
        """Plans, the paper's plan and baselines, each once, with the names of all that are equal to it."""
        names: dict[tuple[object, ...], list[str]] = {}
        first: dict[tuple[object, ...], DeploymentPlan] = {}
        for plan in [*self.plans, self.paper, *self.baselines]:
            key = (plan.threshold, *plan.remote.items(), plan.prefill, plan.decode)
            names.setdefault(key, []).append(plan.name)
            first.setdefault(key, plan)
        return [(plan, ", ".join(names[key])) for key, plan in first.items()]


def to_json(answer: PlanAnswer) -> bytes:
    return msgspec.json.format(msgspec.json.encode(answer), indent=1) + b"\n"
