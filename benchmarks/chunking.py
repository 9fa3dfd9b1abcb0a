"""`python -m benchmarks chunking`: how a mixed node cuts prompts, by a fixed budget or by the time between tokens.

One node of Yi-34B on two A100, the analytic cost model, short chats and now and then a very long prompt. Simulated:
the same figures on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from random import Random

import msgspec
from rich.table import Table

from isthmus.core.types import NS_PER_MS, NS_PER_S
from isthmus.lab.papers.sarathi.one_node import Asked, BatchLimits, serve
from isthmus.lab.papers.sarathi.setup import on_a100
from isthmus.lab.sim.spread import nearest_rank

NUM_REQUESTS = 400
RATE = 0.5
"""Requests a second: the node is at work for 95 % of the time."""
LONG_SHARE, LONG = 0.05, (30_000, 100_000)
SHORT, SHORT_SPREAD = 500, 0.8
ANSWER, ANSWER_SPREAD, LONG_ANSWER = 150, 0.7, 100
MAX_SEQUENCES = 256
WIDE = 8192
"""Token budget with a target: what iterations without decodes take, and no limit to others."""

CHUNKS = {
    "512 tokens": (512, None),
    "2,048 tokens": (2048, None),
    "100 ms": (WIDE, 100),
    "200 ms": (WIDE, 200),
    "300 ms": (WIDE, 300),
}
PARTIAL = (1, 4)


class Measured(msgspec.Struct, frozen=True):
    """`short_*`, `long_*`: times to the first token of prompts of either kind; `gap_*`: between tokens."""

    chunk: str
    partial_prefills: int
    short_mean_s: float
    short_p99_s: float
    long_mean_s: float
    long_max_s: float
    gap_p99_ms: float
    gap_max_ms: float
    busy_s: float


def requests_of(seed: int = 1) -> list[Asked]:
    random, now = Random(seed), 0.0
    found: list[Asked] = []
    for _ in range(NUM_REQUESTS):
        now += random.expovariate(RATE)
        if random.random() < LONG_SHARE:
            prompt, answer = random.randint(*LONG), LONG_ANSWER
        else:
            prompt = max(16, int(random.lognormvariate(log(SHORT), SHORT_SPREAD)))
            answer = max(1, int(random.lognormvariate(log(ANSWER), ANSWER_SPREAD)))
        found.append(Asked(prompt, answer, round(now * NS_PER_S)))
    return found


def run() -> list[Measured]:
    requests = requests_of()
    return [_measured(requests, chunk, partial) for partial in PARTIAL for chunk in CHUNKS]


def _measured(requests: Sequence[Asked], chunk: str, partial: int) -> Measured:
    cost, compiled = on_a100("Yi-34B", 2)
    budget, tbt_ms = CHUNKS[chunk]
    batch_limits = BatchLimits(
        budget,
        MAX_SEQUENCES,
        partial_prefills=partial,
        kv_tokens=cost.kv_capacity_tokens,
        tbt_ms=tbt_ms,
    )
    served = serve(requests, compiled.step_ps, batch_limits)
    both = list(zip(requests, served.ttft_ns(), strict=True))
    short = sorted(ttft / NS_PER_S for asked, ttft in both if asked.num_tokens < LONG[0])
    long = sorted(ttft / NS_PER_S for asked, ttft in both if asked.num_tokens >= LONG[0])
    gaps = sorted(gap / NS_PER_MS for gap in served.gaps_ns())
    return Measured(
        chunk,
        partial,
        short_mean_s=sum(short) / len(short),
        short_p99_s=nearest_rank(short, 99),
        long_mean_s=sum(long) / len(long),
        long_max_s=long[-1],
        gap_p99_ms=nearest_rank(gaps, 99),
        gap_max_ms=gaps[-1],
        busy_s=served.worked_ps / 1e12,
    )


def table(rows: Sequence[Measured]) -> Table:
    drawn = Table(
        "chunk", "partial prefills", "short TTFT mean", "P99", "long TTFT mean", "max (s)", "gap P99", "max (ms)",
        "busy (s)", title="one node, short chats and long prompts",
    )  # fmt: skip
    for row in rows:
        drawn.add_row(*_texts(row))
    return drawn


def _texts(row: Measured) -> Iterator[str]:
    yield from (row.chunk, str(row.partial_prefills))
    yield from (
        f"{value:.2f}" for value in (row.short_mean_s, row.short_p99_s, row.long_mean_s, row.long_max_s)
    )
    yield from (f"{value:.0f}" for value in (row.gap_p99_ms, row.gap_max_ms, row.busy_s))


def as_json(rows: Sequence[Measured]) -> list[dict[str, object]]:
    return [msgspec.to_builtins(row) for row in rows]
