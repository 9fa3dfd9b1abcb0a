"""How much network a prefill datacentre needs, and what the gain costs (sections 2 and 4)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost.offload import bear, egress_of, representative
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
from isthmus.lab.papers.table import PaperCell, cells, table

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


@table(
    "prfaas-sizing",
    title="Network of a prefill cluster at full load, equation (2)",
    source="section 2",
    setup=(
        "From the published throughputs of Table 3 with 8 GPUs an instance. The paper does not say at which length the "
        "10,000 GPUs are meant; only 128K gives its figure (inferred)."
    ),
)
def sizing_table(lab: Lab) -> Iterator[PaperCell]:
    for name, gpus, model, length, gbps in _EXAMPLES:
        ours = egress_of(gpus, _GPUS_PER_INSTANCE, _throughput(model, length), 1)
        yield PaperCell(f"{name}, {length}", "egress (Gbps)", gbps, ours)
    for dense, hybrid, ratio in _RATIOS:
        ours = _throughput(dense, "32K") / _throughput(hybrid, "32K")
        yield PaperCell(f"{dense} over {hybrid}, 32K", "ratio", ratio, ours)


@table(
    "prfaas-price",
    title="Gain for the same money",
    source="section 4",
    setup='No price is published, only "about 15 %": the price is inferred from it and the published ratio, 1.54.',
    unpublished="not published",
)
@marked
def price_table(factors: Factors) -> Iterator[PaperCell]:
    rates = {name: each.held(each.solved(), factors=factors).rate for name, each in DEPLOYMENTS.items()}
    ratio = rates["PrfaaS-PD"] / rates["homogeneous PD"]
    for gain in (0.14, EQUAL_COST_GAIN, 0.16):
        price = _price(PRFAAS.ratio, gain)
        ours = {
            "price of an H200 in H20 (inferred)": price,
            "our gain at that price (%)": 100 * (ratio / _cost(price) - 1),
        }
        published = 100 * EQUAL_COST_GAIN if gain == EQUAL_COST_GAIN else None
        yield from cells(f"a gain of {gain:.0%} at equal cost", ours, None, published)


def _cost(price: float) -> float:
    """Of the two clusters, in that of as many instances of H20."""
    return (REMOTE_INSTANCES * price + LOCAL_INSTANCES) / (REMOTE_INSTANCES + LOCAL_INSTANCES)


def _price(ratio: float, gain: float) -> float:
    """At which a throughput of `ratio` is a gain of `gain` for the same money."""
    cost = ratio / (1 + gain)
    return (cost * (REMOTE_INSTANCES + LOCAL_INSTANCES) - LOCAL_INSTANCES) / REMOTE_INSTANCES


# The three deployments (Table 6), and the search that finds ours (Figure 5).


@table(
    "prfaas-deployments",
    title="Offloading long prompts, against one cluster and against offloading all",
    source="Table 6 and section 4",
    setup=(
        "12 instances each: 4 of H200 and 8 of H20, or 12 of H20. Threshold and split are solved, not given; the other "
        "figures are those of that threshold and split. Prefill on H20 and decode are inferred from this table. TTFT "
        "is the prefill's own time, without queue or transfer."
    ),
)
@marked
def offloading_table(factors: Factors) -> Iterator[PaperCell]:
    plans = {name: deployment.solved() for name, deployment in DEPLOYMENTS.items()}
    held = {name: DEPLOYMENTS[name].held(plan, factors=factors) for name, plan in plans.items()}
    for name, published in zip(plans, (PRFAAS, HOMOGENEOUS, NAIVE), strict=True):
        solved = DEPLOYMENTS[name].solved(factors=factors)
        mean_s, p90_s = ttft_s(plans[name].classes.threshold, factors.work(work()))
        found, ratio = held[name], held[name].rate / held["homogeneous PD"].rate
        ours = {
            "prefill instances there": DEPLOYMENTS[name].fleet.num_remote,
            "prefill instances here": solved.num_prefill,
            "decode instances": solved.num_decode,
            "TTFT mean (s)": mean_s,
            "TTFT P90 (s)": p90_s,
            "remote prefill (req/s)": found.remote,
            "local prefill (req/s)": found.local,
            "decode (req/s)": found.decode,
            "all (req/s)": found.rate,
            "ratio": ratio,
        }
        yield from cells(name, ours, *published)
        if name == "PrfaaS-PD":
            egress_gbps = found.egress / GBPS
            offloaded = {
                "over naive": found.rate / held["naive heterogeneous"].rate,
                "threshold (tokens)": solved.classes.threshold,
                "offloaded (%)": 100 * found.classes.share,
                "mean length offloaded (tokens)": LENGTHS_CASE.mean_above(found.classes.threshold),
                "egress (Gbps)": egress_gbps,
                "egress of the link (%)": 100 * egress_gbps / LINK_GBPS,
            }
            share, of_link = 100 * SHARE, 100 * EGRESS_GBPS / LINK_GBPS
            yield from cells(name, offloaded, OVER_NAIVE, THRESHOLD, share, MEAN_ABOVE, EGRESS_GBPS, of_link)


@table(
    "prfaas-splits",
    title="Throughput by prefill and decode instances",
    source="Figure 5a",
    setup="At the published threshold of 19,400 tokens; one cluster of 12 beside it. Only the peaks are printed.",
    unpublished="only drawn",
)
@marked
def splits_table(factors: Factors) -> Iterator[PaperCell]:
    (classes,) = representative(LENGTHS_CASE, factors.work(work()), [THRESHOLD])
    splits = {"PrfaaS-PD": (OFFLOADING, classes, PRFAAS)}
    (whole,) = HOMOGENEOUS_PD.classes(representative, factors.work(work()))
    splits["homogeneous PD"] = (HOMOGENEOUS_PD, whole, HOMOGENEOUS)
    for name, (deployment, each, published) in splits.items():
        for prefill in range(1, deployment.fleet.num_local):
            solution = bear(each, factors.fleet(deployment.fleet), prefill)
            rate = published.rate if prefill == published.prefill else None
            yield PaperCell(f"{name}, {prefill}/{solution.num_decode}", "all (req/s)", rate, solution.rate)


@table(
    "prfaas-thresholds",
    title="Throughput by threshold",
    source="Figure 5b",
    setup="3 prefill and 5 decode instances. Too high a threshold costs more than too low a one.",
    unpublished="only drawn",
)
@marked
def thresholds_table(factors: Factors) -> Iterator[PaperCell]:
    thresholds = sorted({*range(4000, 64_001, 4000), THRESHOLD})
    for classes in representative(LENGTHS_CASE, factors.work(work()), thresholds):
        solution = bear(classes, factors.fleet(OFFLOADING.fleet), PRFAAS.prefill)
        threshold = int(classes.threshold)
        rate = PRFAAS.rate if threshold == THRESHOLD else None
        yield PaperCell(f"{threshold:,} tokens, {solution.binds} binds", "all (req/s)", rate, solution.rate)
