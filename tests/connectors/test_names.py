"""Names made beside vLLM are those that isthmus makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.blocks import BlockNamer, KVLayout
from isthmus_vllm.plans import Chain

LAYOUT = KVLayout(dtype="bfloat16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
NAMER = BlockNamer(revision="r1", layout=LAYOUT, salt="tenant")
KEY = NAMER.key


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 10), max_size=4))
def test_names_are_those_of_isthmus(tokens: list[int], stops: list[int]) -> None:
    chain, end = Chain(KEY, 4), len(tokens) // 4
    for stop in stops:  # asked in pieces, in any order
        chain.names(tokens, 0, min(stop, end))
    assert list(chain.names(tokens, 0, end)) == NAMER.names(tokens)
    assert chain.parent(0) is None
    assert [chain.parent(first) for first in range(1, end + 1)] == NAMER.names(tokens)


def test_golden() -> None:
    names = Chain(bytes(range(32)), 2).names([1, 2, 3, 4_000_000_000], 0, 2)
    assert [name.hex() for name in names] == [
        "e4bfa18294520422e413cfbe13f340b5",
        "4807890bff42468cb0de50258de0d011",
    ]


def test_names_go_on_as_tokens_come() -> None:
    chain, tokens = Chain(KEY, 4), list(range(5))
    (first,) = chain.names(tokens, 0, 1)
    tokens += range(5, 8)
    assert chain.names(tokens, 1, 2) == (NAMER.names(tokens)[1],)
    assert chain.parent(1) == first
    with pytest.raises(AssertionError):
        chain.names(tokens, 0, 3)
