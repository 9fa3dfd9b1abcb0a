"""What crosses the network: the least bandwidth, latencies, and what of it is hidden (Lamina, sections 3, 4 and 6)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost import compile_cost, facts_of, least_bandwidth
from isthmus.core.cost.pooled import Pooled
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.lamina.setup import (
    LINK,
    MODELS,
    NCCL_LINK,
    NCCL_RTT_S,
    ROOFLINE,
    RTT_S,
    TRACES,
    batches,
    instance,
    pool,
)
from isthmus.lab.papers.table import Cell, Table

SLACK = 0.2
BATCHES = (20, 100, 200, 300)
HIDDEN = {"65B": 13.2, "70B": 3.5}
"""Percent of TBT at most, by sending queries first, at contexts of `_CONTEXT`."""
_CONTEXT = 4096
_AT_PEAK = ROOFLINE.but(matmul=1.0, weight_read=1.0, kv_read=1.0)
_UNPUBLISHED = "no figure is printed"


def least(batch: int, context: float, compute: int = 1, memory: int = 1) -> float:
    """BW_min in GB/s of each compute device's link for 70B, all devices as fast as their data sheets say."""
    model, holder = (
        compile_cost(instance("70B", name, count, _AT_PEAK))
        for name, count in (("h100", compute), ("h20", memory))
    )
    found = Pooled(model, holder, holders=1, bytes_per_s=1.0, rtt_s=0.0, element_bytes=2)
    sent = found.sent_bytes(batch) / compute
    return least_bandwidth(sent, found.model_s(batch), found.attention_s(batch, context), SLACK) / 1e9


def hidden(model: str) -> float:
    """Share of TBT that is saved if attention to what is there begins with the queries, and the projection and the way
    of new keys and values lie beside it."""
    _, batch = batches(model, _CONTEXT)
    found, shape = pool(model), facts_of(MODELS[model].config)
    of_keys = shape.kv_elements * shape.hidden_size / shape.dense_params
    beside = of_keys * found.model_s(batch) + batch * found.model.kv_token_bytes / found.bytes_per_s
    return min(beside, found.attention_s(batch, _CONTEXT)) / found.step_s(batch, _CONTEXT)


def _measure(lab: Lab) -> Iterator[Cell]:
    for compute, memory, context in ((1, 1, 8192), (1, 1, 4096), (2, 4, 8192)):
        for batch in BATCHES:
            row = f"BW_min at ({compute}, {memory}), {context:,} tokens, batch {batch}"
            yield Cell(row, "GB/s", 30, least(batch, context, compute, memory))
    mean = TRACES["Azure-Conv"].context
    for model in MODELS:
        _, batch = batches(model, mean)
        past, through = (
            pool(model, link=link, rtt_s=rtt_s) for link, rtt_s in ((LINK, RTT_S), (NCCL_LINK, NCCL_RTT_S))
        )
        row = f"{model}, Azure-Conv, batch {batch}"
        for name, found in (("past the host", past), ("NCCL", through)):
            yield Cell(
                row, f"network of an iteration, {name} (ms)", None, 1000 * found.network_s(batch), _UNPUBLISHED
            )
        slower = through.step_s(batch, mean) / past.step_s(batch, mean)
        yield Cell(row, "TBT of one batch with NCCL (% more)", None, 100 * (slower - 1), _UNPUBLISHED)
        lost = 1 - through.rate(batch, mean)[0] / past.rate(batch, mean)[0]
        yield Cell(row, "throughput with NCCL (% less)", None, 100 * lost, _UNPUBLISHED)
    for model, figure in HIDDEN.items():
        yield Cell(f"{model}, queries first", "TBT saved at most (%)", figure, 100 * hidden(model))


TABLE = Table(
    name="lamina-network",
    title="What the network must be, and what of it is hidden",
    source="Lamina v2, sections 3, 4 and 6",
    setup=(
        "BW_min keeps the network below a fifth of an iteration; published in words: at most 30 GB/s up to a batch of "
        "300 (70B, one H100 and one H20), by the paper's measured times; ours are the data sheets' peaks, so that the "
        "need is higher. A round trip takes 33.0 us past the host and 66.6 us with NCCL, peaks are 45.7 and 35.5 GB/s, "
        "all as printed. Queries first: what need not be waited for, by the roofline, at contexts of 4,096 and the "
        "largest batch."
    ),
    measure=_measure,
)
