"""Decode with attention on a pool of other nodes, and batches that take turns meanwhile.

Rotational staggered pipelining (Lamina, arXiv 2405.01814v2): n batches on n - 1 replicas of the layers (one replica for
one or two batches) and one pool of attention. A model of L attentions is L + 1 slices of layers, with an attention
between each two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from isthmus.core.cost.elsewhere import SENT_BYTES
from isthmus.core.cost.node_cost import NodeCost


def replicas_of(batches: int) -> int:
    """Replicas of the layers that `batches` take turns on."""
    assert batches >= 1
    return max(1, batches - 1)


def replica_of(batch: int, at: int, batches: int) -> int:
    """The replica on which slice `at` of a batch runs, all counted from 0."""
    return (batch + at) % replicas_of(batches)


def jobs_of(replica: int, batches: int, slices: int) -> Iterator[tuple[int, int]]:
    """(batch, slice) of all jobs of a replica, in order. Slice k of batch j has place j + k n among all jobs, and the
    jobs of one replica are n - 1 places apart (1 with one replica)."""
    for place in range(replica, batches * slices, replicas_of(batches)):
        yield place % batches, place // batches


def period_ps(batches: int, slice_ps: int, attention_ps: int, net_ps: int) -> int:
    """Picoseconds, rounded up, in which each batch under way goes on by one slice and one attention.

    `slice_ps`, `attention_ps`: of one batch on one replica and on the pool; `net_ps`: on the way there and back. The
    longest of three: a replica computes n slices in n - 1 periods, the pool n attentions in each, and a batch waits for
    its own answer. Nothing is idle if `attention_ps` is `slice_ps / (n - 1)` and `net_ps` is 0.
    """
    own = slice_ps + attention_ps + net_ps
    return max(-(-batches * slice_ps // replicas_of(batches)), batches * attention_ps, own)


def step_ps(batches: int, attentions: int, slice_ps: int, attention_ps: int, net_ps: int) -> int:
    """Picoseconds of a step in which each batch goes through all `attentions` and the slice behind the last. An upper
    bound, by at most one period and rounding: batches that begin an n-th of a period after each other never wait."""
    period = period_ps(batches, slice_ps, attention_ps, net_ps)
    return attentions * period + -(-(batches - 1) * period // batches) + slice_ps


_PS = 1e12
ONE_OR_TWO = (1, 2)
"""Batches that take turns on one replica."""


class Pooled(NamedTuple):
    """One replica of the layers and its attention pool (model-attention disaggregation, Lamina): each token sends its
    queries, new key and value, and gets sums back. Times are sums over all layers.

    `holders`: equal nodes of cost `holder` that share each sequence's KV evenly (below 1 if replicas share a node).
    `bytes_per_s`: of all links between the two sides; `rtt_s`: round trip; `element_bytes`: of one element sent.
    """

    model: NodeCost
    holder: NodeCost
    holders: float
    bytes_per_s: float
    rtt_s: float
    element_bytes: int = SENT_BYTES

    def model_s(self, batch: int) -> float:
        """Time without attention."""
        return self.model.decode_step_ps(batch)[0] / _PS

    def attention_s(self, batch: int, context: float) -> float:
        return self.holder.attend_ps(1, batch * context) / self.holders / _PS

    def sent_bytes(self, batch: int) -> float:
        """Bytes of an iteration, both ways."""
        return self.model.queries.num_bytes(batch, self.element_bytes) + batch * self.model.kv_token_bytes

    def network_s(self, batch: int) -> float:
        return self.model.queries.layers * self.rtt_s + self.sent_bytes(batch) / self.bytes_per_s

    def step_s(self, batch: int, context: float, turns: int = 1) -> float:
        """Time until each of `batch` sequences of `context` tokens has its next token, in `turns` batches."""
        turns = min(turns, batch)
        part = -(-batch // turns)
        times = (self.model_s(part), self.attention_s(part, context), self.network_s(part))
        return period_ps(turns, *[round(_PS * time) for time in times]) / _PS

    def rate(self, batch: int, context: float) -> tuple[float, int]:
        """(tokens per second, turns) with the quicker of one or two batches."""
        return max(
            [(batch / self.step_s(batch, context, turns), turns) for turns in ONE_OR_TWO if turns <= batch]
        )


def is_compute_bound(cost: NodeCost, batch: int) -> bool:
    """Whether twice the batch takes at least 1.5 times as long, so that a larger one gains little."""
    return cost.decode_step_ps(2 * batch)[0] >= 1.5 * cost.decode_step_ps(batch)[0]
