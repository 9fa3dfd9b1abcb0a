"""How much network a prefill datacentre needs, and what the gain costs (sections 2 and 4)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost.offload import Solution, bear, egress_of, representative
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.prfaas.case import (
    DEPLOYMENTS,
    EGRESS_GBPS,
    EQUAL_COST_GAIN,
    GBPS,
    HOMOGENEOUS,
    HOMOGENEOUS_PD,
    LENGTHS_CASE,
    LENGTHS_PUBLISHED,
    LINK_GBPS,
    LOCAL_INSTANCES,
    MEAN_ABOVE,
    NAIVE,
    OFFLOADING,
    OVER_NAIVE,
    PRFAAS,
    REMOTE_INSTANCES,
    SHARE,
    THRESHOLD,
    THROUGHPUT,
    Factors,
    marked,
    ttft_s,
    work,
)
from isthmus.lab.papers.table import Figures, PaperCell, Table, compare

_GPUS_PER_INSTANCE = 8
_EXAMPLES = (
    ("512 H200, MiniMax-M2.5", 512, "MiniMax-M2.5", "32K", 3800.0),
    ("512 H200, Qwen3-235B", 512, "Qwen3-235B", "32K", 2100.0),
    ("512 H200, Ring-2.5-1T", 512, "Ring-2.5-1T", "32K", 170.0),
    ("512 H200, Ring-2.5-1T, published as a bound", 512, "Ring-2.5-1T", "128K", 100.0),
    ("10,000 GPUs, Ring-2.5-1T", 10_000, "Ring-2.5-1T", "128K", 1800.0),
)
_RATIOS = (("MiniMax-M2.5", "MiMo-V2-Flash", 13.0), ("Qwen3-235B", "Qwen3.5-397B", 4.0))


def _throughput(model: str, length: str) -> float:
    """Published, in Gbps."""
    return THROUGHPUT[model][list(LENGTHS_PUBLISHED).index(length)]


def _measure_sizing(lab: Lab) -> Iterator[PaperCell]:
    for name, gpus, model, length, gbps in _EXAMPLES:
        ours = egress_of(gpus, _GPUS_PER_INSTANCE, _throughput(model, length), 1)
        yield PaperCell(f"{name}, {length}", "egress (Gbps)", gbps, ours)
    for dense, hybrid, ratio in _RATIOS:
        ours = _throughput(dense, "32K") / _throughput(hybrid, "32K")
        yield PaperCell(f"{dense} over {hybrid}, 32K", "ratio", ratio, ours)


SIZING = Table(
    name="prfaas-sizing",
    title="Network of a prefill cluster at full load, equation (2)",
    source="section 2",
    setup=(
        "From the published throughputs of Table 3 with 8 GPUs an instance. The paper does not say at which length the "
        "10,000 GPUs are meant; only 128K gives its figure (inferred)."
    ),
    measure=_measure_sizing,
)


def _measure_price(factors: Factors) -> Iterator[PaperCell]:
    rates = {name: each.held(each.solved(), factors=factors).rate for name, each in DEPLOYMENTS.items()}
    ratio = rates["PrfaaS-PD"] / rates["homogeneous PD"]
    for gain in (0.14, EQUAL_COST_GAIN, 0.16):
        price = _price(PRFAAS.ratio, gain)
        row = f"a gain of {gain:.0%} at equal cost"
        yield PaperCell(row, "price of an H200 in H20 (inferred)", None, price, "not published")
        published = 100 * EQUAL_COST_GAIN if gain == EQUAL_COST_GAIN else None
        ours = 100 * (ratio / _cost(price) - 1)
        yield PaperCell(
            row, "our gain at that price (%)", published, ours, "" if published else "not published"
        )


def _cost(price: float) -> float:
    """Of the two clusters, in that of as many instances of H20."""
    return (REMOTE_INSTANCES * price + LOCAL_INSTANCES) / (REMOTE_INSTANCES + LOCAL_INSTANCES)


def _price(ratio: float, gain: float) -> float:
    """At which a throughput of `ratio` is a gain of `gain` for the same money."""
    cost = ratio / (1 + gain)
    return (cost * (REMOTE_INSTANCES + LOCAL_INSTANCES) - LOCAL_INSTANCES) / REMOTE_INSTANCES


PRICE = Table(
    name="prfaas-price",
    title="Gain for the same money",
    source="section 4",
    setup='No price is published, only "about 15 %": the price is inferred from it and the published ratio, 1.54.',
    measure=marked(_measure_price),
)


# The three deployments (Table 6), and the search that finds ours (Figure 5).


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
        over_naive, threshold, 100 * held.classes.share, LENGTHS_CASE.mean_above(held.classes.threshold),
        egress_gbps, 100 * egress_gbps / LINK_GBPS,
    )  # fmt: skip
    return published, dict(zip(published, ours, strict=True))


OFFLOADING_TABLE = Table(
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
    (classes,) = representative(LENGTHS_CASE, factors.work(work()), [THRESHOLD])
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
    for classes in representative(LENGTHS_CASE, factors.work(work()), thresholds):
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
