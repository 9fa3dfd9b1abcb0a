"""What would be with another bandwidth, threshold or split, without the links, and at twice the load."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from isthmus.config import Config
from isthmus.core.cost.lengths import mean_of
from isthmus.core.cost.offload import Solution, decode_imbalance, decode_rate, prefill_imbalance
from isthmus.lab.planner import answer as say
from isthmus.lab.planner.decode import offload_of
from isthmus.lab.planner.demand import Demand
from isthmus.lab.planner.fleet import Fleet
from isthmus.lab.planner.solve import GBPS, FleetShape, Method, Solver, round_step, tokens

_EXACT, _PAPER = Method.EXACT, Method.REPRESENTATIVE
_CURVE_POINTS = 100
_BANDWIDTHS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Of the links as they are, where nobody says which to try."""


def what_if(solver: Solver, best: Solution, bandwidths: Sequence[float]) -> say.WhatIf:
    """Around the best plan by the exact method. `bandwidths`: in Gbps; none takes some around the links' own."""
    remote = bool(solver.fleet.remotes)
    return say.WhatIf(
        bandwidth=_bandwidths(solver, bandwidths) if remote else [],
        threshold=_thresholds(solver, best) if remote else [],
        split=_splits(solver, best),
        link_failure=_link_failure(solver, best) if remote else None,
        twice=needs(solver, 2 * best.rate),
    )


def needs(solver: Solver, rate: float, *, offload: bool = True) -> say.Needs:
    """The cheapest fleet that bears `rate`, with the links as they are; the first remote cluster may grow.

    For each threshold the stages' nodes follow from equations (3) to (5), so the search is exact on the grid.
    """
    candidates = solver.thresholds if offload else (math.inf,)
    found = [each for each in (_needs(solver, rate, threshold) for threshold in candidates) if each is not None]
    return min(found, key=lambda each: (each.cost, sum(each.remote.values()), each.egress_gbps))


def cost_of_nodes(fleet: Fleet, shape: FleetShape) -> float:
    """Of so many instances, and the attention nodes that there are, in the unit of the prices."""
    remote = sum(each.price * nodes for each, nodes in zip(fleet.remotes, shape.remotes, strict=False))
    return shape.home * fleet.home.price + fleet.home.beside_cost + remote


def _needs(solver: Solver, rate: float, threshold: float) -> say.Needs | None:
    """None where a link is too thin for what would cross it."""
    column, fleet = solver.column(_EXACT, threshold), solver.fleet
    classes = column.classes
    batch, output = solver.batch, solver.demand.output_tokens
    prefill = _whole(rate * (1 - classes.share) * classes.local_s)
    decode = _whole(rate / decode_rate(1, batch.size, batch.step_s, output))
    remotes = [0] * len(fleet.remotes)
    left = rate * classes.share
    for at in reversed(range(len(fleet.remotes))):  # the first takes what the others cannot
        each, remote_s = fleet.remotes[at], column.remote_s[at]
        most = min(each.egress / classes.kv_bytes, each.nodes / remote_s if at else math.inf) if left else 0.0
        borne = min(left, most)
        remotes[at] = _whole(borne * remote_s)
        left -= borne
    if left > 1e-9 * rate:
        return None
    shape = FleetShape(prefill + decode, tuple(remotes), solver.shape.egress)
    cost, beside, attending = cost_of_nodes(fleet, shape), 0, fleet.home.attending
    if attending is not None:
        beside = _whole(decode * attending.share)
        cost += beside * attending.price - fleet.home.beside_cost
    return say.Needs(
        rate=rate,
        threshold=tokens(threshold),
        remote={each.name: nodes for each, nodes in zip(fleet.remotes, remotes, strict=True)},
        prefill=prefill,
        decode=decode,
        egress_gbps=rate * classes.share * classes.kv_bytes / GBPS,
        cost=cost,
        attention=beside,
    )


def _whole(nodes: float) -> int:
    return math.ceil(nodes - 1e-9)


def _bandwidths(solver: Solver, bandwidths: Sequence[float]) -> list[say.BandwidthPoint]:
    encoded = Solver(solver.fleet, solver.demand, "int8") if solver.codec != "int8" else solver
    widest = max(solver.shape.egress) / GBPS
    found = []
    for gbps in bandwidths or [share * widest for share in _BANDWIDTHS]:
        shape = msgspec.structs.replace(solver.shape, egress=(gbps * GBPS,) * len(solver.shape.egress))
        best = solver.best(shape, _EXACT)
        found.append(
            say.BandwidthPoint(
                gbps=gbps,
                rate=best.rate,
                representative=solver.best(shape, _PAPER).rate,
                int8=encoded.best(shape, _EXACT).rate,
                threshold=tokens(best.classes.threshold),
                prefill=best.num_prefill,
                decode=best.num_decode,
                egress_gbps=best.egress / GBPS,
                binds=best.binds,
            )
        )
    return found


