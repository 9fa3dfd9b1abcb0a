"""What a plan says: plain values, which are also the JSON (docs/plan.md). Every number is finite; None: not there.

Rates are requests per second. A threshold of None offloads nothing.
"""

from __future__ import annotations

import msgspec

from isthmus.lab.sim.spread import Percentiles


class PlanFigures(msgspec.Struct, frozen=True):
    """What the equations say of a plan, by one method.

    `rate`: (6); `remote`, `local`, `decode`: (3) to (5); `binds`: the term that sets the rate; `share`: of requests
    offloaded. `threshold_residual`, `split_residual`: (7) and (8), 0 where they hold, as shares of the lesser side.
    """

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
    """Time to first token on an idle fleet: prefill alone. `wire_s`: what the KV of an offloaded prompt takes on the
    link, most of it while the prefill runs."""

    mean_s: float
    p90_s: float
    remote_mean_s: float | None
    local_mean_s: float | None
    wire_s: float | None


class DeploymentPlan(msgspec.Struct, frozen=True):
    """A threshold and a split. `remote`: instances of each remote cluster; `cost`: of all instances, None without
    prices; `mean_above`, `mean_below`: mean uncached lengths of the two classes."""

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
    """The cheapest fleet for a rate, by its number of nodes where there are no prices. `egress_gbps`: at that rate;
    `attention`: nodes that hold KV, as many for each decode node as there are now."""

    rate: float
    threshold: int | None
    remote: dict[str, int]
    prefill: int
    decode: int
    egress_gbps: float
    cost: float
    attention: int = 0


class BandwidthPoint(msgspec.Struct, frozen=True):
    """The best plan if every link had `gbps`. `int8`: its rate with 8-bit KV on the links."""

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
    """Rates that each stage allows at a threshold, with the best plan's split; None: it has nothing to do."""

    threshold: int | None
    remote: float | None
    link: float | None
    local: float | None
    decode: float
    rate: float
    representative: float


class SplitPoint(msgspec.Struct, frozen=True):
    """A split of the home: the rate at the best plan's threshold, and at a threshold of its own."""

    prefill: int
    decode: int
    rate_at_best: float
    representative_at_best: float
    rate: float
    representative: float
    threshold: int | None


class LinkFailure(msgspec.Struct, frozen=True):
    """No remote cluster can be reached. `as_planned`: rate of the home with the best plan's split; `resplit`: with the
    best split of its own; `needed`: nodes at home that would bear the best plan's rate alone."""

    as_planned: float
    resplit: float
    prefill: int
    decode: int
    needed: Needs


class WhatIf(msgspec.Struct, frozen=True):
    """`twice`: what bears twice the best plan's rate with the links as they are."""

    bandwidth: list[BandwidthPoint]
    threshold: list[ThresholdPoint]
    split: list[SplitPoint]
    link_failure: LinkFailure | None
    twice: Needs


class Trial(msgspec.Struct, frozen=True):
    """One simulation of a plan. `fraction`: of its exact rate that was offered; `requests`: how many, of which the
    first quarter is not counted; `goodput`: share of them inside both limits.

    `ttft`: arrival to first token, of which `queue` and `prefill`; `transfer`: from there to the decode batch.
    """

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
    """The highest rate simulated at which goodput was at least the target; `optimism`: the formula's over it."""

    plan: str
    arrivals: str
    rate: float
    formula: float
    representative: float
    optimism: float | None


class Simulated(msgspec.Struct, frozen=True):
    """`goodput`: the target. `requests`: of each simulation. `best`: of the plans, the one that sustains the most under
    the arrivals that suit it least; None without limits."""

    goodput: float
    requests: int
    trials: list[Trial]
    sustained: list[Sustained]
    best: str | None


class DecodeBatch(msgspec.Struct, frozen=True):
    """What one decode instance does: (5). `binds`: what limits its batch."""

    size: int
    step_ms: float
    binds: str


class BudgetSide(msgspec.Struct, frozen=True):
    """One way to decode. `rate`: tokens a second; `per_price`: tokens for a unit of the price; `binds`: what limits the
    batch; `turns`: as how many batches it is computed; `compute_bound`: a larger batch would bring little."""

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
    """Attention elsewhere, and the same money without. `ratio`: of tokens for the price; `reason`: of that in words."""

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
    """`gbps`: of its link to the home, None for the home itself; `price`: of a node, None without prices;
    `attention`: nodes beside them that hold KV."""

    name: str
    nodes: int
    home: bool
    gbps: float | None
    price: float | None
    attention: int = 0


class PlanAnswer(msgspec.Struct, frozen=True):
    """`plans`: the best splits, each with its best threshold, best first; `baselines`: the same demand otherwise;
    `attention`: where there are attention nodes, what they bring."""

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
        """Plans, the paper's and baselines, each once, with the names of all that are the same."""
        names: dict[tuple[object, ...], list[str]] = {}
        first: dict[tuple[object, ...], DeploymentPlan] = {}
        for plan in [*self.plans, self.paper, *self.baselines]:
            key = (plan.threshold, *plan.remote.items(), plan.prefill, plan.decode)
            names.setdefault(key, []).append(plan.name)
            first.setdefault(key, plan)
        return [(plan, ", ".join(names[key])) for key, plan in first.items()]


def to_json(answer: PlanAnswer) -> bytes:
    """Indented JSON, keys in a fixed order."""
    return msgspec.json.format(msgspec.json.encode(answer), indent=1) + b"\n"
