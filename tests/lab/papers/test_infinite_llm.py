"""Infinite-LLM's tables: bytes and contexts follow from sizes; a simulated pool serves what it should hold."""

from __future__ import annotations

import pytest

from isthmus.lab.papers import infinite_llm
from isthmus.lab.papers.infinite_llm.tables import completes, longest, pool_tokens
from tests.lab.papers.traces import ours


def test_every_table_says_its_version() -> None:
    assert all("v2" in table.source for table in infinite_llm.TABLES)


def test_queries_that_travel_are_an_order_of_magnitude_quicker() -> None:
    found = ours("infinite-llm-traffic")
    # 13B: 40 heads of 128 in 16 bits, 40 layers.
    assert found["a query and its sums, a layer", "KB"] == (2 * 40 * 128 * 2 + 2 * 40 * 4) / 1000
    assert found["KV of 8,192 tokens, a layer", "MB"] == 2 * 40 * 128 * 2 * 8192 / 1e6
    assert all(10 < ratio < 25 for (_, column), ratio in found.items() if column == "times")


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
    found = ours("infinite-llm-moves")
    for tokens in (16, 32):
        assert found[f"{tokens} tokens a step, 7B", "lost on NVLink (%)"] == 0
        assert found[f"{tokens} tokens a step, 7B", "lost on Ethernet (%)"] > 50


def test_lending_gains_more_the_longer_the_long_request_is_and_nothing_where_all_are_alike() -> None:
    found = ours("infinite-llm-gain")
    rows = ("all alike, none waits", "all alike", *(f"1 of {length},000" for length in (30, 60, 90)))
    gains = [found[row, "times vLLM-M"] for row in rows]
    assert gains[0] == gains[1] == 1 < gains[2] < gains[3] < gains[4]
    assert [found[row, "moved (GB)"] > 0 for row in rows] == [False, False, True, True, True]