def _thresholds(solver: Solver, best: Solution) -> list[say.ThresholdPoint]:
    """Fewer than the grid has: no one sees more in a chart. The best one is among them."""
    grid = solver.thresholds[:-1]
    step = round_step(grid[-1] / _CURVE_POINTS) if len(grid) > 1 else 1
    chosen = sorted({each for each in grid if each % step == 0} | {best.classes.threshold})
    return [_threshold(solver, each, best.num_prefill) for each in chosen]


def _threshold(solver: Solver, threshold: float, num_prefill: int) -> say.ThresholdPoint:
    found = solver.at(solver.shape, threshold, num_prefill, _EXACT)
    share, kv_bytes = found.classes.share, found.classes.kv_bytes
    link = sum(solver.shape.egress) / kv_bytes / share if share > 0 else None
    return say.ThresholdPoint(
        threshold=tokens(threshold),
        remote=found.remote / share if share > 0 else None,
        link=link,
        local=found.local / (1 - share) if share < 1 else None,
        decode=found.decode,
        rate=found.rate,
        representative=solver.at(solver.shape, threshold, num_prefill, _PAPER).rate,
    )


def _splits(solver: Solver, best: Solution) -> list[say.SplitPoint]:
    found = []
    for split in solver.splits(solver.shape):
        own = solver.best_threshold(solver.shape, split, _EXACT)
        at_best = {method: solver.at(solver.shape, best.classes.threshold, split, method) for method in Method}
        found.append(
            say.SplitPoint(
                prefill=split,
                decode=own.num_decode,
                rate_at_best=at_best[_EXACT].rate,
                representative_at_best=at_best[_PAPER].rate,
                rate=own.rate,
                representative=solver.best_threshold(solver.shape, split, _PAPER).rate,
                threshold=tokens(own.classes.threshold),
            )
        )
    return found


def _link_failure(solver: Solver, best: Solution) -> say.LinkFailure:
    alone = FleetShape(solver.shape.home, (0,) * len(solver.shape.remotes), solver.shape.egress)
    resplit = solver.best(alone, _EXACT)
    return say.LinkFailure(
        as_planned=solver.at(alone, math.inf, best.num_prefill, _EXACT).rate,
        resplit=resplit.rate,
        prefill=resplit.num_prefill,
        decode=resplit.num_decode,
        needed=needs(solver, best.rate, offload=False),
    )


# The question answered: the best plans, the baselines on equal terms, and what would be if.


def answer(
    config: Config, fleet: Fleet, demand: Demand, *, top: int = 3, bandwidths: Sequence[float] = ()
) -> say.PlanAnswer:
    """Everything but the simulations. `top`: how many plans; `bandwidths`: of the sweep, in Gbps."""
    solver = Solver(fleet, demand)
    found = solver.solve(solver.shape, _EXACT)
    plans = [plan(solver, solver.shape, each, f"plan {rank}") for rank, each in enumerate(found[:top], start=1)]
    return say.PlanAnswer(
        demand=_demand(demand),
        clusters=_clusters(fleet),
        batch=say.DecodeBatch(solver.batch.size, 1000 * solver.batch.step_s, solver.batch.binds),
        plans=plans,
        paper=plan(solver, solver.shape, solver.best(solver.shape, _PAPER), "representative lengths"),
        baselines=_baselines(config, solver),
        what_if=what_if(solver, found[0], bandwidths),
        simulated=None,
        notes=[*fleet.notes, *(demand.workload.notes if demand.workload is not None else ())],
        attention=offload_of(fleet, demand.context),
    )


def plan(solver: Solver, shape: FleetShape, solution: Solution, name: str) -> say.DeploymentPlan:
    """A solution with all that is to be said of it, by both methods."""
    threshold, split = solution.classes.threshold, solution.num_prefill
    by = {method: solver.at(shape, threshold, split, method) for method in Method}
    fleet, lengths, share = solver.fleet, solver.demand.lengths, solution.classes.share
    remote = {each.name: nodes for each, nodes in zip(fleet.remotes, shape.remotes, strict=False)}
    return say.DeploymentPlan(
        name=name,
        threshold=tokens(threshold),
        remote=remote,
        prefill=split,
        decode=solution.num_decode,
        codec=solver.codec if remote else "none",
        exact=_figures(by[_EXACT]),
        representative=_figures(by[_PAPER]),
        mean_above=lengths.mean_above(threshold) if share > 0 else None,
        mean_below=lengths.mean_below(threshold) if share < 1 else None,
        service=_service(solver, shape, threshold),
        cost=cost_of_nodes(fleet, shape) if fleet.priced else None,
    )


