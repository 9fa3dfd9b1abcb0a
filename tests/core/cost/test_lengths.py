"""Distributions against their samples, against numeric integration, and against the published workload."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from isthmus.core.cost import Lengths, LogNormal, Sample
from isthmus.core.cost.lengths import mean_of
from isthmus.core.errors import ConfigError

PUBLISHED = LogNormal(9.90, 1.00, 128, 131_072)
"""The workload of Prefill-as-a-Service."""

samples = st.lists(st.integers(1, 200_000), min_size=1, max_size=60)
log_normals = st.builds(
    LogNormal,
    mu=st.floats(4, 11),
    sigma=st.floats(0.2, 2),
    low=st.floats(1, 500),
    high=st.floats(5_000, 300_000),
)


def cost(length: float) -> float:
    """With a kink, as measured curves have."""
    return 0.4 + 5e-5 * max(length - 1024, 0) + 1e-10 * length * length


def means(lengths: Lengths, function: Callable[[float], float], threshold: float) -> tuple[float, float]:
    """Of the function above and below a threshold, where there is any length."""
    (below, whole), share = lengths.sums(function, (threshold, math.inf)), lengths.share(threshold)
    return (whole - below) / (share or 1), below / ((1 - share) or 1)


def test_the_published_workload() -> None:
    assert mean_of(PUBLISHED) == pytest.approx(27_486, abs=1)
    quantiles = {0.1: 5_439, 0.25: 9_916, 0.5: 19_199, 0.75: 36_523, 0.9: 62_410, 0.95: 82_160, 0.99: 115_417}
    for share, length in quantiles.items():
        assert PUBLISHED.quantile(share) == pytest.approx(length, abs=1)
    assert PUBLISHED.share(19_400) == pytest.approx(0.4957, abs=1e-4)
    assert PUBLISHED.mean_above(19_400) == pytest.approx(45_046, abs=1)
    assert PUBLISHED.mean_below(19_400) == pytest.approx(10_224, abs=1)
    assert LogNormal(9.90, 1.00, 128, 128_000).mean_above(19_400) == pytest.approx(44_756, abs=1)


@given(samples, st.integers(0, 200_001))
def test_a_sample_is_counted(lengths: list[int], threshold: int) -> None:
    """A length that equals the threshold is below."""
    sample = Sample(lengths)
    above = [length for length in lengths if length > threshold]
    below = [length for length in lengths if length <= threshold]
    assert sample.share(threshold) == pytest.approx(len(above) / len(lengths))
    if above:
        assert sample.mean_above(threshold) == pytest.approx(sum(above) / len(above))
        assert means(sample, cost, threshold)[0] == pytest.approx(sum(map(cost, above)) / len(above))
    if below:
        assert sample.mean_below(threshold) == pytest.approx(sum(below) / len(below))
        assert means(sample, cost, threshold)[1] == pytest.approx(sum(map(cost, below)) / len(below))


@given(samples, st.floats(0, 1))
def test_a_quantile_of_a_sample_is_one_of_it(lengths: list[int], share: float) -> None:
    quantile = Sample(lengths).quantile(share)
    assert quantile in lengths
    assert sum(length <= quantile for length in lengths) >= share * len(lengths)
    assert sum(length < quantile for length in lengths) <= share * len(lengths)


@given(log_normals, st.floats(100, 300_000))
def test_closed_forms_agree_with_the_sums(lengths: LogNormal, threshold: float) -> None:
    assert mean_of(lengths, lambda length: 1.0) == pytest.approx(1)
    share = lengths.share(threshold)
    assert lengths.sums(lambda length: 2.0, [threshold]) == [pytest.approx(2 * (1 - share), rel=1e-5, abs=1e-9)]
    assume(1e-6 < share < 1 - 1e-6)
    closed = lengths.mean_above(threshold), lengths.mean_below(threshold)
    assert means(lengths, float, threshold) == pytest.approx(closed, rel=1e-5)
    assert (
        lengths.low
        <= lengths.mean_below(threshold)
        <= threshold
        <= lengths.mean_above(threshold)
        <= lengths.high
    )


@settings(max_examples=10)
@given(log_normals)
def test_a_sample_of_quantiles_has_the_same_expectations(lengths: LogNormal) -> None:
    sample = Sample([lengths.quantile((at + 0.5) / 100) for at in range(100)])
    assert mean_of(sample, cost) == pytest.approx(mean_of(lengths, cost), rel=0.03)


@pytest.mark.parametrize("lengths", [PUBLISHED, Sample([100, 200, 30_000])])
def test_nothing_is_longer_than_the_longest(lengths: Lengths) -> None:
    assert lengths.share(1) == 1 and lengths.share(10**9) == 0
    assert lengths.mean_above(1) == pytest.approx(lengths.mean_below(10**9))
    below, whole = lengths.sums(cost, [1, math.inf])
    assert (below, whole) == (0, pytest.approx(mean_of(lengths, cost)))


def test_many_thresholds_are_as_one() -> None:
    thresholds = range(100, 140_000, 977)
    one_by_one = [PUBLISHED.sums(cost, [threshold])[0] for threshold in thresholds]
    assert PUBLISHED.sums(cost, thresholds) == pytest.approx(one_by_one, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((9.9, 0.0, 1, 10), "sigma must be above 0"),
        ((9.9, 1.0, 10, 10), "below high"),
        ((9.9, 1.0, 0, 10), "low above 0"),
        ((float("nan"), 1.0, 1, 10), "is none"),
        ((200.0, 0.1, 1, 10), "has no length within"),
    ],
)
def test_what_is_no_distribution_is_refused(arguments: tuple[float, float, float, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LogNormal(*arguments)
    with pytest.raises(ConfigError, match="the sample is empty"):
        Sample([])
