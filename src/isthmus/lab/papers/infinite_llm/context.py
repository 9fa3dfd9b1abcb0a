"""The longest context: what all instances hold together, against what one holds (both versions)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from isthmus.lab.papers.infinite_llm.setup import BLOCK_SIZE, MODELS, NUM_GPUS, cluster, instance, least_gpus
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.table import Cell, Table
from isthmus.lab.sim.records import Status
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import Request, Workload

LONGEST = {"v1": 1_900, "v2": 2_000}
"""Thousands of tokens on 32 A100."""
TIMES = (2, 19)
"""Of a vLLM with instances of its own (vLLM-M), least and most over all traces; both versions."""
_COUNTS = (2, 4, 8, 16, 32)
_STEP = 1000
_UNPUBLISHED = "no figure is printed for it"


def pool_tokens(model: str, num_gpus: int = NUM_GPUS, each: int | None = None) -> int:
    """(GPUs x memory x share - weights) / KV bytes of a token, every instance of `each` GPUs having the weights."""
    each = each or least_gpus(model)
    return num_gpus // each * instance(model, each).kv_capacity_tokens


def completes(model: str, count: int, num_tokens: int) -> bool:
    """Whether so many instances serve one prompt of this length, in virtual time."""
    workload = Workload("one prompt", BLOCK_SIZE, [Request(0, num_tokens, BLOCK_SIZE)])
    [record] = Simulation(cluster(model, count), workload).run().records
    return record.status is Status.COMPLETED


def longest(model: str, count: int) -> int:
    """The longest prompt that is served, to a thousand tokens; what all instances but one hold always is."""
    one = pool_tokens(model, least_gpus(model)) // _STEP
    steps = range((count - 1) * one, count * one + 1)
    return _STEP * (
        steps[0] + bisect_left(steps, True, key=lambda step: not completes(model, count, _STEP * step)) - 1
    )


def _measure(lab: Lab) -> Iterator[Cell]:
    for version, figure in LONGEST.items():
        for model in MODELS:
            each = least_gpus(model)
            row = f"{version}; {model} on {NUM_GPUS // each} instances of {each}"
            yield Cell(row, "context (1,000 tokens)", figure, pool_tokens(model) / 1000)
    for count in _COUNTS:
        row, one = f"{count} instances of 7B", pool_tokens("7B", 1)
        lab.report(f"the longest prompt of {row}")
        yield Cell(row, "all memory, times one", None, pool_tokens("7B", count) / one, _UNPUBLISHED)
        yield Cell(row, "served here, times one", None, longest("7B", count) / one, _UNPUBLISHED)
    for which, figure, count in zip(("least", "most"), TIMES, (2, NUM_GPUS), strict=True):
        row = f"over all traces, {which} ({count} instances here)"
        yield Cell(row, "times vLLM-M", figure, longest("7B", count) / pool_tokens("7B", 1))


TABLE = Table(
    name="infinite-llm-context",
    title="Longest context",
    source="Infinite-LLM v1 and v2 (arXiv 2401.02669), evaluation",
    setup=(
        "What A100 have beside the weights (90 % of 80 GiB, less 3 GB for the engine), instances as small as hold the "
        "model. Served here: the longest prompt that is answered in the simulator; its home keeps a quarter of its "
        "memory for what is computed and has not left. Of which models the published lengths are is not known here: "
        "they are the longest of the traces, not all that fits; of 7B more does, of 13B a little less. So are the 2 to "
        "19 times; ours are of all memory."
    ),
    measure=_measure,
)
