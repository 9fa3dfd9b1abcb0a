"""GPU time of a prefill (FAST'25): how much of it the cache saves."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.lab.papers.lab import Lab, Trace
from isthmus.lab.papers.mooncake.systems import SYSTEMS, VLLM_SETUP, replay
from isthmus.lab.papers.table import Cell, Figures, Table, on_trace

_PUBLISHED = {
    Trace.CONVERSATION: (1.062, 1.661, 1.523, 2.021),
    Trace.TOOLAGENT: (0.527, 1.117, 0.740, 1.415),
    Trace.SYNTHETIC: (0.733, 2.022, 1.896, 2.436),
}
"""In the order of `SYSTEMS`."""

_COLUMN = "mean (s)"


def _measure(lab: Lab) -> Iterator[Cell]:
    def row(trace: Trace, system: str) -> Figures:
        times_s = replay(lab, trace, system).prefill_s
        return {_COLUMN: sum(times_s) / len(times_s)}

    for trace, figures in _PUBLISHED.items():
        published = {system: {_COLUMN: figure} for system, figure in zip(SYSTEMS, figures, strict=True)}
        yield from on_trace(lab, trace, published, row)


TABLE = Table(
    name="mooncake-prefill-time",
    title="GPU time of a request's prefill",
    source="FAST'25, prefill GPU time",
    setup=(
        "The runs of mooncake-capacity; the cost curve's time for the tokens that were not cached. Its 15 ms for an "
        f"iteration with prompts come from this table's last row. {VLLM_SETUP}"
    ),
    measure=_measure,
    traces=tuple(_PUBLISHED),
)
