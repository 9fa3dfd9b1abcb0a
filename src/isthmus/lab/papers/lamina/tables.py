"""How many sequences decode at once: memory of the devices that hold KV (Lamina, evaluation)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from isthmus.core.cost import Coefficients, compile_cost, engine_coefficients, facts_of, least_bandwidth
from isthmus.core.cost.pooled import Pooled, is_compute_bound
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
    device,
    instance,
    pool,
    vllm,
)
from isthmus.lab.papers.table import PaperCell, Table

_UNPUBLISHED_BATCH = "printed as one mean"


def _measure_batch(lab: Lab) -> Iterator[PaperCell]:
    ratios = []
    for model in MODELS:
        for trace, lengths in TRACES.items():
            vllm, lamina = batches(model, lengths.context)
            ratios.append(lamina / vllm)
            row = f"{model}, {trace}"
            for column, figure in (("vLLM", vllm), ("Lamina", lamina), ("times", lamina / vllm)):
                yield PaperCell(row, column, None, figure, _UNPUBLISHED_BATCH)
    yield PaperCell("mean", "times", 2.39, fmean(ratios))


BATCH = Table(
    name="lamina-batch",
    title="Largest batches at similar cost",
    source="Lamina v2, evaluation",
    setup=(
        "Sequences of the traces' mean lengths, half way through their answers. Of every device 90 % of the memory is "
        "used, less 3 GB for the engine, as everywhere in our cost model; attention devices have no weights."
    ),
    measure=_measure_batch,
)


# More memory devices bring more throughput until the compute devices are full (Lamina, evaluation).


_MODEL, _TRACE = "70B", "Azure-Conv"
DEVICES = (1, 2, 4, 8)
_UNPUBLISHED_SATURATION = "no figure is printed"


def at(memory: int, trace: str = _TRACE) -> tuple[int, float, bool]:
    """Of 70B on two H100 and so many H20: batch, tokens a second, whether compute binds."""
    context = TRACES[trace].context
    batch = int(instance(_MODEL, "h20", memory).lent_capacity_tokens // context)
    found = pool(_MODEL, memory=memory)
    rate, turns = found.rate(batch, context)
    return batch, rate, is_compute_bound(found.model, batch // turns)


def _measure_saturation(lab: Lab) -> Iterator[PaperCell]:
    for trace in (_TRACE, "Kimi-Conv"):
        before = 0.0
        for memory in DEVICES:
            batch, rate, bound = at(memory, trace)
            row, printed = f"{trace}, {memory} H20", (trace, memory) == (_TRACE, 4)
            reason = "" if printed else _UNPUBLISHED_SATURATION
            yield PaperCell(row, "batch", 800 if printed else None, batch, reason)
            yield PaperCell(row, "tokens/s", None, rate, _UNPUBLISHED_SATURATION)
            yield PaperCell(row, "compute-bound", 1 if printed else None, int(bound), reason)
            if before:
                yield PaperCell(
                    row, "% more than half as many", None, 100 * (rate / before - 1), _UNPUBLISHED_SATURATION
                )
            before = rate


SATURATION = Table(
    name="lamina-saturation",
    title="70B on two H100 and more and more H20",
    source="Lamina v2, evaluation",
    setup=(
        "In words: with (2, 4) the batch reaches 800 and compute is saturated, so that more memory brings little. "
        "Compute-bound (1) is where twice the batch would take more than half as long again. By the roofline, with "
        "half of the batch at a time where two take turns."
    ),
    measure=_measure_saturation,
)


# Tokens a second at similar cost (Lamina, evaluation): what a roofline gives, and what it does not.


PUBLISHED = (16.1, 90.1)
"""Least and most, in percent."""
_UNPUBLISHED_THROUGHPUT = "printed as a range over all models and traces"
EFFICIENCIES = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Of vLLM, as shares of the roofline: a parameter, fitted to nothing."""
_COLUMN = "throughput (% more)"


def measured() -> Coefficients:
    """An engine's shares and overheads, fitted elsewhere (docs/cost-model.md)."""
    return engine_coefficients("vllm", device("h100"), weight_dtype="bf16", kv_dtype="bf16")


