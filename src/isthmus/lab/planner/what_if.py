"""What would be with another bandwidth, threshold or split, without the links, and at twice the load."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from isthmus.core.cost.offload import Solution, decode_rate
from isthmus.lab.planner import answer as say
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
