"""What a node decides of KV that lies with others, step by step. With everything else: `test_node.py`."""

from __future__ import annotations

from typing import Any

from isthmus.attempts import Holding, Route, Share
from isthmus.node import Node, events
from isthmus.node.away import AGAIN_NS, LEASE_NS
from isthmus.scheduler import BlockPool, Run, Scheduler, Stepped
from isthmus.types import NodeId, RequestId, Role

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


def hosting(*peers: NodeId) -> Node:
    """A holder with five blocks of half of the heads, for these."""
    holder = node(A1)
    for peer in peers:
        assert holder.on(events.Asked(OLD, peer, 5, HALF), 1) == [events.Host(OLD, peer, (0, 1, 2))]
    return holder


def test_who_leaves_frees_its_room_at_once() -> None:
    holder = hosting(HOME)
    assert holder.on(events.Left(OLD, HOME), 2) == [events.Unhost(OLD)]
    holder.check_idle()


def test_what_a_lost_home_had_is_kept_for_so_long_and_no_longer() -> None:
    holder = hosting(HOME)
    assert holder.on(events.Left(OLD, HOME, lost=True), 100) == [events.Wake(100 + LEASE_NS)]
    assert not holder.on(events.Woken(), 99 + LEASE_NS)
    assert holder.on(events.Woken(), 100 + LEASE_NS) == [events.Unhost(OLD)]
    holder.check_idle()


def test_one_that_is_lost_keeps_it_for_the_next_though_others_leave() -> None:
    """Its prefill node is told to let go, before the holder knows that its decode node is gone or after."""
    for lost_first in (True, False):
        holder = hosting(HOME, FAR)
        facts = [events.Left(OLD, HOME, lost=True), events.Left(OLD, FAR)]
        for fact in facts if lost_first else reversed(facts):
            assert not of_kind(holder.on(fact, 100), events.Unhost)
        assert holder.on(events.Claimed(KEY, NEXT, OLD), 200) == [events.Rekey(OLD, KEY, NEXT)]
        assert not of_kind(holder.on(events.Woken(), 10 * LEASE_NS), events.Unhost)
        assert holder.on(events.Left(KEY, NEXT), 11 * LEASE_NS) == [events.Unhost(KEY)]
        holder.check_idle()


def test_guests_leave_a_block_for_each_other_and_for_whom_the_holder_computes() -> None:
    """They may grow: into what is left for that a new one does not come."""

    def granted(key: str, num_blocks: int) -> int:
        [host] = of_kind(
            holder.on(events.Asked(RequestId(key), HOME, num_blocks, Share(0, 0, 1)), 3), events.Host
        )
        return len(host.blocks)

    holder = node(A1, 24)
    assert [granted("a#1", 12), granted("b#1", 12), granted("b#1", 11)] == [12, 0, 11]
    assert granted("b#1", 12) == 12, "it grows"
    holder = node(A1, 24)
    begin(holder, 2 * SIZE - 1, 0)
    assert [granted("a#1", 22), granted("a#1", 21), granted("a#1", 22)] == [0, 21, 0]


def test_what_comes_back_of_an_attempt_that_is_over_is_nobodys_until_it_came() -> None:
    home, now = decoding()
    steps(home, SIZE - 1, now)
    for holder in (A0, A1):
        home.on(events.Reserved(KEY, holder, True), now)
    home.on(events.Forget(KEY), now)
    steps(home, 1, now)
    assert home.scheduler.pool.available == 40
    home, now = lent(), 40
    [reclaim] = of_kind(home.on(events.Return(KEY, A0, 1), now), events.Reclaim)
    home.on(events.Forget(KEY), now)
    home.on(Stepped(0), now)
    assert home.scheduler.pool.available == 40 - len(reclaim.blocks) == 39
    home.on(events.Reclaimed(KEY, whole=True), now)
    home.check_idle()


def test_two_nodes_of_one_attempt_claim_the_same() -> None:
    holder = hosting(HOME)
    assert holder.on(events.Claimed(KEY, NEXT, OLD), 2) == [events.Rekey(OLD, KEY, NEXT)]
    assert holder.on(events.Claimed(KEY, FAR, OLD), 3) == [events.Rekey(RequestId(""), KEY, FAR)]
    assert not holder.on(events.Left(OLD, HOME, lost=True), 4), "it is its no more"
    assert not holder.on(events.Left(KEY, NEXT), 5)
    assert holder.on(events.Left(KEY, FAR), 6) == [events.Unhost(KEY)]
    holder.check_idle()


def begin(
    home: Node, num_tokens: int, taken: int, *holdings: Holding, growth: tuple[NodeId, ...] = ()
) -> list[Any]:
    name = home.node
    route = Route(RequestId("r"), 2, name, name, holdings=holdings, growth=growth, taken=taken)
    return home.on(events.Begin(KEY, Role.MIXED, route, num_tokens, num_tokens + 40), 10)


