"""What has to be done beside computing the rows, which the published figures do not list: each step of its own."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost import NodeCost
from isthmus.core.cost.assembly import assembled_ns
from isthmus.core.reuse import SEMANTIC, Selection
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.sarathi.models import coefficients
from isthmus.lab.papers.semsharekv.setup import (
    A100,
    HIDDEN,
    MODEL,
    SCHEDULES,
    UNPUBLISHED,
    kv_bytes,
    load_s,
    node,
)
from isthmus.lab.papers.table import Cell, Table

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


LENGTHS = (700, 5_000, 10_000)
HOST_S = (0.0, 0.01, 0.02, 0.03)
"""That a host takes to launch an iteration's work, while the GPU is at it: a parameter, fitted to nothing."""


def host_bound(num_tokens: int, host_s: float) -> float:
    """Times quicker, where no iteration is shorter than its launches."""
    full = max(node().prefill_ns(num_tokens, 0) / 1e9, host_s)
    assembled = max(computing_s(node(), SEMANTIC, num_tokens), host_s)
    return full / (assembled + beside_s(num_tokens, in_dram=False))


def _measure(lab: Lab) -> Iterator[Cell]:
    for length in LENGTHS:
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
            yield Cell(row, f"{column} (ms)", None, 1000 * seconds, UNPUBLISHED)
    for length in (500, *LENGTHS):
        for host_s in HOST_S:
            column = f"launches of {1000 * host_s:.0f} ms (times)"
            yield Cell(
                f"{length:,} tokens, slow host",
                column,
                None,
                host_bound(length, host_s),
                "a parameter of ours: no reproduction",
            )


TABLE = Table(
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
    measure=_measure,
)
