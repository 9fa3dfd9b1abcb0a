"""What the answers are worth (SemShareKV, evaluation): published figures only, and why."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.table import Cell, Table

_MODEL = "needs a real 7-8B model; measured on SmolLM2 by `isthmus bench reuse`, see docs/reuse.md"
_SNAPKV = "SnapKV prefills in full, which our cost model has as 1.0; what it took there is not printed"
ROUGE_L = {
    "MultiNews, Mistral-7B": {"full": 22.10, "SemShareKV": 23.15},
    "SAMSum": {"full": 18.79, "SemShareKV": 21.22},
    "SAMSum, in place of its own KV": {"the likes'": 21.22, "zeros": 14.63, "random": 5.38},
}


def _measure(lab: Lab) -> Iterator[Cell]:
    for row, figures in ROUGE_L.items():
        for column, figure in figures.items():
            yield Cell(row, f"{column} (ROUGE-L)", figure, None, _MODEL)
    yield Cell("TTFT over SnapKV, most", "times", 2.23, None, _SNAPKV)


TABLE = Table(
    name="semsharekv-quality",
    title="Answers: published figures, none of ours",
    source="SemShareKV (arXiv 2509.24832), evaluation, from notes",
    setup=(
        "Nothing here is reproduced. In words: with RoPE left out of matching, many tokens map to the first ones. "
        "That, and the order likes over zeros over random numbers, is measured on SmolLM2 instead: docs/reuse.md."
    ),
    measure=_measure,
)