def gain(model: str, trace: str, by: Coefficients = ROOFLINE, efficiency: float = 1.0) -> float:
    """Lamina's throughput over vLLM's, both with their largest batches; Lamina as one batch or two, whichever is more.
    `efficiency`: of vLLM."""
    context = TRACES[trace].context
    small, large = batches(model, context)
    fixed, slope = compile_cost(vllm(model, by)).decode_step_ps(small)
    baseline = efficiency * small / ((fixed + slope * small * context) / 1e12)
    return pool(model, by).rate(large, context)[0] / baseline


def _measure_throughput(lab: Lab) -> Iterator[PaperCell]:
    for model in MODELS:
        for trace in TRACES:
            row = f"{model}, {trace}"
            for column, by in ((_COLUMN, ROOFLINE), (f"{_COLUMN}, with overheads", measured())):
                yield PaperCell(row, column, None, _percent(gain(model, trace, by)), _UNPUBLISHED_THROUGHPUT)
    for efficiency in EFFICIENCIES:
        gains = [gain(model, trace, efficiency=efficiency) for model in MODELS for trace in TRACES]
        name = f"vLLM at {efficiency:.0%} of the roofline"
        reason = "" if efficiency == 1.0 else "a parameter of ours: no reproduction"
        for which, found, figure in zip(("least", "most"), (min(gains), max(gains)), PUBLISHED, strict=True):
            published = figure if efficiency == 1.0 else None
            yield PaperCell(f"{which}, {name}", _COLUMN, published, _percent(found), reason)


def _percent(times: float) -> float:
    return 100 * (times - 1)


THROUGHPUT = Table(
    name="lamina-throughput",
    title="Throughput at similar cost",
    source="Lamina v2, evaluation",
    setup=(
        "Decode alone, mean lengths, largest batches. Both by one roofline (60 % of the peak, 80 % of the bandwidths), "
        "Lamina as one batch or two that take turns; the second column has overheads of vLLM as fitted elsewhere, on "
        "both sides. The range is not reproduced: its upper end lies above any of ours, for vLLM is as good here as "
        "its roofline, and the paper's measured times of operators are not printed. 70B on Azure-Conv is bound by "
        "compute, of which Lamina has half. The last rows show what a less efficient vLLM would give; none is a fit."
    ),
    measure=_measure_throughput,
)


# What crosses the network: the least bandwidth, latencies, and what of it is hidden (Lamina, sections 3, 4 and 6).


SLACK = 0.2
BATCHES = (20, 100, 200, 300)
HIDDEN = {"65B": 13.2, "70B": 3.5}
"""Percent of TBT at most, by sending queries first, at contexts of `_CONTEXT`."""
_CONTEXT = 4096
_AT_PEAK = ROOFLINE.but(matmul=1.0, weight_read=1.0, kv_read=1.0)
_UNPUBLISHED_NETWORK = "no figure is printed"


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


def _measure_network(lab: Lab) -> Iterator[PaperCell]:
    for compute, memory, context in ((1, 1, 8192), (1, 1, 4096), (2, 4, 8192)):
        for batch in BATCHES:
            row = f"BW_min at ({compute}, {memory}), {context:,} tokens, batch {batch}"
            yield PaperCell(row, "GB/s", 30, least(batch, context, compute, memory))
    mean = TRACES["Azure-Conv"].context
    for model in MODELS:
        _, batch = batches(model, mean)
        past, through = (
            pool(model, link=link, rtt_s=rtt_s) for link, rtt_s in ((LINK, RTT_S), (NCCL_LINK, NCCL_RTT_S))
        )
        row = f"{model}, Azure-Conv, batch {batch}"
        for name, found in (("past the host", past), ("NCCL", through)):
            yield PaperCell(
                row,
                f"network of an iteration, {name} (ms)",
                None,
                1000 * found.network_s(batch),
                _UNPUBLISHED_NETWORK,
            )
        slower = through.step_s(batch, mean) / past.step_s(batch, mean)
        yield PaperCell(
            row, "TBT of one batch with NCCL (% more)", None, 100 * (slower - 1), _UNPUBLISHED_NETWORK
        )
        lost = 1 - through.rate(batch, mean)[0] / past.rate(batch, mean)[0]
        yield PaperCell(row, "throughput with NCCL (% less)", None, 100 * lost, _UNPUBLISHED_NETWORK)
    for model, figure in HIDDEN.items():
        yield PaperCell(f"{model}, queries first", "TBT saved at most (%)", figure, 100 * hidden(model))


NETWORK = Table(
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
    measure=_measure_network,
)
