"""How many sequences decode at once: memory of the devices that hold KV (Lamina, evaluation)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.lamina.setup import MODELS, TRACES, batches
from isthmus.lab.papers.table import Cell, Table

_UNPUBLISHED = "printed as one mean"


def _measure(lab: Lab) -> Iterator[Cell]:
    ratios = []
    for model in MODELS:
        for trace, lengths in TRACES.items():
            vllm, lamina = batches(model, lengths.context)
            ratios.append(lamina / vllm)
            row = f"{model}, {trace}"
            for column, figure in (("vLLM", vllm), ("Lamina", lamina), ("times", lamina / vllm)):
                yield Cell(row, column, None, figure, _UNPUBLISHED)
    yield Cell("mean", "times", 2.39, fmean(ratios))


TABLE = Table(
    name="lamina-batch",
    title="Largest batches at similar cost",
    source="Lamina v2, evaluation",
    setup=(
        "Sequences of the traces' mean lengths, half way through their answers. Of every device 90 % of the memory is "
        "used, less 3 GB for the engine, as everywhere in our cost model; attention devices have no weights."
    ),
    measure=_measure,
)
