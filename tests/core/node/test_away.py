"""What a node decides of KV that lies with others, step by step. With everything else: `test_node.py`."""

from __future__ import annotations

from typing import Any

from isthmus.core.attempts import Holding, HoldingsChanged, RequestFailed, Route, Share
from isthmus.core.node import Node, events
from isthmus.core.node.away import AGAIN_NS
from isthmus.core.node.letters import (
    ClaimReply,
    ClaimRequest,
    Letter,
    ReserveReply,
    ReserveRequest,
    ShipmentConfirmed,
)
from isthmus.core.scheduler import BlockPool, Run, Scheduler, Stepped
from isthmus.core.types import NodeId, RequestId, Role

from .world import SIZE, limits_of

HOME, NEXT, FAR = NodeId("home"), NodeId("next"), NodeId("far")
A0, A1 = NodeId("a0"), NodeId("a1")
OLD, KEY = RequestId("r#1"), RequestId("r#2")
HALF = Share(0, 1, 2)


def node(name: NodeId, num_blocks: int = 40) -> Node:
    limits = limits_of(num_blocks, 0)
    return Node(dict.fromkeys(Role, limits), Scheduler(limits, None, BlockPool(num_blocks), node=name))


def of_kind(actions: list[Any], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def told(some: Node, peer: NodeId, letter: Letter, now: int) -> list[Any]:
    return some.on(events.LetterReceived(peer, letter), now)


def said(actions: list[Any], kind: type) -> list[Any]:
    """Letters of this kind, and to whom."""
    found = of_kind(actions, events.SendLetter)
    return [(tell.peer, tell.letter) for tell in found if isinstance(tell.letter, kind)]


def begin(
    home: Node, num_tokens: int, taken: int, *holdings: Holding, growth: tuple[NodeId, ...] = ()
) -> list[Any]:
    name = home.node
    route = Route(RequestId("r"), 2, name, name, holdings=holdings, growth=growth, taken=taken)
    return home.on(events.StartAttempt(KEY, Role.MIXED, route, num_tokens, num_tokens + 40), 10)


def test_what_is_whole_is_not_computed() -> None:
    """Up to the first block that a holder does not have, and never beyond what is to lie there."""
    for found, whole in (((5, 5), 5), ((9, 7), 5), ((4, 5), 4), ((0, 5), 0)):
        home = node(NEXT)
        claims = begin(home, 6 * SIZE + 1, 1, Holding((A0, A1), 5))
        assert claims == [
            events.SendLetter(A0, ClaimRequest(KEY, OLD, Share(0, 0, 2))),
            events.SendLetter(A1, ClaimRequest(KEY, OLD, HALF)),
        ]
        assert not of_kind(told(home, A0, ClaimReply(KEY, found[0]), 11), Run), "it waits for both"
        actions = told(home, A1, ClaimReply(KEY, found[1]), 12)
        assert [each.num_blocks for _, each in said(actions, ReserveRequest)] == [5, 5]
        assert not of_kind(actions, Run)
        told(home, A0, ReserveReply(KEY, True), 13)
        [run] = of_kind(told(home, A1, ReserveReply(KEY, True), 14), Run)
        [piece] = run.chunks
        assert piece.start == whole * SIZE
        assert piece.remote == ((Holding((A0, A1), whole),) if whole else ())


def test_what_follows_a_gap_is_not_of_use() -> None:
    home = node(NEXT)
    begin(home, 6 * SIZE + 1, 1, Holding((A0,), 3), Holding((A1,), 3))
    told(home, A0, ClaimReply(KEY, 2), 11)
    told(home, A1, ClaimReply(KEY, 3), 12)
    told(home, A0, ReserveReply(KEY, True), 13)
    [run] = of_kind(told(home, A1, ReserveReply(KEY, True), 14), Run)
    assert run.chunks[0].start == 2 * SIZE and run.chunks[0].remote == (Holding((A0,), 2),)


def test_all_that_is_full_of_a_later_attempt_is_to_lie_there() -> None:
    """What earlier ones generated, too, of which the conductor does not know how much it is."""
    home = node(NEXT)
    claims = begin(home, 9 * SIZE, 1, Holding((A0, A1), 5), growth=(A0, A1))
    assert len(claims) == 2
    told(home, A0, ClaimReply(KEY, 8), 11)
    actions = told(home, A1, ClaimReply(KEY, 8), 12)
    assert [each.num_blocks for _, each in said(actions, ReserveRequest)] == [8, 8]


def decoding() -> tuple[Node, int]:
    """A home that answers a prompt of one token, with growth, and the time."""
    home, now = node(HOME), 20
    [run] = of_kind(begin(home, 1, 0, growth=(A0, A1)), Run)
    assert run.chunks[0].samples
    home.on(Stepped(1), now)
    return home, now


def lent() -> Node:
    """A home that decodes with two blocks at a holder, and a run out."""
    home = node(HOME)
    begin(home, 4 * SIZE, 0)
    home.on(Stepped(1), 20)
    home.on(events.Lend(RequestId("r"), 2, home.node, A0, 2), 21)
    told(home, A0, ReserveReply(KEY, True), 22)
    [ship] = of_kind(home.on(Stepped(0), 23), events.Ship)
    told(home, A0, ShipmentConfirmed(KEY, ship.first + len(ship.blocks)), 24)
    home.on(Stepped(0), 25)
    assert home.held_elsewhere()[0].remote.num_there == 2
    return home


def steps(home: Node, count: int, now: int) -> list[Any]:
    """Until so many more tokens are computed."""
    found: list[Any] = []
    while count > 0:
        run = home.scheduler.run
        assert run is not None
        taken = min(run.steps, count)
        found += home.on(Stepped(taken), now)
        count -= taken
    return found


def test_home_asks_for_room_for_what_is_full() -> None:
    home, now = decoding()
    asked = said(steps(home, SIZE - 1, now), ReserveRequest)
    assert asked == [(A0, ReserveRequest(KEY, 1, Share(0, 0, 2))), (A1, ReserveRequest(KEY, 1, HALF))]
    told(home, A0, ReserveReply(KEY, True), now)
    told(home, A1, ReserveReply(KEY, True), now)
    ships = of_kind(steps(home, 1, now), events.Ship)
    assert [(ship.peer, ship.first, len(ship.blocks)) for ship in ships] == [(A0, 0, 1), (A1, 0, 1)]
    for holder in (A0, A1):
        told(home, holder, ShipmentConfirmed(KEY, 1), now)
    steps(home, 1, now)
    assert home.held_elsewhere()[0].remote.there == (Holding((A0, A1), 1),)


def test_room_that_was_refused_is_asked_for_again_and_not_at_once() -> None:
    """What was to go stays, and is asked for with what filled since."""
    home, now = decoding()
    steps(home, SIZE - 1, now)
    told(home, A0, ReserveReply(KEY, True), now)
    told(home, A1, ReserveReply(KEY, False), now)
    assert not said(steps(home, SIZE, now + AGAIN_NS - 1), ReserveRequest)
    again = said(steps(home, 1, now + AGAIN_NS), ReserveRequest)
    assert [each.num_blocks for _, each in again] == [2, 2]
    assert not of_kind(home.on(events.Woken(), now), events.Ship)


def test_a_chunk_goes_while_the_next_is_computed() -> None:
    """Its full blocks, to each of those that share them; nothing waits until they are there."""
    home = node(HOME)
    begin(home, 40, 0, Holding((A0, A1), 9))
    told(home, A0, ReserveReply(KEY, True), 11)
    [run] = of_kind(told(home, A1, ReserveReply(KEY, True), 12), Run)
    assert (run.chunks[0].start, run.chunks[0].count) == (0, 16)
    actions = home.on(Stepped(1), 13)
    [first, second] = of_kind(actions, events.Ship)
    assert (first.peer, second.peer) == (A0, A1)
    assert first.blocks == second.blocks == run.chunks[0].blocks[:4]
    [after] = of_kind(actions, Run)
    assert after.chunks[0].start == 16 and not after.chunks[0].remote


def failures(actions: list[Any]) -> list[str]:
    return [failed.reason for failed in of_kind(actions, RequestFailed)]


def test_a_holder_that_is_gone_before_it_answers_has_nothing() -> None:
    home = node(NEXT)
    begin(home, 6 * SIZE + 1, 1, Holding((A0,), 3), Holding((A1,), 2))
    told(home, A0, ClaimReply(KEY, 3), 11)
    actions = home.on(events.Gone(A1, "cut"), 12)
    assert not failures(actions)
    assert [holder for holder, _ in said(actions, ReserveRequest)] == [A0, A1]


def test_a_holder_that_is_gone_fails_those_alone_whose_kv_it_has() -> None:
    """One that was asked for more room, and has nothing of it, has refused; and one that refused has nothing."""
    for answer in (events.Gone(A1, "cut"), events.LetterReceived(A1, ReserveReply(KEY, False))):
        home = lent()
        assert said(home.on(events.Lend(RequestId("r"), 2, home.node, A1, 1), 30), ReserveRequest)
        actions = home.on(answer, 31)
        assert of_kind(actions, HoldingsChanged) and not failures(actions)
        assert not failures(home.on(events.Gone(A1, "cut"), 32))
        assert said(home.on(events.Lend(RequestId("r"), 2, home.node, A0, 1), 33), ReserveRequest), (
            "it may ask another"
        )
        assert failures(home.on(events.Gone(A0, "cut"), 34)) == ["home: a0, which has its KV, is gone: cut"]


def test_only_holders_are_believed_and_once() -> None:
    home = lent()
    for letter in (ShipmentConfirmed(KEY, 2, damaged=True), ReserveReply(KEY, False), ReserveReply(KEY, True)):
        assert told(home, A1, letter, 30) == []
    home = node(NEXT)
    begin(home, 6 * SIZE + 1, 1, Holding((A0,), 3))
    assert said(told(home, A0, ClaimReply(KEY, 3), 11), ReserveRequest)
    assert not said(told(home, A0, ClaimReply(KEY, 2), 12), ReserveRequest)
