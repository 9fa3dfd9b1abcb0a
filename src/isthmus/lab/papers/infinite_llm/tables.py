"""Tables of Infinite-LLM: instances of LLaMA2 on A100 as the paper serves them, and what lending memory gains."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from isthmus.config import Config
from isthmus.core.cost import (
    Analytic,
    Coefficients,
    Queries,
    compile_cost,
    engine_coefficients,
    facts_of,
    hardware_named,
)
from isthmus.core.types import NS_PER_S, Role
from isthmus.facts import nodes_of, rules_of
from isthmus.lab.papers.infinite_llm.lending import GREEDY
from isthmus.lab.papers.lab import ROOFLINE, Lab
from isthmus.lab.papers.sarathi.one_node import llama
from isthmus.lab.papers.table import PaperCell, cells, table
from isthmus.lab.sim.deployment import FAR, Deployment
from isthmus.lab.sim.records import RequestStatus
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import Request, Workload

A100 = hardware_named("a100")
NUM_GPUS = 32
BLOCK_SIZE = 16
ETHERNET = 125e6
"""Bytes per second between the nodes of eight, as printed."""
MODELS = {
    "7B": llama(32, 32, 4_096, 11_008, 32_000, 32),
    "13B": llama(40, 40, 5_120, 13_824, 32_000, 40),
    "70B": llama(80, 64, 8_192, 28_672, 32_000, 8),
}


def measured() -> Coefficients:
    """Coefficients of vLLM on an A100 with weights and KV of 16 bits, fitted elsewhere (docs/cost-model.md)."""
    return engine_coefficients("vllm", A100, weight_dtype="bf16", kv_dtype="bf16")


@cache
def instance(model: str, num_gpus: int = 1, by: Coefficients = ROOFLINE) -> Analytic:
    return Analytic(facts_of(MODELS[model]), A100, by, num_gpus=num_gpus)


def least_gpus(model: str) -> int:
    """GPUs of the smallest instance, a power of two, that has memory for KV."""
    num_gpus = 1
    while not instance(model, num_gpus).fits:
        num_gpus *= 2
    return num_gpus


def cluster(model: str, count: int, by: Coefficients = ROOFLINE, **changed: Any) -> Deployment:
    """`count` instances as small as hold the model. `changed`: sections of the configuration."""
    return _mixed(instance(model, least_gpus(model), by), count, changed)


def single(model: str, num_gpus: int, by: Coefficients = ROOFLINE) -> Deployment:
    """One instance on all of them."""
    return _mixed(instance(model, num_gpus, by), 1, {})


def _mixed(cost: Analytic, count: int, changed: dict[str, Any]) -> Deployment:
    """Each computes and answers, as many requests at once as its memory holds."""
    config = Config.model_validate(
        {
            "roles": {"prefill": 0, "decode": 0, "mixed": count},
            "engine": {
                "hardware": "a100",
                "gpus": cost.num_gpus,
                "token_budget": 2048,
                "max_sequences": 4096,
            },
            "limits": {"max_requests": 1_000_000},
            **changed,
        }
    )
    made = nodes_of(config, BLOCK_SIZE, costs={Role.MIXED: cost})
    nodes = tuple(msgspec.structs.replace(facts, max_steps=FAR, max_chunks=FAR) for facts in made)
    return Deployment(nodes=nodes, rules=rules_of(config), has_names=False)


# Throughput with memory that instances lend each other, over instances that do not (second version, by simulation).


OVER_MULTI, OVER_SINGLE = (1.35, 1.73), (1.4, 3.4)
"""Times vLLM-M on traces 0 to 2, times vLLM-S on traces 3 to 8: least and most."""
_MODEL_GAIN, _INSTANCES = "7B", 4
_SHORT, _ANSWER, _LONG_ANSWER = 1_000, 256, 3_000


class InstanceLoad(msgspec.Struct, frozen=True):
    """Requests that come at once: `each` short ones an instance, after `longs` with `length` tokens. 90 short ones do
    not fill an instance."""

    each: int
    longs: int = 0
    length: int = 0

    def requests(self) -> list[Request]:
        long = [Request(0, self.length, _LONG_ANSWER)] * self.longs
        return [*long, *[Request(0, _SHORT, _ANSWER)] * (_INSTANCES * self.each - self.longs)]


LOADS = {
    "all alike, none waits": InstanceLoad(90),
    "all alike": InstanceLoad(180),
    "1 of 30,000": InstanceLoad(180, 1, 30_000),
    "1 of 60,000": InstanceLoad(180, 1, 60_000),
    "1 of 90,000": InstanceLoad(180, 1, 90_000),
    "2 of 90,000": InstanceLoad(180, 2, 90_000),
}


class ServedTokens(msgspec.Struct, frozen=True):
    """Tokens of short answers a second until the last of them, and bytes that moved between instances."""

    rate: float
    moved: int


@cache
def served(load: InstanceLoad, lending: str, placement: str = "round_robin") -> ServedTokens:
    """Throughput of instances that lend by this policy."""
    return _run(
        load, cluster(_MODEL_GAIN, _INSTANCES, measured(), policy=placement, lending={"policy": lending})
    )


@cache
def served_by_one(load: InstanceLoad) -> ServedTokens:
    """Throughput of one instance on all GPUs, with tensor parallelism."""
    return _run(load, single(_MODEL_GAIN, _INSTANCES, measured()))


def _run(load: InstanceLoad, deployment: Deployment) -> ServedTokens:
    result = Simulation(deployment, Workload("gain", BLOCK_SIZE, load.requests())).run()
    short = [each for each in result.records if each.request.output_tokens == _ANSWER]
    seconds = max(each.end_ns for each in short) / NS_PER_S
    return ServedTokens(len(short) * _ANSWER / seconds, result.bytes_moved["shipment"])


@table(
    "infinite-llm-gain",
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
    unpublished="printed as a range over traces that are not public",
)
def gain_table(lab: Lab) -> Iterator[PaperCell]:
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
        yield from cells(row, figures)
    for name, published, found in (
        ("M, traces 0 to 2", OVER_MULTI, multi),
        ("S, traces 3 to 8", OVER_SINGLE, one),
    ):
        yield PaperCell(f"least, over vLLM-{name}", "times", published[0], min(found))
        yield PaperCell(f"most, over vLLM-{name}", "times", published[1], max(found))


# The longest context: what all instances hold together, against what one holds (both versions).


LONGEST = {"v1": 1_900, "v2": 2_000}
"""Thousands of tokens on 32 A100."""
TIMES = (2, 19)
"""Times the context of vLLM-M (instances that do not lend), least and most over all traces; both versions."""
_COUNTS = (2, 4, 8, 16, 32)
_STEP = 1000


def pool_tokens(model: str, num_gpus: int = NUM_GPUS, each: int | None = None) -> int:
    """(GPUs x memory x share - weights) / KV bytes of a token, every instance of `each` GPUs having the weights."""
    each = each or least_gpus(model)
    return num_gpus // each * instance(model, each).kv_capacity_tokens


def completes(model: str, count: int, num_tokens: int) -> bool:
    """Whether `count` instances serve a prompt of this length, in virtual time."""
    workload = Workload("one prompt", BLOCK_SIZE, [Request(0, num_tokens, BLOCK_SIZE)])
    [record] = Simulation(cluster(model, count), workload).run().records
    return record.status is RequestStatus.COMPLETED


def longest(model: str, count: int) -> int:
    """The longest prompt that is served, to a thousand tokens; what all instances but one hold always is."""
    one = pool_tokens(model, least_gpus(model)) // _STEP
    steps = range((count - 1) * one, count * one + 1)
    return _STEP * (
        steps[0] + bisect_left(steps, True, key=lambda step: not completes(model, count, _STEP * step)) - 1
    )


@table(
    "infinite-llm-context",
    title="Longest context",
    source="Infinite-LLM v1 and v2 (arXiv 2401.02669), evaluation",
    setup=(
        "What A100 have beside the weights (90 % of 80 GiB, less 3 GB for the engine), instances as small as hold the "
        "model. Served here: the longest prompt that is answered in the simulator; its home keeps a quarter of its "
        "memory for what is computed and has not left. Of which models the published lengths are is not known here: "
        "they are the longest of the traces, not all that fits; of 7B more does, of 13B a little less. So are the 2 to "
        "19 times; ours are of all memory."
    ),
    unpublished="no figure is printed for it",
)
def context_table(lab: Lab) -> Iterator[PaperCell]:
    for version, figure in LONGEST.items():
        for model in MODELS:
            each = least_gpus(model)
            row = f"{version}; {model} on {NUM_GPUS // each} instances of {each}"
            yield PaperCell(row, "context (1,000 tokens)", figure, pool_tokens(model) / 1000)
    for count in _COUNTS:
        row, one = f"{count} instances of 7B", pool_tokens("7B", 1)
        lab.report(f"the longest prompt of {row}")
        all_memory, here = pool_tokens("7B", count) / one, longest("7B", count) / one
        yield from cells(row, {"all memory, times one": all_memory, "served here, times one": here})
    for which, figure, count in zip(("least", "most"), TIMES, (2, NUM_GPUS), strict=True):
        row = f"over all traces, {which} ({count} instances here)"
        yield PaperCell(row, "times vLLM-M", figure, longest("7B", count) / pool_tokens("7B", 1))


# KV that moves to another instance while its request decodes (second version).


PUBLISHED = {16: 0.0, 32: 8.6}
"""Tokens that move in a step: percent of throughput that is lost."""
_BATCH, _CONTEXT = 32, 1024
_LINKS = {"NVLink": A100.link_bw, "Ethernet": ETHERNET}


def lost(model: str, tokens: int, link: float) -> float:
    """Percent: a step is as long as what moves beside it."""
    cost = compile_cost(instance(model, least_gpus(model)))
    step_s = cost.step_ps((), _BATCH, _BATCH * _CONTEXT) / 1e12
    return 100 * (1 - step_s / max(step_s, tokens * cost.kv_token_bytes / link))


def free_link(model: str, tokens: int) -> float:
    """GB/s on which so much moves for nothing."""
    cost = compile_cost(instance(model, least_gpus(model)))
    return tokens * cost.kv_token_bytes / (cost.step_ps((), _BATCH, _BATCH * _CONTEXT) / 1e12) / 1e9


@table(
    "infinite-llm-moves",
    title="KV that moves beside decoding",
    source="Infinite-LLM v2, overlap",
    setup=(
        f"Steps of {_BATCH} sequences of {_CONTEXT:,} tokens by the roofline; what moves lies beside the step, or "
        "makes it longer. On NVLink both are free, on the 1 Gbit/s between nodes that the paper prints neither is; "
        "the published 0 and 8.6 % lie between, on a link, of a model and a batch that are not known here. Moves here "
        "take 16 tokens a step."
    ),
    unpublished="no figure is printed",
)
def moves_table(lab: Lab) -> Iterator[PaperCell]:
    for tokens, figure in PUBLISHED.items():
        for model in ("7B", "13B", "70B"):
            ours = {f"lost on {name} (%)": lost(model, tokens, link) for name, link in _LINKS.items()}
            ours["free from (GB/s)"] = free_link(model, tokens)
            yield from cells(f"{tokens} tokens a step, {model}", ours, figure, figure)


# Ship the query, or ship the KV (DistAttention, second version).


_MODEL_TRAFFIC, _DEVICES = "13B", 4
MEASURED_MS = {8_192: (0.075, 0.581), 32_768: (0.12, 1.98), 131_072: (0.36, 7.48)}
"""ms of one layer: ship queries, ship KV."""
_SENT_BYTES = 2


def layer_queries() -> Queries:
    whole = compile_cost(instance(_MODEL_TRAFFIC)).queries
    return Queries(whole.elements // whole.layers, whole.heads // whole.layers, 1)


def query_bytes() -> float:
    """For one token in one layer, there and back: of each head's two numbers one is here, so the paper's 4 bytes more
    come to 20.8 KB in place of 20.6."""
    queries = layer_queries()
    return queries.num_bytes(1, _SENT_BYTES) + 4 * queries.heads


def kv_bytes(tokens: int) -> float:
    whole = instance(_MODEL_TRAFFIC)
    return whole.kv_token_bytes * tokens / whole.model.num_layers


def times_ms(tokens: int) -> tuple[float, float]:
    """Of one token's attention in one layer over KV that lies evenly on four GPUs, without any latency: each attends to
    its own part and sums come together; or what three have goes to the fourth, which attends meanwhile."""
    attend_s = (
        compile_cost(instance(_MODEL_TRAFFIC)).attend_ps(1, tokens)
        / 1e12
        / instance(_MODEL_TRAFFIC).model.num_layers
    )
    queries = attend_s / _DEVICES + (_DEVICES - 1) * query_bytes() / A100.link_bw
    kv = max(attend_s, (_DEVICES - 1) / _DEVICES * kv_bytes(tokens) / A100.link_bw)
    return 1000 * queries, 1000 * kv


@table(
    "infinite-llm-traffic",
    title="What travels: queries, or KV",
    source="Infinite-LLM v2 (arXiv 2401.02669v2), DistAttention",
    setup=(
        "One token of LLaMA2-13B, one layer, 16 bits. Times: KV spread over four A100 (inferred: one could not read "
        "the KV of 131,072 tokens in 0.36 ms), NVLink of 300 GB/s each way, 80 % of the memory's bandwidth, no "
        "latency: that is what is missing at 8,192 tokens. RingAttention, which the paper finds 7.7 to 19.8 times "
        "slower, is KV that travels. Tensor parallelism (1 to 25 % slower) is a question of kernels, and is not "
        "computed."
    ),
)
def traffic_table(lab: Lab) -> Iterator[PaperCell]:
    yield PaperCell("a query and its sums, a layer", "KB", 20.8, query_bytes() / 1000)
    yield PaperCell("KV of 8,192 tokens, a layer", "MB", 168, kv_bytes(8192) / 1e6)
    for tokens, printed in MEASURED_MS.items():
        queries, kv = times_ms(tokens)
        ours = {"queries travel (ms)": queries, "KV travels (ms)": kv, "times": kv / queries}
        yield from cells(f"{tokens:,} tokens", ours, *printed, printed[1] / printed[0], inferred=True)
