"""Chunked prefills and hybrid batches, each without the other (Sarathi-Serve, OSDI'24)."""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from random import Random

import msgspec

from isthmus.core.types import NS_PER_S
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.sarathi.gain import apart
from isthmus.lab.papers.sarathi.models import on_a100
from isthmus.lab.papers.sarathi.one_node import WHOLE, Asked, BatchLimits, Served, serve
from isthmus.lab.papers.table import Cell, Figures, Table, compare

_NUM_REQUESTS, _BUDGET, _MAX_SEQUENCES = 128, 1024, 128
_UTILISATION = 0.7
_Z90 = 1.2816  # of the normal distribution


class _Lengths(msgspec.Struct, frozen=True):
    """Median and 90th percentile of prompts and answers; longer requests than `limit` tokens are left out."""

    prompt: tuple[int, int]
    answer: tuple[int, int]
    limit: int


_TRACES = {
    "chat": _Lengths((1730, 5696), (415, 834), 8192),
    "summarisation": _Lengths((7059, 12985), (208, 371), 16384),
}

_PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "chat": {
        "hybrid batches only": (0.53, 0.68),
        "chunked prefills only": (1.04, 0.17),
        "both": (0.76, 0.14),
    },
    "summarisation": {
        "hybrid batches only": (3.78, 1.38),
        "chunked prefills only": (5.38, 0.20),
        "both": (3.90, 0.17),
    },
}


def requests_of(lengths: _Lengths, rate: float) -> list[Asked]:
    """Log-normal lengths, Poisson arrivals of so many a second; the same every time."""
    random, now = Random(1), 0.0
    found: list[Asked] = []

    def draw(of: tuple[int, int]) -> int:
        return max(2, round(random.lognormvariate(log(of[0]), log(of[1] / of[0]) / _Z90)))

    while len(found) < _NUM_REQUESTS:
        prompt, answer = draw(lengths.prompt), draw(lengths.answer)
        if prompt + answer <= lengths.limit:
            now += random.expovariate(rate)
            found.append(Asked(prompt, answer, round(now * NS_PER_S)))
    return found


def rate_of(lengths: _Lengths) -> float:
    """At which hybrid batches of chunks are at work for the given share of the time, if all come at once."""
    at_once = [Asked(each.num_tokens, each.output_tokens) for each in requests_of(lengths, 1.0)]
    return _UTILISATION * _NUM_REQUESTS / (_serve("both", at_once).worked_ps / 1e12)


def _serve(row: str, requests: list[Asked]) -> Served:
    cost, compiled = on_a100("Yi-34B", 2)
    budget = WHOLE if row == "hybrid batches only" else _BUDGET
    step = apart(compiled.step_ps) if row == "chunked prefills only" else compiled.step_ps
    return serve(requests, step, BatchLimits(budget, _MAX_SEQUENCES, kv_tokens=cost.kv_capacity_tokens))


def _measure(lab: Lab) -> Iterator[Cell]:
    for trace, rows in _PUBLISHED.items():
        lengths = _TRACES[trace]
        requests = requests_of(lengths, rate_of(lengths))
        for row, figures in rows.items():
            served = _serve(row, requests)
            ttft, gaps = sorted(served.ttft_ns()), sorted(served.gaps_ns())
            ours = ttft[len(ttft) // 2] / NS_PER_S, gaps[len(gaps) * 99 // 100] / NS_PER_S
            yield from compare(f"{trace}, {row}", _columns(figures), _columns(ours))


def _columns(figures: tuple[float, float]) -> Figures:
    return dict(zip(("TTFT P50 (s)", "TBT P99 (s)"), figures, strict=True))


TABLE = Table(
    name="sarathi-ablation",
    title="Chunked prefills and hybrid batches, each without the other",
    source="Sarathi-Serve (OSDI'24), ablation",
    setup=(
        "Yi-34B on two A100, budget 1,024, 128 requests on one node with our scheduler and the analytic cost model. "
        "Without chunks prompts are computed whole beside the decodes; without hybrid batches each iteration is "
        "one batch of chunks and then one of decodes. The paper does not give the load: ours is 70 % of what the node "
        "can do. Lengths are log-normal with the printed medians and 90th percentiles."
    ),
    measure=_measure,
)
