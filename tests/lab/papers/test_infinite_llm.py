"""Infinite-LLM's tables: bytes and contexts follow from sizes; a simulated pool serves what it should hold."""

from __future__ import annotations

import pytest

from isthmus.lab.papers import infinite_llm
from isthmus.lab.papers.infinite_llm.lending import GREEDY
from isthmus.lab.papers.infinite_llm.tables import (
    A100,
    ETHERNET,
    LOADS,
    MEASURED_MS,
    completes,
    kv_bytes,
    longest,
    lost,
    pool_tokens,
    query_bytes,
    served,
    times_ms,
)


def test_every_table_says_its_version() -> None:
    for table in infinite_llm.TABLES:
        assert "v2" in table.source


def test_bytes_by_hand() -> None:
    """13B: 40 heads of 128 in 16 bits, 40 layers."""
    assert query_bytes() == 2 * 40 * 128 * 2 + 2 * 40 * 4
    assert kv_bytes(8192) == 2 * 40 * 128 * 2 * 8192


def test_queries_that_travel_are_an_order_of_magnitude_quicker() -> None:
    for tokens, (query_ms, kv_ms) in MEASURED_MS.items():
        ours = times_ms(tokens)
        assert ours[1] == pytest.approx(kv_ms, rel=0.3)
        assert 10 < ours[1] / ours[0] < 25
        if tokens > 8192:  # below, the latency that is not printed is most of it
            assert ours[0] == pytest.approx(query_ms, rel=0.2)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_pool_serves_all_but_a_quarter_of_one_memory(count: int) -> None:
    one = pool_tokens("7B", 1)
    assert pool_tokens("7B", count) == count * one
    assert longest("7B", count) == pytest.approx((count - 0.25) * one, rel=0.01)
    assert not completes("7B", count, longest("7B", count) + 1000)


def test_the_published_lengths_fit_where_they_can() -> None:
    assert pool_tokens("7B") > 2_000_000
    assert pool_tokens("13B") == pytest.approx(1_900_000, rel=0.02)


def test_moves_are_free_on_nvlink_and_not_between_the_paper_s_nodes() -> None:
    for tokens in (16, 32):
        assert lost("7B", tokens, A100.link_bw) == 0
        assert lost("7B", tokens, ETHERNET) > 50


@pytest.mark.parametrize("load", ["all alike, none waits", "all alike"])
def test_nothing_moves_and_nothing_is_gained_where_all_are_alike(load: str) -> None:
    off, lent = (served(LOADS[load], lending) for lending in ("none", GREEDY))
    assert off.rate == lent.rate and lent.moved == 0


def test_lending_gains_more_the_longer_the_long_request_is() -> None:
    gains = []
    for length in ("30,000", "60,000", "90,000"):
        off, lent = (served(LOADS[f"1 of {length}"], lending) for lending in ("none", GREEDY))
        gains.append(lent.rate / off.rate)
        assert off.moved == 0 < lent.moved
    assert 1 < gains[0] < gains[1] < gains[2]
