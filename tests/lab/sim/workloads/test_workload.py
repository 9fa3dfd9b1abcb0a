"""How a trace's clock is read: speed, spreading, limits."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import ConfigError
from isthmus.lab.sim.workloads import Replay

TIMES = st.lists(st.integers(0, 50), min_size=1, max_size=40).map(
    lambda times: [t * 10**9 for t in sorted(times)]
)


def test_speed_divides_arrival_times() -> None:
    assert Replay(speed=2.0).arrivals([0, 5, 3 * 10**9]) == [0, 2, 1_500_000_000]
    assert Replay().arrivals([0, 5, 7]) == [0, 5, 7]


@given(TIMES, st.integers(0, 5))
def test_spread_arrivals_keep_their_order_and_their_bucket(times: list[int], seed: int) -> None:
    spread = Replay(spread_seed=seed).arrivals(times)
    assert spread == sorted(spread)
    distinct = sorted(set(times))
    following = dict(pairwise(distinct))
    last_width = distinct[-1] - distinct[-2] if len(distinct) > 1 else 0
    for before, after in zip(times, spread, strict=True):
        end = following.get(before, before + last_width)
        assert before <= after < end or before == after == end
    assert spread == Replay(spread_seed=seed).arrivals(times)
    assert Replay(spread_seed=seed, speed=3.0).arrivals(times) == [round(time / 3) for time in spread]


def test_arrivals_are_spread_evenly_over_the_whole_bucket() -> None:
    width, num = 3 * 10**9, 20_000
    spread = Replay(spread_seed=1).arrivals([0] * num + [width])[:num]
    # The k-th smallest of n uniform draws lies about 1/sqrt(n) around k/n.
    assert max(abs(time / width - index / num) for index, time in enumerate(spread)) < 2.5 / math.sqrt(num)
    assert spread != Replay(spread_seed=2).arrivals([0] * num + [width])[:num]


@pytest.mark.parametrize(("name", "values"), [("speed", [0.0, -1.0, math.nan, math.inf]), ("limit", [0, -3])])
def test_a_replay_that_leaves_nothing_is_refused(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=name):
            Replay(**{name: value})
