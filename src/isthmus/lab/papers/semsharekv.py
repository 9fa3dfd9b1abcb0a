"""SemShareKV (arXiv 2509.24832) and its neighbours: prompts assembled from other prompts' KV, by cost model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from statistics import fmean

from isthmus.core.cost import Analytic, NodeCost, compile_cost, facts_of, hardware_named
from isthmus.core.cost.node_cost import assembled_ns
from isthmus.core.reuse import CACHEBLEND, EPIC, SEMANTIC, TAIL, Selection, pack, rows_per_layer
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.sarathi.one_node import coefficients, llama
from isthmus.lab.papers.table import PaperCell, Table

A100 = hardware_named("a100")
MODELS = {
    "Mistral-7B": llama(32, 32, 4_096, 14_336, 32_000, 8),
    "LLaMA-3.1-8B": llama(32, 32, 4_096, 14_336, 128_256, 8),
}
MODEL = "Mistral-7B"
HIDDEN = 4_096
LENGTHS = (500, 700, 1_000, 2_000, 5_000, 10_000)

SEMBLEND = Selection("semblend", recompute=0.8 * 0.85, decay=0.85, floor=0.01)
"""Of the re-implementation WorldFlowAI/semblend: layer 1 in full, then 0.8 * 0.85^i of the tokens, at least 0.01."""
SCHEDULES = {"ours": SEMANTIC, "semblend's": SEMBLEND}
"""The paper's own factors are not known."""

UNPUBLISHED = "no figure is printed"


@cache
def node(model: str = MODEL) -> NodeCost:
    """One A100, weights and KV of 16 bits, an engine's shares and overheads as fitted elsewhere."""
    return compile_cost(Analytic(facts_of(MODELS[model]), A100, coefficients()))


def kv_bytes(num_tokens: int) -> int:
    return num_tokens * node().kv_token_bytes


def load_s(num_tokens: int, bytes_per_s: float) -> float:
    """Until a donor's KV is here."""
    return kv_bytes(num_tokens) / bytes_per_s


# TTFT against full recomputation (SemShareKV, evaluation): what fewer rows bring, and what is left of it.


PUBLISHED_TTFT = 6.25
"""The most of all models, data sets and lengths."""
_MANY = 1_000_000
COMPUTING, ON_GPU, IN_DRAM = (
    "computing alone (times)",
    "donor on the GPU (times)",
    "donor in DRAM (times)",
)


def rows_share(selection: Selection) -> float:
    """Of a long prompt's tokens, computed in the mean layer."""
    rows = rows_per_layer(selection, _MANY, 0, node().num_layers)
    return sum(rows) / len(rows) / _MANY


def gains(model: str, selection: Selection, num_tokens: int) -> dict[str, float]:
    """Times quicker than a full prefill: without any other step, and with all of them."""
    full = node(model).prefill_ns(num_tokens, 0) / 1e9
    computing = computing_s(node(model), selection, num_tokens)
    return {
        COMPUTING: full / computing,
        ON_GPU: full / (computing + beside_s(num_tokens, in_dram=False)),
        IN_DRAM: full / (computing + beside_s(num_tokens, in_dram=True)),
    }


def _measure_ttft(lab: Lab) -> Iterator[PaperCell]:
    for name, selection in SCHEDULES.items():
        share = rows_share(selection)
        row = f"{name} schedule"
        yield PaperCell(row, "rows of the mean layer (%)", None, 100 * share, UNPUBLISHED)
        yield PaperCell(row, "linear operators alone (times)", None, 1 / share, UNPUBLISHED)
        found = {(model, length): gains(model, selection, length) for model in MODELS for length in LENGTHS}
        for column in (COMPUTING, ON_GPU, IN_DRAM):
            printed = column == ON_GPU
            yield PaperCell(
                f"most, {row}",
                column,
                PUBLISHED_TTFT if printed else None,
                max(each[column] for each in found.values()),
                "" if printed else UNPUBLISHED,
            )
        for (model, length), each in found.items():
            reason = "in words: little gain below 700 tokens" if length <= 700 else UNPUBLISHED
            for column, times in each.items():
                yield PaperCell(f"{model}, {length:,} tokens, {name}", column, None, times, reason)


TTFT = Table(
    name="semsharekv-ttft",
    title="Times quicker than full recomputation",
    source="SemShareKV (arXiv 2509.24832), evaluation, from notes: its text was not at hand",
    setup=(
        "One prompt alone on an A100 of 80 GB, by our cost model with an engine's overheads as fitted elsewhere "
        "(docs/cost-model.md). Every token but the last 32 has its like in the donor. Schedules: ours (a layer in "
        "full, then 0.4 * 0.85^i, at least 0.02), and the one of the re-implementation semblend (0.8 * 0.85^i, at "
        "least 0.01); the paper's factors are not known, so neither is its own. The paper keeps the donor's KV on the "
        "GPU. All steps of semsharekv-steps come one after the other. That gains are small below 700 tokens is not "
        "reproduced: it would take a host as slow as in the last rows of semsharekv-steps."
    ),
    measure=_measure_ttft,
)


