from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.types import NS_PER_S
from isthmus.lab.sim.records import RequestStatus
from isthmus.lab.sim.report import curves
from isthmus.lab.sim.report.curves import BinnedCurve, Bins, binned, merged, presence
from tests.lab.sim.report.results import record, result

SECONDS = Bins(0, NS_PER_S, 10)
INTERVALS = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120)), max_size=12)


def in_seconds(changes: list[curves.Change]) -> BinnedCurve:
    return binned(changes, SECONDS)


@given(INTERVALS)
def test_bins_hold_what_counting_every_moment_gives(intervals: list[tuple[int, int]]) -> None:
    curve = binned(presence(intervals), Bins(10, 20, 4))
    present = [sum(start <= time < end for start, end in intervals) for time in range(10, 90)]
    for index in range(4):
        moments = present[20 * index : 20 * (index + 1)]
        assert math.isclose(curve.mean[index], sum(moments) / 20, abs_tol=1e-9)
        assert curve.largest[index] == max(moments)


def test_a_growing_value_has_the_mean_and_the_top_of_its_ramp() -> None:
    curve = in_seconds([(0, 10, 1e-9), (2 * NS_PER_S, -12, -1e-9)])
    assert curve.mean[:3] == pytest.approx([10.5, 11.5, 0])
    assert curve.largest[:3] == pytest.approx([11, 12, 0])


@given(INTERVALS)
def test_a_union_covers_the_same_moments_once(intervals: list[tuple[int, int]]) -> None:
    union = merged(intervals)
    for time in range(121):
        assert sum(start <= time < end for start, end in union) == any(s <= time < e for s, e in intervals)


@given(st.integers(0, 10**13), st.integers(0, 10**13), st.integers(1, 300))
def test_bins_cover_the_time_and_are_not_too_many(start_ns: int, span_ns: int, most: int) -> None:
    bins = Bins.covering(start_ns, start_ns + span_ns, most)
    assert bins.edge(0) == start_ns and bins.edge(bins.count) >= start_ns + span_ns
    assert 1 <= bins.count <= most
    assert bins.index(start_ns) == 0 and bins.index(start_ns + span_ns) == bins.index(10**15) == bins.count - 1


def test_where_one_request_is_at_which_time() -> None:
    one = result([record()])  # arrived 1, prefill 2 to 4, joined 5, done 9
    assert in_seconds(curves.prefill_queue(one)).mean == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert in_seconds(curves.prefill_nodes_at_work(one)).mean == [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    assert in_seconds(curves.waiting_for_decode(one)).mean == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert in_seconds(curves.decoding(one)).mean == [0, 0, 0, 0, 0, 1, 1, 1, 1, 0]


def test_decode_tokens_grow_from_the_prompt_to_prompt_and_output() -> None:
    curve = in_seconds(curves.decode_tokens(result([record(num_tokens=100, output_tokens=40)])))
    assert curve.mean == pytest.approx([0] * 5 + [105, 115, 125, 135, 0], abs=1e-6)


def test_two_prefills_at_once_on_a_node_are_one_node_at_work() -> None:
    same = [record(0, prefill=3), record(1, prefill=3, times_s={"prefill_start": 3, "first_token": 6})]
    other = record(2, prefill=4)
    assert in_seconds(curves.prefill_nodes_at_work(result([*same, other]))).mean[2:6] == [2, 2, 1, 1]


def test_a_refused_request_waits_until_its_refusal_and_an_unfinished_one_to_the_end() -> None:
    never = {"prefill_start": -1, "first_token": -1, "landed": -1, "joined": -1}
    refused = record(0, status=RequestStatus.REFUSED, stage="prefill", times_s=never | {"end": 3})
    unfinished = record(1, status=RequestStatus.UNFINISHED, times_s=never | {"end": -1})
    assert in_seconds(curves.prefill_queue(result([refused, unfinished]))).mean == [0, 2, 2, *[1] * 7]
    assert curves.decoding(result([refused, unfinished])) == []
