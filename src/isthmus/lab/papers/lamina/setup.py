"""What Lamina compares: devices and prices as printed, models, traces by their mean lengths; and the roofline."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import msgspec

from isthmus.core.cost import Analytic, Coefficients, Hardware, compile_cost, facts_of, hardware_named
from isthmus.core.cost.pooled import Pooled
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.roofline import ROOFLINE
from isthmus.lab.papers.sarathi.setup import LLAMA_33B, llama
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


TABLE = Table(
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
