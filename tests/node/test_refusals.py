"""What a node does not believe, does not do twice, and does not count on."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.attempts import BlocksStored, RequestFailed
from isthmus.node import Node
from isthmus.node import node as node_module
from isthmus.node.events import (
    Begin,
    Broken,
    Fetch,
    Forget,
    Granted,
    Landed,
    Load,
    Loaded,
    Release,
    Save,
    Send,
)
from isthmus.scheduler import BlockPool, Run, Scheduler, Stepped, TierCache
from isthmus.types import NodeId, RequestId, Role

from .world import fetch_of, limits_of, route_of

HERE, PEER = NodeId("here"), NodeId("peer")
KEY = RequestId("r#1")
NAMES = tuple(range(5))


def node_of(held: int = 0) -> Node:
    """With so many of the names in DRAM."""
    made, tiers = limits_of(40, 0), TierCache(30)
    tiers.put(NAMES[:held])
    return Node(dict.fromkeys(Role, made), Scheduler(made, tiers, BlockPool(40), node=HERE))


def begin(part: Role, attempt: int = 1, **fields: Any) -> Begin:
    """An attempt with 22 tokens of prompt: five blocks of four, and two more."""
    ends = {Role.PREFILL: (HERE, PEER), Role.DECODE: (PEER, HERE), Role.MIXED: (HERE, HERE)}
    route = route_of("r", *ends[part], **fields)
    return Begin(RequestId(f"r#{attempt}"), part, route, 22, 30, NAMES)


def kinds(actions: list[Any]) -> list[str]:
    return [type(action).__name__ for action in actions]


def failures(actions: list[Any]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, RequestFailed)]


def test_room_is_granted_once() -> None:
    node = node_of()
    [offer, *_] = node.on(begin(Role.PREFILL), 1)
    assert node.on(Granted(KEY), 2) == [Send(KEY, offer.peer, offer.extent, False)]
    assert node.on(Granted(KEY), 3) == []


def test_a_hand_over_has_not_landed_before_it_is_computed() -> None:
    """Its blocks would go to somebody else while they are written."""
    node = node_of()
    node.on(begin(Role.PREFILL), 1)
    node.on(Granted(KEY), 2)
    free = node.scheduler.pool.available
    assert node.on(Landed(KEY), 3) == []
    assert KEY in node and node.scheduler.pool.available == free
    node.check()


@pytest.mark.parametrize(("held", "own"), [(0, 2), (1, 2), (1, 3)])
def test_a_prefix_that_is_not_here_any_more_is_not_counted_on(held: int, own: int) -> None:
    """At once, so that nobody hands over what follows it."""
    node = node_of(held)
    actions = node.on(begin(Role.DECODE, handover_start=own, recall=fetch_of(HERE, 0, own)), 1)
    assert failures(actions) == ["here: a prefix it was to take from its cache is not there"]
    assert "Grant" not in kinds(actions) and KEY not in node
    node.check_idle()


def test_a_prefix_of_which_less_was_loaded_than_counted_on_fails_the_attempt() -> None:
    node = node_of(3)
    actions = node.on(begin(Role.DECODE, handover_start=3, recall=fetch_of(HERE, 0, 3)), 1)
    assert [action.names for action in actions if isinstance(action, Load)] == [NAMES[:3]]
    assert node.tiers is not None and node.tiers.num_pinned == 3
    actions = node.on(Loaded(KEY, 2), 2)
    assert failures(actions) == ["here: a prefix it counted on is not in its cache any more"]
    assert Release(KEY) in actions
    node.check_idle()


def test_what_no_node_could_go_on_with_is_final() -> None:
    """The reason names no node, since none is at fault."""
    node = node_of()
    node.on(begin(Role.MIXED), 1)
    actions = node.on(Broken(KEY, "no token may come", final=True), 2)
    (failed,) = [action for action in actions if isinstance(action, RequestFailed)]
    assert (failed.reason, failed.final) == ("no token may come", True)
    node.on(Stepped(1), 3)
    assert KEY not in node
    node.check_idle()


def distrusting() -> Node:
    """A later stage missed what this request took from the cache."""
    node = node_of(4)
    node.on(begin(Role.PREFILL, num_cached=4), 1)
    actions = node.on(Broken(KEY, "a cached block is missing", distrust=True), 2)
    assert failures(actions) == ["here: a cached block is missing"]
    node.on(Stepped(1), 3)
    return node


def test_what_failed_a_request_once_is_not_used_for_it_again() -> None:
    node = distrusting()
    actions = node.on(begin(Role.MIXED, 2, num_cached=5, fetch=fetch_of(PEER, 4, 5)), 4)
    assert not any(isinstance(action, (Fetch, Load)) for action in actions)
    (run,) = [action for action in actions if isinstance(action, Run)]
    assert [(piece.start, piece.count) for piece in run.chunks] == [(0, 16)]
    later = [*node.on(Stepped(1), 5), *node.on(Stepped(1), 6)]
    assert not any(isinstance(action, (Save, BlocksStored)) for action in later), "it leaves what it computed"
    node.on(Forget(RequestId("r#2")), 7)
    node.on(Stepped(1), 8)
    node.check_idle()


def test_another_request_uses_the_cache_as_before() -> None:
    node = distrusting()
    other = Begin(RequestId("s#1"), Role.MIXED, route_of("s", HERE, HERE, num_cached=4), 22, 30, NAMES)
    assert [len(action.names) for action in node.on(other, 4) if isinstance(action, Load)] == [4]


def test_distrust_is_remembered_of_so_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "MAX_DISTRUSTED", 2)
    node = node_of()
    for number in range(4):
        key = RequestId(f"r{number}#1")
        node.on(Begin(key, Role.DECODE, route_of(f"r{number}", PEER, HERE), 9, 12, ()), 1)
        node.on(Broken(key, "x", distrust=True), 2)
    assert list(node._distrusted) == ["r2", "r3"]
    node.check_idle()