# What has to be done beside computing the rows, which the published figures do not list: each step of its own.


PLANES = 256
"""Bits of a token's hash (both re-implementations that say)."""
NUM_PROMPTS = 10_000
"""Among so many the like one is looked for."""

# One core of an AMD EPYC, shared with other work, 24 November 2026: `isthmus.core.reuse.similarity` for each prompt;
# 5,000 rows of 4,096 numbers to 256 bits (torch); distances of 5,000 to 5,000 hashes (numpy, bits counted 64 at a
# time).
SEARCH_S = 0.62e-6
HASH_S = 24e-6
PAIR_S = 3.8e-9


def search_s() -> float:
    return NUM_PROMPTS * SEARCH_S


def matching_s(num_tokens: int) -> float:
    """On the GPU: the donor's embeddings come from host memory, both prompts are hashed, all hashes are compared. As
    products of matrices, by the share of the peak that others reach."""
    products = 2 * num_tokens * HIDDEN * PLANES + num_tokens**2 * PLANES
    embeddings = num_tokens * HIDDEN * 2
    return 2 * products / (coefficients().matmul * A100.bf16_flops) + embeddings / A100.pcie_bw


def host_matching_s(num_tokens: int) -> float:
    """On one core, where the embeddings are; the donor's hashes are there."""
    return num_tokens * HASH_S + num_tokens**2 * PAIR_S


def moving_s(num_tokens: int) -> float:
    """All donor's KV is read and written once: to its new places, keys turned on the way."""
    return 2 * kv_bytes(num_tokens) / (coefficients().kv_read * A100.memory_bw)


def computing_s(cost: NodeCost, selection: Selection, num_tokens: int) -> float:
    """Every token has its like: all but the tail are candidates."""
    return assembled_ns(cost, selection, num_tokens, 0, num_tokens) / 1e9


def beside_s(num_tokens: int, *, in_dram: bool) -> float:
    """All but computing, one step after the other; matching on the GPU."""
    loading = load_s(num_tokens, A100.pcie_bw) if in_dram else 0.0
    return search_s() + matching_s(num_tokens) + moving_s(num_tokens) + loading


LENGTHS_STEPS = (700, 5_000, 10_000)
HOST_S = (0.0, 0.01, 0.02, 0.03)
"""That a host takes to launch an iteration's work, while the GPU is at it: a parameter, fitted to nothing."""


def host_bound(num_tokens: int, host_s: float) -> float:
    """Times quicker, where no iteration is shorter than its launches."""
    full = max(node().prefill_ns(num_tokens, 0) / 1e9, host_s)
    assembled = max(computing_s(node(), SEMANTIC, num_tokens), host_s)
    return full / (assembled + beside_s(num_tokens, in_dram=False))


def _measure_steps(lab: Lab) -> Iterator[PaperCell]:
    for length in LENGTHS_STEPS:
        row = f"{length:,} tokens"
        steps = {
            "full prefill": node().prefill_ns(length, 0) / 1e9,
            **{f"computing, {name}": computing_s(node(), each, length) for name, each in SCHEDULES.items()},
            f"search among {NUM_PROMPTS:,} prompts, one core": search_s(),
            "matching tokens, GPU": matching_s(length),
            "matching tokens, one core instead": host_matching_s(length),
            "moving and turning KV": moving_s(length),
            "donor's KV from DRAM": load_s(length, A100.pcie_bw),
            "donor's KV from an SSD instead": load_s(length, A100.ssd_read_bw),
        }
        for column, seconds in steps.items():
            yield PaperCell(row, f"{column} (ms)", None, 1000 * seconds, UNPUBLISHED)
    for length in (500, *LENGTHS_STEPS):
        for host_s in HOST_S:
            column = f"launches of {1000 * host_s:.0f} ms (times)"
            yield PaperCell(
                f"{length:,} tokens, slow host",
                column,
                None,
                host_bound(length, host_s),
                "a parameter of ours: no reproduction",
            )


