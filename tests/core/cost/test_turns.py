"""Batches that take turns: the schedule against a step-by-step simulation of it, and the closed form of its times."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.cost.pooled import jobs_of, period_ps, replica_of, replicas_of, step_ps

BATCHES = st.integers(1, 8)
SLICES = st.integers(1, 60)

Times = dict[tuple[int, int], tuple[int, int]]
"""From when to when, by (batch, slice), or by (batch, the slice before it) of attentions."""


def simulated(batches: int, slices: int, slice_ps: int, attention_ps: int, net_ps: int) -> tuple[Times, Times]:
    """Each replica does its jobs in their order, each as soon as the answer to its batch has come; the pool takes what
    it is asked in the order of the schedule."""
    ran, attended = Times(), Times()
    free, pool, ready = [0] * replicas_of(batches), 0, [0] * batches
    for place in range(batches * slices):
        batch, at = place % batches, place // batches
        replica = replica_of(batch, at, batches)
        start = max(free[replica], ready[batch])
        free[replica] = start + slice_ps
        ran[batch, at] = start, free[replica]
        if at + 1 < slices:
            begun = max(pool, free[replica])
            pool = begun + attention_ps
            attended[batch, at] = begun, pool
            ready[batch] = pool + net_ps
    return ran, attended


@given(BATCHES, SLICES)
def test_every_slice_runs_once_and_where_the_rule_says(batches: int, slices: int) -> None:
    jobs = [
        (job, replica) for replica in range(replicas_of(batches)) for job in jobs_of(replica, batches, slices)
    ]
    assert sorted(job for job, _ in jobs) == [(j, k) for j in range(batches) for k in range(slices)]
    assert all(replica_of(*job, batches) == replica for job, replica in jobs)


@given(st.integers(3, 8), SLICES)
def test_the_context_of_a_batch_goes_to_the_next_replica(batches: int, slices: int) -> None:
    for batch in range(batches):
        for at in range(slices - 1):
            here, there = replica_of(batch, at, batches), replica_of(batch, at + 1, batches)
            assert there == (here + 1) % replicas_of(batches)


@given(BATCHES, SLICES, st.integers(1, 999), st.integers(0, 999), st.integers(0, 999))
def test_no_device_does_two_things_at_once(
    batches: int, slices: int, slice_ps: int, attention_ps: int, net_ps: int
) -> None:
    ran, attended = simulated(batches, slices, slice_ps, attention_ps, net_ps)
    devices = [
        [ran[job] for job in jobs_of(replica, batches, slices)] for replica in range(replicas_of(batches))
    ]
    for device in (*devices, list(attended.values())):
        assert all(stop <= start for (_, stop), (start, _) in pairwise(device))
    for (batch, at), (_, came) in attended.items():
        assert ran[batch, at][1] + attention_ps <= came <= ran[batch, at + 1][0] - net_ps


@given(BATCHES, st.integers(1, 60), st.integers(1, 999), st.integers(0, 999), st.integers(0, 999))
def test_a_step_takes_a_period_for_each_attention(
    batches: int, attentions: int, slice_ps: int, attention_ps: int, net_ps: int
) -> None:
    times = slice_ps * replicas_of(batches), attention_ps, net_ps  # so that nothing is rounded
    ran, _ = simulated(batches, attentions + 1, *times)
    took, period = max(stop for _, stop in ran.values()), period_ps(batches, *times)
    step = step_ps(batches, attentions, *times)
    assert attentions * period <= took <= step
    assert step - took <= period


@pytest.mark.parametrize(
    ("batches", "slice_ps", "attention_ps", "net_ps", "period"),
    [
        (1, 10, 4, 3, 17),
        (2, 10, 4, 3, 20),  # the layers
        (2, 4, 10, 3, 20),  # the pool
        (2, 4, 4, 30, 38),  # the way
        (3, 10, 5, 0, 15),  # all three
        (4, 10, 1, 0, 14),  # 40 on three replicas
    ],
)
def test_the_longest_of_three(batches: int, slice_ps: int, attention_ps: int, net_ps: int, period: int) -> None:
    assert period_ps(batches, slice_ps, attention_ps, net_ps) == period
