"""Which blocks go first, and of which tenant."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.scheduler.tiers import RecencyEviction, TierCache, surplus
from isthmus.core.types import NOBODY, BlockName, Tenant

Chain = tuple[BlockName, ...]


def chain(path: str) -> Chain:
    """Names of the blocks of "abc": "a", "ab", "abc". A name says what comes before it."""
    return tuple(cast(BlockName, path[: end + 1]) for end in range(len(path)))


def filled(*paths: str) -> RecencyEviction:
    order = RecencyEviction()
    for path in paths:
        use(order, path)
    return order


def use(order: RecencyEviction, path: str) -> None:
    order.use(chain(path), sum(name in order.held for name in chain(path)))


def evict(order: RecencyEviction, count: int, pins: str = "", spared: str = "") -> list[str]:
    return [cast(str, name) for name, _ in order.evict(count, set(chain(pins)), chain(spared))]


# Used in this order.
USED = ("pq", "ab", "xyz", "abc", "pq", "ab", "d")
GO = ["xyz", "xy", "x", "abc", "pq", "p", "ab", "a", "d"]


def test_what_was_used_longest_ago_goes_first_a_tail_before_its_head() -> None:
    assert evict(filled(*USED), 99) == GO
    one_by_one = filled(*USED)
    assert [evict(one_by_one, 1)[0] for _ in GO] == GO


def test_pinned_and_spared_blocks_keep_their_turn() -> None:
    order = filled(*USED)
    gone = evict(order, 4, pins="xy", spared="d")
    assert gone == [name for name in GO if name not in ("x", "xy", "d")][:4]
    assert evict(order, 99) == [name for name in GO if name not in gone]


def test_what_left_one_tier_is_taken_in_by_another_with_its_history() -> None:
    upper, lower = filled(*USED), RecencyEviction()
    lower.admit(upper.evict(4, (), ()))
    lower.admit(upper.evict(99, (), ()))
    assert not upper.held
    assert evict(lower, 99) == GO


def test_heads_are_what_the_names_say() -> None:
    assert filled("abc", "abd", "x").heads() == {"a": None, "ab": "a", "abc": "ab", "abd": "ab", "x": None}


ACME, GLOBEX, THIRD = Tenant("acme"), Tenant("globex"), Tenant("third", 2.0)


def salted(tenant: Tenant, path: str) -> Chain:
    """Names that say what comes before them, and are salted with the tenant's name."""
    return tuple(cast(BlockName, f"{tenant.name}:{path[: end + 1]}") for end in range(len(path)))


def flood(cache: TierCache, tenant: Tenant, num_prompts: int, length: int = 4) -> None:
    for number in range(num_prompts):
        cache.put(tuple(cast(BlockName, (tenant.name, number, at)) for at in range(length)), tenant)


SIZES = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 50))


@given(SIZES, st.lists(st.sampled_from([0.25, 0.5, 1, 2, 3, 7]), min_size=5, max_size=5), st.integers(0, 120))
def test_what_is_given_comes_from_those_that_have_most_next_to_their_weight(
    sizes: dict[str, int], drawn: list[float], count: int
) -> None:
    weights = dict(zip("abcde", drawn, strict=True))

    given_up = surplus(sizes, weights, count)

    assert sum(given_up.values()) == min(count, sum(sizes.values()))
    left = {name: sizes[name] - given_up.get(name, 0) for name in sizes}
    assert all(0 <= left[name] <= sizes[name] for name in sizes)
    for giver, given_blocks in given_up.items():
        for other in sizes:  # to within one block, nobody who gave is left with less than somebody who has more
            if given_blocks:
                assert left[other] / weights[other] <= (left[giver] + 1) / weights[giver] + 1e-9


@pytest.mark.parametrize(("dram", "ssd"), [(40, 0), (16, 24)])
def test_one_tenants_flood_leaves_another_half_of_what_fits(dram: int, ssd: int) -> None:
    cache = TierCache(dram, ssd)
    flood(cache, GLOBEX, 10)
    assert cache.sizes() == {"globex": 40}, "a lone tenant fills everything"

    flood(cache, ACME, 400)

    cache.check()
    assert cache.sizes() == {"globex": 20, "acme": 20}


