from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.conductor import LinkRule
from isthmus.core.conductor.copies import ClusterLink, Link, begin, end, expected_ns, transfer_ns
from isthmus.core.types import NS_PER_S

RATE = 1_000_000
MS = NS_PER_S // 1000


def shared_fairly(sizes: list[int]) -> list[Fraction]:
    """When each of these copies ends, in ns, if all begin at 0 and share one link of RATE evenly."""
    ends = [Fraction(0)] * len(sizes)
    now, done = Fraction(0), 0
    waiting = sorted(range(len(sizes)), key=lambda at: sizes[at])
    for count, at in enumerate(waiting):
        now += Fraction((sizes[at] - done) * (len(sizes) - count) * NS_PER_S, RATE)
        done, ends[at] = sizes[at], now
    return ends


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8))
def test_on_one_link_it_is_what_fair_sharing_gives(sizes: list[int]) -> None:
    """The estimate of each when it is asked for, and, of all, after the last one began: to the ns per copy."""
    link = Link(RATE)
    for count, size in enumerate(sizes, 1):
        own, delay = transfer_ns(link, Link(RATE), size, 0)
        ends, before = shared_fairly(sizes[:count]), shared_fairly(sizes[: count - 1])
        assert own == pytest.approx(float(ends[-1]), abs=count)
        assert delay == pytest.approx(float(sum(ends[:-1]) - sum(before)), abs=count)
        begin(link, Link(RATE), size, 0)
    until = [copy.until_ns for copy in link.copies]
    assert until == pytest.approx([float(at) for at in shared_fairly(sizes)], abs=2 * len(sizes))


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**9))
def test_a_copy_that_joins_another_on_its_way(first: int, second: int, now: int) -> None:
    link = Link(RATE)
    copy = begin(link, Link(RATE), first, 0)
    left = max(Fraction(0), first - Fraction(now * RATE, NS_PER_S))
    assert copy.bytes_left(now) == pytest.approx(float(left), abs=0.01)
    own, delay = transfer_ns(link, Link(RATE), second, now)
    assert own == pytest.approx(float((second + min(left, second)) * NS_PER_S / RATE), abs=20)
    assert delay == pytest.approx(float(min(left, second) * NS_PER_S / RATE), abs=20)
    until = copy.until_ns
    begin(link, Link(RATE), second, now)
    assert copy.until_ns == pytest.approx(until + delay, abs=2)
    assert copy.bytes_left(now) == pytest.approx(float(left), abs=0.01)


def test_a_copy_on_both_links_is_delayed_once_and_its_end_frees_both() -> None:
    out, into = Link(RATE), Link(RATE)
    copy = begin(out, into, 3000, 0)
    assert transfer_ns(out, into, 1000, 0) == pytest.approx((2 * MS, MS))
    other = begin(out, into, 1000, 0)
    assert copy.until_ns == pytest.approx(4 * MS, abs=3)
    late = copy.until_ns + MS  # overdue, it delays nobody and is not delayed
    assert transfer_ns(out, into, 500, late) == (MS / 2, 0) and copy.bytes_left(late) == 0
    for ended in (copy, copy, other):
        end(ended)
    assert not out.copies and not into.copies
    assert transfer_ns(out, into, 1000, 0) == (MS, 0)


def test_a_link_that_was_used_of_late_is_expected_to_be_used() -> None:
    """Half of what it could carry in the last window: twice as long, by whatever; and never endless."""
    out, into = Link(RATE), Link(RATE)
    assert expected_ns(out, into, 1000, 0) == (MS, 0)
    out.use(60 * RATE, 0)
    assert transfer_ns(out, into, 1000, 0) == (MS, 0)
    assert expected_ns(out, into, 1000, 0) == (pytest.approx(2 * MS), 0)
    end(begin(Link(RATE), into, 60 * RATE, 0))
    assert expected_ns(out, into, 1000, 0)[0] == pytest.approx(4 * MS)
    end(begin(out, Link(RATE), 1000 * RATE, 0))
    assert expected_ns(out, into, 1000, 0)[0] <= 40 * MS * (1 + 1e-9)
    assert expected_ns(out, into, 1000, 3600 * NS_PER_S)[0] == pytest.approx(MS, rel=1e-6)


# Between clusters.


def across(rate: int = RATE // 4, rtt_ns: int = 0) -> ClusterLink:
    return ClusterLink(LinkRule("far", "near", rate, rtt_ns))


def test_the_slowest_of_three_links_counts_and_half_a_round_trip() -> None:
    assert transfer_ns(Link(RATE), Link(RATE), 1000, 0, across(rtt_ns=6 * MS)) == (4 * MS + 3 * MS, 0)
    assert transfer_ns(Link(RATE // 8), Link(RATE), 1000, 0, across()) == (8 * MS, 0)


def test_copies_between_clusters_share_their_link_alone() -> None:
    link = across()
    first = begin(Link(RATE), Link(RATE), 1000, 0, link)
    own, delay = transfer_ns(Link(RATE), Link(RATE), 1000, 0, link)
    assert (own, delay) == pytest.approx((8 * MS, 4 * MS))
    begin(Link(RATE), Link(RATE), 1000, 0, link)
    assert first.until_ns == pytest.approx(8 * MS, abs=3)
    within = transfer_ns(first.link_out, Link(RATE), 1000, 0)
    assert within[0] == pytest.approx(2 * MS)  # it is on its node's link as well
    end(first)
    assert len(link.copies) == 1 and not first.link_out.copies
    assert expected_ns(Link(RATE), Link(RATE), 1000, 0, link)[0] > 8 * MS


def test_a_hand_over_waits_for_computing_or_for_what_is_owed() -> None:
    link = across(rate=1000, rtt_ns=2 * MS)
    assert link.handed_over_ns(500, 0, 2 * NS_PER_S) == 2 * NS_PER_S + MS  # streamed while computed
    assert link.handed_over_ns(500, 100, 2 * NS_PER_S) == 2.1 * NS_PER_S + MS  # the state comes at the end
    link.owed = 4000
    assert link.handed_over_ns(500, 100, 2 * NS_PER_S) == 4.5 * NS_PER_S + MS
