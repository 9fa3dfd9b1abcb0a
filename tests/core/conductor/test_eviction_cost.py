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
from isthmus.core.types import NS_PER_S, BlockName, NodeId, RequestId, Role

from .views import CURVE, LINK, MS, arrival, view_of

P, D = Role.PREFILL, Role.DECODE


class Ghosts:
    """Two prefill nodes with caches of so many blocks; one block was inserted."""

    def __init__(self, cache_blocks: int = 10, calibration: float = 1.0) -> None:
        self.view = view_of(P, P, D)
        for node in self.view.nodes.values():
            node.cache_blocks = cache_blocks
        self.cluster = self.view.clusters[""]
        self.cluster.recent.insert(1, 0)
        self.cluster.calibration.add(int(10 * calibration), 10)
        self.cost = EvictionCost(self.view)

    def evicted(self, *gone: int, count: int | None = None, node: int = 0) -> None:
        """`gone`: blocks that no node has any more; `count`: how many the node evicted."""
        self.cost.evicted(self.view.prefills[node], len(gone) if count is None else count, list(gone))

    def loss_ms(self, num_tokens: int, *names: int, cached: int = 0) -> float:
        """Node time lost so far, when a request was asked for."""
        self.cost.asked(arrival(num_tokens, names), self.cluster, cached, 0)
        return self.cluster.recent.loss_per_block_ns(0) / MS


def test_what_is_computed_again_was_lost_once() -> None:
    ghosts = Ghosts()
    ghosts.evicted(1, 2, 3)
    assert [ghosts.loss_ms(30, 1, 2, 3, 4) for _ in range(2)] == [12, 12]  # three blocks of four tokens
    ghosts = Ghosts()
    ghosts.evicted(3, 4, 6)
    assert ghosts.loss_ms(40, 1, 2, 3, 4, 5, 6, cached=2) == 8, "only the run after the cached prefix counts"
    assert ghosts.loss_ms(40, 5, 6) == 8, "5 was never here"
    ghosts = Ghosts()
    ghosts.evicted(1, 2)
    assert ghosts.loss_ms(8, 1, 2) == 7, "one token is computed in any case"
    slower = Ghosts(calibration=2.0)
    slower.evicted(1)
    assert slower.loss_ms(30, 1) == 8


@pytest.mark.parametrize(("size", "further", "lost"), [(10, 9, 4), (10, 10, 4), (10, 11, 0), (0, 0, 0)])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_ghost_counts_for_as_many_evictions_as_its_node_has_room(
    size: int, further: int, lost: int, elsewhere: bool
) -> None:
    """Those count of blocks too that another node has; a node of unknown size has no ghosts."""
    ghosts = Ghosts(size)
    ghosts.evicted(1)
    ghosts.evicted(*([] if elsewhere else range(100, 100 + further)), count=further)
    ghosts.evicted(count=50, node=1)  # another node's evictions do not age it
    assert ghosts.loss_ms(30, 1) == lost


def test_what_is_kept_is_bounded_by_the_caches() -> None:
    ghosts = Ghosts()
    for at in range(5000):
        ghosts.evicted(3 * at, 3 * at + 1, 3 * at + 2, node=at % 2)
        assert len(ghosts.cost._younger) <= 20 + 3 and len(ghosts.cost._older) <= 20 + 3


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
