from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.conductor.learning import WINDOW_NS, Calibration, Decaying, OutputLengths, Recent
from isthmus.core.types import NS_PER_S


@pytest.mark.parametrize("factor", [0.2, 0.7, 1.0, 1.3, 8.0])
def test_a_common_error_of_the_estimates_cancels(factor: float) -> None:
    calibration, random = Calibration(), Random(1)
    for _ in range(300):
        estimate = random.randint(10**6, 10**9)
        calibration.add(round(estimate * factor * random.uniform(0.7, 1.3)), estimate)
    assert calibration.ratio == pytest.approx(factor, rel=0.03)


def test_calibration_follows_a_change_of_the_hardware() -> None:
    calibration = Calibration()
    for _ in range(3000):
        calibration.add(10**9, 10**9)
    for count in range(1, 4001):
        calibration.add(2 * 10**9, 10**9)
        if count % 1000 == 0:
            assert calibration.ratio == pytest.approx(2 - (1 - 1 / 1000) ** count, abs=0.06)
    assert calibration.ratio > 1.95


@pytest.mark.parametrize(
    ("measured", "ratio"),
    [
        ([], 1.0),
        ([(5, 0)], 1.0),
        ([(10**12, 1)], 1000),  # no measurement makes a node slower than that
        ([(1, 10**12)], 0.001),
        ([(900, 1)], 900),
        ([(50_000_000, 1_000_000), (1_000_000_000, 1_000_000_000)], 1.049),  # long prefills weigh more
    ],
)
def test_one_measurement_weighs_as_much_as_it_took(measured: list[tuple[int, int]], ratio: float) -> None:
    calibration = Calibration()
    for took, estimated in measured:
        calibration.add(took, estimated)
    assert calibration.ratio == pytest.approx(ratio, abs=0.0005)


@given(st.lists(st.tuples(st.integers(0, 10**11), st.floats(0, 1e12)), max_size=20))
def test_a_decaying_sum(added: list[tuple[int, float]]) -> None:
    """Each amount counts exp(-age / window)."""
    total, now = Decaying(), 0
    amounts = []
    for gap, amount in added:
        now += gap
        total.add(amount, now)
        amounts.append((now, amount))
    expected = sum(amount * math.exp((at - now) / WINDOW_NS) for at, amount in amounts)
    assert total.at(now) == pytest.approx(expected)
    assert total.at(now + WINDOW_NS) == pytest.approx(expected / math.e)
    assert total.at(now + 10**18) == 0.0


def test_the_rate_of_accepted_requests() -> None:
    recent = Recent()
    assert recent.rate(0) == recent.rate(10**18) == 0.0
    for second in range(5, 15):
        recent.accept(second * NS_PER_S)
    assert recent.rate(15 * NS_PER_S) == pytest.approx(10 / 120)  # nobody is known to come but those
    for second in range(15, 1000):
        recent.accept(second * NS_PER_S)
    assert recent.rate(1000 * NS_PER_S) == pytest.approx(1.0, rel=0.01)
    assert recent.rate(1000 * NS_PER_S + WINDOW_NS) == 0.0


def test_a_second_of_a_node_costs_those_who_come_while_the_queues_drain() -> None:
    recent = Recent()
    for _ in range(240):  # two a second
        recent.accept(0)
    assert recent.backlog_price([0, 0, 0, 0], 0) == 0.0
    assert recent.backlog_price([8 * NS_PER_S, 0, 0, 0], 0) == pytest.approx(2 / 4 * 2)
    assert recent.backlog_price([8 * NS_PER_S] * 4, WINDOW_NS + 1) == 0.0  # nobody comes


def test_what_an_inserted_block_costs() -> None:
    recent = Recent()
    assert recent.loss_per_block_ns(0) == 0.0
    recent.insert(100, 0)
    assert recent.loss_per_block_ns(0) == 0.0
    recent.lose(5e9, 0)
    assert recent.loss_per_block_ns(0) == pytest.approx(5e7)
    assert recent.loss_per_block_ns(WINDOW_NS) == pytest.approx(5e7)  # both fade alike
    recent.insert(100, WINDOW_NS)
    assert recent.loss_per_block_ns(WINDOW_NS) == pytest.approx(5e9 / math.e / (100 / math.e + 100))


# Output lengths.


def lengths_like(random: Random, count: int) -> list[int]:
    return [1 + min(50_000, int(random.lognormvariate(5.0, 1.2))) for _ in range(count)]


def learned(lengths: list[int]) -> OutputLengths:
    outputs = OutputLengths()
    for length in lengths:
        outputs.add(length)
    return outputs


def test_the_survival_curve_is_the_empirical_one() -> None:
    lengths = lengths_like(Random(3), 8000)
    outputs = learned(lengths)
    assert outputs.mean == pytest.approx(sum(lengths) / len(lengths))
    for at in (0, 1, 5, 20, 100, 150, 400, 1000, 5000, 20_000):
        longer = sum(1 for length in lengths if length > at) / len(lengths)
        assert outputs.survival(at) == pytest.approx(longer, abs=0.025)
    for age, more in ((0, 100), (50, 50), (100, 400), (400, 100), (1000, 500)):
        alive = [length for length in lengths if length > age]
        share = sum(1 for length in alive if length > age + more) / len(alive)
        assert outputs.going_on(age, more) == pytest.approx(share, abs=0.06)


def test_of_few_answers_or_far_longer_ones_all_that_is_known_counts() -> None:
    nothing = OutputLengths()
    assert (nothing.mean, nothing.survival(10**6), nothing.going_on(10, 10)) == (0.0, 1.0, 1.0)
    few = learned([10, 20, 30])
    assert (few.going_on(500, 1), few.going_on(5, 500)) == (1.0, 0.0), "who outlived all goes on"
    huge = learned([2**40] * 20)  # beyond all bins
    assert huge.survival(2**30) > 0 and huge.mean == 2**40
    outputs = OutputLengths()
    for _ in range(40):
        outputs.add(100)
        outputs.survival(1)
    assert outputs.survival(50) == 1.0
    for _ in range(40):
        outputs.add(10)
    assert outputs.survival(50) == pytest.approx(0.5, abs=0.1)


def test_what_is_forgotten_weighs_half_and_leaves_shares_as_they_are() -> None:
    lengths = OutputLengths()
    for _ in range(2 * OutputLengths.REMEMBERED):
        lengths.add(100)
    assert lengths.survival(1) == pytest.approx(1.0) and lengths.mean == 100
    for _ in range(OutputLengths.REMEMBERED):
        lengths.add(1000)
    assert lengths.survival(500) == pytest.approx(0.5, abs=0.02)
