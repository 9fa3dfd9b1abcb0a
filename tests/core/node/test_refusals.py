"""What a node does not believe, does not do twice, and does not count on."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.core.attempts import BlocksStored, RequestFailed
from isthmus.core.node import Node, attempts
from isthmus.core.node import node as node_module
from isthmus.core.node.attempts import SEVERED_NS
from isthmus.core.node.events import (
    BlocksFetched,
    Broken,
    DropAttempt,
    EndFetch,
    EndGive,
    Fetch,
    Gone,
    HandoverComplete,
    LetterReceived,
    LoadBlocks,
    Loaded,
    ReleaseResources,
    SaveBlocks,
    SendHandover,
    SendLetter,
    StartAttempt,
    Wake,
    Woken,
)
from isthmus.core.node.letters import FetchRequest, HandoverConfirmed, HandoverGranted
from isthmus.core.scheduler import BlockPool, Run, Saved, Scheduler, Stepped, TierCache
from isthmus.core.types import NodeId, RequestId, Role

from .world import fetch_of, limits_of, route_of

HERE, PEER, OTHER = NodeId("here"), NodeId("peer"), NodeId("other")
KEY = RequestId("r#1")
NAMES = tuple(range(5))


def node_of(held: int = 0) -> Node:
    """With so many of the names in DRAM."""
    made, tiers = limits_of(40, 0), TierCache(30)
    tiers.put(NAMES[:held])
    return Node(dict.fromkeys(Role, made), Scheduler(made, tiers, BlockPool(40), node=HERE))


def begin(part: Role, attempt: int = 1, **fields: Any) -> StartAttempt:
    """An attempt with 22 tokens of prompt: five blocks of four, and two more."""
    ends = {Role.PREFILL: (HERE, PEER), Role.DECODE: (PEER, HERE), Role.MIXED: (HERE, HERE)}
    route = route_of("r", *ends[part], **fields)
    return StartAttempt(RequestId(f"r#{attempt}"), part, route, 22, 30, NAMES)


def kinds(actions: list[Any]) -> list[str]:
    return [type(action).__name__ for action in actions]


def failures(actions: list[Any]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, RequestFailed)]


def test_room_is_granted_once_and_by_its_decode_node_alone() -> None:
    node = node_of()
    [offer, *_] = node.on(begin(Role.PREFILL), 1)
    assert node.on(LetterReceived(OTHER, HandoverGranted(KEY)), 2) == []
    assert node.on(LetterReceived(PEER, HandoverGranted(KEY)), 3) == [
        SendHandover(KEY, PEER, offer.extent, False)
    ]
    assert node.on(LetterReceived(PEER, HandoverGranted(KEY)), 4) == []


def test_a_grant_may_come_before_the_heads_word_and_counts_from_its_decode_node_alone() -> None:
    for peer in (OTHER, PEER):
        node = node_of()
        assert node.on(LetterReceived(peer, HandoverGranted(KEY)), 1) == []
        assert ("SendHandover" in kinds(node.on(begin(Role.PREFILL), 2))) == (peer == PEER)


def test_letters_of_attempts_that_never_begin_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MAX_EARLY", 2)
    node, known = node_of(), []
    for number in range(3):
        node.on(LetterReceived(PEER, HandoverGranted(RequestId(f"r#{number}"))), 1)
    for number in range(3):
        known.append("SendHandover" in kinds(node.on(begin(Role.PREFILL, number), 2)))
        node.on(DropAttempt(RequestId(f"r#{number}")), 3)
        node.on(Stepped(0), 4)
    assert known == [False, True, True]


def test_a_hand_over_has_not_landed_before_it_is_computed_and_where_nobody_decodes_it() -> None:
    """Its blocks would go to somebody else while they are written."""
    node = node_of()
    node.on(begin(Role.PREFILL), 1)
    node.on(LetterReceived(PEER, HandoverGranted(KEY)), 2)
    free = node.scheduler.pool.available
    assert node.on(LetterReceived(PEER, HandoverConfirmed(KEY)), 3) == []
    assert KEY in node and node.scheduler.pool.available == free
    assert "FinishHandover" in kinds([*node.on(Stepped(1), 4), *node.on(Stepped(1), 5)])
    assert node.on(LetterReceived(OTHER, HandoverConfirmed(KEY)), 6) == []
    assert kinds(node.on(LetterReceived(PEER, HandoverConfirmed(KEY)), 7)) == [
        "PrefillFinished",
        "ReleaseResources",
    ]
    node.on(Saved(KEY), 8)
    node.check_idle()


@pytest.mark.parametrize("part", [Role.PREFILL, Role.DECODE])
def test_a_lost_peer_costs_nothing_until_the_head_had_its_time(part: Role) -> None:
    """It is sent nothing meanwhile."""
    node = node_of()
    node.on(begin(part), 1)
    assert node.on(Gone(OTHER, "cut"), 2) == []
    assert node.on(Gone(PEER, "cut"), 3) == [Wake(3 + SEVERED_NS)]
    assert node.on(Gone(PEER, "cut again"), 4) == []
    told = [*node.on(LetterReceived(PEER, HandoverGranted(KEY)), 5), *node.on(Woken(), 2 + SEVERED_NS)]
    if part is Role.PREFILL:
        told += [*node.on(Stepped(1), 6), *node.on(Stepped(1), 7)]
    assert not {"SendHandover", "FinishHandover", "RequestFailed"} & {*kinds(told)}
    assert failures(node.on(Woken(), 3 + SEVERED_NS)) == ["here: the session with peer ended: cut"]
    if part is Role.PREFILL:
        node.on(Saved(KEY), 4 + SEVERED_NS)
    node.check_idle()


def test_a_lost_peer_costs_nothing_that_has_no_need_of_it_any_more() -> None:
    """What is computed here alone, and what decodes with all of its KV."""
    node = node_of()
    node.on(begin(Role.MIXED), 1)
    assert node.on(Gone(HERE, "cut"), 2) == node.on(Gone(PEER, "cut"), 3) == []
    node = node_of()
    node.on(begin(Role.DECODE), 1)
    node.on(HandoverComplete(KEY), 2)
    assert node.on(Gone(PEER, "cut"), 3) == []


def test_a_lost_peer_takes_its_fetches_and_what_it_fetched_with_it() -> None:
    """And nobody else's."""
    node = node_of(3)
    node.on(begin(Role.MIXED, fetch=fetch_of(PEER, 3, 5)), 1)
    for peer in (PEER, OTHER):
        node.on(LetterReceived(peer, FetchRequest(RequestId("f"), NAMES[:2], 0)), 2)
    assert node.on(Gone(OTHER, "cut"), 3) == [EndGive(RequestId("f"), OTHER)]
    assert node.on(Gone(PEER, "cut"), 4) == [EndFetch(KEY), EndGive(RequestId("f"), PEER)]
    node.on(DropAttempt(KEY), 5)
    node.on(BlocksFetched(KEY, 0), 6)
    node.on(Stepped(0), 7)
    node.check_idle()


