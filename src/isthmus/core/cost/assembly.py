"""What an assembled prompt takes: each layer computes fewer of its tokens than the one before (`isthmus.core.reuse`).

Each of `L` layers takes an `L`-th of an iteration in which as many rows as it computes are new:

    time = sum over layers i of  step([others..., (r_i, p + (n - r_i) // 2)]) / L        r_i = rows_per_layer(...)[i]

since r rows, spread evenly over n tokens after p cached ones, attend to as many tokens in sum as a chunk of r after
p + (n - r) / 2 does: r (p + n / 2). A layer reads its weights once, however few rows it has. All layers count as equal,
and as such that keep KV.

Left out: the layer in which candidates are chosen projects keys and values of those it does not compute. That is at
most a sixth of one layer's matrices (2 of 12 h^2 without grouped heads; a 26th for Mistral-7B), so at most 1 / (6 L) of
a full prefill: 0.5 % at 32 layers. Where r is so small that reading KV takes longer than attending to it,
p + (n + r) / 2 tokens are read instead of p + n: with a 7B model that is less than reading the weights, up to 200,000
tokens. To bring donors' KV here, and to turn its keys, is not a matter of this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from isthmus.core.cost.node_cost import NodeCost
from isthmus.core.reuse import Selection, rows_per_layer
from isthmus.core.reuse.selection import TAIL


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
