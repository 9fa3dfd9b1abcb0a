"""The simulated study of prefill in another datacenter."""

from __future__ import annotations

from benchmarks.offload import SYSTEMS, highest, simulate, table


def test_a_link_that_is_down_sends_nothing_and_fails_nobody() -> None:
    cell = simulate("controlled", SYSTEMS["controlled"], "down", 1.0, num=200, fault=0.0)
    whole = simulate("controlled", SYSTEMS["controlled"], "up", 1.0, num=200)
    assert cell.failed == 0
    assert cell.offloaded < whole.offloaded
    assert 0 < cell.threshold_changes < 20


def test_the_highest_rate_is_sustained() -> None:
    cell = highest("naive", SYSTEMS["naive"], "highest", num=60, seed=0, bursty=False)
    assert cell.goodput >= 0.99
    assert 1.0 < cell.rate < 4.0
    assert table([cell]).row_count == 1
