"""What conductor, scheduler and simulator hold: the cost of work on one node, ready to be asked many times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from isthmus.core.cost.analytic import Analytic, AnalyticCost
from isthmus.core.cost.curve import Curve, CurveCost
from isthmus.core.cost.elsewhere import Queries
from isthmus.core.cost.transfer import Handling

Cost = Analytic | Curve
"""What travels in messages and is written by the flight recorder: a tagged union."""


class NodeCost(Protocol):
    """Pure: the same question has the same answer. Times are whole nanoseconds or picoseconds.

    A chunk is `(num_tokens, cached)`: so many new tokens after `cached` ones of the same prompt.
    """

    kv_token_bytes: int
    """Bytes one token adds to the KV cache: all layers, whole model."""
    state_bytes: int
    """Bytes of a sequence that do not grow with it (recurrent states, short windows); 0 for most models."""
    num_layers: int
    handling: Handling
    """What the node does to KV beside computing it."""
    queries: Queries
    """What a token asks of KV that lies elsewhere."""

    def prefill_ns(self, num_tokens: int, cached: int) -> int:
        """One prompt alone, computed in one go. 0 for no tokens."""
        ...

    def decode_step_ps(self, num_decodes: int) -> tuple[int, int]:
        """(fixed, per token of context): an iteration of that many decodes whose contexts sum to C takes
        exactly `fixed + per * C` picoseconds."""
        ...

    def step_ps(self, chunks: Sequence[tuple[int, int]], num_decodes: int, context: int) -> int:
        """A mixed iteration. `step_ps((), B, C)` is the decode step; `step_ps([(n, p)], 0, 0) // 1000` equals
        `prefill_ns(n, p)`."""
        ...

    def attend_ps(self, num_queries: int, num_tokens: float) -> float:
        """Attention alone, of queries of one sequence, all of which see so many tokens; it is part of an iteration's
        time. With one query, `num_tokens` may be of many sequences."""
        ...


def compile_cost(cost: Cost) -> NodeCost:
    """The evaluator of a cost. Derives everything once, so keep it."""
    return AnalyticCost(cost) if isinstance(cost, Analytic) else CurveCost(cost)


# Chunked pipeline parallelism: a prompt's chunks through the stages of one group (Mooncake, FAST'25).


def pipeline(chunk_times_ps: Sequence[int], stages: int) -> tuple[int, int]:
    """(occupancy, latency) of a prompt whose chunks would take `chunk_times_ps` on one instance.

    A chunk's time is split evenly over the stages, rounded up, and a stage works on one chunk at a time, in
    order: a flow shop. Occupancy is when the first stage is free for another prompt; latency is when the last
    chunk leaves the last stage. Since a chunk takes the same time in each stage, the makespan is exactly
    sum + (stages - 1) * max: only the slowest chunk is waited for, once in each further stage.
    """
    assert stages >= 1
    parts = [-(-time // stages) for time in chunk_times_ps]
    if not parts:
        return 0, 0
    occupancy = sum(parts)
    return occupancy, occupancy + (stages - 1) * max(parts)
