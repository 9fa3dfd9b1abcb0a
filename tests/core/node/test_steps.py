"""Steps of one node: what it does not believe, does not do twice, and does not count on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.attempts import BlocksStored, HoldingsChanged, MemoryUsed, RequestFailed, RoleChanged
from isthmus.core.node import Node, attempts, events, letters
from isthmus.core.node import node as node_module
from isthmus.core.node.attempts import SEVERED_NS
from isthmus.core.node.letters import NONE, extent_of
from isthmus.core.scheduler import BlockPool, Run, Saved, Scheduler, Stepped, TierCache
from isthmus.core.types import NodeId, RequestId, Role, Tenant

from .world import Place, fetch_of, limits_of, route_of

HERE, PEER, OTHER = NodeId("here"), NodeId("peer"), NodeId("other")
KEY = RequestId("r#1")
NAMES = tuple(range(5))


def node_of(held: int = 0, **about: int) -> Node:
    """With so many of the names in DRAM."""
    made, tiers = limits_of(40, 0), TierCache(30, 30)
    tiers.put(NAMES[:held])
    return Node(dict.fromkeys(Role, made), Scheduler(made, tiers, BlockPool(40), node=HERE), **about)


def begin(part: Role, attempt: int = 1, **fields: Any) -> events.StartAttempt:
    """An attempt with 22 tokens of prompt: five blocks of four, and two more."""
    ends = {Role.PREFILL: (HERE, PEER), Role.DECODE: (PEER, HERE), Role.MIXED: (HERE, HERE)}
    route = route_of("r", *ends[part], **fields)
    return events.StartAttempt(RequestId(f"r#{attempt}"), part, route, 22, 30, NAMES)


def kinds(actions: list[Any]) -> list[str]:
    return [type(action).__name__ for action in actions]


def failures(actions: list[Any]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, RequestFailed)]


def test_room_is_granted_once_and_by_its_decode_node_alone() -> None:
    node = node_of()
    [offer, *_] = node.on(begin(Role.PREFILL), 1)
    assert node.on(events.LetterReceived(OTHER, letters.HandoverGranted(KEY)), 2) == []
    assert node.on(events.LetterReceived(PEER, letters.HandoverGranted(KEY)), 3) == [
        events.SendHandover(KEY, PEER, offer.extent, False)
    ]
    assert node.on(events.LetterReceived(PEER, letters.HandoverGranted(KEY)), 4) == []


def test_a_grant_may_come_before_the_heads_word_and_counts_from_its_decode_node_alone() -> None:
    for peer in (OTHER, PEER):
        node = node_of()
        assert node.on(events.LetterReceived(peer, letters.HandoverGranted(KEY)), 1) == []
        assert ("SendHandover" in kinds(node.on(begin(Role.PREFILL), 2))) == (peer == PEER)


def test_letters_of_attempts_that_never_begin_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MAX_EARLY", 2)
    node, known = node_of(), []
    for number in range(3):
        node.on(events.LetterReceived(PEER, letters.HandoverGranted(RequestId(f"r#{number}"))), 1)
    for number in range(3):
        known.append("SendHandover" in kinds(node.on(begin(Role.PREFILL, number), 2)))
        node.on(events.DropAttempt(RequestId(f"r#{number}")), 3)
        node.on(Stepped(0), 4)
    assert known == [False, True, True]


def test_a_hand_over_has_not_landed_before_it_is_computed_and_where_nobody_decodes_it() -> None:
    """Its blocks would go to somebody else while they are written."""
    node = node_of()
    node.on(begin(Role.PREFILL), 1)
    node.on(events.LetterReceived(PEER, letters.HandoverGranted(KEY)), 2)
    free = node.scheduler.pool.available
    assert node.on(events.LetterReceived(PEER, letters.HandoverConfirmed(KEY)), 3) == []
    assert KEY in node and node.scheduler.pool.available == free
    assert "FinishHandover" in kinds([*node.on(Stepped(1), 4), *node.on(Stepped(1), 5)])
    assert node.on(events.LetterReceived(OTHER, letters.HandoverConfirmed(KEY)), 6) == []
    assert kinds(node.on(events.LetterReceived(PEER, letters.HandoverConfirmed(KEY)), 7)) == [
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
    assert node.on(events.Gone(OTHER, "cut"), 2) == []
    assert node.on(events.Gone(PEER, "cut"), 3) == [events.Wake(3 + SEVERED_NS)]
    assert node.on(events.Gone(PEER, "cut again"), 4) == []
    told = [
        *node.on(events.LetterReceived(PEER, letters.HandoverGranted(KEY)), 5),
        *node.on(events.Woken(), 2 + SEVERED_NS),
    ]
    if part is Role.PREFILL:
        told += [*node.on(Stepped(1), 6), *node.on(Stepped(1), 7)]
    assert not {"SendHandover", "FinishHandover", "RequestFailed"} & {*kinds(told)}
    assert failures(node.on(events.Woken(), 3 + SEVERED_NS)) == ["here: the session with peer ended: cut"]
    if part is Role.PREFILL:
        node.on(Saved(KEY), 4 + SEVERED_NS)
    node.check_idle()


def test_a_lost_peer_takes_its_fetches_and_what_it_fetched_with_it() -> None:
    """And nobody else's."""
    node = node_of(3)
    node.on(begin(Role.MIXED, fetch=fetch_of(PEER, 3, 5)), 1)
    for peer in (PEER, OTHER):
        node.on(events.LetterReceived(peer, letters.FetchRequest(RequestId("f"), NAMES[:2], 0)), 2)
    assert node.on(events.Gone(OTHER, "cut"), 3) == [events.EndGive(RequestId("f"), OTHER)]
    assert node.on(events.Gone(PEER, "cut"), 4) == [events.EndFetch(KEY), events.EndGive(RequestId("f"), PEER)]
    assert events.EndFetch(KEY) in node.on(events.DropAttempt(KEY), 5), "nobody waits for it any more"
    node.on(events.BlocksFetched(KEY, 0), 6)
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
    assert [action.names for action in actions if isinstance(action, events.LoadBlocks)] == [NAMES[:3]]
    assert node.tiers is not None and node.tiers.num_pinned == 3
    actions = node.on(events.Loaded(KEY, 2), 2)
    assert failures(actions) == ["here: a prefix it counted on is not in its cache any more"]
    assert events.ReleaseResources(KEY) in actions
    node.check_idle()


