from __future__ import annotations

from isthmus.core.conductor import FetchOrder, NodeJoined, Paths
from isthmus.core.conductor.estimates import can_copy
from isthmus.core.conductor.view import View
from isthmus.core.cost import Curve
from isthmus.core.types import NodeId, Role

from .views import LINK, MS, SLOW, arrival, estimator, queue_up, view_of

NAMES = list(range(10))
P, D = Role.PREFILL, Role.DECODE


def _joined(name: str, cost: Curve, paths: Paths = LINK, block_size: int = 4) -> NodeJoined:
    return NodeJoined(NodeId(name), P, 1000, block_size, cost, paths)


def test_one_token_is_computed_at_least() -> None:
    view = view_of(P, D)
    view.index.store(view.prefills[0].bit, NAMES)
    assert estimator(view, arrival(40, NAMES)).local(0).work_ns == 1 * MS


def test_a_fetch_runs_while_the_request_waits_and_computes() -> None:
    view = view_of(P, P, D)
    source, target = view.prefills
    view.index.store(source.bit, NAMES)
    view.index.store(target.bit, NAMES[:2])
    for wait, tokens, work in ((0, 50, 10), (0, 45, 8), (5, 45, 5), (100, 45, 5)):
        queue_up(view, 0, wait)
        fetched = estimator(view, arrival(tokens, NAMES)).fetched(1, source, 10)
        assert (fetched.work_ns, fetched.ttft_ns) == (work * MS, (wait + work) * MS)
        assert (fetched.cached, fetched.own, fetched.fetch_bytes, fetched.source) == (10, 2, 8000, source)
        assert fetched.fetch == FetchOrder(NodeId("n0"), 2, 10, 8 * MS)
        computes = tokens - 40 >= 8 - wait
        assert fetched.compute_ns == ((tokens - 40) * MS if computes else 0)


def test_loading_hides_behind_computing_or_takes_its_place() -> None:
    for memory, work in ((0, 10), (10_000_000, 10), (500_000, 20)):
        view = view_of(P, D, paths=Paths(memory=memory))
        view.index.store(view.prefills[0].bit, NAMES)
        local = estimator(view, arrival(50, NAMES)).local(0)
        assert local.work_ns == work * MS
        assert local.compute_ns == (10 * MS if work == 10 else 0)


def test_a_disk_is_read_while_the_request_waits() -> None:
    view = view_of(P, D, paths=Paths(disk=100_000))  # 10 ms a block
    view.index.store(view.prefills[0].bit, NAMES)
    view.index.demote(view.prefills[0].bit, NAMES[7:])
    for wait, work in ((0, 30), (15, 15), (25, 10), (90, 10)):
        queue_up(view, wait)
        local = estimator(view, arrival(50, NAMES)).local(0)
        assert (local.work_ns, local.compute_ns) == (work * MS, 10 * MS if work == 10 else 0)


def test_calibration_scales_computing_alone() -> None:
    view = view_of(P, P, D)
    source = view.prefills[0]
    view.index.store(source.bit, NAMES)
    view.clusters[""].calibration.add(30, 10)
    found = estimator(view, arrival(50, NAMES))
    assert found.local(1).work_ns == 150 * MS
    assert found.local(1).compute_ns == 50 * MS
    fetched = found.fetched(1, source, 10)
    assert fetched.work_ns == 30 * MS
    assert fetched.fetch is not None and fetched.fetch.until_ns == 10 * MS


def test_each_kind_of_node_has_its_own_cost() -> None:
    view = view_of(P, D)
    view.join(_joined("slow", SLOW))
    found = estimator(view, arrival(10))
    assert [found.local(at).work_ns for at in range(2)] == [10 * MS, 20.1 * MS]


def test_who_can_copy_to_whom() -> None:
    view = view_of(P, P)
    view.join(_joined("unlinked", SLOW, Paths()))
    view.join(_joined("other layout", SLOW, LINK, block_size=8))
    first, second, unlinked, other = view.nodes.values()
    assert can_copy(first, second) and can_copy(second, first)
    assert not can_copy(first, unlinked) and not can_copy(unlinked, first)
    assert not can_copy(first, other)


def test_a_slot_is_used_again() -> None:
    view: View = view_of(P, P, D)
    first = view.prefills[0]
    view.index.store(first.bit, NAMES)
    view.leave(first)
    view.join(_joined("new", SLOW))
    assert estimator(view, arrival(50, NAMES)).deepest == 0
    assert view.nodes[NodeId("new")].slot == first.slot
