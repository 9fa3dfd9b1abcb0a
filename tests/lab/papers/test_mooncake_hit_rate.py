from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.types import BlockName
from isthmus.lab.papers.mooncake.hit_rate import (
    OPTIMUM,
    RANKS,
    HitRate,
    Prompt,
    hit_rate,
    optimal_hits,
    ranked_hits,
)
from isthmus.lab.planner.demand import pool_hits

Chain = tuple[BlockName, ...]
POLICIES = ("lru", *RANKS, OPTIMUM)


def chain(path: str) -> Chain:
    """Names of the blocks of "abc": "a", "ab", "abc". A name says what comes before it."""
    return tuple(cast(BlockName, path[: end + 1]) for end in range(len(path)))


def prompts(*paths: str) -> list[Prompt]:
    """Prompts of blocks of 10 tokens, the last of them holding 4."""
    return [(10 * len(path) - 6, chain(path)) for path in paths]


workloads = st.lists(st.text("ab", min_size=1, max_size=4).map(chain), max_size=6)
long_workloads = st.lists(st.text("abc", min_size=1, max_size=6).map(chain), max_size=30)


def closed_subsets(names: Iterable[BlockName], size: int) -> list[frozenset[str]]:
    every = sorted(cast(Iterable[str], set(names)))
    subsets = [frozenset(some) for count in range(size + 1) for some in combinations(every, count)]
    return [some for some in subsets if all(len(name) == 1 or name[:-1] in some for name in some)]


def most_hits(chains: list[Chain], capacity: int) -> int:
    """Tries every set of blocks, closed under prefixes, that could be kept after each request."""
    best: dict[frozenset[str], int] = {frozenset(): 0}
    for names in chains:
        reached: dict[frozenset[str], int] = {}
        for held, hits in best.items():
            found = hits + len(held & set(cast(tuple[str, ...], names)))
            for kept in closed_subsets(cast(Iterable[BlockName], {*held, *names}), capacity):
                reached[kept] = max(reached.get(kept, 0), found)
        best = reached
    return max(best.values())


def test_the_shares_of_blocks_and_of_tokens() -> None:
    rate = hit_rate(prompts("ab", "abc", "abc"), None, "lru", block_size=10)
    # Found: none, 2 of 3 blocks, and all 3, of which the last holds 4 tokens.
    assert rate == HitRate(blocks=(2 + 3) / 8, tokens=(20 + 24) / (14 + 24 + 24))


def test_requests_of_the_warm_up_fill_the_pool_and_are_not_counted() -> None:
    rate = hit_rate(prompts("ab", "cd", "ab", "xy"), None, "lru", block_size=10, warmup=0.5)
    assert rate == HitRate(blocks=0.5, tokens=0.5)


def test_the_least_recently_used_chain_is_lost_and_the_optimum_keeps_what_is_needed_next() -> None:
    workload = prompts("ab", "cd", "ab", "cd")
    assert hit_rate(workload, 2, "lru", block_size=10).blocks == 0
    assert hit_rate(workload, 2, "optimum", block_size=10).blocks == 2 / 8


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_asked_and_no_room(policy: str) -> None:
    assert hit_rate([], 5, policy) == HitRate(0.0, 0.0)
    assert hit_rate(prompts("ab", "ab"), 0, policy) == HitRate(0.0, 0.0)


@settings(max_examples=60)
@given(workloads, st.integers(0, 5))
def test_no_choice_of_what_to_keep_finds_more_than_the_optimum(chains: list[Chain], capacity: int) -> None:
    assert sum(optimal_hits(chains, capacity)) == most_hits(chains, capacity)


@given(long_workloads, st.integers(0, 25))
def test_no_policy_finds_more_than_the_optimum(chains: list[Chain], capacity: int) -> None:
    most = sum(optimal_hits(chains, capacity))
    assert sum(pool_hits(chains, capacity)) <= most
    for rank in RANKS.values():
        assert sum(ranked_hits(chains, capacity, rank)) <= most


class Facts:
    """What is known of a block, all of it since it came to the pool."""

    uses = last_use = last_store = reach = 0


KEYS: dict[str, Callable[[str, Facts], tuple[int, ...]]] = {
    "lfu": lambda name, facts: (facts.uses, facts.last_use),
    "fifo": lambda name, facts: (facts.last_store,),
    "length_aware": lambda name, facts: (facts.uses, facts.reach, facts.last_use),
    "length_aware_early": lambda name, facts: (facts.uses, -len(name), facts.last_use),
}


def plain_hits(chains: list[list[str]], capacity: int, policy: str) -> Iterator[int]:
    """The same rules the plain way: leaves are searched for, and victims go one by one."""
    held: dict[str, Facts] = {}
    for now, names in enumerate(chains, 1):
        is_new = not set(names) <= held.keys()
        yield sum(name in held for name in names)
        for name in names:
            facts = held.setdefault(name, Facts())
            facts.uses, facts.last_use, facts.reach = facts.uses + 1, now, max(facts.reach, len(names))
            facts.last_store = now if is_new else facts.last_store
        while len(held) > capacity:
            leaves = [name for name in held if not any(other[:-1] == name for other in held)]
            left = [name for name in leaves if name not in names]
            victim = min(left, key=lambda name: (KEYS[policy](name, held[name]), name), default=None)
            del held[victim or max(set(names) & held.keys(), key=len)]


@given(long_workloads, st.integers(0, 12), st.sampled_from(sorted(RANKS)))
def test_the_lowest_rank_goes_first_as_if_it_was_searched_for(
    chains: list[Chain], capacity: int, policy: str
) -> None:
    plain = plain_hits(cast(list[list[str]], [list(names) for names in chains]), capacity, policy)
    assert list(ranked_hits(chains, capacity, RANKS[policy])) == list(plain)


@given(long_workloads, st.integers(0, 25))
def test_lru_finds_at_every_request_at_least_what_a_smaller_pool_finds(
    chains: list[Chain], capacity: int
) -> None:
    smaller, larger = pool_hits(chains, capacity), pool_hits(chains, capacity + 1)
    assert all(few <= many for few, many in zip(smaller, larger, strict=True))


@given(long_workloads, st.integers(0, 25))
def test_the_optimum_grows_with_capacity(chains: list[Chain], capacity: int) -> None:
    assert sum(optimal_hits(chains, capacity)) <= sum(optimal_hits(chains, capacity + 1))


@given(long_workloads, st.sampled_from(POLICIES))
def test_without_a_limit_every_policy_finds_all_that_came_before(chains: list[Chain], policy: str) -> None:
    workload = [(10 * len(names), names) for names in chains]
    seen: set[BlockName] = set()
    found = 0
    for names in chains:
        found += len(seen & set(names))
        seen.update(names)
    asked = sum(map(len, chains))
    assert hit_rate(workload, None, policy, block_size=10).blocks == (found / asked if asked else 0)
