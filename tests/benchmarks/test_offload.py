"""The simulated study of prefill in another datacenter."""

from __future__ import annotations

import pytest

from isthmus.benchmarks.offload import SYSTEMS, highest, simulate, table


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_serves_the_case_study(system: str) -> None:
    cell = simulate(system, SYSTEMS[system], "Poisson", 1.0, num=60)
    assert (cell.requests, cell.failed) == (60, 0)
    assert cell.goodput > 0.9
    assert cell.ttft_s == pytest.approx(cell.queue_s + cell.prefill_s)
    least, most = {"homogeneous": (0.0, 0.0), "naive": (1.0, 1.0), "fixed": (0.3, 0.7)}.get(system, (0.3, 1.0))
    assert least <= cell.offloaded <= most
    assert (cell.egress_gbps > 0) == (cell.offloaded > 0)


def test_a_link_that_is_down_sends_nothing_and_fails_nobody() -> None:
    cell = simulate("controlled", SYSTEMS["controlled"], "down", 1.0, num=200, fault=0.0)
    whole = simulate("controlled", SYSTEMS["controlled"], "up", 1.0, num=200)
    assert cell.failed == 0
    assert cell.offloaded < whole.offloaded
    assert 0 < cell.threshold_changes < 20


def test_eight_bits_spare_a_narrow_link() -> None:
    plain, narrow = (
        simulate("fixed", SYSTEMS["fixed"], "5 Gbps", 1.2, num=100, gbps=5.0, compression=codec)
        for codec in ("none", "int8")
    )
    assert narrow.egress_gbps < 0.9 * plain.egress_gbps
    assert narrow.goodput >= plain.goodput


def test_the_highest_rate_is_sustained() -> None:
    cell = highest("naive", SYSTEMS["naive"], "highest", num=60, seed=0, bursty=False)
    assert cell.goodput >= 0.99
    assert 1.0 < cell.rate < 4.0
    assert table([cell]).row_count == 1
