"""Throughput with memory that instances lend each other, over instances that do not (second version, by simulation)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import msgspec

from isthmus.core.types import NS_PER_S
from isthmus.lab.papers.infinite_llm.lending import GREEDY
from isthmus.lab.papers.infinite_llm.setup import BLOCK_SIZE, cluster, measured, single
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.table import Cell, Table
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import Request, Workload

OVER_MULTI, OVER_SINGLE = (1.35, 1.73), (1.4, 3.4)
"""Times vLLM-M on traces 0 to 2, times vLLM-S on traces 3 to 8: least and most."""
_MODEL, _INSTANCES = "7B", 4
_SHORT, _ANSWER, _LONG_ANSWER = 1_000, 256, 3_000
_UNPUBLISHED = "printed as a range over traces that are not public"


class Load(msgspec.Struct, frozen=True):
    """What comes at once: so many short requests an instance, and before them some with `length` tokens. Of 90 short
    ones no instance is full."""

    each: int
    longs: int = 0
    length: int = 0

    def requests(self) -> list[Request]:
        long = [Request(0, self.length, _LONG_ANSWER)] * self.longs
        return [*long, *[Request(0, _SHORT, _ANSWER)] * (_INSTANCES * self.each - self.longs)]


LOADS = {
    "all alike, none waits": Load(90),
    "all alike": Load(180),
    "1 of 30,000": Load(180, 1, 30_000),
    "1 of 60,000": Load(180, 1, 60_000),
    "1 of 90,000": Load(180, 1, 90_000),
    "2 of 90,000": Load(180, 2, 90_000),
}


class Served(msgspec.Struct, frozen=True):
    """Tokens of short answers a second until the last of them, and bytes that moved between instances."""

    rate: float
    moved: int


@cache
def served(load: Load, lending: str, placement: str = "round_robin") -> Served:
    """By instances that lend by this policy."""
    return _run(load, cluster(_MODEL, _INSTANCES, measured(), policy=placement, lending={"policy": lending}))


@cache
def served_by_one(load: Load) -> Served:
    """By one instance on all GPUs, with tensor parallelism."""
    return _run(load, single(_MODEL, _INSTANCES, measured()))


def _run(load: Load, deployment: Deployment) -> Served:
    result = Simulation(deployment, Workload("gain", BLOCK_SIZE, load.requests())).run()
    short = [each for each in result.records if each.request.output_tokens == _ANSWER]
    seconds = max(each.end_ns for each in short) / NS_PER_S
    return Served(len(short) * _ANSWER / seconds, result.bytes_moved["shipment"])


def _measure(lab: Lab) -> Iterator[Cell]:
    multi, one = [], []
    for row, load in LOADS.items():
        lab.report(f"lending, {row}")
        off, greedy, ours = served(load, "none"), served(load, GREEDY), served(load, "isthmus", "isthmus")
        multi.append(greedy.rate / off.rate)
        one.append(greedy.rate / served_by_one(load).rate)
        figures = {
            "times vLLM-M": multi[-1],
            "moved (GB)": greedy.moved / 1e9,
            "times vLLM-S": one[-1],
            "our placement, times vLLM-M": served(load, "none", "isthmus").rate / off.rate,
            "our placement and lending, times vLLM-M": ours.rate / off.rate,
        }
        for column, figure in figures.items():
            yield Cell(row, column, None, figure, _UNPUBLISHED)
    for name, published, found in (
        ("M, traces 0 to 2", OVER_MULTI, multi),
        ("S, traces 3 to 8", OVER_SINGLE, one),
    ):
        yield Cell(f"least, over vLLM-{name}", "times", published[0], min(found))
        yield Cell(f"most, over vLLM-{name}", "times", published[1], max(found))


TABLE = Table(
    name="infinite-llm-gain",
    title="Throughput with lending",
    source="Infinite-LLM v2, evaluation; greedy of debtors and creditors",
    setup=(
        "Direction only: lengths, loads and models of the traces are not known here. Four A100, 7B, our fitted cost of "
        "vLLM. 180 requests an instance come at once, of 1,000 tokens and 256 of answer, and first one or two long "
        "ones with answers of 3,000; counted are tokens of the short answers until the last of them. vLLM-M: an "
        "instance a GPU, requests dealt out in turn, nobody lends; ours beside it is the greedy, or our own placement "
        "and lending. vLLM-S: one instance with tensor parallelism, which computes a long prompt four times as fast, "
        "so that over it nothing is gained here."
    ),
    measure=_measure,
)
