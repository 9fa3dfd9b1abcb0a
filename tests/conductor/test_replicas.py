from __future__ import annotations

from random import Random

import pytest

from isthmus.blocks import state_names
from isthmus.conductor import Abort, Action, FetchFinished, Paths, Replicate, Route, Rules
from isthmus.conductor.copies import begin
from isthmus.conductor.policies import POLICIES
from isthmus.conductor.replicas import REMEMBERED, Replicas
from isthmus.conductor.view import ClusterView
from isthmus.types import NS_PER_S, BlockName, NodeId, RequestId, Role

from .cluster import Cluster
from .test_conductor import play
from .views import LINK, MS, arrival, estimator, queue_up, view_of

P, D = Role.PREFILL, Role.DECODE
NAMES: list[BlockName] = list(range(10))
SLOW = Paths(network=50_000, handover=50_000)
"""A block takes 20 ms from node to node, and 4 ms to compute: only parts of a fetch pay."""
CRAWL = Paths(network=10_000, handover=10_000)
"""A block takes 100 ms: no fetch pays."""


def busy_holder(*waits_ms: float, paths: Paths = SLOW) -> tuple[ClusterView, Replicas]:
    """The first of three nodes has the prefix; their queues are so long."""
    view = view_of(P, P, P, D, paths=paths)
    view.index.store(view.prefills[0].bit, NAMES)
    queue_up(view, *waits_ms)
    return view, Replicas(view)


def ask(
    view: ClusterView, replicas: Replicas, names: list[BlockName] = NAMES, now: int = 0
) -> Replicate | None:
    found = estimator(view, arrival(4 * len(names) + 5, names), now)
    placement = POLICIES["isthmus"](found, Rules())
    return replicas.consider(found, placement)


def test_a_prefix_is_copied_to_the_idlest_node_when_asked_for_again() -> None:
    view, replicas = busy_holder(30, 20, 5)
    assert ask(view, replicas) is None
    copy = ask(view, replicas)
    assert copy == Replicate(tuple(NAMES), NodeId("n0"), NodeId("n2"))
    first, _, third = view.prefills
    assert list(first.link_out.copies) == list(third.link_in.copies) == list(view.replicas.values())
    view.check()


def test_nobody_copies_where_the_holder_is_free_or_the_fetch_is_free() -> None:
    view, replicas = busy_holder(0, 0, 0)
    assert [ask(view, replicas) for _ in range(5)] == [None] * 5
    view, replicas = busy_holder(30, 20, 5, paths=Paths(network=10**9))
    assert [ask(view, replicas) for _ in range(5)] == [None] * 5


def test_a_placement_away_from_the_holder_is_a_copy_itself() -> None:
    view, replicas = busy_holder(1000, 20, 5)
    assert [ask(view, replicas) for _ in range(5)] == [None] * 5  # n2 computes it
    view, replicas = busy_holder(30, 20, 5)
    assert ask(view, replicas) is None
    queue_up(view, 1000, 20, 5)
    assert ask(view, replicas) is None
    queue_up(view, 30, 20, 5)
    assert ask(view, replicas) is None  # what was paid before is settled
    assert ask(view, replicas) is not None


def test_nobody_copies_for_a_prefix_that_nobody_has() -> None:
    view, replicas = busy_holder(30, 20, 5)
    assert [ask(view, replicas, [50, 51]) for _ in range(5)] == [None] * 5


def test_nobody_copies_without_a_link() -> None:
    view, replicas = busy_holder(30, 20, 5, paths=Paths())
    assert [ask(view, replicas) for _ in range(5)] == [None] * 5


def test_one_copy_of_a_prefix_at_a_time_and_none_on_a_busy_link() -> None:
    view, replicas = busy_holder(30, 20, 5)
    copies = [ask(view, replicas) for _ in range(10)]
    assert sum(copy is not None for copy in copies) == 1
    view, replicas = busy_holder(30, 20, 5)
    begin(view.prefills[0].link_out, view.prefills[1].link_in, 10**6, 0)
    assert [ask(view, replicas) for _ in range(10)] == [None] * 10
    view, replicas = busy_holder(30, 20, 5)
    begin(view.prefills[1].link_out, view.prefills[2].link_in, 10**6, 0)
    assert [ask(view, replicas) for _ in range(10)] == [None] * 10


