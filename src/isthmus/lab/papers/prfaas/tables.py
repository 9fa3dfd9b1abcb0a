"""Tables of Prefill-as-a-Service: its deployments and their price, and what the results depend on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache

from isthmus.core.cost.offload import RequestWork, Solution, bear, egress_of, expected, representative
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.prfaas import case
from isthmus.lab.papers.prfaas.case import Factors, marked
from isthmus.lab.papers.prfaas.interpolation import RULES, Points, Times, held_out, polynomial
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
    return case.THROUGHPUT[model][list(case.LENGTHS_PUBLISHED).index(length)]


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
    rates = {name: each.held(each.solved(), factors=factors).rate for name, each in case.DEPLOYMENTS.items()}
    ratio = rates["PrfaaS-PD"] / rates["homogeneous PD"]
    for gain in (0.14, case.EQUAL_COST_GAIN, 0.16):
        price = _price(case.PRFAAS.ratio, gain)
        ours = {
            "price of an H200 in H20 (inferred)": price,
            "our gain at that price (%)": 100 * (ratio / _cost(price) - 1),
        }
        published = 100 * case.EQUAL_COST_GAIN if gain == case.EQUAL_COST_GAIN else None
        yield from cells(f"a gain of {gain:.0%} at equal cost", ours, None, published)


def _cost(price: float) -> float:
    """Cost of the two clusters, as a share of that of as many instances of H20."""
    return (case.REMOTE_INSTANCES * price + case.LOCAL_INSTANCES) / (
        case.REMOTE_INSTANCES + case.LOCAL_INSTANCES
    )


def _price(ratio: float, gain: float) -> float:
    """Price of an H200 at which a throughput of `ratio` is a gain of `gain` for the same money."""
    cost = ratio / (1 + gain)
    return (
        cost * (case.REMOTE_INSTANCES + case.LOCAL_INSTANCES) - case.LOCAL_INSTANCES
    ) / case.REMOTE_INSTANCES


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
    plans = {name: deployment.solved() for name, deployment in case.DEPLOYMENTS.items()}
    held = {name: case.DEPLOYMENTS[name].held(plan, factors=factors) for name, plan in plans.items()}
    for name, published in zip(plans, (case.PRFAAS, case.HOMOGENEOUS, case.NAIVE), strict=True):
        solved = case.DEPLOYMENTS[name].solved(factors=factors)
        mean_s, p90_s = case.ttft_s(plans[name].classes.threshold, factors.work(case.work()))
        found, ratio = held[name], held[name].rate / held["homogeneous PD"].rate
        ours = {
            "prefill instances there": case.DEPLOYMENTS[name].fleet.num_remote,
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
            egress_gbps = found.egress / case.GBPS
            offloaded = {
                "over naive": found.rate / held["naive heterogeneous"].rate,
                "threshold (tokens)": solved.classes.threshold,
                "offloaded (%)": 100 * found.classes.share,
                "mean length offloaded (tokens)": case.LENGTHS_CASE.mean_above(found.classes.threshold),
                "egress (Gbps)": egress_gbps,
                "egress of the link (%)": 100 * egress_gbps / case.LINK_GBPS,
            }
            egress = (case.EGRESS_GBPS, 100 * case.EGRESS_GBPS / case.LINK_GBPS)
            known = (case.OVER_NAIVE, case.THRESHOLD, 100 * case.SHARE, case.MEAN_ABOVE, *egress)
            yield from cells(name, offloaded, *known)


@table(
    "prfaas-splits",
    title="Throughput by prefill and decode instances",
    source="Figure 5a",
    setup="At the published threshold of 19,400 tokens; one cluster of 12 beside it. Only the peaks are printed.",
    unpublished="only drawn",
)
@marked
def splits_table(factors: Factors) -> Iterator[PaperCell]:
    (classes,) = representative(case.LENGTHS_CASE, factors.work(case.work()), [case.THRESHOLD])
    splits = {"PrfaaS-PD": (case.OFFLOADING, classes, case.PRFAAS)}
    (whole,) = case.HOMOGENEOUS_PD.classes(representative, factors.work(case.work()))
    splits["homogeneous PD"] = (case.HOMOGENEOUS_PD, whole, case.HOMOGENEOUS)
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
    thresholds = sorted({*range(4000, 64_001, 4000), case.THRESHOLD})
    for classes in representative(case.LENGTHS_CASE, factors.work(case.work()), thresholds):
        solution = bear(classes, factors.fleet(case.OFFLOADING.fleet), case.PRFAAS.prefill)
        threshold = int(classes.threshold)
        rate = case.PRFAAS.rate if threshold == case.THRESHOLD else None
        yield PaperCell(f"{threshold:,} tokens, {solution.binds} binds", "all (req/s)", rate, solution.rate)


# What the results hang on: inferred inputs, interpolation of the profile, bandwidth, what the formula leaves out.


_VARIED = {
    "as it is": case.AS_IS,
    "times on H200 -5 %": case.Factors(h200=0.95),
    "times on H200 +5 %": case.Factors(h200=1.05),
    "times on H20 -5 %": case.Factors(h20=0.95),
    "times on H20 +5 %": case.Factors(h20=1.05),
    "decode times -5 %": case.Factors(decode=0.95),
    "decode times +5 %": case.Factors(decode=1.05),
}


@table(
    "prfaas-inferred",
    title="What hangs on the inputs inferred from Table 6, and what does not",
    source="Table 6",
    setup=(
        "Capacity: requests per second of all, of which a stage bears its share, so remote prefill / p and local "
        "prefill / (1 - p) of equation (6), with 3 prefill and 5 decode instances. At the best threshold the two are "
        "equal, so beside both stands the published rate of all. Local capacity at 19,400 tokens is the published one "
        "by construction. The last three: threshold and split solved anew for each row."
    ),
    unpublished="not published",
)
@marked
def inferred_inputs_table(factors: Factors) -> Iterator[PaperCell]:
    paper = case.PRFAAS
    capacities = (paper.remote_rate, paper.rate, case.THRESHOLD, case.THRESHOLD)
    published = (*capacities, paper.rate, paper.ratio, case.OVER_NAIVE)
    for row, varied in _VARIED.items():
        inputs, there = varied * factors, _at(case.THRESHOLD, varied * factors)
        rates = [
            each.held(each.solved(factors=varied), factors=inputs).rate
            for each in (case.OFFLOADING, case.HOMOGENEOUS_PD, case.NAIVE_PD)
        ]
        ours = {
            "remote prefill at 19,400 tokens (req/s)": there.remote,
            "remote capacity at 19,400 tokens (req/s)": _remote_capacity(there),
            "remote capacity reaches 3.24 req/s at (tokens)": _remote_reaches(case.PRFAAS.rate, inputs),
            "remote capacity meets local capacity at (tokens)": _remote_meets_local(inputs),
            "all (req/s)": rates[0],
            "ratio": rates[0] / rates[1],
            "over naive": rates[0] / rates[2],
        }
        yield from cells(row, ours, *(published if varied == case.AS_IS else ()))


def _at(threshold: float, factors: Factors) -> Solution:
    """The published split at a threshold."""
    (classes,) = representative(case.LENGTHS_CASE, factors.work(case.work()), [threshold])
    return bear(classes, factors.fleet(case.OFFLOADING.fleet), case.PRFAAS.prefill)


def _remote_capacity(solution: Solution) -> float:
    """Requests per second of all, of which the remote stage bears its share: the first term of equation (6)."""
    return solution.remote / solution.classes.share


def _local_capacity(solution: Solution) -> float:
    """The second."""
    return solution.local / (1 - solution.classes.share)


def _remote_reaches(rate: float, factors: Factors) -> int:
    """The lowest threshold with that remote capacity, which rises with the threshold."""
    return bisect_left(
        range(case.LONGEST), rate, lo=case.SHORTEST + 1, key=lambda each: _remote_capacity(_at(each, factors))
    )


def _remote_meets_local(factors: Factors) -> int:
    """The lowest threshold with no more local than remote capacity: the former falls, the latter rises."""

    def excess(threshold: int) -> float:
        solution = _at(threshold, factors)
        return _remote_capacity(solution) - _local_capacity(solution)

    return bisect_left(range(case.LONGEST), 0.0, lo=case.SHORTEST + 1, key=excess)


@cache
def _read(rule: Callable[[Points], Times], lengths: tuple[int, ...]) -> RequestWork:
    return case.work(rule(case.h200_points(lengths)))


@table(
    "prfaas-interpolation",
    title="The same study by how the profile of Table 5 is read",
    source="Table 6",
    setup=(
        "The paper does not say how it interpolates, and its K is 1,000 in some places and 1,024 in others. Everywhere "
        "else the rule is least squares in seconds at the lengths that the KV sizes of the same rows give."
    ),
)
@marked
def interpolation_table(factors: Factors) -> Iterator[PaperCell]:
    readings = {
        "lengths from the KV": case.MEASURED_LENGTHS,
        "K = 1,024": tuple(case.LENGTHS_PUBLISHED.values()),
    }
    for reading, lengths in readings.items():
        for name, rule in RULES.items():
            what = _read(rule, lengths)
            plan, solved = case.OFFLOADING.solved(what=what), case.OFFLOADING.solved(what=what, factors=factors)
            held = case.OFFLOADING.held(plan, what=what, factors=factors)
            naive = case.NAIVE_PD.held(case.NAIVE_PD.solved(what=what), what=what, factors=factors)
            _, p90_s = case.ttft_s(plan.classes.threshold, factors.work(what))
            ours = {
                "all (req/s)": held.rate,
                "threshold (tokens)": solved.classes.threshold,
                "prefill instances here": solved.num_prefill,
                "remote prefill (req/s)": held.remote,
                "egress (Gbps)": held.egress / case.GBPS,
                "TTFT P90 (s)": p90_s,
                "naive, all (req/s)": naive.rate,
            }
            paper = case.PRFAAS
            rates = (paper.rate, case.THRESHOLD, paper.prefill, paper.remote_rate)
            known = (*rates, case.EGRESS_GBPS, paper.ttft_p90_s, case.NAIVE.rate)
            yield from cells(f"{name}, {reading}", ours, *known)


@table(
    "prfaas-held-out",
    title="Which interpolation predicts a prefill time that it has not seen",
    source="not in the paper",
    setup=(
        "The 8K and the 32K point of Table 5 and of the six profiles behind Table 3, 14 in all, each predicted from "
        "the other three. Straight lines are out. Of the two that are close, the study takes a + b l + c l^2, which is "
        "the cost model's own form; the other is in prfaas-interpolation."
    ),
    unpublished="not published",
)
def held_out_table(lab: Lab) -> Iterator[PaperCell]:
    profiles = {
        "the paper's model": case.h200_points(),
        **{name: case.implied_points(name) for name in case.THROUGHPUT},
    }
    for name, rule in RULES.items():
        if name == "cubic":
            continue  # needs four points, of which one is held out
        errors = [abs(error) for points in profiles.values() for error in held_out(rule, points)]
        mean, largest = 100 * sum(errors) / len(errors), 100 * max(errors)
        yield from cells(name, {"mean error (%)": mean, "largest error (%)": largest})


@table(
    "prfaas-bandwidth",
    title="The best threshold and split by bandwidth",
    source="not in the paper",
    setup="The case study with another link. Where the link does not bind, more of it changes nothing.",
    unpublished="not published",
)
@marked
def bandwidth_table(factors: Factors) -> Iterator[PaperCell]:
    for gbps in (1, 2, 5, 10, 20, 50, 100):
        deployment = case.CaseDeployment(case.fleet(gbps=gbps), case.GRID)
        solved, held = deployment.solved(factors=factors), deployment.held(deployment.solved(), factors=factors)
        figures = {
            "all (req/s)": held.rate,
            "threshold (tokens)": solved.classes.threshold,
            "offloaded (%)": 100 * held.classes.share,
            "prefill instances here": solved.num_prefill,
            "egress (Gbps)": held.egress / case.GBPS,
        }
        yield from cells(f"{gbps} Gbps, {held.binds} binds", figures)


@table(
    "prfaas-beyond",
    title="What the formula leaves out",
    source="not in the paper",
    setup=(
        "The paper replaces each class by its mean length; the distribution takes what its requests take on average. "
        "It also leaves out queues, states that cannot leave before the last token, and attention over a cached prefix."
    ),
    unpublished="not published",
)
@marked
def beyond_table(factors: Factors) -> Iterator[PaperCell]:
    what = factors.work(case.work())
    for name, deployment in case.DEPLOYMENTS.items():
        for how, split in (("representative lengths", representative), ("distribution", expected)):
            held = deployment.held(deployment.solved(split), split, factors=factors)
            ours: dict[str, float] = {"all (req/s)": held.rate}
            if name == "PrfaaS-PD":
                ours["threshold (tokens)"] = deployment.solved(split, factors=factors).classes.threshold
            yield from cells(f"{name}, {how}", ours)
    (classes,) = expected(case.LENGTHS_CASE, what, [case.THRESHOLD])
    planned = bear(classes, factors.fleet(case.OFFLOADING.fleet), case.PRFAAS.prefill)
    yield from cells("the published plan, distribution", {"all (req/s)": planned.rate})
    for gbps in (100, 25, 10):
        rate = gbps * case.GBPS
        mean_s, p90_s = case.ttft_s(case.THRESHOLD, what, _sent_at(rate))
        ours = {
            "TTFT mean (s)": mean_s,
            "TTFT P90 (s)": p90_s,
            "of which states, which cannot be sent sooner (s)": case.STATE_BYTES / rate,
        }
        yield from cells(f"the published plan, KV sent after the prefill at {gbps} Gbps", ours)
    new, cached = 10_000, 50_000
    pair_s = polynomial(case.h200_points(), 2)[2]
    by_uncached = what.remote_s(new)
    ours = {
        "prefill by uncached length alone (s)": by_uncached,
        "prefill with the pairs it has (s)": by_uncached + 2 * pair_s * new * cached,
    }
    yield from cells(f"{new:,} tokens after {cached:,} cached, on H200", ours)


def _sent_at(rate: float) -> Times:
    return lambda length: case.kv_bytes(length) / rate
