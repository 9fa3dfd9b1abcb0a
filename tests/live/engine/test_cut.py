"""The minimum cut: known networks, and random ones against all cuts there are."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.models.graph import min_cut

Edges = list[tuple[str, str, int]]


def weight_of(edges: Edges, far: frozenset[str]) -> int:
    return sum(weight for start, stop, weight in edges if start not in far and stop in far)


NODES = "sabcdt"
EDGES = st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES), st.integers(0, 9)), max_size=16)


@settings(max_examples=300)
@given(EDGES)
def test_no_other_cut_weighs_less(edges: Edges) -> None:
    weight, far = min_cut(edges, "s", "t")
    others = [frozenset(["t", *inner]) for count in range(5) for inner in combinations("abcd", count)]
    least = [each for each in others if weight_of(edges, each) == weight]
    assert weight == weight_of(edges, far) == min(weight_of(edges, each) for each in others)
    assert len(far) == min(len(each) for each in least) and far in least
