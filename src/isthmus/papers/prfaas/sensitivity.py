"""What the results hang on: the interpolation of the profile, bandwidth, and what the formula leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.cost.offload import bear, expected, representative
from isthmus.papers.lab import Lab
from isthmus.papers.prfaas.case import (
    DEPLOYMENTS,
    GRID,
    LENGTHS,
    MEASURED_LENGTHS,
    NAIVE_PD,
    OFFLOADING,
    STATE_BYTES,
    Deployment,
    fleet,
    h200_points,
    kv_bytes,
    ttft_s,
    work,
)
from isthmus.papers.prfaas.interpolation import RULES, Times, held_out, polynomial
from isthmus.papers.prfaas.kv import implied_points
from isthmus.papers.prfaas.published import EGRESS_GBPS, GBPS, NAIVE, PRFAAS, THRESHOLD, THROUGHPUT
from isthmus.papers.prfaas.published import LENGTHS as NOMINAL_LENGTHS
from isthmus.papers.table import Cell, Table, compare

_UNPUBLISHED = "not published"


def _measure_rules(lab: Lab) -> Iterator[Cell]:
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
            what = work(rule(h200_points(lengths)))
            solution, naive = OFFLOADING.solved(what=what), NAIVE_PD.solved(what=what)
            values = (
                solution.rate, solution.classes.threshold, solution.num_prefill, solution.remote,
                solution.egress / GBPS, ttft_s(solution.classes.threshold, what)[1], naive.rate,
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
    measure=_measure_rules,
)


def _measure_held_out(lab: Lab) -> Iterator[Cell]:
    profiles = {"the paper's model": h200_points(), **{name: implied_points(name) for name in THROUGHPUT}}
    for name, rule in RULES.items():
        if name == "cubic":
            continue  # needs four points, of which one is held out
        errors = [abs(error) for points in profiles.values() for error in held_out(rule, points)]
        yield Cell(name, "mean error (%)", None, 100 * sum(errors) / len(errors), _UNPUBLISHED)
        yield Cell(name, "largest error (%)", None, 100 * max(errors), _UNPUBLISHED)


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


def _measure_bandwidth(lab: Lab) -> Iterator[Cell]:
    for gbps in (1, 2, 5, 10, 20, 50, 100):
        solution = Deployment(fleet(gbps=gbps), GRID).solved()
        figures = {
            "all (req/s)": solution.rate,
            "threshold (tokens)": solution.classes.threshold,
            "offloaded (%)": 100 * solution.classes.share,
            "prefill instances here": solution.num_prefill,
            "egress (Gbps)": solution.egress / GBPS,
        }
        for column, figure in figures.items():
            yield Cell(f"{gbps} Gbps, {solution.binds} binds", column, None, figure, _UNPUBLISHED)


BANDWIDTH = Table(
    name="prfaas-bandwidth",
    title="The best threshold and split by bandwidth",
    source="not in the paper",
    setup="The case study with another link. Where the link does not bind, more of it changes nothing.",
    measure=_measure_bandwidth,
)


def _measure_beyond(lab: Lab) -> Iterator[Cell]:
    what = work()
    for name, deployment in DEPLOYMENTS.items():
        for how, split in (("representative lengths", representative), ("distribution", expected)):
            solution = deployment.solved(split)
            yield _ours(f"{name}, {how}", "all (req/s)", solution.rate)
            if name == "PrfaaS-PD":
                yield _ours(f"{name}, {how}", "threshold (tokens)", solution.classes.threshold)
    (classes,) = expected(LENGTHS, what, [THRESHOLD])
    planned = bear(classes, OFFLOADING.fleet, PRFAAS.prefill)
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


def _ours(row: str, column: str, figure: float) -> Cell:
    return Cell(row, column, None, figure, _UNPUBLISHED)


BEYOND = Table(
    name="prfaas-beyond",
    title="What the formula leaves out",
    source="not in the paper",
    setup=(
        "The paper replaces each class by its mean length; the distribution takes what its requests take on average. "
        "It also leaves out queues, states that cannot leave before the last token, and attention over a cached prefix."
    ),
    measure=_measure_beyond,
)
