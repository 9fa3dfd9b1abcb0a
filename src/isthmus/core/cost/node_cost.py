"""What conductor, scheduler and simulator hold: the cost of work on one node, ready to be asked many times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from isthmus.core.cost.analytic import Analytic, AnalyticCost
from isthmus.core.cost.curve import Curve, CurveCost
from isthmus.core.cost.elsewhere import Queries
from isthmus.core.cost.transfer import Handling
from isthmus.core.reuse import TAIL, Selection, rows_per_layer

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


# What an assembled prompt takes: each layer computes fewer of its tokens than the one before (`isthmus.core.reuse`).
#
# Each of `L` layers takes an `L`-th of an iteration in which as many rows as it computes are new:
#
# time = sum over layers i of  step([others..., (r_i, p + (n - r_i) // 2)]) / L        r_i = rows_per_layer(...)[i]
#
# since r rows, spread evenly over n tokens after p cached ones, attend to as many tokens in sum as a chunk of r after
# p + (n - r) / 2 does: r (p + n / 2). A layer reads its weights once, however few rows it has. All layers count as
# equal, and as such that keep KV.
#
# Left out: the layer in which candidates are chosen projects keys and values of those it does not compute. That is at
# most a sixth of one layer's matrices (2 of 12 h^2 without grouped heads; a 26th for Mistral-7B), so at most 1 / (6
# L) of a full prefill: 0.5 % at 32 layers. Where r is so small that reading KV takes longer than attending to it, p +
# (n + r) / 2 tokens are read instead of p + n: with a 7B model that is less than reading the weights, up to 200,000
# tokens. To bring donors' KV here, and to turn its keys, is not a matter of this file.


class AssembledChunk(NamedTuple):
    """A chunk that is assembled: of `num_tokens` tokens after `cached` ones, `num_candidates` have a donor's KV. The
    `first` tokens of passages are none of them; those among the last `TAIL` do not count."""

    selection: Selection
    num_tokens: int
    cached: int
    num_candidates: int

    def rows(self, num_layers: int) -> tuple[int, ...]:
        """Tokens computed in each layer."""
        num_candidates = max(0, min(self.num_candidates, self.num_tokens - TAIL))
        return rows_per_layer(self.selection, num_candidates, self.num_tokens - num_candidates, num_layers)


def assembled_step_ps(
    cost: NodeCost,
    assembled: Sequence[AssembledChunk],
    chunks: Sequence[tuple[int, int]],
    num_decodes: int,
    context: int,
) -> int:
    """A mixed iteration with assembled chunks in it; without any, `cost.step_ps`."""
    layers = Counter(zip(*[each.rows(cost.num_layers) for each in assembled], strict=True))
    if not layers:
        return cost.step_ps(chunks, num_decodes, context)
    total = 0
    for rows, count in layers.items():
        beside = [_attending(each, computed) for each, computed in zip(assembled, rows, strict=True)]
        total += count * cost.step_ps([*chunks, *beside], num_decodes, context)
    return -(-total // cost.num_layers)


def _attending(chunk: AssembledChunk, rows: int) -> tuple[int, int]:
    """The chunk of consecutive tokens that attends like so many of this one."""
    return rows, chunk.cached + (chunk.num_tokens - rows) // 2


def assembled_ns(
    cost: NodeCost, selection: Selection, num_tokens: int, cached: int, num_candidates: int
) -> int:
    """A prefill of `num_tokens` tokens after `cached` ones, `num_candidates` of which have a donor's KV. Without
    candidates, `cost.prefill_ns`."""
    if not num_tokens:
        return 0
    chunk = AssembledChunk(selection, num_tokens, cached, num_candidates)
    return assembled_step_ps(cost, [chunk], (), 0, 0) // 1000


def assembled_weight(selection: Selection, num_tokens: int, num_candidates: int, num_layers: int) -> int:
    """As many plain prompt tokens are computed: the mean over the layers, rounded up. What a token budget counts."""
    rows = AssembledChunk(selection, num_tokens, 0, num_candidates).rows(num_layers)
    return -(-sum(rows) // num_layers)
