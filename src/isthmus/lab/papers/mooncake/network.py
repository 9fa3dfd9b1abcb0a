"""How much network the global cache needs (FAST'25, Figure 13)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.lab.papers.lab import Lab, Trace, Variant
from isthmus.lab.papers.mooncake.cluster import mooncake
from isthmus.lab.papers.table import Cell, Figures, Table, on_trace

_RECOMPUTE = "recompute"
_TTFT_S = {24: 5.09, 40: 2.40, 80: 1.73, 100: 1.60, 160: 1.41, 320: 1.25, 400: 1.25}
_TRANSFER_S = {24: 3.65, 40: 1.13, 80: 0.51, 100: 0.40, 160: 0.25}

_PUBLISHED: dict[str, Figures] = {
    **{
        f"{gbps} Gbps": {"mean TTFT (s)": ttft_s}
        | ({"mean transfer (s)": _TRANSFER_S[gbps]} if gbps in _TRANSFER_S else {})
        for gbps, ttft_s in _TTFT_S.items()
    },
    _RECOMPUTE: {"mean TTFT (s)": 2.62},
}


def _measure(lab: Lab) -> Iterator[Cell]:
    def row(trace: Trace, name: str) -> Figures:
        if name == _RECOMPUTE:
            deployment = mooncake(policy="local_aware")
        else:
            deployment = mooncake(network={"node_gbps": float(name.split()[0])})
        outcome = lab.run(Variant(trace), deployment, name)
        fetches = outcome.fetch_s
        return {
            "mean TTFT (s)": sum(outcome.ttft_s) / len(outcome.ttft_s),
            "mean transfer (s)": sum(fetches) / len(fetches) if fetches else 0.0,
        }

    yield from on_trace(lab, Trace.SYNTHETIC, _PUBLISHED, row)


TABLE = Table(
    name="mooncake-network",
    title="TTFT and transfer time by network bandwidth",
    source="FAST'25, Figure 13",
    setup=(
        "8P8D with Algorithm 1, the synthetic trace at its own speed; so many Gbps each way at each node, "
        "shared by fetches and hand-overs. Recompute: local cache aware, nothing is fetched."
    ),
    measure=_measure,
    traces=(Trace.SYNTHETIC,),
)
