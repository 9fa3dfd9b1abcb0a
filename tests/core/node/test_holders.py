"""KV that lies with others, step by step: what its home decides, and what a holder does. All else: `test_node.py`."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.core.attempts import Holding, HoldingsChanged, RequestFailed, Route, Share
from isthmus.core.node import Node, events
from isthmus.core.node.away import AGAIN_NS, LEASE_NS
from isthmus.core.node.events import (
    Gone,
    Host,
    LetterReceived,
    Rekey,
    SendLetter,
    ShipmentStored,
    Unhost,
    Wake,
    Woken,
)
from isthmus.core.node.letters import (
    ClaimReply,
    ClaimRequest,
    Letter,
    ReserveReply,
    ReserveRequest,
    SendBack,
    ShipmentConfirmed,
    Shrink,
)
from isthmus.core.scheduler import BlockPool, Run, Scheduler, Stepped
from isthmus.core.types import NodeId, RequestId, Role

from .world import SIZE, limits_of

HOME, NEXT, FAR = NodeId("home"), NodeId("next"), NodeId("far")
A0, A1 = NodeId("a0"), NodeId("a1")
OLD, KEY = RequestId("r#1"), RequestId("r#2")
HALF, WHOLE = Share(0, 1, 2), Share()


def node(name: NodeId, num_blocks: int = 40, **about: int) -> Node:
    limits = limits_of(num_blocks, 0)
    scheduler = Scheduler(limits, None, BlockPool(num_blocks), node=name)
    return Node(dict.fromkeys(Role, limits), scheduler, **about)


def of_kind(actions: list[Any], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def told(some: Node, peer: NodeId, letter: Letter, now: int) -> list[Any]:
    return some.on(LetterReceived(peer, letter), now)


def asked(actions: list[Any]) -> list[tuple[NodeId, int]]:
    """Who is asked for room, and for how many blocks."""
    found = of_kind(actions, SendLetter)
    return [(tell.peer, tell.letter.num_blocks) for tell in found if isinstance(tell.letter, ReserveRequest)]


def failures(actions: list[Any]) -> list[str]:
    return [failed.reason for failed in of_kind(actions, RequestFailed)]


def begin(
    home: Node, num_tokens: int, taken: int, *holdings: Holding, growth: tuple[NodeId, ...] = ()
) -> list[Any]:
    name = home.node
    route = Route(RequestId("r"), 2, name, name, holdings=holdings, growth=growth, taken=taken)
    return home.on(events.StartAttempt(KEY, Role.MIXED, route, num_tokens, num_tokens + 40), 10)


# At home.


BOTH = (Holding((A0, A1), 5),)
EACH = (Holding((A0,), 3), Holding((A1,), 3))


@pytest.mark.parametrize(
    ("holdings", "found", "whole"),
    [
        (BOTH, (5, 5), 5),
        (BOTH, (9, 7), 5),
        (BOTH, (4, 5), 4),
        (BOTH, (0, 5), 0),
        (EACH, (2, 3), 2),
        (EACH, (3, 2), 5),
    ],
)
def test_what_is_whole_is_not_computed(
    holdings: tuple[Holding, ...], found: tuple[int, int], whole: int
) -> None:
    """Up to the first block that a holder does not have, and never beyond what is to lie there."""
    home, count = node(NEXT), holdings[0].num_blocks
    claims = begin(home, 6 * SIZE + 1, 1, *holdings)
    shares = (Share(0, 0, 2), HALF) if holdings is BOTH else (Share(), Share(3))
    assert claims == [
        SendLetter(holder, ClaimRequest(KEY, OLD, share))
        for holder, share in zip((A0, A1), shares, strict=True)
    ]
    assert not of_kind(told(home, A0, ClaimReply(KEY, found[0]), 11), Run), "it waits for both"
    actions = told(home, A1, ClaimReply(KEY, found[1]), 12)
    assert asked(actions) == [(A0, count), (A1, count)] and not of_kind(actions, Run)
    assert not asked(told(home, A1, ClaimReply(KEY, 0), 12)), "a holder says it once"
    told(home, A0, ReserveReply(KEY, True), 13)
    [run] = of_kind(told(home, A1, ReserveReply(KEY, True), 14), Run)
    [piece] = run.chunks
    assert piece.start == sum(each.num_blocks for each in piece.remote) * SIZE == whole * SIZE


def test_all_that_is_full_of_a_later_attempt_is_to_lie_there() -> None:
    """What earlier ones generated, too, of which the conductor does not know how much it is."""
    home = node(NEXT)
    assert len(begin(home, 9 * SIZE, 1, *BOTH, growth=(A0, A1))) == 2
    told(home, A0, ClaimReply(KEY, 8), 11)
    assert asked(told(home, A1, ClaimReply(KEY, 8), 12)) == [(A0, 8), (A1, 8)]


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
    assert asked(steps(home, SIZE - 1, now)) == [(A0, 1), (A1, 1)]
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
    assert not asked(steps(home, SIZE, now + AGAIN_NS - 1))
    assert asked(steps(home, 1, now + AGAIN_NS)) == [(A0, 2), (A1, 2)]
    assert not of_kind(home.on(Woken(), now), events.Ship)


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


def test_a_holder_that_is_gone_before_it_answers_has_nothing() -> None:
    home = node(NEXT)
    begin(home, 6 * SIZE + 1, 1, Holding((A0,), 3), Holding((A1,), 2))
    told(home, A0, ClaimReply(KEY, 3), 11)
    actions = home.on(Gone(A1, "cut"), 12)
    assert not failures(actions) and asked(actions) == [(A0, 3), (A1, 2)]


@pytest.mark.parametrize("answer", [Gone(A1, "cut"), LetterReceived(A1, ReserveReply(KEY, False))])
def test_a_holder_that_is_gone_fails_those_alone_whose_kv_it_has(answer: Any) -> None:
    """One that was asked for more room, and has nothing of it, has refused; and one that refused has nothing."""
    home = lent()
    assert asked(home.on(events.Lend(RequestId("r"), 2, home.node, A1, 1), 30))
    actions = home.on(answer, 31)
    assert of_kind(actions, HoldingsChanged) and not failures(actions)
    assert not failures(home.on(Gone(A1, "cut"), 32))
    assert asked(home.on(events.Lend(RequestId("r"), 2, home.node, A0, 1), 33)), "it may ask another"
    assert failures(home.on(Gone(A0, "cut"), 34)) == ["home: a0, which has its KV, is gone: cut"]


@pytest.mark.parametrize(
    "letter",
    [ShipmentConfirmed(KEY, 2, damaged=True), ReserveReply(KEY, False), ReserveReply(KEY, True)],
    ids=repr,
)
def test_only_holders_are_believed(letter: Letter) -> None:
    assert told(lent(), A1, letter, 30) == []


# At a holder.


def hosting(*peers: NodeId, share: Share = HALF, num_blocks: int = 5) -> Node:
    """A holder with so many blocks of a share for these, all of which have come."""
    holder, room = node(A1, kv_heads=2), tuple(range(-(-num_blocks // share.parts)))
    for peer in peers:
        actions = told(holder, peer, ReserveRequest(OLD, num_blocks, share), 1)
        assert actions == [Host(OLD, peer, share, room), SendLetter(peer, ReserveReply(OLD, True))]
    assert holder.on(ShipmentStored(OLD, peers[0], num_blocks), 1) == [
        SendLetter(peers[0], ShipmentConfirmed(OLD, num_blocks))
    ]
    return holder


def test_what_a_lost_home_had_is_kept_for_so_long_and_no_longer() -> None:
    holder = hosting(HOME)
    assert holder.on(Gone(HOME, "x"), 100) == [Unhost(OLD, HOME), Wake(100 + LEASE_NS)]
    assert not holder.on(Woken(), 99 + LEASE_NS)
    assert holder.on(Woken(), 100 + LEASE_NS) == [Unhost(OLD)]
    holder.check_idle()


@pytest.mark.parametrize("lost_first", [True, False])
def test_one_that_is_lost_keeps_it_for_the_next_though_others_leave(lost_first: bool) -> None:
    """Its prefill node is told to let go, before the holder knows that its decode node is gone or after."""
    holder, facts = hosting(HOME, FAR), [Gone(HOME, "x"), LetterReceived(FAR, Shrink(OLD, 0))]
    for fact in facts if lost_first else reversed(facts):
        assert Unhost(OLD) not in holder.on(fact, 100)
    rekey = Rekey(OLD, KEY, NEXT, HALF, 5)
    assert told(holder, NEXT, ClaimRequest(KEY, OLD, HALF), 200) == [
        rekey,
        SendLetter(NEXT, ClaimReply(KEY, 5)),
    ]
    assert not holder.on(Woken(), 10 * LEASE_NS)
    assert told(holder, NEXT, Shrink(KEY, 0), 11 * LEASE_NS) == [Unhost(KEY, NEXT), Unhost(KEY)]
    holder.check_idle()


def test_two_nodes_of_one_attempt_claim_the_same() -> None:
    """And who asked in the name of the attempt before is not heard any more."""
    holder = hosting(HOME)
    told(holder, NEXT, ClaimRequest(KEY, OLD, HALF), 2)
    assert told(holder, FAR, ClaimRequest(KEY, OLD, HALF), 3) == [
        Host(KEY, FAR, HALF, (0, 1, 2)),
        SendLetter(FAR, ClaimReply(KEY, 5)),
    ]
    for fact in (
        Gone(HOME, "x"),
        LetterReceived(HOME, Shrink(OLD, 0)),
        LetterReceived(HOME, Shrink(OLD, 1)),
        ShipmentStored(OLD, HOME, 1),
    ):
        assert holder.on(fact, 4) == []
    assert told(holder, NEXT, Shrink(KEY, 0), 5) == [Unhost(KEY, NEXT)]
    assert told(holder, FAR, Shrink(KEY, 0), 6) == [Unhost(KEY, FAR), Unhost(KEY)]
    holder.check_idle()


@pytest.mark.parametrize("share", [Share(2, 1, 2), Share(0, 0, 2), WHOLE], ids=str)
def test_of_another_share_nothing_is_found_and_its_room_is_kept(share: Share) -> None:
    """Nor by the other node of an attempt."""
    holder = hosting(HOME)
    nothing = SendLetter(NEXT, ClaimReply(KEY, 0))
    assert told(holder, NEXT, ClaimRequest(KEY, OLD, share), 2) == [Rekey(OLD, KEY, NEXT, share, 0), nothing]
    assert holder.num_hosted == 3 and holder.num_stowed(KEY) == 0
    holder = hosting(HOME)
    told(holder, FAR, ClaimRequest(KEY, OLD, HALF), 2)
    assert told(holder, NEXT, ClaimRequest(KEY, OLD, share), 3)[-1] == nothing


@pytest.mark.parametrize(
    ("key", "num_blocks", "share"),
    [(OLD, 5, WHOLE), (OLD, 0, HALF), (OLD, -1, HALF), *[(KEY, 1, Share(0, 0, parts)) for parts in (0, 3, -1)]],
    ids=str,
)
def test_what_cannot_be_had_is_refused_and_changes_nothing(
    key: RequestId, num_blocks: int, share: Share
) -> None:
    """Another share than before, no blocks, or heads that cannot be cut so."""
    holder = hosting(HOME)
    refused = [SendLetter(HOME, ReserveReply(key, False))]
    assert told(holder, HOME, ReserveRequest(key, num_blocks, share), 2) == refused
    if key == KEY:
        assert told(holder, HOME, ClaimRequest(KEY, OLD, share), 3) == [SendLetter(HOME, ClaimReply(KEY, 0))]
    assert (holder.num_hosted, holder.num_stowed(OLD)) == (3, 5)


def test_only_who_has_room_is_believed() -> None:
    holder = hosting(HOME, share=WHOLE)
    for letter in (Shrink(OLD, 1), SendBack(OLD, 0, 1), Shrink(OLD, 0)):
        assert told(holder, NEXT, letter, 2) == []
    for fact in (ShipmentStored(OLD, NEXT, 1), ShipmentStored(OLD, NEXT, 0, damaged=True), Gone(NEXT, "x")):
        assert holder.on(fact, 3) == []
    assert (holder.num_hosted, holder.num_stowed(OLD)) == (5, 5)


def test_a_home_hears_what_came_and_what_came_damaged() -> None:
    """Not of what is being written anew, which counts no more."""
    holder = hosting(HOME)
    assert holder.on(ShipmentStored(OLD, HOME, 2), 2) == []
    assert holder.num_stowed(OLD) == 2
    damaged = ShipmentStored(OLD, HOME, 2, damaged=True)
    assert holder.on(damaged, 3) == [SendLetter(HOME, ShipmentConfirmed(OLD, 2, damaged=True))]
    assert holder.on(ShipmentStored(OLD, HOME, 4), 4) == [SendLetter(HOME, ShipmentConfirmed(OLD, 4))]
    assert told(holder, NEXT, ClaimRequest(KEY, OLD, HALF), 5)[-1] == SendLetter(NEXT, ClaimReply(KEY, 4))


@pytest.mark.parametrize(
    ("first", "count", "share"), [(4, 2, WHOLE), (-1, 2, WHOLE), (5, 1, WHOLE), (2, 0, WHOLE), (0, 1, HALF)]
)
def test_only_what_is_whole_goes_home(first: int, count: int, share: Share) -> None:
    holder = hosting(HOME, share=share)
    assert told(holder, HOME, SendBack(OLD, first, count), 2) == []
    if share == WHOLE:
        assert told(holder, HOME, SendBack(OLD, 3, 2), 3) == [events.Ship(OLD, HOME, 0, (3, 4))]


def test_guests_leave_a_block_for_each_other_and_for_whom_the_holder_computes() -> None:
    """They may grow: into what is left for that a new one does not come."""

    def granted(key: str, num_blocks: int) -> int:
        actions = told(holder, HOME, ReserveRequest(RequestId(key), num_blocks), 3)
        return sum(len(action.blocks) for action in actions if isinstance(action, Host))

    holder = node(A1, 24, kv_heads=2)
    assert [granted("a#1", 12), granted("b#1", 12), granted("b#1", 11)] == [12, 0, 11]
    assert granted("b#1", 12) == 12, "it grows"
    holder = node(A1, 24, kv_heads=2)
    begin(holder, 2 * SIZE - 1, 0)
    assert [granted("a#1", 22), granted("a#1", 21), granted("a#1", 22)] == [0, 21, 0]
