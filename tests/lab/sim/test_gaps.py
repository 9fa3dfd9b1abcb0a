from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.lab.sim.node import Gaps
from isthmus.lab.sim.summary import mean_of_longest

GAPS = st.lists(
    st.tuples(st.integers(-60, -20), st.sampled_from([0, 1, 2, 7]), st.integers(1, 12)), min_size=1, max_size=12
)


def expanded(gaps: list[Gaps]) -> list[int]:
    return [-largest - growth * at for largest, growth, size in gaps for at in range(size)]


@given(GAPS, st.data())
def test_the_longest_gaps_are_those_of_a_sorted_list(gaps: list[Gaps], data: st.DataObject) -> None:
    every = sorted(expanded(gaps))
    count = data.draw(st.integers(1, len(every)))
    assert mean_of_longest(list(gaps), count) == sum(every[-count:]) / count


def test_the_longest_may_lie_in_many_runs() -> None:
    gaps = [(-100, 10, 3), (-95, 0, 2), (-300, 0, 1)]
    assert mean_of_longest(list(gaps), 4) == (300 + 100 + 95 + 95) / 4
    assert mean_of_longest(list(gaps), 5) == (300 + 100 + 95 + 95 + 90) / 5
