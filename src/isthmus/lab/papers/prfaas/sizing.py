"""How much network a prefill datacentre needs, and what the gain costs (sections 2 and 4)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost.offload import egress_of
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.prfaas.case import DEPLOYMENTS
from isthmus.lab.papers.prfaas.inferred import Factors, marked
from isthmus.lab.papers.prfaas.published import (
    EQUAL_COST_GAIN,
    LENGTHS,
    LOCAL_INSTANCES,
    PRFAAS,
    REMOTE_INSTANCES,
    THROUGHPUT,
)
from isthmus.lab.papers.table import PaperCell, Table

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
    return THROUGHPUT[model][list(LENGTHS).index(length)]


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
