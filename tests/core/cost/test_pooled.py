"""Batches that take turns, and decode with all attention elsewhere: the schedule against a simulation, closed forms."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.cost import Curve, compile_cost
from isthmus.core.cost.pooled import (
    Pooled,
    is_compute_bound,
    jobs_of,
    period_ps,
    replica_of,
    replicas_of,
    step_ps,
)
from tests.core.cost.models import LLAMA_70B, instance

TURNS = st.integers(1, 8)
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


@given(TURNS, SLICES)
def test_every_slice_runs_once_and_where_the_rule_says(batches: int, slices: int) -> None:
    """The context of a batch goes to the next replica."""
    count = replicas_of(batches)
    jobs = [(job, replica) for replica in range(count) for job in jobs_of(replica, batches, slices)]
    assert sorted(job for job, _ in jobs) == [(j, k) for j in range(batches) for k in range(slices)]
    for (batch, at), replica in jobs:
        assert replica_of(batch, at, batches) == replica
        assert batches < 3 or replica_of(batch, at + 1, batches) == (replica + 1) % count


@given(TURNS, SLICES, st.integers(1, 999), st.integers(0, 999), st.integers(0, 999))
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


@given(TURNS, st.integers(1, 60), st.integers(1, 999), st.integers(0, 999), st.integers(0, 999))
def test_a_step_takes_a_period_for_each_attention(
    batches: int, attentions: int, slice_ps: int, attention_ps: int, net_ps: int
) -> None:
    times = slice_ps * replicas_of(batches), attention_ps, net_ps  # so that nothing is rounded
    ran, _ = simulated(batches, attentions + 1, *times)
    took, period = max(stop for _, stop in ran.values()), period_ps(batches, *times)
    step = step_ps(batches, attentions, *times)
    assert attentions * period <= took <= step
    assert step - took <= period


# Attention elsewhere.

MODEL = compile_cost(instance(LLAMA_70B, "h100", 2, weight_dtype="bf16"))
HOLDER = compile_cost(instance(LLAMA_70B, "h20", 4, weight_dtype="bf16"))
POOL = Pooled(MODEL, HOLDER, 1, 90e9, 33e-6, 2)
BATCHES, CONTEXTS = st.integers(1, 1000), st.floats(1, 1e5)


def test_one_batch_waits_for_each_part() -> None:
    found = POOL.model_s(100) + POOL.attention_s(100, 4000) + POOL.network_s(100)
    assert POOL.step_s(100, 4000) == pytest.approx(found)


def test_what_crosses_is_queries_sums_and_new_kv() -> None:
    queries = MODEL.queries
    each = 4 * queries.elements + 4 * queries.heads + MODEL.kv_token_bytes
    assert POOL.sent_bytes(7) == 7 * each
    assert POOL.network_s(7) == pytest.approx(80 * 33e-6 + 7 * each / 90e9)


@given(BATCHES, CONTEXTS)
def test_two_batches_take_the_longest_of_three(batch: int, context: float) -> None:
    if batch == 1:
        assert POOL.step_s(1, context, 2) == POOL.step_s(1, context)
        return
    part = -(-batch // 2)
    model, attention = POOL.model_s(part), POOL.attention_s(part, context)
    whole = model + attention + POOL.network_s(part)
    assert POOL.step_s(batch, context, 2) == pytest.approx(max(2 * model, 2 * attention, whole), abs=2e-12)


@given(BATCHES, CONTEXTS)
def test_the_better_of_one_and_two_is_taken(batch: int, context: float) -> None:
    rate, turns = POOL.rate(batch, context)
    assert rate == batch / POOL.step_s(batch, context, turns)
    assert all(rate >= batch / POOL.step_s(batch, context, other) for other in (1, 2) if other <= batch)


@given(BATCHES, CONTEXTS, st.floats(1, 8), st.sampled_from([1, 2]))
def test_more_holders_are_never_slower(batch: int, context: float, more: float, turns: int) -> None:
    step_s = POOL.step_s(batch, context, turns)
    assert POOL._replace(holders=more).step_s(batch, context, turns) <= step_s
    assert POOL._replace(rtt_s=1e-3).step_s(batch, context, turns) >= step_s


def test_small_batches_read_weights_and_large_ones_compute() -> None:
    assert not is_compute_bound(MODEL, 10) and is_compute_bound(MODEL, 1000)
    free = compile_cost(Curve(1000, 1, 1e-5, decode_fixed_s=0.01, decode_sequence_s=1e-3))
    assert not is_compute_bound(free, 5) and is_compute_bound(free, 20)
