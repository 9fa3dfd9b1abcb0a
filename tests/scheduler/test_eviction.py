from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.scheduler.eviction import EVICTIONS, EvictionPolicy, RankEviction, first_in
from isthmus.types import BlockName

Chain = tuple[BlockName, ...]


def chain(path: str) -> Chain:
    """Names of the blocks of "abc": "a", "ab", "abc". A name says what comes before it."""
    return tuple(cast(BlockName, path[: end + 1]) for end in range(len(path)))


def filled(eviction: str, *paths: str) -> EvictionPolicy:
    policy = EVICTIONS[eviction]()
    for path in paths:
        use(policy, path)
    return policy


def use(policy: EvictionPolicy, path: str) -> None:
    policy.use(chain(path), sum(name in policy.held for name in chain(path)))


def evict(policy: EvictionPolicy, count: int, pins: str = "", spared: str = "") -> list[str]:
    return [cast(str, name) for name, _ in policy.evict(count, set(chain(pins)), chain(spared))]


# What goes first, of chains used in this order. "ab" is used three times, "pq" twice, the others once.
USED = ("pq", "ab", "xyz", "abc", "pq", "ab", "d")


@pytest.mark.parametrize(
    ("eviction", "order"),
    [
        ("lru", ["xyz", "xy", "x", "abc", "pq", "p", "ab", "a", "d"]),
        ("lfu", ["xyz", "xy", "x", "abc", "d", "pq", "p", "ab", "a"]),
        ("fifo", ["pq", "p", "xyz", "xy", "x", "abc", "ab", "a", "d"]),
        ("length_aware", ["d", "xyz", "xy", "x", "abc", "pq", "p", "ab", "a"]),
        ("length_aware_early", ["xyz", "abc", "xy", "x", "d", "pq", "p", "ab", "a"]),
    ],
)
def test_each_policy_in_its_order(eviction: str, order: list[str]) -> None:
    assert evict(filled(eviction, *USED), 99) == order
    one_by_one = filled(eviction, *USED)
    assert [evict(one_by_one, 1)[0] for _ in order] == order


def test_a_short_prompt_does_not_make_a_long_one_short() -> None:
    policy = filled("length_aware", "abcd", "ab", "xyz", "xyz")
    assert evict(policy, 99) == ["abcd", "abc", "xyz", "xy", "x", "ab", "a"]


def test_every_policy_is_tested() -> None:
    assert set(EVICTIONS) == {"lru", "lfu", "fifo", "length_aware", "length_aware_early"}


@pytest.mark.parametrize("eviction", sorted(EVICTIONS))
def test_pinned_and_spared_blocks_keep_their_turn(eviction: str) -> None:
    policy = filled(eviction, *USED)
    use(policy, "d")
    everything = evict(filled(eviction, *USED, "d"), 99)
    gone = evict(policy, 4, pins="xy", spared="d")
    assert gone == [name for name in everything if name not in ("x", "xy", "d")][:4]
    assert evict(policy, 99) == [name for name in everything if name not in gone]


@given(
    st.sampled_from(sorted(EVICTIONS)),
    st.lists(st.one_of(st.text("ab", min_size=1, max_size=6), st.integers(1, 6))),
)
def test_leaves_go_first(eviction: str, steps: list[str | int]) -> None:
    policy = EVICTIONS[eviction]()
    for step in steps:
        if isinstance(step, str):
            use(policy, step)
            continue
        held = {cast(str, name) for name in policy.held}
        for name in evict(policy, step):
            held.remove(name)
            assert not any(other.startswith(name) for other in held), "a head went before its tail"
        assert held == set(policy.held)


@given(st.lists(st.one_of(st.text("ab", min_size=1, max_size=6), st.integers(1, 6))))
def test_first_in_first_out_is_by_each_blocks_own_arrival_among_the_leaves(steps: list[str | int]) -> None:
    """Why `first_in` may rank a head by the newest of its tails."""
    policy = RankEviction(first_in)
    arrivals: dict[str, int] = {}
    for now, step in enumerate(steps):
        if isinstance(step, str):
            use(policy, step)
            for name in chain(step):
                arrivals.setdefault(cast(str, name), now)
            continue
        for name in evict(policy, step):
            leaves = [leaf for leaf in arrivals if not any(other[:-1] == leaf for other in arrivals)]
            assert arrivals[name] == min(arrivals[leaf] for leaf in leaves)
            del arrivals[name]


@pytest.mark.parametrize("eviction", sorted(EVICTIONS))
def test_what_left_one_tier_is_taken_in_by_another_with_its_history(eviction: str) -> None:
    upper, lower = filled(eviction, *USED), EVICTIONS[eviction]()
    everything = evict(filled(eviction, *USED), 99)
    lower.admit(upper.evict(4, (), ()))
    lower.admit(upper.evict(99, (), ()))
    assert not upper.held
    assert evict(lower, 99) == everything


@pytest.mark.parametrize("eviction", sorted(EVICTIONS))
def test_heads_are_what_the_names_say(eviction: str) -> None:
    policy = filled(eviction, "abc", "abd", "x")
    assert policy.heads() == {"a": None, "ab": "a", "abc": "ab", "abd": "ab", "x": None}


def test_coming_and_going_leaves_nothing_behind() -> None:
    policy = RankEviction(first_in)
    for _ in range(1000):
        use(policy, "abc")
        policy.admit(policy.remove(chain("abc")[::-1]))
    assert len(policy._heap) <= 2 * 3 + 100 + 3
    assert evict(policy, 99) == ["abc", "ab", "a"]