STEPS = Table(
    name="semsharekv-steps",
    title="What has to be done beside computing",
    source="SemShareKV (arXiv 2509.24832) lists none of it",
    setup=(
        f"{MODEL}, a donor as long as the prompt. The search compares signatures of 256 bits; matching hashes both "
        "prompts' embeddings to 256 bits, fetches the donor's from host memory, and compares every token with every "
        "other: products of matrices on the GPU, or bits counted on one core of a server CPU (measured). Moving reads "
        "and writes all donor's KV at 82 % of the memory's bandwidth; PCIe and SSD by data sheet, 32 and 6.8 GB/s. A "
        "slow host: what is left of the gain, donor on the GPU, if no iteration is shorter than so many ms. The paper "
        "runs Hugging Face Transformers, whose launches it does not print; it sees little gain below 700 tokens."
    ),
    measure=_measure_steps,
)


# GPU memory of a prompt's KV, of which deeper layers keep less (SemShareKV, evaluation).


LENGTH, BLOCK = 5_000, 16
PUBLISHED_MEMORY = 42.0
_SET = "the schedule's `fade` is set by the published 42 %"


def packed_bytes(num_tokens: int, block_size: int) -> int:
    """Of the blocks that the prompt's KV takes then."""
    packing = pack(SEMANTIC, num_tokens, node().num_layers, block_size)
    num_dropped = packing.num_dropped if packing else 0
    return kv_bytes((-(-num_tokens // block_size) - num_dropped) * block_size)


def less(num_tokens: int, block_size: int) -> float:
    """Percent, against the same prompt's KV without blocks."""
    return 100 * (1 - packed_bytes(num_tokens, block_size) / kv_bytes(num_tokens))


def _measure_memory(lab: Lab) -> Iterator[PaperCell]:
    layers = node().num_layers
    row = f"{LENGTH:,} tokens"
    yield PaperCell("a token", "KV (bytes)", None, node().kv_token_bytes, UNPUBLISHED)
    yield PaperCell(row, "full (MB)", None, kv_bytes(LENGTH) / 1e6, UNPUBLISHED)
    kept = fmean([SEMANTIC.kept(layer, layers) for layer in range(layers)])
    yield PaperCell(row, "kept, mean of the layers (%)", None, 100 * kept, _SET, inferred=True)
    yield PaperCell(row, "packed (MB)", None, packed_bytes(LENGTH, BLOCK) / 1e6, UNPUBLISHED, inferred=True)
    yield PaperCell(row, "less (%)", PUBLISHED_MEMORY, less(LENGTH, BLOCK), inferred=True)
    for block_size in (1, 64, 256):
        yield PaperCell(
            f"{row}, blocks of {block_size}", "less (%)", None, less(LENGTH, block_size), _SET, inferred=True
        )
    for length in (500, 1_000, 10_000):
        yield PaperCell(f"{length:,} tokens", "less (%)", None, less(length, BLOCK), _SET, inferred=True)
    # Nothing is dropped before the last layer has said what the question attends to.
    yield PaperCell(
        row, "while it is assembled, with the donor's (MB)", None, 2 * kv_bytes(LENGTH) / 1e6, UNPUBLISHED
    )
    yield PaperCell(row, "embeddings, host memory (MB)", None, LENGTH * HIDDEN * 2 / 1e6, UNPUBLISHED)


MEMORY = Table(
    name="semsharekv-memory",
    title="GPU memory of a prompt's KV",
    source="SemShareKV (arXiv 2509.24832), evaluation, from notes",
    setup=(
        f"{MODEL}, 16 bits, by counting blocks of {BLOCK} tokens. Layer i keeps 0.8 * exp(-0.7 i / 31) of the prompt; "
        "0.7 was set so that 0.58 is kept in the mean, which is the published figure: it says that the mechanism "
        "frees what it promises to, rounding and tail included, and no more. The saving begins when the prompt is "
        "done: while it is assembled, its own KV and, on the GPU, the donor's are there."
    ),
    measure=_measure_memory,
)


# Two neighbours that reuse passages at other places: CacheBlend (arXiv 2405.16444) and EPIC (arXiv 2410.15332).


LENGTHS_NEIGHBOURS = (2_000, 5_000, 10_000, 30_000)
PASSAGE = 512
"""Tokens (EPIC's code)."""
FIRSTS = (1, 16, 64)
CACHEBLEND_PUBLISHED, EPIC_PUBLISHED = (2.2, 3.3), 8.0
PLACES = {"GPU": 0.0, "DRAM": A100.pcie_bw, "SSD": A100.ssd_read_bw}
"""Where donors' KV is -> bytes per second from there; 0: it is here."""


def full_s(num_tokens: int) -> float:
    return node().prefill_ns(num_tokens, 0) / 1e9


def _loaded_s(num_ns: int, num_tokens: int, place: str) -> float:
    """Layers are loaded while others are computed, so the longer of the two counts."""
    rate = PLACES[place]
    return max(num_ns / 1e9, load_s(num_tokens, rate) if rate else 0.0)


def cacheblend_s(num_tokens: int, place: str) -> float:
    return _loaded_s(assembled_ns(node(), CACHEBLEND, num_tokens, 0, num_tokens), num_tokens, place)


def epic_s(num_tokens: int, first: int, place: str) -> float:
    """The first tokens of each passage are computed, and the question."""
    num_passages = -(-(num_tokens - TAIL) // PASSAGE)
    candidates = num_tokens - TAIL - first * num_passages
    return _loaded_s(assembled_ns(node(), EPIC, num_tokens, 0, candidates), num_tokens, place)


def _measure_neighbours(lab: Lab) -> Iterator[PaperCell]:
    blended = {
        (length, place): full_s(length) / cacheblend_s(length, place)
        for length in LENGTHS_NEIGHBOURS
        for place in PLACES
    }
    over_full, over_blend = "over full (times)", "over CacheBlend (times)"
    ends = zip(
        ("least", "most"), CACHEBLEND_PUBLISHED, (min(blended.values()), max(blended.values())), strict=True
    )
    for which, figure, found in ends:
        yield PaperCell(f"CacheBlend 15 %, {which}", over_full, figure, found)
    over = [cacheblend_s(length, "GPU") / epic_s(length, EPIC.first, "GPU") for length in LENGTHS_NEIGHBOURS]
    yield PaperCell(f"EPIC, k = {EPIC.first}, most", over_blend, EPIC_PUBLISHED, max(over))
    for (length, place), times in blended.items():
        yield PaperCell(f"CacheBlend 15 %, {length:,} tokens, {place}", over_full, None, times, UNPUBLISHED)
    for first in FIRSTS:
        for length in LENGTHS_NEIGHBOURS:
            for place in PLACES if first == EPIC.first else ("GPU",):
                seconds = epic_s(length, first, place)
                row = f"EPIC, k = {first}, {length:,} tokens, {place}"
                yield PaperCell(row, over_full, None, full_s(length) / seconds, UNPUBLISHED)
                yield PaperCell(row, over_blend, None, cacheblend_s(length, place) / seconds, UNPUBLISHED)


NEIGHBOURS = Table(
    name="semsharekv-neighbours",
    title="CacheBlend and EPIC: TTFT",
    source="CacheBlend (arXiv 2405.16444) and EPIC (arXiv 2410.15332), evaluations, from notes",
    setup=(
        f"{MODEL}, one prompt alone on an A100 of 80 GB, passages of {PASSAGE} tokens and a question of {TAIL}; "
        "CacheBlend computes 15 % behind the first layer, EPIC the first k tokens of each passage. Donors' KV on the "
        "GPU, in DRAM (32 GB/s) or on an SSD (6.8 GB/s), loaded layer by layer beside computing. Published: 2.2 to 3.3 "
        "times over full recomputation, and up to 8 times over existing systems, of which CacheBlend at 15 % is one. "
        "Their models, GPUs, stores and loads are not in our sources, so neither range is reproduced, only its order."
    ),
    measure=_measure_neighbours,
)


# What the answers are worth (SemShareKV, evaluation): published figures only, and why.


_MODEL = "needs a real 7-8B model; measured on SmolLM2 by `isthmus bench reuse`, see docs/reuse.md"
_SNAPKV = "SnapKV prefills in full, which our cost model has as 1.0; what it took there is not printed"
ROUGE_L = {
    "MultiNews, Mistral-7B": {"full": 22.10, "SemShareKV": 23.15},
    "SAMSum": {"full": 18.79, "SemShareKV": 21.22},
    "SAMSum, in place of its own KV": {"the likes'": 21.22, "zeros": 14.63, "random": 5.38},
}


def _measure_quality(lab: Lab) -> Iterator[PaperCell]:
    for row, figures in ROUGE_L.items():
        for column, figure in figures.items():
            yield PaperCell(row, f"{column} (ROUGE-L)", figure, None, _MODEL)
    yield PaperCell("TTFT over SnapKV, most", "times", 2.23, None, _SNAPKV)


QUALITY = Table(
    name="semsharekv-quality",
    title="Answers: published figures, none of ours",
    source="SemShareKV (arXiv 2509.24832), evaluation, from notes",
    setup=(
        "Nothing here is reproduced. In words: with RoPE left out of matching, many tokens map to the first ones. "
        "That, and the order likes over zeros over random numbers, is measured on SmolLM2 instead: docs/reuse.md."
    ),
    measure=_measure_quality,
)

TABLES: tuple[Table, ...] = (TTFT, STEPS, MEMORY, NEIGHBOURS, QUALITY)
