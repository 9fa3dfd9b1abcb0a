"""The question answered: the best plans, the baselines on equal terms, and what would be if."""

from __future__ import annotations

import math
from collections.abc import Sequence

from isthmus.config import Config
from isthmus.core.cost.lengths import mean_of
from isthmus.core.cost.offload import Solution, decode_imbalance, prefill_imbalance
from isthmus.lab.planner import answer as say
from isthmus.lab.planner.attention import offload_of
from isthmus.lab.planner.demand import Demand
from isthmus.lab.planner.fleet import Fleet
from isthmus.lab.planner.solve import GBPS, FleetShape, Method, Solver, tokens
from isthmus.lab.planner.what_if import cost_of_nodes, what_if

_EXACT, _PAPER = Method.EXACT, Method.REPRESENTATIVE


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
