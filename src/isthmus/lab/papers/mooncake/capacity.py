"""Effective request capacity (FAST'25): the share of requests inside both limits."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.lab.papers.lab import Lab, Trace
from isthmus.lab.papers.mooncake.cluster import TTFT_LIMIT_S
from isthmus.lab.papers.mooncake.systems import SYSTEMS, VLLM_SETUP, replay
from isthmus.lab.papers.table import Cell, Figures, Table, on_trace

_LIMITS_MS = (100, 200, 300)
_GAIN = "gain over the best baseline"

_PUBLISHED: dict[Trace, dict[str, tuple[float, float, float]]] = {
    Trace.CONVERSATION: {
        "Mooncake": (96.6, 100.0, 100.0),
        "vLLM": (16.1, 38.8, 62.8),
        "vLLM prefix caching": (15.1, 34.3, 56.0),
        "vLLM chunked prefill": (9.4, 28.8, 55.4),
        _GAIN: (498.0, 157.0, 59.0),
    },
    Trace.TOOLAGENT: {
        "Mooncake": (93.2, 99.8, 100.0),
        "vLLM": (43.1, 45.3, 49.8),
        "vLLM prefix caching": (56.5, 70.0, 81.3),
        "vLLM chunked prefill": (18.6, 21.3, 40.4),
        _GAIN: (64.0, 42.0, 22.0),
    },
    Trace.SYNTHETIC: {
        "Mooncake": (99.6, 100.0, 100.0),
        "vLLM": (61.3, 71.0, 78.1),
        "vLLM prefix caching": (61.0, 70.8, 77.2),
        "vLLM chunked prefill": (46.6, 57.3, 69.5),
        _GAIN: (62.0, 40.0, 28.0),
    },
}


def _measure(lab: Lab) -> Iterator[Cell]:
    def row(trace: Trace, name: str) -> Figures:
        if name == _GAIN:
            return _gain(lab, trace)
        return _columns(*_shares(lab, trace, name))

    for trace, rows in _PUBLISHED.items():
        published = {name: _columns(*figures) for name, figures in rows.items()}
        yield from on_trace(lab, trace, published, row)


def _gain(lab: Lab, trace: Trace) -> Figures:
    ours, *baselines = (_shares(lab, trace, system) for system in SYSTEMS)
    best = [max(shares) for shares in zip(*baselines, strict=True)]
    return _columns(
        *(100 * (share / other - 1) if other else None for share, other in zip(ours, best, strict=True))
    )


def _shares(lab: Lab, trace: Trace, system: str) -> list[float]:
    outcome = replay(lab, trace, system)
    return [100 * outcome.within(TTFT_LIMIT_S, limit_ms / 1000) for limit_ms in _LIMITS_MS]


def _columns(*figures: float | None) -> Figures:
    return {f"TBT <= {limit_ms} ms (%)": figure for limit_ms, figure in zip(_LIMITS_MS, figures, strict=True)}


TABLE = Table(
    name="mooncake-capacity",
    title="Requests with TTFT <= 30 s and TBT below a limit",
    source="FAST'25, end-to-end results",
    setup=(
        "8P8D against 16 vLLM nodes, each trace at its own speed: the paper's arrival rate is not published. "
        f"{VLLM_SETUP}"
    ),
    measure=_measure,
    traces=tuple(_PUBLISHED),
)
