"""Assembled prompts: never more than a full prefill, exactly as much where nothing is saved, and the closed forms."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.cost import Curve, NodeCost, compile_cost
from isthmus.core.cost.node_cost import AssembledChunk, assembled_ns, assembled_step_ps, assembled_weight
from isthmus.core.reuse import CACHEBLEND, EPIC, SELECTIONS, TAIL, Selection, rows_per_layer
from tests.core.cost.models import CONFIGS, instance

COSTS: list[NodeCost] = [
    compile_cost(each)
    for each in (
        instance(),
        instance(CONFIGS["gpt-oss"], num_gpus=1),
        Curve(1024, 12, 1e-5, 0.002, 1e-9, decode_fixed_s=0.004, decode_sequence_s=1e-4, decode_context_s=1e-8),
        Curve(1024, 57, prefill_points=((1024, 0.44), (131_072, 7.4)), decode_points=((1, 0.02), (20, 0.025))),
    )
]
LINEAR = compile_cost(Curve(1024, 12, prefill_token_s=1e-5, prefill_fixed_s=0.002))
"""Without attention and weights to read."""

costs = st.sampled_from(COSTS)
selections = st.sampled_from([*SELECTIONS.values()]) | st.builds(
    Selection,
    st.just("any"),
    full_layers=st.integers(0, 3),
    recompute=st.floats(0, 1),
    decay=st.floats(0.1, 1),
    floor=st.floats(0, 0.2),
)
tokens, cached = st.integers(1, 20_000), st.integers(0, 20_000)
shares = st.floats(0, 1)


@given(costs, selections, tokens, cached, shares, shares)
def test_more_candidates_never_take_longer(
    cost: NodeCost, selection: Selection, num_tokens: int, cached: int, one: float, other: float
) -> None:
    counts = sorted(int(num_tokens * share) for share in (one, other))
    many, few = [assembled_ns(cost, selection, num_tokens, cached, count) for count in reversed(counts)]
    assert many <= few <= cost.prefill_ns(num_tokens, cached)


@given(costs, selections, st.integers(0, 20_000), cached)
def test_without_candidates_it_is_a_prefill(
    cost: NodeCost, selection: Selection, num_tokens: int, cached: int
) -> None:
    assert assembled_ns(cost, selection, num_tokens, cached, 0) == cost.prefill_ns(num_tokens, cached)
    assert assembled_weight(selection, num_tokens, 0, cost.num_layers) == num_tokens


@given(costs, tokens, cached, shares)
def test_computing_all_candidates_is_a_prefill(
    cost: NodeCost, num_tokens: int, cached: int, share: float
) -> None:
    everything, count = Selection("all", recompute=1.0), int(num_tokens * share)
    assert assembled_ns(cost, everything, num_tokens, cached, count) == cost.prefill_ns(num_tokens, cached)
    assert assembled_weight(everything, num_tokens, count, cost.num_layers) == num_tokens


@given(costs, selections, st.integers(1, TAIL), cached)
def test_the_tail_is_always_computed(
    cost: NodeCost, selection: Selection, num_tokens: int, cached: int
) -> None:
    assert assembled_ns(cost, selection, num_tokens, cached, num_tokens) == cost.prefill_ns(num_tokens, cached)


@given(tokens, shares, st.integers(1, 100))
def test_the_weight_is_the_mean_of_the_rows(num_tokens: int, share: float, num_layers: int) -> None:
    count = int(max(0, num_tokens - TAIL) * share)
    for selection in SELECTIONS.values():
        rows = rows_per_layer(selection, count, num_tokens - count, num_layers)
        weight = assembled_weight(selection, num_tokens, count, num_layers)
        assert sum(rows) <= weight * num_layers < sum(rows) + num_layers


@given(st.integers(1, 100), st.integers(64, 512))
def test_epic_costs_as_many_tokens_as_it_computes(num_passages: int, length: int) -> None:
    """Linear in k, the first tokens of each passage."""
    num_tokens = num_passages * length + TAIL
    times = [
        assembled_ns(LINEAR, EPIC, num_tokens, 0, num_passages * (length - first)) for first in range(0, 65, 16)
    ]
    gaps = [after - before for before, after in pairwise(times)]
    assert set(gaps) == {num_passages * 16 * 10_000}  # 10 us a token


def test_cacheblend_takes_its_share_of_all_layers_but_the_first() -> None:
    found = assembled_ns(LINEAR, CACHEBLEND, 10_000 + TAIL, 0, 10_000)
    assert found == round(2e6 + 1e4 * (TAIL + 10_000 * (1 + 11 * 0.15) / 12))


@given(tokens, cached, shares)
def test_rows_attend_as_if_they_were_spread_evenly(num_tokens: int, cached: int, share: float) -> None:
    """r rows over n tokens behind p: r (p + n / 2) pairs, but for half a token a row."""
    pair_ns = 2000  # a pair (row, token) is two of n (n + 2 p)
    cost = compile_cost(Curve(1024, 1, 0.0, prefill_pair_s=1e-6))
    only = Selection("only", full_layers=0, recompute=0.0)
    rows = num_tokens - max(0, min(int(num_tokens * share), num_tokens - TAIL))
    found = assembled_ns(cost, only, num_tokens, cached, num_tokens - rows)
    exact = pair_ns * rows * (cached + num_tokens / 2)
    assert exact - pair_ns * rows / 2 - 1 <= found <= exact + 1


@given(costs, st.lists(st.tuples(tokens, cached), max_size=2), st.integers(0, 20), st.integers(0, 100_000))
def test_beside_other_work(
    cost: NodeCost, chunks: list[tuple[int, int]], num_decodes: int, context: int
) -> None:
    context *= num_decodes > 0
    assert assembled_step_ps(cost, [], chunks, num_decodes, context) == cost.step_ps(
        chunks, num_decodes, context
    )
    plain = [AssembledChunk(CACHEBLEND, *chunk, num_candidates=0) for chunk in chunks]
    assert assembled_step_ps(cost, plain, [], num_decodes, context) == cost.step_ps(
        chunks, num_decodes, context
    )
    whole = cost.step_ps([*chunks, (4000, 100)], num_decodes, context)
    found = assembled_step_ps(cost, [AssembledChunk(CACHEBLEND, 4000, 100, 3900)], chunks, num_decodes, context)
    assert cost.step_ps([*chunks, (100, 2050)], num_decodes, context) <= found <= whole


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
def test_two_assembled_chunks_share_an_iteration(selection: Selection) -> None:
    cost = COSTS[0]
    one, other = AssembledChunk(selection, 5000, 0, 4500), AssembledChunk(EPIC, 3000, 1000, 2000)
    both = assembled_step_ps(cost, [one, other], [], 0, 0)
    alone = [assembled_step_ps(cost, [each], [], 0, 0) for each in (one, other)]
    assert max(alone) < both < sum(alone)
