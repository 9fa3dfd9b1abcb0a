"""The three deployments (Table 6), and the search that finds ours (Figure 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from isthmus.cost.offload import Solution, bear, representative
from isthmus.papers.lab import Lab
from isthmus.papers.prfaas.case import (
    DEPLOYMENTS,
    HOMOGENEOUS_PD,
    LENGTHS,
    OFFLOADING,
    Deployment,
    ttft_s,
    work,
)
from isthmus.papers.prfaas.published import (
    EGRESS_GBPS,
    GBPS,
    HOMOGENEOUS,
    LINK_GBPS,
    MEAN_ABOVE,
    NAIVE,
    PRFAAS,
    SHARE,
    THRESHOLD,
)
from isthmus.papers.table import Cell, Figures, Table, compare

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
_USED: Mapping[str, tuple[str, ...]] = {
    "PrfaaS-PD": ("local prefill (req/s)", "decode (req/s)"),
    "homogeneous PD": ("TTFT P90 (s)", "local prefill (req/s)", "decode (req/s)", "all (req/s)"),
    "naive heterogeneous": ("decode (req/s)",),
}
"""Figures that an input was inferred from."""
_DRAWN = "only drawn"


def _measure(lab: Lab) -> Iterator[Cell]:
    solved = {name: deployment.solved() for name, deployment in DEPLOYMENTS.items()}
    base = solved["homogeneous PD"].rate
    for name, published in zip(solved, (PRFAAS, HOMOGENEOUS, NAIVE), strict=True):
        ours = _figures(DEPLOYMENTS[name], solved[name], base)
        columns = {column: f"{column}*" if column in _USED[name] else column for column in _COLUMNS}
        figures = {columns[column]: value for column, value in zip(_COLUMNS, published, strict=True)}
        yield from compare(name, figures, {columns[column]: value for column, value in ours.items()})
        if name == "PrfaaS-PD":
            yield from compare(name, *_offloaded(solved[name]))


def _figures(deployment: Deployment, solution: Solution, base: float) -> dict[str, float]:
    mean_s, p90_s = ttft_s(solution.classes.threshold, work())
    values = (
        deployment.fleet.num_remote, solution.num_prefill, solution.num_decode, mean_s, p90_s,
        solution.remote, solution.local, solution.decode, solution.rate, solution.rate / base,
    )  # fmt: skip
    return dict(zip(_COLUMNS, values, strict=True))


def _offloaded(solution: Solution) -> tuple[Figures, Figures]:
    threshold, egress_gbps = solution.classes.threshold, solution.egress / GBPS
    published: Figures = {
        "threshold (tokens)": THRESHOLD,
        "offloaded (%)": 100 * SHARE,
        "mean length offloaded (tokens)": MEAN_ABOVE,
        "egress (Gbps)": EGRESS_GBPS,
        "egress of the link (%)": 100 * EGRESS_GBPS / LINK_GBPS,
    }
    ours = (
        threshold, 100 * solution.classes.share, LENGTHS.mean_above(threshold), egress_gbps,
        100 * egress_gbps / LINK_GBPS,
    )  # fmt: skip
    return published, dict(zip(published, ours, strict=True))


TABLE = Table(
    name="prfaas-deployments",
    title="Offloading long prompts, against one cluster and against offloading all",
    source="Table 6 and section 4",
    setup=(
        "12 instances each: 4 of H200 and 8 of H20, or 12 of H20. Threshold and split are solved, not given. An "
        "asterisk: the published figure was used to infer an input (prefill on H20, decode), so it is no test. TTFT is "
        "the prefill's own time, without queue or transfer."
    ),
    measure=_measure,
)


def _measure_splits(lab: Lab) -> Iterator[Cell]:
    (classes,) = representative(LENGTHS, work(), [THRESHOLD])
    splits = {"PrfaaS-PD": (OFFLOADING, classes, PRFAAS)}
    (whole,) = HOMOGENEOUS_PD.classes(representative, work())
    splits["homogeneous PD"] = (HOMOGENEOUS_PD, whole, HOMOGENEOUS)
    for name, (deployment, each, published) in splits.items():
        for prefill in range(1, deployment.fleet.num_local):
            solution = bear(each, deployment.fleet, prefill)
            yield _drawn(
                f"{name}, {prefill}/{solution.num_decode}",
                solution,
                prefill == published.prefill,
                published.rate,
            )


def _drawn(row: str, solution: Solution, peak: bool, rate: float) -> Cell:
    return Cell(row, "all (req/s)", rate if peak else None, solution.rate, "" if peak else _DRAWN)


SPLITS = Table(
    name="prfaas-splits",
    title="Throughput by prefill and decode instances",
    source="Figure 5a",
    setup="At the published threshold of 19,400 tokens; one cluster of 12 beside it. Only the peaks are printed.",
    measure=_measure_splits,
)


def _measure_thresholds(lab: Lab) -> Iterator[Cell]:
    thresholds = sorted({*range(4000, 64_001, 4000), THRESHOLD})
    for classes in representative(LENGTHS, work(), thresholds):
        solution = bear(classes, OFFLOADING.fleet, PRFAAS.prefill)
        threshold = int(classes.threshold)
        yield _drawn(
            f"{threshold:,} tokens, {solution.binds} binds", solution, threshold == THRESHOLD, PRFAAS.rate
        )


THRESHOLDS = Table(
    name="prfaas-thresholds",
    title="Throughput by threshold",
    source="Figure 5b",
    setup="3 prefill and 5 decode instances. Too high a threshold costs more than too low a one.",
    measure=_measure_thresholds,
)