def test_what_no_node_could_go_on_with_is_final() -> None:
    """The reason names no node, since none is at fault."""
    node = node_of()
    node.on(begin(Role.MIXED), 1)
    actions = node.on(events.Broken(KEY, "no token may come", final=True), 2)
    (failed,) = [action for action in actions if isinstance(action, RequestFailed)]
    assert (failed.reason, failed.final) == ("no token may come", True)
    node.on(Stepped(1), 3)
    assert KEY not in node
    node.check_idle()


def distrusting() -> Node:
    """A later stage missed what this request took from the cache."""
    node = node_of(4)
    node.on(begin(Role.PREFILL, num_cached=4), 1)
    actions = node.on(events.Broken(KEY, "a cached block is missing", distrust=True), 2)
    assert failures(actions) == ["here: a cached block is missing"]
    node.on(Stepped(1), 3)
    return node


def test_what_failed_a_request_once_is_not_used_for_it_again() -> None:
    node = distrusting()
    actions = node.on(begin(Role.MIXED, 2, num_cached=5, fetch=fetch_of(PEER, 4, 5)), 4)
    assert not any(isinstance(action, (events.Fetch, events.LoadBlocks)) for action in actions)
    (run,) = [action for action in actions if isinstance(action, Run)]
    assert [(piece.start, piece.count) for piece in run.chunks] == [(0, 16)]
    later = [*node.on(Stepped(1), 5), *node.on(Stepped(1), 6)]
    assert not any(isinstance(action, (events.SaveBlocks, BlocksStored)) for action in later), (
        "it leaves what it computed"
    )
    node.on(events.DropAttempt(RequestId("r#2")), 7)
    node.on(Stepped(1), 8)
    node.check_idle()