def test_a_copy_ends_when_its_blocks_are_there_or_a_node_is_not() -> None:
    for how in ("stored", "source left", "target left", "time passes"):
        view, replicas = busy_holder(30, 20, 5)
        ask(view, replicas)
        assert ask(view, replicas) is not None
        first, second, third = view.prefills
        match how:
            case "stored":
                replicas.stored(second, tuple(NAMES))
                replicas.stored(third, tuple(NAMES[:9]))
                assert view.replicas
                replicas.stored(third, tuple(NAMES))
            case "source left":
                replicas.left(first)
            case "target left":
                replicas.left(third)
            case "time passes":
                ask(view, replicas, now=NS_PER_S // 2)
        assert not view.replicas and not first.link_out.copies and not third.link_in.copies, how


def test_room_in_the_cache_has_its_price() -> None:
    """Each ask pays 25 ms; ten blocks push out what costs 10 ms each, and there will be two holders."""
    view, replicas = busy_holder(30, 20, 5)
    view.pools[""].recent.insert(1, 0)
    view.pools[""].recent.lose(10 * MS, 0)
    asks = 0
    while ask(view, replicas) is None:
        asks += 1
        assert asks < 50
    assert asks >= 8


def test_links_that_fetches_need_have_their_price() -> None:
    def asks_until(num_fetches: int) -> int:
        view, replicas = busy_holder(30, 20, 5)
        found = estimator(view, arrival(45, NAMES))
        for _ in range(num_fetches):
            fetched = found.fetched(1, view.prefills[0], 10)  # of this or any prefix
            fetched.ttft_ns = 0
            replicas.consider(found, fetched)
        return next(count for count in range(1, 1000) if ask(view, replicas) is not None)

    assert asks_until(0) == 2
    assert asks_until(10_000) > 10


def test_asks_of_long_ago_do_not_count() -> None:
    view, replicas = busy_holder(30, 20, 5)
    for hour in range(5):
        now = hour * 3600 * NS_PER_S
        queue_up(view, 30, 20, 5, now=now)
        assert ask(view, replicas, now=now) is None


def test_what_is_remembered_is_bounded() -> None:
    view, replicas = busy_holder(30, 20, 5)
    for at in range(3 * REMEMBERED):
        names: list[BlockName] = list(range(100 * at, 100 * at + 3))
        view.index.store(view.prefills[0].bit, names)
        ask(view, replicas, names)
    assert len(replicas._asked) <= REMEMBERED


def test_a_fetch_counts_with_a_copy_under_way() -> None:
    view, replicas = busy_holder(30, 20, 5)
    ask(view, replicas)
    alone = estimator(view, arrival(45, NAMES)).fetched(2, view.prefills[0], 10).ttft_ns
    assert ask(view, replicas) is not None
    assert estimator(view, arrival(45, NAMES)).fetched(2, view.prefills[0], 10).ttft_ns > 1.5 * alone


# The whole way.


def hot(rules: Rules, paths: Paths, state_blocks: int = 0) -> Cluster:
    """A burst for one prefix, whose holder is busy; copies arrive when they should."""
    some = Cluster(rules, paths, step_ns=0)
    for node, role in (("p1", P), ("p2", P), ("p3", P), ("p4", P), ("p5", P), ("d1", D)):
        some.join(node, role, 10_000, state_blocks=state_blocks)
    some.store("p1", *NAMES, *state_names(NAMES[-1], state_blocks))
    some.arrives("long", 30)
    return some


def burst(some: Cluster) -> list[list[Action]]:
    """The answers to six requests for the hot prefix."""
    return [some.arrives(f"r{at}", 45, names=NAMES) for at in range(6)]


@pytest.mark.parametrize("state_blocks", [0, 2])
def test_the_conductor_orders_it_after_the_route(state_blocks: int) -> None:
    some = hot(Rules(policy="isthmus", replicate=True), CRAWL, state_blocks)
    actions = burst(some)
    assert all(isinstance(first, Route) for first, *_ in actions)
    ordered = [action for _, *rest in actions for action in rest]
    assert 0 < len(ordered) <= 3 and all(isinstance(action, Replicate) for action in ordered)
    assert some.conductor.view.replicas
    for action in ordered:
        assert isinstance(action, Replicate)
        some.store(action.target, *action.names)
    assert not some.conductor.view.replicas
    some.drain()


def test_by_default_nothing_is_replicated() -> None:
    some = hot(Rules(policy="isthmus"), CRAWL)
    for at in range(6):
        assert len(some.arrives(f"r{at}", 45, names=NAMES)) == 1


def test_when_its_node_leaves_a_copy_is_forgotten() -> None:
    some = hot(Rules(policy="isthmus", replicate=True), CRAWL)
    burst(some)
    assert some.conductor.view.replicas
    assert all(isinstance(action, Abort | Route) for action in some.leave("p1"))
    assert not some.conductor.view.replicas


def test_random_histories_with_copies() -> None:
    """The judge in `Cluster` sees that a source has the blocks, and the target not all of them."""
    num_copies = 0
    for seed in range(16):
        some = Cluster(Rules(policy="isthmus", replicate=True), paths=SLOW if seed % 2 else LINK)
        for node, role in (("p1", P), ("p2", P), ("p3", P), ("d1", D)):
            some.join(node, role)
        play(some, Random(seed), 300)
        for _, _, actions in some.log:
            num_copies += sum(isinstance(action, Replicate) for action in actions)
        for name in list(some.routes):
            some.on(FetchFinished(RequestId(name), some.routes[name].attempt))
        for copy in list(some.conductor.view.replicas):
            for node in some.joined:
                some.store(node, copy)
        some.drain()
    assert num_copies >= 3
