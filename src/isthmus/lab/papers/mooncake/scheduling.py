"""Four ways to choose the prefill node (FAST'25, Figure 5)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.lab.papers.lab import Lab, Trace, Variant
from isthmus.lab.papers.mooncake.cluster import mooncake
from isthmus.lab.papers.table import Cell, Figures, Table, on_trace
from isthmus.lab.sim.spread import nearest_rank

_POLICIES = {
    "random": "random",
    "load balancing": "least_loaded",
    "local cache aware": "local_aware",
    "global cache aware": "mooncake",
}

_PUBLISHED: dict[str, Figures] = {
    "random": {"mean (s)": 19.65, "median (s)": 13.7, "P75 (s)": 29.3},
    "load balancing": {"mean (s)": 5.27, "median (s)": 3.56, "P75 (s)": 7.4},
    "local cache aware": {"mean (s)": 3.58, "median (s)": 2.16, "P75 (s)": 5.1},
    "global cache aware": {"mean (s)": 3.07, "median (s)": 1.72, "P75 (s)": 4.1},
}


def _measure(lab: Lab) -> Iterator[Cell]:
    def row(trace: Trace, name: str) -> Figures:
        outcome = lab.run(Variant(trace), mooncake(policy=_POLICIES[name]), name)
        ordered = sorted(outcome.ttft_s)
        return {
            "mean (s)": sum(ordered) / len(ordered),
            "median (s)": nearest_rank(ordered, 50),
            "P75 (s)": nearest_rank(ordered, 75),
        }

    yield from on_trace(lab, Trace.CONVERSATION, _PUBLISHED, row)


TABLE = Table(
    name="mooncake-scheduling",
    title="TTFT by scheduling policy",
    source="FAST'25, Figure 5",
    setup=(
        "8P8D, the conversation trace at its own speed. Neither the split of the paper's 16 nodes nor its "
        "arrival rate nor the balancing threshold (here 1) is published, so the order is what can be "
        "compared."
    ),
    measure=_measure,
    traces=(Trace.CONVERSATION,),
)
