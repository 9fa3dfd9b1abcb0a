"""What a holder decides of other nodes' KV: who has room, who may say something of it, and when it goes."""

from __future__ import annotations

import pytest

from isthmus.core.attempts import Share
from isthmus.core.node import Node
from isthmus.core.node.away import LEASE_NS
from isthmus.core.node.events import (
    Gone,
    Host,
    LetterReceived,
    Rekey,
    SendLetter,
    Ship,
    ShipmentStored,
    Unhost,
    Wake,
    Woken,
)
from isthmus.core.node.letters import (
    ClaimReply,
    ClaimRequest,
    ReserveReply,
    ReserveRequest,
    SendBack,
    ShipmentConfirmed,
    Shrink,
)
from isthmus.core.scheduler import BlockPool, Scheduler
from isthmus.core.types import NodeId, RequestId, Role

from .test_away import A1, FAR, HALF, HOME, KEY, NEXT, OLD, begin, told
from .world import SIZE, limits_of

WHOLE = Share()
HEADS = 2


def holder_of(num_blocks: int = 40) -> Node:
    limits = limits_of(num_blocks, 0)
    scheduler = Scheduler(limits, None, BlockPool(num_blocks), node=A1)
    return Node(dict.fromkeys(Role, limits), scheduler, kv_heads=HEADS)


def hosting(*peers: NodeId, share: Share = HALF, num_blocks: int = 5) -> Node:
    """A holder with so many blocks of a share for these, all of which have come."""
    holder, room = holder_of(), tuple(range(-(-num_blocks // share.parts)))
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
    holder = hosting(HOME)
    told_it = told(holder, NEXT, ClaimRequest(KEY, OLD, share), 2)
    assert told_it == [Rekey(OLD, KEY, NEXT, share, 0), SendLetter(NEXT, ClaimReply(KEY, 0))]
    assert holder.num_hosted == 3 and holder.num_stowed(KEY) == 0


def test_of_what_another_node_claimed_as_another_share_nothing_is_found() -> None:
    holder = hosting(HOME)
    told(holder, NEXT, ClaimRequest(KEY, OLD, HALF), 2)
    assert told(holder, FAR, ClaimRequest(KEY, OLD, Share(2, 1, 2)), 3)[-1] == SendLetter(
        FAR, ClaimReply(KEY, 0)
    )


@pytest.mark.parametrize("share", [Share(0, 0, 0), Share(0, 0, 3), Share(0, 0, -1)], ids=str)
def test_heads_that_cannot_be_cut_so_have_no_room(share: Share) -> None:
    holder = hosting(HOME)
    assert told(holder, NEXT, ReserveRequest(KEY, 1, share), 2) == [SendLetter(NEXT, ReserveReply(KEY, False))]
    assert told(holder, NEXT, ClaimRequest(KEY, OLD, share), 3) == [SendLetter(NEXT, ClaimReply(KEY, 0))]
    assert holder.num_stowed(OLD) == 5


@pytest.mark.parametrize(
    "asked",
    [ReserveRequest(OLD, 5, WHOLE), ReserveRequest(OLD, 0, HALF), ReserveRequest(OLD, -1, HALF)],
    ids=repr,
)
def test_what_cannot_be_had_is_refused_and_changes_nothing(asked: ReserveRequest) -> None:
    holder = hosting(HOME)
    assert told(holder, HOME, asked, 2) == [SendLetter(HOME, ReserveReply(OLD, False))]
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
        assert told(holder, HOME, SendBack(OLD, 3, 2), 3) == [Ship(OLD, HOME, 0, (3, 4))]


def test_guests_leave_a_block_for_each_other_and_for_whom_the_holder_computes() -> None:
    """They may grow: into what is left for that a new one does not come."""

    def granted(key: str, num_blocks: int) -> int:
        actions = told(holder, HOME, ReserveRequest(RequestId(key), num_blocks), 3)
        return sum(len(action.blocks) for action in actions if isinstance(action, Host))

    holder = holder_of(24)
    assert [granted("a#1", 12), granted("b#1", 12), granted("b#1", 11)] == [12, 0, 11]
    assert granted("b#1", 12) == 12, "it grows"
    holder = holder_of(24)
    begin(holder, 2 * SIZE - 1, 0)
    assert [granted("a#1", 22), granted("a#1", 21), granted("a#1", 22)] == [0, 21, 0]