@pytest.mark.parametrize(("held", "own"), [(0, 2), (1, 2), (1, 3)])
def test_a_prefix_that_is_not_here_any_more_is_not_counted_on(held: int, own: int) -> None:
    """At once, so that nobody hands over what follows it."""
    node = node_of(held)
    actions = node.on(begin(Role.DECODE, handover_start=own, recall=fetch_of(HERE, 0, own)), 1)
    assert failures(actions) == ["here: a prefix it was to take from its cache is not there"]
    assert "ReceiveHandover" not in kinds(actions) and KEY not in node
    node.check_idle()


def test_a_prefix_of_which_less_was_loaded_than_counted_on_fails_the_attempt() -> None:
    node = node_of(3)
    actions = node.on(begin(Role.DECODE, handover_start=3, recall=fetch_of(HERE, 0, 3)), 1)
    assert [action.names for action in actions if isinstance(action, LoadBlocks)] == [NAMES[:3]]
    assert node.tiers is not None and node.tiers.num_pinned == 3
    actions = node.on(Loaded(KEY, 2), 2)
    assert failures(actions) == ["here: a prefix it counted on is not in its cache any more"]
    assert ReleaseResources(KEY) in actions
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
    assert not any(isinstance(action, (Fetch, LoadBlocks)) for action in actions)
    (run,) = [action for action in actions if isinstance(action, Run)]
    assert [(piece.start, piece.count) for piece in run.chunks] == [(0, 16)]
    later = [*node.on(Stepped(1), 5), *node.on(Stepped(1), 6)]
    assert not any(isinstance(action, (SaveBlocks, BlocksStored)) for action in later), (
        "it leaves what it computed"
    )
    node.on(DropAttempt(RequestId("r#2")), 7)
    node.on(Stepped(1), 8)
    node.check_idle()


def test_distrust_is_remembered_of_so_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "MAX_DISTRUSTED", 2)
    node = node_of()
    for number in range(4):
        key = RequestId(f"r{number}#1")
        node.on(StartAttempt(key, Role.DECODE, route_of(f"r{number}", PEER, HERE), 9, 12, ()), 1)
        node.on(Broken(key, "x", distrust=True), 2)
    assert list(node._distrusted) == ["r2", "r3"]
    node.check_idle()


def test_a_lost_peer_costs_nothing_that_waits_for_its_own_cache_alone() -> None:
    node = node_of(3)
    node.on(begin(Role.DECODE, handover_start=3, recall=fetch_of(HERE, 0, 3)), 1)
    node.on(HandoverComplete(KEY), 2)
    assert node.on(Gone(PEER, "cut"), 3) == []
    assert SendLetter(PEER, HandoverConfirmed(KEY)) in node.on(Loaded(KEY, 3), 4)
