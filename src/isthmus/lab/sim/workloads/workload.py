"""Requests in order of arrival, as every source gives them, and the replay of a trace's times."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from isthmus.core.conductor import PromptContent
from isthmus.core.errors import ConfigError

PLAIN_BLOCK_SIZE = 512
"""Tokens per block where a source says nothing of blocks."""


class Request(msgspec.Struct, frozen=True, gc=False):
    """One simulated request: `num_tokens` in (at least 1), `output_tokens` out (at least 1).

    `blocks`: ids of the prompt's blocks, the last one perhaps partial; equal ids mean an equal prefix up to and
    including that block. Empty: the prompt shares nothing. `answer`: ids of the full blocks that prompt and answer have
    beyond the prompt's full ones; None where nobody knows them. A higher `priority` is refused last.
    `ttft_slo_ms`, `tbt_slo_ms`: the request's own limits, None takes the deployment's. `content`: what the prompt says,
    of one that may be computed with more than its own prefix.
    """

    arrival_ns: int
    num_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0
    ttft_slo_ms: int | None = None
    tbt_slo_ms: int | None = None
    answer: tuple[int, ...] | None = None
    content: PromptContent | None = None


class Measured(msgspec.Struct, frozen=True):
    """Times that a recording has of requests whose answers were streamed, in ns."""

    ttft_ns: tuple[int, ...]
    tbt_ns: tuple[int, ...]


class Workload(msgspec.Struct, frozen=True):
    """Requests in order of arrival, counted from 0 ns. `block_size`: tokens per block id. `notes`: what was ignored of
    their source, or made up, in words. `exact`: times are, and not of steps in which several requests come. `measured`:
    None where the source has no times of answers."""

    name: str
    block_size: int
    requests: list[Request]
    notes: tuple[str, ...] = ()
    exact: bool = True
    measured: Measured | None = None


class Replay(msgspec.Struct, frozen=True):
    """Options of a replay.

    `speed` divides all arrival times. `spread_seed`: arrivals with one timestamp are spread at random up to the
    next timestamp, None leaves them together. `limit`: only so many requests, from the start.
    """

    speed: float = 1.0
    spread_seed: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if not (self.speed > 0.0 and math.isfinite(self.speed)):
            raise ConfigError(f"speed: {self.speed} is not above 0; 2 replays a trace twice as fast")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit: {self.limit} requests leave nothing to simulate; take at least 1")

    def refuse_spread(self, source: str | Path) -> None:
        """For traces with exact times."""
        if self.spread_seed is not None:
            raise ConfigError(
                f"{source}: its arrival times are exact; only Mooncake's timestamps can be spread"
            )

    def arrivals(self, times_ns: Sequence[int]) -> list[int]:
        """The arrival times of a trace, in ns from its start, as they are replayed. Order is kept."""
        times = list(times_ns) if self.spread_seed is None else _spread(times_ns, self.spread_seed)
        if self.speed == 1.0:
            return times
        return [round(time / self.speed) for time in times]


AS_IT_STANDS = Replay()


def _spread(times_ns: Sequence[int], seed: int) -> list[int]:
    """Each run of equal times spread uniformly up to the next time; the last over as much as the run before."""
    rng = random.Random(seed)
    runs = [(time, sum(1 for _ in run)) for time, run in groupby(times_ns)]
    spread: list[int] = []
    width = 0
    for index, (time, count) in enumerate(runs):
        if index + 1 < len(runs):
            width = runs[index + 1][0] - time
        spread += sorted(time + int(rng.random() * width) for _ in range(count))
    return spread