def test_a_share_is_as_large_as_its_weight() -> None:
    cache = TierCache(30)
    flood(cache, THIRD, 20)
    flood(cache, ACME, 200)
    assert cache.sizes() == {"third": 20, "acme": 10}
    flood(cache, THIRD, 200)
    assert cache.sizes() == {"third": 20, "acme": 10}


def test_what_a_tenant_does_not_use_of_its_share_others_have() -> None:
    cache = TierCache(30)
    cache.put(salted(GLOBEX, "abcde"), GLOBEX)
    flood(cache, ACME, 100, 5)
    assert cache.sizes() == {"globex": 5, "acme": 25}
    assert cache.match(salted(GLOBEX, "abcde")) == (5, 0)


def test_what_was_found_on_the_ssd_is_of_who_uses_it_first() -> None:
    cache = TierCache(4, 40)
    for root in "ab":
        for path in ("xyz", "xw"):
            cache.restore(salted(GLOBEX, root + path))
    cache.put(salted(ACME, "m"), ACME)
    assert cache.sizes() == {"": 10, "acme": 1}

    cache.put(salted(GLOBEX, "ax"), GLOBEX)

    cache.check()
    assert cache.sizes() == {"": 5, "acme": 1, "globex": 5}
    flood(cache, ACME, 30)
    cache.check()
    assert cache.match(salted(GLOBEX, "axyz"))[0] == 4
    assert cache.match(salted(GLOBEX, "axw"))[0] == 3


def test_a_chain_whose_head_is_anothers_is_the_others_too() -> None:
    """No live tenant sees another's names, but a trace may say so. What is held stays closed under prefixes."""
    cache = TierCache(8)
    shared = salted(NOBODY, "abcd")
    cache.put(shared[:2], ACME)
    cache.put(shared, GLOBEX)
    assert cache.sizes() == {"acme": 4}
    flood(cache, GLOBEX, 2)
    cache.check()


def test_pinned_blocks_stay_whoever_is_above_its_share() -> None:
    cache = TierCache(8)
    first, second = salted(ACME, "abcd"), salted(ACME, "wxyz")
    cache.put(first, ACME)
    cache.put(second, ACME)
    cache.pin(first)
    cache.pin(second)
    change = cache.put(salted(GLOBEX, "a"), GLOBEX)
    assert change.stored == () and cache.sizes()["acme"] == 8
    cache.unpin(second)
    assert cache.put(salted(GLOBEX, "abc"), GLOBEX).evicted == second[:0:-1]


OWNERS = st.sampled_from([ACME, GLOBEX, THIRD])
PUTS = st.lists(st.tuples(OWNERS, st.text("ab", min_size=1, max_size=6)), max_size=40)


@given(PUTS, st.sampled_from([(9, 0), (3, 6), (0, 5)]))
def test_nobody_within_its_share_gives_to_others(
    puts: list[tuple[Tenant, str]], capacity: tuple[int, int]
) -> None:
    cache, weights = TierCache(*capacity), {"acme": 1.0, "globex": 1.0, "third": 2.0}
    for tenant, path in puts:
        before = {name: cache.dram.held.get(name) for name in cache.dram.held}
        change = cache.put(salted(tenant, path), tenant)
        cache.check()
        if not isinstance(next(iter(before.values()), None), str):
            continue  # one tenant so far
        level = max((len([*filter(name.__eq__, cache.dram.held.values())]) / w for name, w in weights.items()))
        for name in (*change.evicted, *change.demoted):
            owner = before.get(name)
            if owner is not None and owner != tenant.name:
                kept = len([*filter(owner.__eq__, cache.dram.held.values())])
                assert (kept + 1) / weights[owner] >= level - 1e-9


@given(PUTS)
def test_a_lone_tenants_changes_are_those_without_tenants(puts: list[tuple[Tenant, str]]) -> None:
    plain, named = TierCache(5, 4), TierCache(5, 4)
    for tenant, path in puts:
        names = salted(tenant, path)
        assert plain.put(names) == named.put(names, Tenant("acme", 3.0))
