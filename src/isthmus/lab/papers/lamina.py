"""Lamina (arXiv 2405.01814v2): decode attention and KV on devices of their own.

The first version (attention offloading, May 2024) has other hardware and other headlines, 1.48 to 12.1 times the
throughput per dollar; its prices and configurations are not known here, so none of that is reproduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from statistics import fmean

import msgspec

from isthmus.core.cost import (
    Analytic,
    Coefficients,
    Hardware,
    compile_cost,
    engine_coefficients,
    facts_of,
    hardware_named,
    least_bandwidth,
)
from isthmus.core.cost.pooled import Pooled, is_compute_bound
from isthmus.lab.papers.lab import ROOFLINE, Lab
from isthmus.lab.papers.sarathi.one_node import LLAMA_33B, llama
from isthmus.lab.papers.table import PaperCell, Table

PRICES = {"h100": 11.06, "h20": 4.63}
"""US dollars an hour."""
LINK, RTT_S = 45.7e9, 33.0e-6
"""Peak of one link in bytes per second, and a ping-pong, both past the host."""
NCCL_LINK, NCCL_RTT_S = 35.5e9, 66.6e-6
_SENT_BYTES = 2


class PaperModel(msgspec.Struct, frozen=True):
    """Of its Lamina: `compute` and `memory` devices; its vLLM has twice as many H100 as the former. `weights_gb`: as
    printed."""

    config: dict[str, object]
    compute: int
    memory: int
    weights_gb: float


MODELS = {
    "33B": PaperModel(LLAMA_33B, 1, 2, 64.7),
    "65B": PaperModel(llama(80, 64, 8_192, 22_016, 32_000, 64), 2, 4, 130.1),
    "70B": PaperModel(llama(80, 64, 8_192, 28_672, 128_256, 8), 2, 4, 137.5),
}


class MeanLengths(msgspec.Struct, frozen=True):
    """Means of a trace."""

    prompt: float
    answer: float

    @property
    def context(self) -> float:
        """Of a sequence half way through its answer."""
        return self.prompt + self.answer / 2


TRACES = {
    "Azure-Conv": MeanLengths(1154.7, 211.1),
    "Azure-Code": MeanLengths(2047.8, 27.9),
    "Kimi-Conv": MeanLengths(12035.1, 342.6),
    "Kimi-TA": MeanLengths(8560.0, 182.1),
}


def device(name: str) -> Hardware:
    """With the memory and the network of the paper's testbed; the other figures are the same here."""
    memory = {"h100": 80, "h20": 96}[name] * 10**9
    return msgspec.structs.replace(hardware_named(name), memory_bytes=memory, nic_bw=50e9)


@cache
def instance(model: str, name: str, count: int, by: Coefficients = ROOFLINE) -> Analytic:
    """So many devices as one."""
    return Analytic(facts_of(MODELS[model].config), device(name), by, num_gpus=count)


def vllm(model: str, by: Coefficients = ROOFLINE) -> Analytic:
    return instance(model, "h100", 2 * MODELS[model].compute, by)


def pool(
    model: str,
    by: Coefficients = ROOFLINE,
    *,
    memory: int | None = None,
    link: float = LINK,
    rtt_s: float = RTT_S,
) -> Pooled:
    """Lamina's; with another number of `memory` devices. The compute devices' links are the narrower side."""
    found = MODELS[model]
    layers = compile_cost(instance(model, "h100", found.compute, by))
    holders = compile_cost(instance(model, "h20", memory or found.memory, by))
    wide = link * min(found.compute, memory or found.memory)
    return Pooled(layers, holders, 1, wide, rtt_s, _SENT_BYTES)


def batches(model: str, context: float) -> tuple[int, int]:
    """Sequences that fit: vLLM's, Lamina's."""
    memory = instance(model, "h20", MODELS[model].memory)
    return int(vllm(model).kv_capacity_tokens // context), int(memory.lent_capacity_tokens // context)


def _measure(lab: Lab) -> Iterator[PaperCell]:
    printed = {"33B": (20.32, 22.12), "65B": (40.64, 44.24), "70B": (40.64, 44.24)}
    for name, model in MODELS.items():
        lamina = model.compute * PRICES["h100"] + model.memory * PRICES["h20"]
        yield PaperCell(name, "Lamina ($/h)", printed[name][0], lamina)
        yield PaperCell(name, "vLLM ($/h)", printed[name][1], 2 * model.compute * PRICES["h100"])
        yield PaperCell(name, "weights (GB)", model.weights_gb, vllm(name).weight_bytes / 1e9)
    whole = device("h100").memory_bytes / (vllm("70B").kv_token_bytes * 8192)
    yield PaperCell("70B, a whole H100", "requests of 8,192 tokens", 30, whole)


SETUP = Table(
    name="lamina-setup",
    title="What is compared: prices and sizes",
    source="Lamina v2 (arXiv 2405.01814v2), tables of hardware and models",
    setup=(
        "33B: one H100 and two H20 against two H100; 65B and 70B: two and four against four. The price of an H20 is "
        "the paper's estimate. Weights are counted from the models' shapes, 16 bits. The first version of the paper "
        "(1.48 to 12.1 times per dollar) is not reproduced: its prices are not known."
    ),
    measure=_measure,
)


# How many sequences decode at once: memory of the devices that hold KV (Lamina, evaluation).


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

TABLES: tuple[Table, ...] = (SETUP, BATCH, THROUGHPUT, SATURATION, NETWORK)
