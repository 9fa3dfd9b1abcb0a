"""Batches that take turns: while attention of one is computed elsewhere, layers of others run here.

Rotational staggered pipelining (Lamina, arXiv 2405.01814v2, section on it): n batches on n - 1 replicas of the layers
and one pool of attention. A model of L attentions is L + 1 slices of layers, with an attention between each two. One
batch alone, and two, need one replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from isthmus.core.cost.elsewhere import SENT_BYTES
from isthmus.core.cost.node_cost import NodeCost


def replicas_of(batches: int) -> int:
    """Copies of the layers that so many batches take turns on."""
    assert batches >= 1
    return max(1, batches - 1)


def replica_of(batch: int, at: int, batches: int) -> int:
    """Where slice `at` of a batch runs, all counted from 0."""
    return (batch + at) % replicas_of(batches)


def jobs_of(replica: int, batches: int, slices: int) -> Iterator[tuple[int, int]]:
    """(batch, slice) of all that runs on a replica, in its order.

    Slice k of batch j has place j + k n among all, so that those of one replica are n - 1 places apart (those of all
    n batches, where there is one replica alone).
    """
    for place in range(replica, batches * slices, replicas_of(batches)):
        yield place % batches, place // batches


def period_ps(batches: int, slice_ps: int, attention_ps: int, net_ps: int) -> int:
    """Picoseconds in which each of the batches goes on by one slice and one attention, once all are under way, rounded
    up.

    `slice_ps`: one slice of one batch on one replica; `attention_ps`: one attention of one batch, all that the pool
    does for it; `net_ps`: on the way there and back, in which nothing is occupied. The longest of three: a replica has
    n slices in n - 1 periods, the pool has n attentions in each, and no batch goes on before its own answer has come.
    Nothing is idle where `attention_ps` is `slice_ps / (n - 1)` and `net_ps` is 0: all three are one then.
    """
    own = slice_ps + attention_ps + net_ps
    return max(-(-batches * slice_ps // replicas_of(batches)), batches * attention_ps, own)


def step_ps(batches: int, attentions: int, slice_ps: int, attention_ps: int, net_ps: int) -> int:
    """Picoseconds of a step in which each batch goes through all `attentions` and the slice behind the last, and after
    which all begin anew. An upper bound, by at most one period and what is rounded up: batches that begin a period's
    n-th part after each other never wait. Units as in `period_ps`."""
    period = period_ps(batches, slice_ps, attention_ps, net_ps)
    return attentions * period + -(-(batches - 1) * period // batches) + slice_ps


# Decode where all KV, and so all attention, is with a pool of other nodes (model-attention disaggregation, Lamina).
#
# Every token of a batch sends its queries, its new key and value, and gets sums back; a batch may be cut into some that
# take turns (`turns`). Times are of all layers: a period of each layer, summed.


_PS = 1e12
ONE_OR_TWO = (1, 2)
"""Batches that take turns on one copy of the layers."""


class Pooled(NamedTuple):
    """One copy of the model's layers and its pool.

    `holders`: equal nodes, each with the cost `holder`, among which each sequence's KV is spread evenly (a part of one,
    where several copies share them). `bytes_per_s`: between the two sides, all links together; `rtt_s`: of a question
    and its answer; `element_bytes`: of what is sent.
    """

    model: NodeCost
    holder: NodeCost
    holders: float
    bytes_per_s: float
    rtt_s: float
    element_bytes: int = SENT_BYTES

    def model_s(self, batch: int) -> float:
        """All but attention."""
        return self.model.decode_step_ps(batch)[0] / _PS

    def attention_s(self, batch: int, context: float) -> float:
        return self.holder.attend_ps(1, batch * context) / self.holders / _PS

    def sent_bytes(self, batch: int) -> float:
        """In an iteration, both ways."""
        return self.model.queries.num_bytes(batch, self.element_bytes) + batch * self.model.kv_token_bytes

    def network_s(self, batch: int) -> float:
        return self.model.queries.layers * self.rtt_s + self.sent_bytes(batch) / self.bytes_per_s

    def step_s(self, batch: int, context: float, turns: int = 1) -> float:
        """Until each of `batch` sequences of so many tokens has its next one; in `turns` batches that take turns."""
        turns = min(turns, batch)
        part = -(-batch // turns)
        times = (self.model_s(part), self.attention_s(part, context), self.network_s(part))
        return period_ps(turns, *[round(_PS * time) for time in times]) / _PS

    def rate(self, batch: int, context: float) -> tuple[float, int]:
        """Tokens a second, and in how many batches that take turns: one or two, whichever are quicker."""
        return max(
            [(batch / self.step_s(batch, context, turns), turns) for turns in ONE_OR_TWO if turns <= batch]
        )


def is_compute_bound(cost: NodeCost, batch: int) -> bool:
    """Whether twice the batch takes over half as long again, so that memory for a larger one brings little. Reading
    weights alone takes as long for any batch."""
    return cost.decode_step_ps(2 * batch)[0] >= 1.5 * cost.decode_step_ps(batch)[0]
