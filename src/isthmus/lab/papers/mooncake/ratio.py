"""How to split 16 nodes into prefill and decode (FAST'25, Figure 15)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.lab.papers.lab import Lab, Trace, Variant
from isthmus.lab.papers.mooncake.cluster import mooncake
from isthmus.lab.papers.table import Cell, Figures, Table, on_trace


def _figures(effective: float, ttft_s: float, tbt_ms: float) -> Figures:
    return {"effective (%)": effective, "TTFT (s)": ttft_s, "TBT (ms)": tbt_ms}


_PUBLISHED = {
    "5P11D": _figures(77.7, 5.74, 31.5),
    "6P10D": _figures(97.2, 1.71, 31.8),
    "7P9D": _figures(99.1, 1.30, 32.9),
    "8P8D": _figures(99.0, 1.19, 35.0),
    "9P7D": _figures(99.2, 1.12, 38.2),
    "10P6D": _figures(98.4, 1.11, 44.2),
    "11P5D": _figures(86.1, 1.14, 58.3),
}

_TTFT_LIMIT_S, _TBT_LIMIT_S = 10.0, 0.1


def _measure(lab: Lab) -> Iterator[Cell]:
    def row(trace: Trace, name: str) -> Figures:
        prefill, decode = map(int, name.removesuffix("D").split("P"))
        outcome = lab.run(Variant(trace), mooncake(prefill, decode), name)
        several = [tbt_s for tbt_s in outcome.tbt_s if tbt_s]  # with one token there is no gap
        return _figures(
            100 * outcome.within(_TTFT_LIMIT_S, _TBT_LIMIT_S),
            sum(outcome.ttft_s) / len(outcome.ttft_s),
            1000 * sum(several) / max(1, len(several)),
        )

    yield from on_trace(lab, Trace.SYNTHETIC, _PUBLISHED, row)


TABLE = Table(
    name="mooncake-ratio",
    title="Effective requests, TTFT and TBT by the split of 16 nodes",
    source="FAST'25, Figure 15",
    setup=(
        "Algorithm 1, the synthetic trace at its own speed, TTFT <= 10 s and TBT <= 100 ms. One constant of "
        "the cost curve, what a further sequence adds to an iteration, was fitted to the TBT column on a "
        "generated workload."
    ),
    measure=_measure,
    traces=(Trace.SYNTHETIC,),
)
