"""The time between tokens that a recording has of an answer."""

from __future__ import annotations

from isthmus.live.servers.gaps import Gaps


def test_the_longest_tenth_of_the_gaps_counts() -> None:
    gaps, now = Gaps(), 0.0
    for gap_ms in [0, *[10] * 18, 30, 50]:
        gaps.take(now := now + gap_ms / 1000)
    assert gaps.tbt_ns(21) == 40_000_000, "two of twenty gaps"
    assert gaps.tbt_ns(11) == 50_000_000, "one of ten, though more parts came"


def test_an_answer_in_one_part_has_no_gaps() -> None:
    gaps = Gaps()
    assert gaps.tbt_ns(10) == 0
    gaps.take(1.0)
    assert gaps.tbt_ns(10) == 0
    gaps.take(2.0)
    assert gaps.tbt_ns(1) == 0, "a token alone is followed by no other"
