"""Selections: fewer and fewer tokens from layer to layer, and packings that free what they say, never the question."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.reuse import CACHEBLEND, EPIC, SELECTIONS, SEMANTIC, TAIL, Selection, pack, rows_per_layer

selections = st.sampled_from([*SELECTIONS.values()]) | st.builds(
    Selection,
    st.just("any"),
    full_layers=st.integers(0, 4),
    recompute=st.floats(0, 1.5),
    decay=st.floats(0, 1),
    floor=st.floats(0, 1),
    keep=st.floats(0, 1.2),
    fade=st.floats(0, 5),
)
layers = st.integers(1, 80)
tokens, blocks = st.integers(0, 20_000), st.sampled_from([1, 7, 16, 64, 256])


@given(selections, layers)
def test_shares_never_grow_with_the_layer(selection: Selection, num_layers: int) -> None:
    computed = [selection.computed(layer) for layer in range(num_layers)]
    kept = [selection.kept(layer, num_layers) for layer in range(num_layers)]
    for shares in (computed, kept):
        assert all(0 <= share <= 1 for share in shares)
        assert all(later <= earlier for earlier, later in pairwise(shares))
    assert all(share == 1 for share in computed[: selection.full_layers])


@given(selections, tokens, tokens, layers)
def test_rows_lie_between_the_others_and_all(
    selection: Selection, num_candidates: int, num_others: int, num_layers: int
) -> None:
    rows = rows_per_layer(selection, num_candidates, num_others, num_layers)
    assert len(rows) == num_layers
    assert all(num_others <= count <= num_others + num_candidates for count in rows)
    assert all(later <= earlier for earlier, later in pairwise(rows))
    assert set(rows_per_layer(selection, 0, num_others, num_layers)) == {num_others}
    full = Selection("full", recompute=1.0)
    assert set(rows_per_layer(full, num_candidates, num_others, num_layers)) == {num_others + num_candidates}


@given(selections, tokens, layers, blocks)
def test_a_packing_holds_what_is_kept_and_leaves_the_tail(
    selection: Selection, num_tokens: int, num_layers: int, block_size: int
) -> None:
    packing = pack(selection, num_tokens, num_layers, block_size)
    if packing is None:
        return
    assert packing.num_blocks * block_size <= num_tokens - TAIL
    assert len(packing.kept) == num_layers
    assert all(1 <= count <= packing.num_blocks for count in packing.kept)
    assert all(later <= earlier for earlier, later in pairwise(packing.kept))
    for layer, count in enumerate(packing.kept):
        assert count >= min(1.0, selection.kept(layer, num_layers)) * packing.num_blocks
    assert packing.num_packed * num_layers >= sum(packing.kept) > (packing.num_packed - 1) * num_layers
    assert packing.num_packed + packing.num_dropped == packing.num_blocks
    assert packing.num_dropped > 0


@given(tokens, layers, blocks)
def test_nothing_is_packed_where_all_is_kept(num_tokens: int, num_layers: int, block_size: int) -> None:
    for selection in (CACHEBLEND, EPIC):
        assert not selection.drops
        assert pack(selection, num_tokens, num_layers, block_size) is None


@given(st.integers(0, TAIL), layers, blocks)
def test_a_question_alone_is_never_packed(num_tokens: int, num_layers: int, block_size: int) -> None:
    greedy = Selection("greedy", keep=0.0)
    assert pack(greedy, num_tokens, num_layers, block_size) is None
    assert pack(greedy, TAIL + block_size - 1, num_layers, block_size) is None


@given(st.integers(0, 5_000), st.integers(0, 5_000))
def test_longer_prompts_drop_no_fewer_blocks(one: int, other: int) -> None:
    found = [pack(SEMANTIC, num_tokens, 32, 16) for num_tokens in sorted((one, other))]
    short, long = (each.num_dropped if each else 0 for each in found)
    assert short <= long


def test_the_published_share_of_memory() -> None:
    """42 % less at 5,000 tokens: what `fade` was set by."""
    assert fmean([SEMANTIC.kept(layer, 32) for layer in range(32)]) == pytest.approx(0.58, abs=0.005)
    packing = pack(SEMANTIC, 5_000, 32, 16)
    assert packing is not None
    assert (packing.num_blocks, packing.num_packed, packing.num_dropped) == (310, 179, 131)


@pytest.mark.parametrize(
    ("selection", "rows"),
    [
        (SEMANTIC, (1_032, 432, 372, 321, 278)),
        (CACHEBLEND, (1_032, 182, 182, 182, 182)),
        (EPIC, (32, 32, 32, 32, 32)),
    ],
    ids=lambda each: each.name if isinstance(each, Selection) else "",
)
def test_rows_of_the_three(selection: Selection, rows: tuple[int, ...]) -> None:
    assert rows_per_layer(selection, 1_000, 32, 5) == rows


def test_one_layer_keeps_its_share() -> None:
    assert SEMANTIC.kept(0, 1) == 0.8
