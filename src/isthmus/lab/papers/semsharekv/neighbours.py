"""Two neighbours that reuse passages at other places: CacheBlend (arXiv 2405.16444) and EPIC (arXiv 2410.15332)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.cost.assembly import assembled_ns
from isthmus.core.reuse import CACHEBLEND, EPIC
from isthmus.core.reuse.selection import TAIL
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.semsharekv.setup import A100, MODEL, UNPUBLISHED, load_s, node
from isthmus.lab.papers.table import Cell, Table

LENGTHS = (2_000, 5_000, 10_000, 30_000)
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


def _measure(lab: Lab) -> Iterator[Cell]:
    blended = {
        (length, place): full_s(length) / cacheblend_s(length, place) for length in LENGTHS for place in PLACES
    }
    over_full, over_blend = "over full (times)", "over CacheBlend (times)"
    ends = zip(
        ("least", "most"), CACHEBLEND_PUBLISHED, (min(blended.values()), max(blended.values())), strict=True
    )
    for which, figure, found in ends:
        yield Cell(f"CacheBlend 15 %, {which}", over_full, figure, found)
    over = [cacheblend_s(length, "GPU") / epic_s(length, EPIC.first, "GPU") for length in LENGTHS]
    yield Cell(f"EPIC, k = {EPIC.first}, most", over_blend, EPIC_PUBLISHED, max(over))
    for (length, place), times in blended.items():
        yield Cell(f"CacheBlend 15 %, {length:,} tokens, {place}", over_full, None, times, UNPUBLISHED)
    for first in FIRSTS:
        for length in LENGTHS:
            for place in PLACES if first == EPIC.first else ("GPU",):
                seconds = epic_s(length, first, place)
                row = f"EPIC, k = {first}, {length:,} tokens, {place}"
                yield Cell(row, over_full, None, full_s(length) / seconds, UNPUBLISHED)
                yield Cell(row, over_blend, None, cacheblend_s(length, place) / seconds, UNPUBLISHED)


TABLE = Table(
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
    measure=_measure,
)
