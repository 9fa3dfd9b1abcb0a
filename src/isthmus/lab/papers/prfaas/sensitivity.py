"""What the results hang on: inferred inputs, interpolation of the profile, bandwidth, what the formula leaves out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache

from isthmus.core.cost.offload import RequestWork, Solution, bear, expected, representative
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.prfaas.case import (
    AS_IS,
    DEPLOYMENTS,
    EGRESS_GBPS,
    GBPS,
    GRID,
    HOMOGENEOUS_PD,
    LENGTHS_CASE,
    LONGEST,
    MEASURED_LENGTHS,
    NAIVE,
    NAIVE_PD,
    OFFLOADING,
    OVER_NAIVE,
    PRFAAS,
    SHORTEST,
    STATE_BYTES,
    THRESHOLD,
    THROUGHPUT,
    CaseDeployment,
    Factors,
    fleet,
    h200_points,
    implied_points,
    kv_bytes,
    marked,
    ttft_s,
    work,
)
from isthmus.lab.papers.prfaas.case import LENGTHS_PUBLISHED as NOMINAL_LENGTHS
from isthmus.lab.papers.prfaas.interpolation import RULES, Points, Times, held_out, polynomial
from isthmus.lab.papers.table import PaperCell, Table, compare

_UNPUBLISHED = "not published"
_VARIED = {
    "as it is": AS_IS,
    "times on H200 -5 %": Factors(h200=0.95),
    "times on H200 +5 %": Factors(h200=1.05),
    "times on H20 -5 %": Factors(h20=0.95),
    "times on H20 +5 %": Factors(h20=1.05),
    "decode times -5 %": Factors(decode=0.95),
    "decode times +5 %": Factors(decode=1.05),
}


def _measure_inferred(factors: Factors) -> Iterator[PaperCell]:
    published = {
        "remote prefill at 19,400 tokens (req/s)": PRFAAS.remote_rate,
        "remote capacity at 19,400 tokens (req/s)": PRFAAS.rate,
        "remote capacity reaches 3.24 req/s at (tokens)": THRESHOLD,
        "remote capacity meets local capacity at (tokens)": THRESHOLD,
        "all (req/s)": PRFAAS.rate,
        "ratio": PRFAAS.ratio,
        "over naive": OVER_NAIVE,
    }
    for row, varied in _VARIED.items():
        inputs, there = varied * factors, _at(THRESHOLD, varied * factors)
        rates = [
            each.held(each.solved(factors=varied), factors=inputs).rate
            for each in (OFFLOADING, HOMOGENEOUS_PD, NAIVE_PD)
        ]
        ours = (
            there.remote, _remote_capacity(there), _remote_reaches(PRFAAS.rate, inputs),
            _remote_meets_local(inputs), rates[0], rates[0] / rates[1], rates[0] / rates[2],
        )  # fmt: skip
        figures = published if varied == AS_IS else dict.fromkeys(published)
        yield from compare(row, figures, dict(zip(published, ours, strict=True)), unpublished=_UNPUBLISHED)


def _at(threshold: float, factors: Factors) -> Solution:
    """The published split at a threshold."""
    (classes,) = representative(LENGTHS_CASE, factors.work(work()), [threshold])
    return bear(classes, factors.fleet(OFFLOADING.fleet), PRFAAS.prefill)


def _remote_capacity(solution: Solution) -> float:
    """Requests per second of all, of which the remote stage bears its share: the first term of equation (6)."""
    return solution.remote / solution.classes.share


def _local_capacity(solution: Solution) -> float:
    """The second."""
    return solution.local / (1 - solution.classes.share)


def _remote_reaches(rate: float, factors: Factors) -> int:
    """The lowest threshold with that remote capacity, which rises with the threshold."""
    return bisect_left(
        range(LONGEST), rate, lo=SHORTEST + 1, key=lambda each: _remote_capacity(_at(each, factors))
    )


def _remote_meets_local(factors: Factors) -> int:
    """The lowest threshold with no more local than remote capacity: the former falls, the latter rises."""

    def excess(threshold: int) -> float:
        solution = _at(threshold, factors)
        return _remote_capacity(solution) - _local_capacity(solution)

    return bisect_left(range(LONGEST), 0.0, lo=SHORTEST + 1, key=excess)


INFERRED_INPUTS = Table(
    name="prfaas-inferred",
    title="What hangs on the inputs inferred from Table 6, and what does not",
    source="Table 6",
    setup=(
        "Capacity: requests per second of all, of which a stage bears its share, so remote prefill / p and local "
        "prefill / (1 - p) of equation (6), with 3 prefill and 5 decode instances. At the best threshold the two are "
        "equal, so beside both stands the published rate of all. Local capacity at 19,400 tokens is the published one "
        "by construction. The last three: threshold and split solved anew for each row."
    ),
    measure=marked(_measure_inferred),
)


@cache
def _read(rule: Callable[[Points], Times], lengths: tuple[int, ...]) -> RequestWork:
    return work(rule(h200_points(lengths)))


def _measure_rules(factors: Factors) -> Iterator[PaperCell]:
    published = {
        "all (req/s)": PRFAAS.rate,
        "threshold (tokens)": THRESHOLD,
        "prefill instances here": PRFAAS.prefill,
        "remote prefill (req/s)": PRFAAS.remote_rate,
        "egress (Gbps)": EGRESS_GBPS,
        "TTFT P90 (s)": PRFAAS.ttft_p90_s,
        "naive, all (req/s)": NAIVE.rate,
    }
    readings = {"lengths from the KV": MEASURED_LENGTHS, "K = 1,024": tuple(NOMINAL_LENGTHS.values())}
    for reading, lengths in readings.items():
        for name, rule in RULES.items():
            what = _read(rule, lengths)
            plan, solved = OFFLOADING.solved(what=what), OFFLOADING.solved(what=what, factors=factors)
            held = OFFLOADING.held(plan, what=what, factors=factors)
            naive = NAIVE_PD.held(NAIVE_PD.solved(what=what), what=what, factors=factors)
            _, p90_s = ttft_s(plan.classes.threshold, factors.work(what))
            values = (
                held.rate, solved.classes.threshold, solved.num_prefill, held.remote, held.egress / GBPS, p90_s,
                naive.rate,
            )  # fmt: skip
            yield from compare(f"{name}, {reading}", published, dict(zip(published, values, strict=True)))


INTERPOLATION = Table(
    name="prfaas-interpolation",
    title="The same study by how the profile of Table 5 is read",
    source="Table 6",
    setup=(
        "The paper does not say how it interpolates, and its K is 1,000 in some places and 1,024 in others. Everywhere "
        "else the rule is least squares in seconds at the lengths that the KV sizes of the same rows give."
    ),
    measure=marked(_measure_rules),
)


def _measure_held_out(lab: Lab) -> Iterator[PaperCell]:
    profiles = {"the paper's model": h200_points(), **{name: implied_points(name) for name in THROUGHPUT}}
    for name, rule in RULES.items():
        if name == "cubic":
            continue  # needs four points, of which one is held out
        errors = [abs(error) for points in profiles.values() for error in held_out(rule, points)]
        yield PaperCell(name, "mean error (%)", None, 100 * sum(errors) / len(errors), _UNPUBLISHED)
        yield PaperCell(name, "largest error (%)", None, 100 * max(errors), _UNPUBLISHED)


HELD_OUT = Table(
    name="prfaas-held-out",
    title="Which interpolation predicts a prefill time that it has not seen",
    source="not in the paper",
    setup=(
        "The 8K and the 32K point of Table 5 and of the six profiles behind Table 3, 14 in all, each predicted from "
        "the other three. Straight lines are out. Of the two that are close, the study takes a + b l + c l^2, which is "
        "the cost model's own form; the other is in prfaas-interpolation."
    ),
    measure=_measure_held_out,
)


def _measure_bandwidth(factors: Factors) -> Iterator[PaperCell]:
    for gbps in (1, 2, 5, 10, 20, 50, 100):
        deployment = CaseDeployment(fleet(gbps=gbps), GRID)
        solved, held = deployment.solved(factors=factors), deployment.held(deployment.solved(), factors=factors)
        figures = {
            "all (req/s)": held.rate,
            "threshold (tokens)": solved.classes.threshold,
            "offloaded (%)": 100 * held.classes.share,
            "prefill instances here": solved.num_prefill,
            "egress (Gbps)": held.egress / GBPS,
        }
        for column, figure in figures.items():
            yield _ours(f"{gbps} Gbps, {held.binds} binds", column, figure)


BANDWIDTH = Table(
    name="prfaas-bandwidth",
    title="The best threshold and split by bandwidth",
    source="not in the paper",
    setup="The case study with another link. Where the link does not bind, more of it changes nothing.",
    measure=marked(_measure_bandwidth),
)


def _measure_beyond(factors: Factors) -> Iterator[PaperCell]:
    what = factors.work(work())
    for name, deployment in DEPLOYMENTS.items():
        for how, split in (("representative lengths", representative), ("distribution", expected)):
            held = deployment.held(deployment.solved(split), split, factors=factors)
            yield _ours(f"{name}, {how}", "all (req/s)", held.rate)
            if name == "PrfaaS-PD":
                solved = deployment.solved(split, factors=factors)
                yield _ours(f"{name}, {how}", "threshold (tokens)", solved.classes.threshold)
    (classes,) = expected(LENGTHS_CASE, what, [THRESHOLD])
    planned = bear(classes, factors.fleet(OFFLOADING.fleet), PRFAAS.prefill)
    yield _ours("the published plan, distribution", "all (req/s)", planned.rate)
    for gbps in (100, 25, 10):
        rate = gbps * GBPS
        mean_s, p90_s = ttft_s(THRESHOLD, what, _sent_at(rate))
        row = f"the published plan, KV sent after the prefill at {gbps} Gbps"
        yield _ours(row, "TTFT mean (s)", mean_s)
        yield _ours(row, "TTFT P90 (s)", p90_s)
        yield _ours(row, "of which states, which cannot be sent sooner (s)", STATE_BYTES / rate)
    new, cached = 10_000, 50_000
    pair_s = polynomial(h200_points(), 2)[2]
    by_uncached = what.remote_s(new)
    row = f"{new:,} tokens after {cached:,} cached, on H200"
    yield _ours(row, "prefill by uncached length alone (s)", by_uncached)
    yield _ours(row, "prefill with the pairs it has (s)", by_uncached + 2 * pair_s * new * cached)


def _sent_at(rate: float) -> Times:
    return lambda length: kv_bytes(length) / rate


def _ours(row: str, column: str, figure: float) -> PaperCell:
    return PaperCell(row, column, None, figure, _UNPUBLISHED)


BEYOND = Table(
    name="prfaas-beyond",
    title="What the formula leaves out",
    source="not in the paper",
    setup=(
        "The paper replaces each class by its mean length; the distribution takes what its requests take on average. "
        "It also leaves out queues, states that cannot leave before the last token, and attention over a cached prefix."
    ),
    measure=marked(_measure_beyond),
)