def test_distrust_is_remembered_of_so_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "MAX_DISTRUSTED", 2)
    node = node_of()
    for number in range(4):
        key = RequestId(f"r{number}#1")
        node.on(events.StartAttempt(key, Role.DECODE, route_of(f"r{number}", PEER, HERE), 9, 12, ()), 1)
        node.on(events.Broken(key, "x", distrust=True), 2)
    assert list(node._distrusted) == ["r2", "r3"]
    node.check_idle()


def test_a_lost_peer_costs_nothing_that_has_no_need_of_it_any_more() -> None:
    """What is computed here alone, what decodes with all of its KV, and what waits for its own cache alone."""
    node = node_of(3)
    node.on(begin(Role.MIXED, 2), 1)
    assert node.on(events.Gone(HERE, "cut"), 2) == node.on(events.Gone(PEER, "cut"), 3) == []
    node.on(begin(Role.DECODE, handover_start=3, recall=fetch_of(HERE, 0, 3)), 1)
    node.on(events.HandoverComplete(KEY), 2)
    assert node.on(events.Gone(PEER, "cut"), 3) == []
    heard = [*node.on(events.Loaded(KEY, 3), 4), *node.on(events.Gone(PEER, "cut"), 5)]
    assert [letter.letter for letter in heard if isinstance(letter, events.SendLetter)] == [
        letters.HandoverConfirmed(KEY)
    ]


# Fetches and time.


def recalling() -> Node:
    """Receives a hand-over while it fetches what that leaves out."""
    node = node_of(transfer_ns=1000)
    node.on(begin(Role.DECODE, handover_start=2, recall=fetch_of(OTHER, 0, 2)), 1)
    return node


def test_a_hand_over_beside_a_fetch_has_a_time_out_of_its_own() -> None:
    """What comes of one of them says nothing of the other, though both are of one attempt."""
    node = recalling()
    node.on(events.Progress(KEY), 10)
    assert node.on(events.Woken(), 900) == []
    node.on(events.Progress(KEY, fetched=True), 1000)
    assert failures(node.on(events.Woken(), 1100)) == ["here: no KV came for 1e-06 s"]
    assert node.on(events.BlocksFetched(KEY, 2), 1200)[-1:], "what came is kept all the same"
    node.check_idle()


def test_a_fetch_that_stands_still_is_ended_though_the_hand_over_goes_on() -> None:
    node = recalling()
    node.on(events.Progress(KEY, fetched=True), 10)
    node.on(events.Progress(KEY), 1100)
    assert node.on(events.Woken(), 1101) == [events.EndFetch(KEY)]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("start", "held", "stop"), [(2, 0, 2), (2, 2, 2), (2, 3, 3), (2, 5, 5), (-1, 5, -1), (5, 5, 5), (9, 5, 9)]
)
def test_of_what_is_wanted_as_much_is_given_as_is_here(start: int, held: int, stop: int, whole: bool) -> None:
    """All or nothing where it is of no use in parts."""
    key, node = RequestId("f"), node_of()
    if held:
        node.on(events.PrefixesRecovered((NAMES[:held],)), 1)
    stop = start if whole and held < len(NAMES) else stop
    want = events.LetterReceived(PEER, letters.FetchRequest(key, NAMES, start, whole))
    assert node.on(want, 2) == [events.Give(key, PEER, NAMES, start, stop, stop - start)]
    assert node.tiers is not None and node.tiers.num_pinned == (held if stop > start else 0)
    assert node.on(events.LetterReceived(PEER, letters.FetchDone(key)), 3) == [events.EndGive(key, PEER)]
    node.check_idle()


