"""Decode with all attention elsewhere: one batch waits for its parts, two hide what is shorter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.cost import Curve, compile_cost
from isthmus.core.cost.pooled import Pooled, is_compute_bound
from tests.core.cost.models import LLAMA_70B, instance

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