def _figures(solution: Solution) -> say.PlanFigures:
    share = solution.classes.share
    both = 0 < share < 1
    return say.PlanFigures(
        rate=solution.rate,
        remote=solution.remote,
        local=solution.local,
        decode=solution.decode,
        binds=solution.binds,
        share=share,
        egress_gbps=solution.egress / GBPS,
        threshold_residual=_finite(prefill_imbalance(solution.remote, solution.local, share)) if both else None,
        split_residual=_finite(decode_imbalance(solution.remote, solution.local, solution.decode)),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _service(solver: Solver, shape: FleetShape, threshold: float) -> say.IdleTtft:
    """Over evenly spaced quantiles of the lengths. Offloaded requests are shared out as the remote nodes are."""
    lengths = solver.quantiles
    count = len(lengths)
    local_s = solver.service_s(solver.fleet.home.prefill)
    stays = [local_s(length) for length in lengths if length <= threshold]
    gone: list[tuple[float, float]] = []  # seconds, and how many requests that stands for
    wire: list[float] = []
    for remote, nodes, egress in zip(solver.fleet.remotes, shape.remotes, shape.egress, strict=False):
        remote_s, weight = solver.service_s(remote.prefill), nodes / sum(shape.remotes)
        above = [length for length in lengths if length > threshold]
        gone += [(remote_s(length), weight) for length in above]
        wire += [weight * solver.kv_bytes(length) / egress for length in above]
    every = sorted([(seconds, 1.0) for seconds in stays] + gone)
    return say.IdleTtft(
        mean_s=math.fsum(seconds * weight for seconds, weight in every) / count,
        p90_s=_weighted(every, 0.9 * count),
        remote_mean_s=_mean(math.fsum(seconds * weight for seconds, weight in gone), count - len(stays)),
        local_mean_s=_mean(math.fsum(stays), len(stays)),
        wire_s=_mean(math.fsum(wire), count - len(stays)),
    )


def _weighted(ordered: Sequence[tuple[float, float]], rank: float) -> float:
    """The smallest value that values of so much weight do not exceed."""
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= rank - 1e-6:
            return value
    return ordered[-1][0]


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


def _baselines(config: Config, solver: Solver) -> list[say.DeploymentPlan]:
    """The same demand on as many nodes, or nodes of the same price, otherwise."""
    fleet, shape = solver.fleet, solver.shape
    found = []
    configured = _configured(config, solver)
    if configured is not None:
        found.append(plan(solver, shape, configured, "as configured"))
    if not fleet.remotes:
        return found
    homogeneous = FleetShape(fleet.num_nodes, (), ())
    found.append(plan(solver, homogeneous, solver.best(homogeneous, _EXACT), "homogeneous"))
    naive = solver.at(shape, 0.0, 0, _EXACT)
    if not fleet.home.fixed:
        found.append(plan(solver, shape, naive, "naive"))
    if fleet.priced:
        nodes = int(fleet.cost / fleet.home.price + 1e-9)
        equal = FleetShape(nodes, (), ())
        found.append(plan(solver, equal, solver.best(equal, _EXACT), "equal cost"))
    return found


def _configured(config: Config, solver: Solver) -> Solution | None:
    """The split of the configuration, with its threshold, or the best for that split where it is auto."""
    home = solver.fleet.home
    if not 0 <= home.configured < home.nodes or home.mixed:
        return None
    if solver.fleet.remotes and config.offload.threshold is not None:
        return solver.at(solver.shape, float(config.offload.threshold), home.configured, _EXACT)
    return solver.best_threshold(solver.shape, home.configured, _EXACT)


def _demand(demand: Demand) -> say.DemandFacts:
    return say.DemandFacts(
        source=demand.source,
        mean_uncached=mean_of(demand.lengths),
        mean_cached=demand.cached,
        p50_uncached=demand.lengths.quantile(0.5),
        p90_uncached=demand.lengths.quantile(0.9),
        output_tokens=demand.output_tokens,
        rate=demand.rate,
    )


def _clusters(fleet: Fleet) -> list[say.PlannedCluster]:
    home = fleet.home
    priced = fleet.priced
    return [
        say.PlannedCluster(
            home.name,
            home.nodes,
            True,
            None,
            home.price if priced else None,
            home.attending.nodes if home.attending else 0,
        ),
        *(
            say.PlannedCluster(each.name, each.nodes, False, each.egress / GBPS, each.price if priced else None)
            for each in fleet.remotes
        ),
    ]
