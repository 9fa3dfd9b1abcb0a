"""The three deployments (Table 6), and the search that finds ours (Figure 5)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost.offload import Solution, bear, representative
from isthmus.lab.papers.prfaas.case import (
    DEPLOYMENTS,
    HOMOGENEOUS_PD,
    LENGTHS,
    OFFLOADING,
    ttft_s,
    work,
)
from isthmus.lab.papers.prfaas.inferred import Factors, marked
from isthmus.lab.papers.prfaas.published import (
    EGRESS_GBPS,
    GBPS,
    HOMOGENEOUS,
    LINK_GBPS,
    MEAN_ABOVE,
    NAIVE,
    OVER_NAIVE,
    PRFAAS,
    SHARE,
    THRESHOLD,
)
from isthmus.lab.papers.table import Figures, PaperCell, Table, compare

_COLUMNS = (
    "prefill instances there",
    "prefill instances here",
    "decode instances",
    "TTFT mean (s)",
    "TTFT P90 (s)",
    "remote prefill (req/s)",
    "local prefill (req/s)",
    "decode (req/s)",
    "all (req/s)",
    "ratio",
)
_DRAWN = "only drawn"


def _measure(factors: Factors) -> Iterator[PaperCell]:
    plans = {name: deployment.solved() for name, deployment in DEPLOYMENTS.items()}
    held = {name: DEPLOYMENTS[name].held(plan, factors=factors) for name, plan in plans.items()}
    for name, published in zip(plans, (PRFAAS, HOMOGENEOUS, NAIVE), strict=True):
        solved = DEPLOYMENTS[name].solved(factors=factors)
        mean_s, p90_s = ttft_s(plans[name].classes.threshold, factors.work(work()))
        found, ratio = held[name], held[name].rate / held["homogeneous PD"].rate
        ours = (
            DEPLOYMENTS[name].fleet.num_remote, solved.num_prefill, solved.num_decode, mean_s, p90_s,
            found.remote, found.local, found.decode, found.rate, ratio,
        )  # fmt: skip
        figures = dict(zip(_COLUMNS, published, strict=True))
        yield from compare(name, figures, dict(zip(_COLUMNS, ours, strict=True)))
        if name == "PrfaaS-PD":
            over_naive = found.rate / held["naive heterogeneous"].rate
            yield from compare(name, *_offloaded(solved.classes.threshold, found, over_naive))


def _offloaded(threshold: float, held: Solution, over_naive: float) -> tuple[Figures, Figures]:
    egress_gbps = held.egress / GBPS
    published: Figures = {
        "over naive": OVER_NAIVE,
        "threshold (tokens)": THRESHOLD,
        "offloaded (%)": 100 * SHARE,
        "mean length offloaded (tokens)": MEAN_ABOVE,
        "egress (Gbps)": EGRESS_GBPS,
        "egress of the link (%)": 100 * EGRESS_GBPS / LINK_GBPS,
    }
    ours = (
        over_naive, threshold, 100 * held.classes.share, LENGTHS.mean_above(held.classes.threshold),
        egress_gbps, 100 * egress_gbps / LINK_GBPS,
    )  # fmt: skip
    return published, dict(zip(published, ours, strict=True))


TABLE = Table(
    name="prfaas-deployments",
    title="Offloading long prompts, against one cluster and against offloading all",
    source="Table 6 and section 4",
    setup=(
        "12 instances each: 4 of H200 and 8 of H20, or 12 of H20. Threshold and split are solved, not given; the other "
        "figures are those of that threshold and split. Prefill on H20 and decode are inferred from this table. TTFT "
        "is the prefill's own time, without queue or transfer."
    ),
    measure=marked(_measure),
)


def _measure_splits(factors: Factors) -> Iterator[PaperCell]:
    (classes,) = representative(LENGTHS, factors.work(work()), [THRESHOLD])
    splits = {"PrfaaS-PD": (OFFLOADING, classes, PRFAAS)}
    (whole,) = HOMOGENEOUS_PD.classes(representative, factors.work(work()))
    splits["homogeneous PD"] = (HOMOGENEOUS_PD, whole, HOMOGENEOUS)
    for name, (deployment, each, published) in splits.items():
        for prefill in range(1, deployment.fleet.num_local):
            solution = bear(each, factors.fleet(deployment.fleet), prefill)
            yield _drawn(
                f"{name}, {prefill}/{solution.num_decode}",
                solution,
                prefill == published.prefill,
                published.rate,
            )


def _drawn(row: str, solution: Solution, peak: bool, rate: float) -> PaperCell:
    return PaperCell(row, "all (req/s)", rate if peak else None, solution.rate, "" if peak else _DRAWN)


SPLITS = Table(
    name="prfaas-splits",
    title="Throughput by prefill and decode instances",
    source="Figure 5a",
    setup="At the published threshold of 19,400 tokens; one cluster of 12 beside it. Only the peaks are printed.",
    measure=marked(_measure_splits),
)


def _measure_thresholds(factors: Factors) -> Iterator[PaperCell]:
    thresholds = sorted({*range(4000, 64_001, 4000), THRESHOLD})
    for classes in representative(LENGTHS, factors.work(work()), thresholds):
        solution = bear(classes, factors.fleet(OFFLOADING.fleet), PRFAAS.prefill)
        threshold = int(classes.threshold)
        yield _drawn(
            f"{threshold:,} tokens, {solution.binds} binds", solution, threshold == THRESHOLD, PRFAAS.rate
        )


THRESHOLDS = Table(
    name="prfaas-thresholds",
    title="Throughput by threshold",
    source="Figure 5b",
    setup="3 prefill and 5 decode instances. Too high a threshold costs more than too low a one.",
    measure=marked(_measure_thresholds),
)
