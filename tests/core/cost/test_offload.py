"""The equations of Prefill-as-a-Service on its own numbers, and the solver against brute force."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.cost import Curve, LogNormal, Sample, compile_cost, offload
from isthmus.core.cost.offload import PrefillFleet, RequestWork, Solution, best_threshold

GBPS = 1e9 / 8
LENGTHS = LogNormal(9.90, 1.00, 128, 131_072)
WORK = RequestWork(
    remote_s=lambda length: 0.4 + 2e-5 * length + 2.5e-10 * length * length,
    local_s=lambda length: 0.47 + 1.3e-4 * length + 3e-10 * length * length,
    kv_bytes=lambda length: 182_353_920 + 17_280 * length,
)
FLEET = PrefillFleet(num_remote=4, num_local=8, egress=100 * GBPS, decode_rate=800 / 1024)
GRID = range(200, 131_001, 200)

samples = st.lists(st.integers(1, 130_000), min_size=1, max_size=40)
capacities = st.sampled_from([0, 1, 2, 5])
egresses = st.sampled_from([0.0, 1e7, 1e9, 1e12])


def rises_then_falls(length: int) -> float:
    """KV per second of prefill that is not monotone, as for most models."""
    return 1e8 + 1e4 * length if length < 30_000 else 4e8


def test_one_equation_each() -> None:
    assert offload.kv_throughput(200e6, 0.5) == 400e6
    assert offload.egress_of(512, 8, 200e6, 0.5) == 64 * 400e6
    assert offload.remote_rate(4, 0.5, 200e6, 1e9) == 5  # the link
    assert offload.remote_rate(4, 1.0, 200e6, 1e9) == 4  # computing
    assert offload.local_rate(3, 2.0) == 1.5
    assert offload.decode_rate(5, 20, 0.025, 1024) == pytest.approx(3.90625)
    assert offload.highest_rate(1.61, 1.64, 3.91, 0.496) == pytest.approx(1.61 / 0.496)
    assert offload.prefill_imbalance(2.0, 1.0, 0.5) == 1.0
    assert offload.decode_imbalance(1.5, 1.5, 4.5) == 0.5
    # An empty class does not bind.
    assert offload.highest_rate(0.0, 2.0, 3.0, 0.0) == 2.0
    assert offload.highest_rate(2.0, 0.0, 3.0, 1.0) == 2.0
    assert offload.prefill_imbalance(0.0, 2.0, 0.0) == math.inf


def test_the_largest_batch_keeps_the_limit_exactly() -> None:
    """10 ms, 1 ms a sequence and 1 us a token of context: with 1,000 tokens each, 12, 14, 16 ... ms."""
    cost = compile_cost(Curve(1, 1, 1e-4, decode_fixed_s=0.01, decode_sequence_s=1e-3, decode_context_s=1e-6))
    for tbt_ms, size in ((11, 0), (12, 1), (13, 1), (30, 10), (1000, 20), (None, 20)):
        assert offload.largest_batch(cost, 1000, 20, tbt_ms) == size
    assert offload.largest_batch(cost, 1000.0001, 20, 30) == 9


@pytest.mark.parametrize("split", [offload.representative, offload.expected])
def test_classes_of_a_sample(split: offload.Split) -> None:
    sample = Sample([1_000, 2_000, 50_000])
    everything, some, nothing = split(sample, WORK, [0, 2_000, 50_000])
    assert (everything.share, everything.local_s) == (1, 0)
    assert (nothing.share, nothing.remote_s, nothing.kv_bytes) == (0, 0, 0)
    assert some.share == pytest.approx(1 / 3)
    assert some.remote_s == pytest.approx(WORK.remote_s(50_000))
    assert some.kv_bytes == pytest.approx(WORK.kv_bytes(50_000))


def test_expected_times_are_longer_since_prefill_is_convex() -> None:
    mean = offload.representative(LENGTHS, WORK, GRID)
    exact = offload.expected(LENGTHS, WORK, GRID)
    for one, other in zip(mean, exact, strict=True):
        assert other.remote_s >= one.remote_s * (1 - 1e-6)
        assert other.local_s >= one.local_s * (1 - 1e-6)
        assert other.kv_bytes == pytest.approx(one.kv_bytes, rel=1e-4)  # linear in the length


def bound(solution: Solution) -> float:
    """The term that is said to bind."""
    share, fleet, classes = solution.classes.share, FLEET, solution.classes
    return {
        offload.REMOTE_COMPUTE: lambda: fleet.num_remote / (share * classes.remote_s),
        offload.LINK: lambda: fleet.egress / (share * classes.kv_bytes),
        offload.LOCAL_COMPUTE: lambda: solution.num_prefill / ((1 - share) * classes.local_s),
        offload.DECODE: lambda: solution.decode,
    }[solution.binds]()


@pytest.mark.parametrize("split", [offload.representative, offload.expected])
def test_the_grid_finds_the_best_of_all_pairs(split: offload.Split) -> None:
    many = split(LENGTHS, WORK, GRID)
    solutions = offload.solve(many, FLEET)
    best = offload.best(solutions)
    every = [offload.bear(classes, FLEET, prefill) for classes in many for prefill in range(9)]
    assert best.rate == max(solution.rate for solution in every)
    assert best.num_prefill + best.num_decode == 8
    for solution in every:
        assert solution.rate == pytest.approx(bound(solution))
        assert solution.egress == pytest.approx(
            solution.rate * solution.classes.share * solution.classes.kv_bytes
        )
        assert solution.egress <= FLEET.egress * (1 + 1e-9)


def test_baselines_are_corners_of_the_grid() -> None:
    homogeneous = PrefillFleet(0, 12, 0.0, 800 / 1024)
    (nothing,) = offload.solve(offload.representative(LENGTHS, WORK, [131_072]), homogeneous)
    assert (nothing.classes.share, nothing.egress, nothing.num_prefill) == (0, 0, 9)
    (naive,) = offload.solve(offload.representative(LENGTHS, WORK, [0]), FLEET)
    assert (naive.classes.share, naive.num_prefill, naive.num_decode) == (1, 0, 8)


def brute_force(
    lengths: list[int], num_remote: float, num_local: float, egress: float, kv: Callable[[int], float]
) -> dict[int | None, float]:
    """Rate of every threshold, by what an hour of requests takes of each stage."""
    found: dict[int | None, float] = {}
    for threshold in (None, 0, *lengths):
        above = [each for each in lengths if threshold is not None and each > threshold]
        below = [each for each in lengths if threshold is None or each <= threshold]
        needs = [
            (sum(map(WORK.remote_s, above)), num_remote),
            (sum(map(kv, above)), egress),
            (sum(map(WORK.local_s, below)), num_local),
        ]
        found[threshold] = min(len(lengths) * capacity / need for need, capacity in needs if need)
    return found


@given(samples, capacities, capacities, egresses, st.sampled_from([WORK.kv_bytes, rises_then_falls]))
def test_the_best_threshold_is_that_of_brute_force(
    lengths: list[int], num_remote: int, num_local: int, egress: float, kv: Callable[[int], float]
) -> None:
    found = best_threshold(lengths, WORK.remote_s, num_remote, WORK.local_s, num_local, kv, egress)
    rates = brute_force(lengths, num_remote, num_local, egress, kv)
    assert found.rate == pytest.approx(max(rates.values()))
    assert rates[found.tokens] == pytest.approx(found.rate)
    offloaded = 0 if found.tokens is None else sum(each > found.tokens for each in lengths)
    assert found.share == pytest.approx(offloaded / len(lengths))
    assert found.binds in (offload.REMOTE_COMPUTE, offload.LINK, offload.LOCAL_COMPUTE)
    nothing = best_threshold(lengths, WORK.remote_s, 0, WORK.local_s, 0, kv, 0.0)
    assert nothing == offload.Threshold(None, 0.0, 0.0, offload.LOCAL_COMPUTE)


def test_a_sample_leads_to_the_threshold_of_its_distribution() -> None:
    sample = [int(LENGTHS.quantile((at + 0.5) / 1000)) for at in range(1000)]
    found = best_threshold(sample, WORK.remote_s, 4, WORK.local_s, 3, WORK.kv_bytes, FLEET.egress)
    best = max(
        (offload.bear(classes, FLEET, 3) for classes in offload.expected(LENGTHS, WORK, GRID)),
        key=lambda each: each.rate,
    )
    assert found.tokens == pytest.approx(best.classes.threshold, rel=0.01)
    assert (found.rate, found.share) == (
        pytest.approx(best.rate, rel=0.01),
        pytest.approx(best.classes.share, rel=0.01),
    )
