"""TTFT against full recomputation (SemShareKV, evaluation): what fewer rows bring, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.reuse import Selection, rows_per_layer
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.semsharekv.setup import LENGTHS, MODELS, SCHEDULES, UNPUBLISHED, node
from isthmus.lab.papers.semsharekv.steps import beside_s, computing_s
from isthmus.lab.papers.table import Cell, Table

PUBLISHED = 6.25
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


def _measure(lab: Lab) -> Iterator[Cell]:
    for name, selection in SCHEDULES.items():
        share = rows_share(selection)
        row = f"{name} schedule"
        yield Cell(row, "rows of the mean layer (%)", None, 100 * share, UNPUBLISHED)
        yield Cell(row, "linear operators alone (times)", None, 1 / share, UNPUBLISHED)
        found = {(model, length): gains(model, selection, length) for model in MODELS for length in LENGTHS}
        for column in (COMPUTING, ON_GPU, IN_DRAM):
            printed = column == ON_GPU
            yield Cell(
                f"most, {row}",
                column,
                PUBLISHED if printed else None,
                max(each[column] for each in found.values()),
                "" if printed else UNPUBLISHED,
            )
        for (model, length), each in found.items():
            reason = "in words: little gain below 700 tokens" if length <= 700 else UNPUBLISHED
            for column, times in each.items():
                yield Cell(f"{model}, {length:,} tokens, {name}", column, None, times, reason)


TABLE = Table(
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
    measure=_measure,
)