def test_what_is_whole_is_not_computed() -> None:
    """Up to the first block that a holder does not have, and never beyond what is to lie there."""
    for found, whole in (((5, 5), 5), ((9, 7), 5), ((4, 5), 4), ((0, 5), 0)):
        home = node(NEXT)
        claims = begin(home, 6 * SIZE + 1, 1, Holding((A0, A1), 5))
        assert claims == [
            events.Claim(KEY, A0, OLD, Share(0, 0, 2)),
            events.Claim(KEY, A1, OLD, HALF),
        ]
        assert not home.on(events.Found(KEY, A0, found[0]), 11), "it waits for both"
        actions = home.on(events.Found(KEY, A1, found[1]), 12)
        assert [each.num_blocks for each in of_kind(actions, events.Reserve)] == [5, 5]
        assert not of_kind(actions, Run)
        home.on(events.Reserved(KEY, A0, True), 13)
        [run] = of_kind(home.on(events.Reserved(KEY, A1, True), 14), Run)
        [piece] = run.chunks
        assert piece.start == whole * SIZE
        assert piece.remote == ((Holding((A0, A1), whole),) if whole else ())


def test_what_follows_a_gap_is_not_of_use() -> None:
    home = node(NEXT)
    begin(home, 6 * SIZE + 1, 1, Holding((A0,), 3), Holding((A1,), 3))
    home.on(events.Found(KEY, A0, 2), 11)
    home.on(events.Found(KEY, A1, 3), 12)
    home.on(events.Reserved(KEY, A0, True), 13)
    [run] = of_kind(home.on(events.Reserved(KEY, A1, True), 14), Run)
    assert run.chunks[0].start == 2 * SIZE and run.chunks[0].remote == (Holding((A0,), 2),)


def test_all_that_is_full_of_a_later_attempt_is_to_lie_there() -> None:
    """What earlier ones generated, too, of which the conductor does not know how much it is."""
    home = node(NEXT)
    claims = begin(home, 9 * SIZE, 1, Holding((A0, A1), 5), growth=(A0, A1))
    assert len(claims) == 2
    home.on(events.Found(KEY, A0, 8), 11)
    actions = home.on(events.Found(KEY, A1, 8), 12)
    assert [each.num_blocks for each in of_kind(actions, events.Reserve)] == [8, 8]


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
    home.on(events.Move(KEY, A0, 2), 21)
    home.on(events.Reserved(KEY, A0, True), 22)
    [ship] = of_kind(home.on(Stepped(0), 23), events.Ship)
    home.on(events.Shipped(KEY, A0, ship.first + len(ship.blocks)), 24)
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
    asked = of_kind(steps(home, SIZE - 1, now), events.Reserve)
    assert asked == [
        events.Reserve(KEY, A0, 1, Share(0, 0, 2)),
        events.Reserve(KEY, A1, 1, Share(0, 1, 2)),
    ]
    home.on(events.Reserved(KEY, A0, True), now)
    home.on(events.Reserved(KEY, A1, True), now)
    ships = of_kind(steps(home, 1, now), events.Ship)
    assert [(ship.holder, ship.first, len(ship.blocks)) for ship in ships] == [(A0, 0, 1), (A1, 0, 1)]
    for holder in (A0, A1):
        home.on(events.Shipped(KEY, holder, 1), now)
    steps(home, 1, now)
    assert home.held_elsewhere()[0].remote.there == (Holding((A0, A1), 1),)


def test_room_that_was_refused_is_asked_for_again_and_not_at_once() -> None:
    """What was to go stays, and is asked for with what filled since."""
    home, now = decoding()
    steps(home, SIZE - 1, now)
    home.on(events.Reserved(KEY, A0, True), now)
    home.on(events.Reserved(KEY, A1, False), now)
    assert not of_kind(steps(home, SIZE, now + AGAIN_NS - 1), events.Reserve)
    again = of_kind(steps(home, 1, now + AGAIN_NS), events.Reserve)
    assert [each.num_blocks for each in again] == [2, 2]
    assert not of_kind(home.on(events.Woken(), now), events.Ship)


def test_a_chunk_goes_while_the_next_is_computed() -> None:
    """Its full blocks, to each of those that share them; nothing waits until they are there."""
    home = node(HOME)
    begin(home, 40, 0, Holding((A0, A1), 9))
    home.on(events.Reserved(KEY, A0, True), 11)
    [run] = of_kind(home.on(events.Reserved(KEY, A1, True), 12), Run)
    assert (run.chunks[0].start, run.chunks[0].count) == (0, 16)
    actions = home.on(Stepped(1), 13)
    [first, second] = of_kind(actions, events.Ship)
    assert (first.holder, second.holder) == (A0, A1)
    assert first.blocks == second.blocks == run.chunks[0].blocks[:4]
    [after] = of_kind(actions, Run)
    assert after.chunks[0].start == 16 and not after.chunks[0].remote
