"""One cache for all prefill nodes against one for each (FAST'25, Figure 10)."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.lab.papers.lab import Lab, Trace, Variant
from isthmus.lab.papers.mooncake.cluster import mooncake
from isthmus.lab.papers.table import Cell, Figures, Table, on_trace

_POLICIES = {"local": "local_aware", "global": "mooncake"}


def _figures(hit_rate: float, gpu_s: float) -> Figures:
    return {"hit rate (%)": hit_rate, "GPU time (s)": gpu_s}


_PUBLISHED = {
    Trace.CONVERSATION: {"local": _figures(16.9, 1.379), "global": _figures(37.5, 1.050)},
    Trace.TOOLAGENT: {"local": _figures(42.0, 0.703), "global": _figures(58.1, 0.521)},
    Trace.SYNTHETIC: {"local": _figures(26.4, 1.497), "global": _figures(62.2, 0.783)},
}


def _measure(lab: Lab) -> Iterator[Cell]:
    def row(trace: Trace, name: str) -> Figures:
        # With one output token the decode node has nothing to do.
        deployment = mooncake(prefill=10, decode=1, policy=_POLICIES[name])
        outcome = lab.run(Variant(trace, one_token=True), deployment, f"{name} cache")
        times_s = outcome.prefill_s
        return _figures(100 * outcome.summary.hit_rate_tokens, sum(times_s) / len(times_s))

    for trace, published in _PUBLISHED.items():
        yield from on_trace(lab, trace, published, row)


TABLE = Table(
    name="mooncake-global-cache",
    title="Global against local cache",
    source="FAST'25, Figure 10",
    setup=(
        "10 prefill nodes with 3 million tokens of cache each, one output token, each trace at its own speed. "
        "Local: lowest TTFT with what each node has; how the paper chose nodes there is not said, and a "
        "choice that looks at caches hits more. Global: Algorithm 1."
    ),
    measure=_measure,
    traces=tuple(_PUBLISHED),
)