def test_only_who_wanted_it_has_enough_of_it() -> None:
    """Another node that says so has its own, of the same attempt."""
    node = node_of(3)
    assert node.tiers is not None
    for peer in (PEER, OTHER, PEER):
        node.on(events.LetterReceived(peer, letters.FetchRequest(KEY, NAMES, 0)), 1)
    for _ in range(2):
        done = events.LetterReceived(OTHER, letters.FetchDone(KEY))
        assert node.on(done, 2) == [events.EndGive(KEY, OTHER)]
        assert node.tiers.num_pinned == 3, "the other one reads it still"
    node.on(events.LetterReceived(PEER, letters.FetchDone(KEY)), 3)
    node.check_idle()


def test_it_counts_on_no_block_that_has_no_name() -> None:
    """The tokens of an earlier attempt fill the prompt's last block up, which so loses its name."""
    route = route_of("r", HERE, HERE, fetch=fetch_of(PEER, 1, 5), num_cached=5)
    begun = events.StartAttempt(KEY, Role.MIXED, route, 22, 30, NAMES[:3])
    [fetch] = [action for action in node_of(1).on(begun, 1) if isinstance(action, events.Fetch)]
    assert (fetch.names, fetch.start) == (NAMES[:3], 1)


@given(st.integers(1, 5), st.integers(0, 6), st.integers(1, 40), st.integers(0, 3))
def test_a_transfer_goes_on_at_the_block_of_the_first_token_that_is_missing(
    size: int, start: int, beyond: int, state_blocks: int
) -> None:
    """Between the last token and the state lies nothing: a state begins with a block."""
    num_tokens = start * size + beyond
    route = route_of("r", PEER, HERE, handover_start=start, codec="int8")
    extent = extent_of(route, num_tokens, size, state_blocks)
    prompt, states = range(start * size, num_tokens), range(extent.states, extent.stop)
    assert extent.start == prompt.start and extent.num_tokens == prompt.stop
    assert len(states) == state_blocks * size or not state_blocks
    assert extent.states % size == 0 and 0 <= extent.states - num_tokens < size
    for received in (*prompt, *(states if state_blocks else ())):
        assert extent.resumes(received) == received // size * size
    assert extent.resumes(num_tokens) == (extent.states if state_blocks else num_tokens // size * size)
    assert all(extent.codec_at(token) == "int8" for token in prompt)
    assert all(extent.codec_at(token) == NONE for token in states)


# The whole node.


@pytest.mark.parametrize(
    ("tiers", "state_blocks", "keeps"), [(None, 0, 0), (None, 2, 0), ((9, 0), 2, 0), ((9, 0), 0, 1)]
)
def test_answers_are_kept_where_there_is_room_and_no_state(
    tiers: tuple[int, int] | None, state_blocks: int, keeps: int
) -> None:
    assert Place(HERE, 40, tiers, state_blocks).node.keeps_answers == bool(keeps)


def test_a_role_is_taken_once_when_nothing_of_the_old_one_runs() -> None:
    limits = {role: limits_of(40, 0) for role in Role}
    node = Node(limits, Scheduler(limits[Role.MIXED], TierCache(30), BlockPool(40), node=HERE))
    node.on(begin(Role.MIXED), 1)
    assert node.on(events.Convert(HERE, Role.DECODE), 2) == []
    node.on(events.DropAttempt(KEY), 3)
    assert node.scheduler.limits is limits[Role.MIXED], "what runs is of the old role"
    taken = RoleChanged(HERE, Role.DECODE)
    assert node.on(Stepped(1), 4) == [events.ReleaseResources(KEY), taken]
    assert node.scheduler.limits is limits[Role.DECODE]
    assert node.on(events.Convert(HERE, Role.MIXED), 5) == [RoleChanged(HERE, Role.MIXED)]
    node.on(begin(Role.MIXED), 6)
    assert RoleChanged not in map(type, node.on(Stepped(1), 7))


def test_what_comes_for_a_key_that_is_not_known_is_void() -> None:
    node, key = node_of(), RequestId("gone#1")
    keyed = (
        (events.BlocksFetched, events.Loaded),
        (events.HandoverComplete, events.DropAttempt, events.Progress),
    )
    facts = [*[kind(key, 3) for kind in keyed[0]], *[kind(key) for kind in keyed[1]]]
    facts += [events.Broken(key, "x"), events.ShipmentStored(key, PEER, 3), events.Reclaimed(key, whole=True)]
    facts += [events.Lend(RequestId("s"), 1, HERE, PEER, 1), events.Repay(RequestId("s"), 1, HERE, PEER, 1)]
    granted, counted = (
        (letters.HandoverGranted, letters.HandoverConfirmed),
        (letters.ClaimReply, letters.Shrink),
    )
    said = [*[kind(key) for kind in granted], *[kind(key, 3) for kind in counted]]
    said += [letters.ReserveReply(key, True), letters.ShipmentConfirmed(key, 3), letters.SendBack(key, 0, 1)]
    for fact in (*facts, *[events.LetterReceived(PEER, letter) for letter in said]):
        assert node.on(fact, 1) == []


def test_of_first_tokens_of_several_those_of_requests_that_are_gone_are_passed_over() -> None:
    node = node_of(stages=2)
    node.on(begin(Role.PREFILL), 1)
    node.on(Stepped(1), 2)
    node.on(Stepped(1), 3)
    assert events.ReleaseResources(KEY) in node.on(events.Sampled((RequestId("gone#1"), KEY), (KEY,)), 4)


def test_a_move_or_a_return_that_cannot_be_is_answered_with_what_lies_where() -> None:
    node = node_of()
    node.on(begin(Role.MIXED), 0)
    node.on(Stepped(1), 1)
    node.on(Stepped(1), 2)
    for kind, count in ((events.Repay, 1), (events.Lend, 0)):
        order = kind(RequestId("r"), 1, HERE, PEER, count)
        assert [each for each in node.on(order, 3) if not isinstance(each, Run)] == [
            HoldingsChanged(RequestId("r"), 1, ())
        ]


def test_what_changed_within_a_period_is_told_at_its_end_though_nothing_happens_then() -> None:
    period_ns = 100
    node = node_of(report_ns=period_ns)

    def told(*happened: events.Event, now: int) -> list[Any]:
        actions = [each for event in happened for each in node.on(event, now)]
        return [each for each in actions if isinstance(each, MemoryUsed | events.Wake)]

    assert isinstance(told(begin(Role.DECODE), now=1)[0], MemoryUsed)
    [used] = told(events.DropAttempt(KEY), now=1 + period_ns)
    assert used.num_available == 40
    due_ns = 1 + 2 * period_ns
    assert told(begin(Role.DECODE, 2), now=due_ns - 50) == [events.Wake(due_ns)]
    assert told(begin(Role.DECODE, 3), now=due_ns - 40) == []
    [used] = told(events.Woken(), now=due_ns)
    assert len(used.entries) == 2
    assert told(events.Woken(), now=due_ns + period_ns) == []


@pytest.mark.parametrize("names", [NAMES[1:3], NAMES[1::-1], NAMES[:1] * 2, NAMES[:3:2]], ids=str)
@pytest.mark.parametrize("tenants", [1, 2])
def test_a_fetch_of_names_that_are_no_chain_is_void(names: tuple[int, ...], tenants: int) -> None:
    node = node_of(3)
    assert node.tiers is not None
    if tenants > 1:
        node.tiers.put((100, 101), Tenant("other"))
    node.on(events.LetterReceived(PEER, letters.FetchRequest(KEY, NAMES, 0)), 1)
    assert node.on(events.LetterReceived(OTHER, letters.FetchRequest(KEY, names, 0)), 2) == []
    for peer in (OTHER, PEER):
        node.on(events.LetterReceived(peer, letters.FetchDone(KEY)), 3)
    node.check_idle()
