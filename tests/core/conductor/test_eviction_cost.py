from __future__ import annotations

from collections import OrderedDict
from random import Random

import pytest

from isthmus.core.conductor import (
    BlocksEvicted,
    BlocksStored,
    Conductor,
    FirstToken,
    NodeJoined,
    RequestArrived,
    RequestEnded,
    Route,
    Rules,
)
from isthmus.core.conductor.eviction_cost import EvictionCost
from isthmus.core.conductor.view import View
from isthmus.core.types import NS_PER_S, BlockName, NodeId, RequestId, Role

from .views import CURVE, LINK, MS, arrival, view_of

P, D = Role.PREFILL, Role.DECODE


def no_ghosts_yet(*roles: Role, cache_blocks: int = 10) -> tuple[View, EvictionCost]:
    view = view_of(*roles)
    for node in view.nodes.values():
        node.cache_blocks = cache_blocks
    view.clusters[""].recent.insert(1, 0)
    return view, EvictionCost(view)


def loss_ms(view: View) -> float:
    """Node time lost so far: one block was inserted."""
    return view.clusters[""].recent.loss_per_block_ns(0) / MS


def test_what_is_computed_again_was_lost() -> None:
    view, cost = no_ghosts_yet(P, D)
    cost.evicted(view.prefills[0], 3, [1, 2, 3])
    cost.asked(arrival(30, [1, 2, 3, 4]), view.clusters[""], 0, 0)
    assert loss_ms(view) == 12  # three blocks of four tokens
    cost.asked(arrival(30, [1, 2, 3, 4]), view.clusters[""], 0, 0)
    assert loss_ms(view) == 12  # now they are there again


def test_only_the_run_after_the_cached_prefix_counts() -> None:
    view, cost = no_ghosts_yet(P, D)
    cost.evicted(view.prefills[0], 3, [3, 4, 6])
    cost.asked(arrival(40, [1, 2, 3, 4, 5, 6]), view.clusters[""], 2, 0)
    assert loss_ms(view) == 8
    cost.asked(arrival(40, [5, 6]), view.clusters[""], 0, 0)
    assert loss_ms(view) == 8  # 5 was never here


def test_one_token_is_computed_in_any_case() -> None:
    view, cost = no_ghosts_yet(P, D)
    cost.evicted(view.prefills[0], 2, [1, 2])
    cost.asked(arrival(8, [1, 2]), view.clusters[""], 0, 0)
    assert loss_ms(view) == 7


def test_a_ghost_counts_for_as_many_evictions_as_its_node_has_room() -> None:
    for further, lost in ((9, 4), (10, 4), (11, 0)):
        view, cost = no_ghosts_yet(P, P, D)
        cost.evicted(view.prefills[0], 1, [1])
        cost.evicted(view.prefills[0], further, list(range(100, 100 + further)))
        cost.evicted(view.prefills[1], 50, [])  # another node's evictions do not age it
        cost.asked(arrival(30, [1]), view.clusters[""], 0, 0)
        assert loss_ms(view) == lost, further


def test_blocks_that_another_node_still_has_are_no_ghosts_but_they_age() -> None:
    view, cost = no_ghosts_yet(P, D)
    node = view.prefills[0]
    cost.evicted(node, 1, [1])
    cost.evicted(node, 11, [])
    cost.asked(arrival(30, [1]), view.clusters[""], 0, 0)
    assert loss_ms(view) == 0


def test_a_loss_is_measured_like_all_work() -> None:
    view, cost = no_ghosts_yet(P, D)
    view.clusters[""].calibration.add(20, 10)
    cost.evicted(view.prefills[0], 1, [1])
    cost.asked(arrival(30, [1]), view.clusters[""], 0, 0)
    assert loss_ms(view) == 8


def test_a_node_of_unknown_size_has_no_ghosts() -> None:
    view, cost = no_ghosts_yet(P, D, cache_blocks=0)
    cost.evicted(view.prefills[0], 1, [1])
    cost.asked(arrival(30, [1]), view.clusters[""], 0, 0)
    assert loss_ms(view) == 0


def test_what_is_kept_is_bounded_by_the_caches() -> None:
    view, cost = no_ghosts_yet(P, P, D)
    for at in range(5000):
        cost.evicted(view.prefills[at % 2], 3, [3 * at, 3 * at + 1, 3 * at + 2])
        assert len(cost._younger) <= 20 + 3 and len(cost._older) <= 20 + 3


class Lru:
    """One node's cache, block by block, told to a conductor."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held = capacity, OrderedDict[BlockName, None]()

    def use(self, names: list[BlockName]) -> tuple[list[BlockName], list[BlockName]]:
        fresh = [name for name in names if name not in self.held]
        for name in reversed(names):
            self.held[name] = None
            self.held.move_to_end(name)
        gone = [self.held.popitem(last=False)[0] for _ in range(max(0, len(self.held) - self.capacity))]
        return fresh, gone


@pytest.mark.parametrize("capacity", [20, 60])
def test_the_loss_predicts_what_a_larger_cache_saves(capacity: int) -> None:
    """Node time per insertion, learned at one size, against what one more block of cache saves in truth."""

    def run(size: int) -> tuple[float, int, float]:
        random, cache = Random(1), Lru(size)
        conductor = Conductor(Rules(max_requests=10**9))
        conductor.on(NodeJoined(NodeId("d"), D, 10**6, 4), 0)
        conductor.on(NodeJoined(NodeId("p"), P, 10**6, 4, CURVE, LINK, size), 0)
        computed = inserted = 0
        for at in range(4000):
            now = at * NS_PER_S // 100
            names: list[BlockName] = [min(200, int(random.paretovariate(0.7)))]
            fresh, gone = cache.use(names)
            computed, inserted = computed + len(fresh), inserted + len(fresh)
            request = RequestId(f"r{at}")
            (route,) = conductor.on(RequestArrived(request, "", 5, 1, tuple(names)), now)
            assert isinstance(route, Route)
            conductor.on(FirstToken(request, 1), now + route.work_ns)
            conductor.on(RequestEnded(request, 1), now + route.work_ns)
            if fresh:
                conductor.on(BlocksStored(NodeId("p"), tuple(fresh)), now)
            if gone:
                conductor.on(BlocksEvicted(NodeId("p"), tuple(gone)), now)
        return computed * 4.0, inserted, conductor.view.clusters[""].recent.loss_per_block_ns(now) / MS

    less, inserted, loss = run(capacity)
    more, _, _ = run(capacity + capacity // 2)
    saved = (less - more) / (capacity // 2)  # ms, per block of cache, in all
    assert loss > 0
    # One more insertion shortens everyone's stay by one place for one stay: C insertions cost one block of cache.
    assert saved / 3 < loss * inserted / capacity < 3 * saved
