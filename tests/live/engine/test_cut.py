"""The minimum cut: known networks, and random ones against all cuts there are."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.models.slices import ENDLESS, min_cut

Edges = list[tuple[str, str, int]]

CLRS = [  # the textbook's: Introduction to Algorithms, chapter on flow
    ("s", "1", 16), ("s", "2", 13), ("1", "3", 12), ("2", "1", 4), ("2", "4", 14), ("3", "2", 9), ("3", "t", 20),
    ("4", "3", 7), ("4", "t", 4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("edges", "weight", "far"),
    [
        (CLRS, 23, {"3", "t"}),
        ([("s", "a", 3), ("a", "t", 5)], 3, {"a", "t"}),
        ([("s", "a", 5), ("a", "t", 3)], 3, {"t"}),
        ([("s", "a", 3), ("a", "b", 3), ("b", "t", 3)], 3, {"t"}),  # of equals that next to the sink
        ([("s", "a", 1), ("s", "a", 2), ("a", "t", 9)], 3, {"a", "t"}),
        ([("s", "a", ENDLESS), ("a", "b", 1), ("b", "t", ENDLESS), ("s", "b", 4)], 5, {"b", "t"}),
        ([("s", "a", 4), ("b", "t", 4)], 0, {"b", "t"}),
        ([("s", "a", 4), ("t", "a", 4)], 0, {"t"}),  # a direction counts
        # A flow that went the wrong way first must be turned back.
        ([("s", "a", 1), ("s", "b", 1), ("a", "b", 1), ("a", "t", 1), ("b", "t", 1)], 2, {"t"}),
    ],
)
def test_known_networks(edges: Edges, weight: int, far: set[str]) -> None:
    assert min_cut(edges, "s", "t") == (weight, far)


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
