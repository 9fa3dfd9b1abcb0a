"""Batches that take turns: while attention of one is computed elsewhere, layers of others run here.

Rotational staggered pipelining (Lamina, arXiv 2405.01814v2, section on it): n batches on n - 1 replicas of the layers
and one pool of attention. A model of L attentions is L + 1 slices of layers, with an attention between each two. One
batch alone, and two, need one replica.
"""

from __future__ import annotations

from collections.abc import Iterator


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
