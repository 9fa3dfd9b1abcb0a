"""A node whose engine is a server: what it answers to each fact, and that all ends and adds up whatever comes."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.attempts import (
    BlocksEvicted,
    BlocksStored,
    FetchFinished,
    FetchOrder,
    Holding,
    PrefillFinished,
    RequestFailed,
    RoleChanged,
    Share,
)
from isthmus.core.node import server_node as module
from isthmus.core.node.attempts import SEVERED_NS
from isthmus.core.node.events import (
    Action,
    AdoptBlocks,
    AnswerComplete,
    BlocksFetched,
    BlocksLost,
    Broken,
    Convert,
    Discard,
    DropAttempt,
    EndFetch,
    EndGive,
    EngineBlocks,
    EnginePrefilled,
    Event,
    Fetch,
    Give,
    Gone,
    LetterReceived,
    PrefixesRecovered,
    Progress,
    ReleaseResources,
    SavesDone,
    SendLetter,
    SlotsFilled,
    StartAttempt,
    Submit,
    Wake,
    Woken,
)
from isthmus.core.node.letters import (
    ClaimReply,
    ClaimRequest,
    FetchDone,
    FetchRequest,
    HandoverConfirmed,
    Letter,
    PromptComputed,
    ReserveReply,
    ReserveRequest,
)
from isthmus.core.node.server_node import SETTLE_NS, ServerNode, handover_key
from isthmus.core.scheduler import TierCache
from isthmus.core.types import BlockName, NodeId, RequestId, Role, Tenant

from .world import SIZE, fetch_of, route_of

P0, P1, D0 = NodeId("p0"), NodeId("p1"), NodeId("d0")
KEY = RequestId("r#1")
PARAMS = b'{"remote_request_id":"x"}'
NAMES = (11, 12, 13, 14)


def node_of(name: NodeId, tiers: tuple[int, int] | None = (30, 0), **limits: int) -> ServerNode:
    return ServerNode(name, Role.MIXED, TierCache(*tiers) if tiers else None, **limits)


def begin(part: Role, prefill: NodeId = P0, decode: NodeId = D0, **fields: object) -> StartAttempt:
    return StartAttempt(KEY, part, route_of("r", prefill, decode, **fields), SIZE * 4 + 1, 40, NAMES)


def kept(node: ServerNode, names: tuple[BlockName, ...], now: int = 0) -> None:
    """They are in its cache."""
    node.on(SlotsFilled(RequestId("before"), names), now)
    assert node.tiers is not None and node.tiers.match(names)[0] == len(names)


def told(node: ServerNode, peer: NodeId, letter: Letter, now: int) -> list[Action]:
    return node.on(LetterReceived(peer, letter), now)


def asks(fetch: Fetch) -> list[Action]:
    """What is done for a fetch."""
    return [SendLetter(fetch.source, FetchRequest(fetch.key, fetch.names, fetch.start)), fetch]


def kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


# On one node.


def test_blocks_that_an_attempt_was_submitted_with_are_the_last_to_go() -> None:
    node = node_of(P0, (8, 0))
    kept(node, NAMES)
    kept(node, (21, 22, 23, 24))
    node.on(begin(Role.MIXED, decode=P0), 1)
    node.on(EnginePrefilled(KEY), 2)
    node.on(AnswerComplete(KEY), 3)
    assert BlocksEvicted(P0, (24, 23)) in node.on(SlotsFilled(RequestId("later"), (31, 32)), 4)
    assert node.tiers is not None and node.tiers.match(NAMES)[0] == len(NAMES)


@pytest.mark.parametrize("tiers", [None, (30, 0)])
def test_what_both_prefills_and_decodes_here_goes_to_the_engine_at_once(tiers: tuple[int, int] | None) -> None:
    node = node_of(P0, tiers)
    if tiers:
        kept(node, NAMES[:2])
    assert node.on(begin(Role.MIXED, P0, P0), 1) == [Submit(KEY, 2 if tiers else 0)]
    assert (node.num_running, node.num_waiting, KEY in node) == (1, 0, True)
    assert node.on(EnginePrefilled(KEY), 2) == []
    assert node.tiers is None or not node.tiers.num_pinned, "it is in the engine's memory"
    assert node.on(SavesDone(KEY), 3) == []
    assert node.on(AnswerComplete(KEY), 4) == [ReleaseResources(KEY)]
    assert node.on(AnswerComplete(KEY), 5) == []
    node.check_idle()


def test_a_prompt_waits_for_what_its_route_fetches_and_uses_what_came() -> None:
    node = node_of(P0, transfer_ns=1000)
    kept(node, NAMES[:1])
    order = fetch_of(P1, 1, 4)
    assert node.on(begin(Role.MIXED, P0, P0, fetch=order), 1) == asks(Fetch(KEY, P1, NAMES, 1))
    assert (node.num_running, node.num_waiting) == (0, 1)
    assert AdoptBlocks(KEY, NAMES[1:2]) in node.on(BlocksFetched(KEY, 2, ended=False), 2)
    assert node.on(Woken(), 5000) == [], "it has not begun: its source may be busy"
    node.on(Progress(KEY), 5000)
    assert node.on(Woken(), 9000) == [], "that was of something else"
    node.on(Progress(KEY, fetched=True), 9000)
    assert node.on(Woken(), 10000) == []
    assert node.on(Woken(), 10001) == [EndFetch(KEY)]
    ended = node.on(BlocksFetched(KEY, 3), 10002)
    assert ended[:2] == [SendLetter(P1, FetchDone(KEY)), AdoptBlocks(KEY, NAMES[2:3])]
    assert ended[-2:] == [FetchFinished(RequestId("r"), 1), Submit(KEY, 3)]
    node.on(AnswerComplete(KEY), 10003)
    node.check_idle()


def test_what_comes_is_kept_in_the_share_of_who_asked_for_it_though_it_is_gone() -> None:
    node = node_of(P0)
    order = msgspec.structs.replace(begin(Role.MIXED, P0, P0, fetch=fetch_of(P1, 0, 4)), tenant=Tenant("acme"))
    node.on(order, 1)
    node.on(DropAttempt(KEY), 2)
    node.on(BlocksFetched(KEY, 3), 3)
    filled = msgspec.structs.replace(order, key=RequestId("s#1"), tenant=Tenant("globex"), names=(21, 22))
    node.on(msgspec.structs.replace(filled, route=route_of("s", P0, P0)), 4)
    node.on(SlotsFilled(RequestId("s#1"), (21, 22)), 5)
    assert node.tiers is not None and node.tiers.sizes() == {"acme": 3, "globex": 2}


# A prompt that decodes elsewhere.


def test_engines_hand_over_themselves_without_a_cache() -> None:
    node = node_of(P0, None)
    assert node.on(begin(Role.PREFILL), 1) == [Submit(KEY, 0)]
    assert node.on(EnginePrefilled(KEY, 5, PARAMS), 2) == [SendLetter(D0, PromptComputed(KEY, 5, PARAMS))]
    assert node.on(EnginePrefilled(KEY, 5, PARAMS), 3) == []
    assert told(node, D0, HandoverConfirmed(KEY), 4) == [
        PrefillFinished(RequestId("r"), 1),
        ReleaseResources(KEY),
    ]
    node.check_idle()


@pytest.mark.parametrize("saved", ["before", "after", "too late"])
def test_its_last_blocks_are_saved_before_it_is_passed_unless_they_take_too_long(saved: str) -> None:
    node, passed = node_of(P0), [SendLetter(D0, PromptComputed(KEY, 5))]
    node.on(begin(Role.PREFILL), 1)
    assert told(node, D0, HandoverConfirmed(KEY), 2) == [], "it was not passed"
    if saved == "before":
        assert node.on(SavesDone(KEY), 2) == []
        assert node.on(EnginePrefilled(KEY, 5), 3) == passed
    else:
        assert node.on(EnginePrefilled(KEY, 5), 3) == [Wake(3 + SETTLE_NS)]
        assert node.num_running == 0
        fill = RequestId("fill")
        assert node.on(SlotsFilled(fill, NAMES), 4)[0] == AdoptBlocks(fill, NAMES)
        assert node.on(Woken(), 2 + SETTLE_NS) == []
        last = SavesDone(KEY) if saved == "after" else Woken()
        assert node.on(last, 3 + SETTLE_NS) == passed
    for again in (SavesDone(KEY), Woken()):
        assert node.on(again, 4 + SETTLE_NS) == [], "it is not passed twice"
    assert told(node, D0, HandoverConfirmed(KEY), 7 + SETTLE_NS) == [
        PrefillFinished(RequestId("r"), 1),
        ReleaseResources(KEY),
    ]
    node.check_idle()


@pytest.mark.parametrize("unread", [False, True])
def test_what_is_given_is_the_decode_nodes_until_that_answers_for_it(unread: bool) -> None:
    """Even when the attempt is forgotten meanwhile: its engine may be reading."""
    node = brought_to(PASSED, None)
    assert node.on(DropAttempt(KEY), 10) == [ReleaseResources(KEY)]
    with pytest.raises(AssertionError, match="never answered"):
        node.check_idle()
    assert told(node, D0, HandoverConfirmed(KEY, unread), 11) == ([Discard(PARAMS)] if unread else [])
    assert told(node, D0, HandoverConfirmed(KEY, unread), 12) == []
    node.check_idle()


@pytest.mark.parametrize("forgotten_first", [False, True])
def test_what_was_given_to_a_node_that_is_gone_is_let_go_of(forgotten_first: bool) -> None:
    """Once the head says so too: until then its engine may be reading."""
    node, gone = brought_to(PASSED, None), Gone(D0, "broken pipe")
    assert node.on(Gone(P1, "another"), 9) == []
    if forgotten_first:
        assert node.on(DropAttempt(KEY), 10) == [ReleaseResources(KEY)]
        assert node.on(gone, 11) == [Discard(PARAMS)]
    else:
        assert node.on(gone, 10) == [Wake(10 + SEVERED_NS)]
        assert node.on(DropAttempt(KEY), 11) == [Discard(PARAMS), ReleaseResources(KEY)]
    assert node.on(gone, 12) == []
    node.check_idle()


@pytest.mark.parametrize("tiers", [None, (30, 0)])
def test_a_lost_session_fails_it_only_when_the_head_had_its_time(tiers: tuple[int, int] | None) -> None:
    node = node_of(P0, tiers)
    node.on(begin(Role.PREFILL), 1)
    assert node.on(Gone(D0, "early"), 1) == [], "it was not passed"
    node.on(EnginePrefilled(KEY, 5, b"" if tiers else PARAMS), 2)
    node.on(SavesDone(KEY), 2)
    assert SEVERED_NS == 250_000_000
    assert node.on(Gone(D0, "broken pipe"), 10) == [Wake(10 + SEVERED_NS)]
    assert node.on(Woken(), 9 + SEVERED_NS) == []
    actions = node.on(Woken(), 10 + SEVERED_NS)
    assert actions == [
        ReleaseResources(KEY),
        RequestFailed(RequestId("r"), 1, "p0: the session with d0 ended: broken pipe"),
    ]
    node.check_idle()


# What was computed elsewhere.


@pytest.mark.parametrize("early", [False, True])
def test_what_engines_hand_over_goes_to_the_engine_as_it_comes(early: bool) -> None:
    """The word of it may come before the head's."""
    node, facts = (
        node_of(D0, None),
        [begin(Role.DECODE), LetterReceived(P0, PromptComputed(KEY, 7, PARAMS))],
    )
    first, second = reversed(facts) if early else facts
    assert node.on(first, 1) == []
    assert node.on(second, 2) == [Submit(KEY, 0, PARAMS, 7)]
    assert told(node, P0, PromptComputed(KEY, 7, PARAMS), 3) == [], "params are used once"
    assert node.on(EnginePrefilled(KEY), 4) == [SendLetter(P0, HandoverConfirmed(KEY))]
    assert node.on(EnginePrefilled(KEY), 5) == []
    assert node.on(AnswerComplete(KEY), 6) == [ReleaseResources(KEY)]
    node.check_idle()


@pytest.mark.parametrize("early", [False, True])
def test_what_a_cache_hands_over_is_fetched_then_its_source_let_go(early: bool) -> None:
    node, facts = node_of(D0), [begin(Role.DECODE), LetterReceived(P0, PromptComputed(KEY, 7))]
    kept(node, NAMES[:1])
    first, second = reversed(facts) if early else facts
    assert node.on(first, 1) == []
    handover = handover_key(KEY)
    assert node.on(second, 2) == asks(Fetch(handover, P0, NAMES, 1))
    node.on(BlocksFetched(handover, 3, ended=False), 3)
    assert node.on(BlocksFetched(handover, 4), 4)[-2:] == [
        SendLetter(P0, HandoverConfirmed(KEY)),
        Submit(KEY, 4, cached_tokens=7),
    ]
    assert node.tiers is not None and node.tiers.num_pinned == 4
    assert node.on(EnginePrefilled(KEY), 5) == []
    assert node.tiers.num_pinned == 0
    assert node.on(AnswerComplete(KEY), 6) == [ReleaseResources(KEY)]
    node.check_idle()


@pytest.mark.parametrize("recalled", [0, 2])
def test_a_recall_ends_before_the_hand_over_is_fetched(recalled: int) -> None:
    node = node_of(D0)
    recall = FetchOrder(P1, 0, 2)
    assert node.on(begin(Role.DECODE, handover_start=2, recall=recall), 1) == asks(Fetch(KEY, P1, NAMES[:2], 0))
    assert told(node, P0, PromptComputed(KEY, 3), 2) == []
    assert node.on(BlocksFetched(KEY, recalled), 3)[-1] == Fetch(handover_key(KEY), P0, NAMES, recalled)


# An attempt ends before its time.

GATHERING, AWAITING, FETCHING, SUBMITTED, ANSWERED, PASSED = (
    module.GATHERING, module.AWAITING, module.FETCHING, module.SUBMITTED,
    module.ANSWERED, module.PASSED,
)  # fmt: skip


def brought_to(state: str, tiers: tuple[int, int] | None) -> ServerNode:
    part = Role.PREFILL if state in (ANSWERED, PASSED) else Role.DECODE
    node = node_of(P0 if part is Role.PREFILL else D0, tiers)
    recall = {"recall": FetchOrder(P1, 0, 2), "handover_start": 2} if state is GATHERING else {}
    node.on(begin(part, **recall), 1)
    params = b"" if tiers else PARAMS
    if state in (ANSWERED, PASSED):
        node.on(EnginePrefilled(KEY, 1, params), 2)
    if state is PASSED:
        node.on(SavesDone(KEY), 3)
    if state in (FETCHING, SUBMITTED):
        told(node, P0, PromptComputed(KEY, 1, params), 2)
    if state is SUBMITTED:
        node.on(BlocksFetched(handover_key(KEY), 4), 3)
    assert node._attempts[KEY].state is state
    return node


@pytest.mark.parametrize(
    ("state", "tiers"),
    [(state, (30, 0)) for state in (GATHERING, AWAITING, FETCHING, SUBMITTED, ANSWERED, PASSED)]
    + [(state, None) for state in (AWAITING, SUBMITTED, PASSED)],
)
def test_what_is_forgotten_takes_nothing_with_it(state: str, tiers: tuple[int, int] | None) -> None:
    """What engines keep for each other is let go of only where nobody may use it any more."""
    node = brought_to(state, tiers)
    actions = node.on(DropAttempt(KEY), 10)
    fetch = {GATHERING: KEY, FETCHING: handover_key(KEY)}.get(state)
    expected: list[Action] = [EndFetch(fetch)] if fetch else []
    expected.append(ReleaseResources(KEY))
    if state is FETCHING or (state is SUBMITTED and tiers is None):
        expected.insert(0, SendLetter(P0, HandoverConfirmed(KEY)))  # its engine tells the other one itself
    assert actions == expected
    assert node.on(DropAttempt(KEY), 11) == []
    if fetch:
        assert AdoptBlocks(fetch, NAMES[:1]) in node.on(BlocksFetched(fetch, 1), 12), "what came is kept"
    if state in (GATHERING, AWAITING):
        assert told(node, P0, PromptComputed(KEY, 1, b"" if tiers else PARAMS), 12) == [
            SendLetter(P0, HandoverConfirmed(KEY, unread=True))
        ]
        assert told(node, P0, PromptComputed(RequestId("s#1"), 1), 12) == [], "that may begin yet"
    if state is PASSED:
        told(node, D0, HandoverConfirmed(KEY), 12)
    node.check_idle()
    assert node.on(Woken(), 13 + SETTLE_NS) == []


def test_word_that_came_early_for_an_attempt_that_is_forgotten_is_answered() -> None:
    """It waits for what its route fetches."""
    node = node_of(D0)
    node.on(begin(Role.DECODE, recall=FetchOrder(P1, 0, 2), handover_start=2), 1)
    assert told(node, P0, PromptComputed(KEY, 1), 2) == []
    assert node.on(DropAttempt(KEY), 3) == [
        SendLetter(P0, HandoverConfirmed(KEY, unread=True)),
        EndFetch(KEY),
        ReleaseResources(KEY),
    ]
    node.on(BlocksFetched(KEY, 0), 4)
    node.check_idle()


def test_of_attempts_that_ended_before_any_word_only_so_many_are_remembered() -> None:
    node = node_of(D0, None)
    keys = [RequestId(f"s{number}#1") for number in range(module.MAX_REFUSED + 1)]
    for key in keys:
        node.on(msgspec.structs.replace(begin(Role.DECODE), key=key), 1)
        node.on(DropAttempt(key), 2)
    assert told(node, P0, PromptComputed(keys[0], 1, PARAMS), 3) == []
    assert told(node, P0, PromptComputed(keys[1], 1, PARAMS), 3) == [
        SendLetter(P0, HandoverConfirmed(keys[1], unread=True))
    ]


@pytest.mark.parametrize("final", [False, True])
def test_what_the_engine_refuses_fails_and_for_good_if_it_is_final(final: bool) -> None:
    node = brought_to(SUBMITTED, (30, 0))
    reason = "why" if final else "d0: why"
    expected = [ReleaseResources(KEY), RequestFailed(RequestId("r"), 1, reason, final=final)]
    assert node.on(Broken(KEY, "why", final=final), 10) == expected
    assert node.on(Broken(KEY, "why", final=final), 11) == []
    node.check_idle()


def test_what_the_engine_never_answered_was_not_read() -> None:
    """Where its prefill node's engine keeps the KV, that lets go of it."""
    node = brought_to(SUBMITTED, None)
    failed = RequestFailed(RequestId("r"), 1, "d0: why")
    assert node.on(Broken(KEY, "why"), 10) == [
        SendLetter(P0, HandoverConfirmed(KEY, unread=True)),
        ReleaseResources(KEY),
        failed,
    ]
    for peer, heard in ((P0, []), (P1, [SendLetter(P0, HandoverConfirmed(KEY))])):
        node = brought_to(SUBMITTED, None)
        node.on(Gone(peer, "cut"), 9)
        assert node.on(EnginePrefilled(KEY), 10) == heard, (
            "nobody waits for word of it where the session is over"
        )
        assert node.on(Broken(KEY, "why"), 11) == [ReleaseResources(KEY), failed]


def test_nobody_has_kv_in_its_engines_memory_nor_its_attempts_elsewhere() -> None:
    node = node_of(D0)
    for fields in ({"holdings": (Holding((P1,), 1),)}, {"growth": (P1,)}):
        assert kinds(node.on(begin(Role.MIXED, D0, D0, **fields), 0)) == ["ReleaseResources", "RequestFailed"]
    assert told(node, P0, ReserveRequest(KEY, 1), 1) == [SendLetter(P0, ReserveReply(KEY, False))]
    assert told(node, P0, ClaimRequest(KEY, RequestId("r#0"), Share()), 2) == [
        SendLetter(P0, ClaimReply(KEY, 0))
    ]


@pytest.mark.parametrize("tiers", [None, (30, 0)])
def test_only_the_other_node_of_an_attempt_is_believed(tiers: tuple[int, int] | None) -> None:
    node = brought_to(PASSED, tiers)
    assert told(node, P1, HandoverConfirmed(KEY), 4) == []
    assert "PrefillFinished" in kinds(told(node, D0, HandoverConfirmed(KEY), 5))
    for passed_first in (False, True):
        node, params = node_of(D0, tiers), b"" if tiers else PARAMS
        facts = [begin(Role.DECODE), LetterReceived(P1, PromptComputed(KEY, 7, params))]
        for fact in reversed(facts) if passed_first else facts:
            assert node.on(fact, 1) == []
        assert kinds(told(node, P0, PromptComputed(KEY, 7, params), 2))[-1] == ("Fetch" if tiers else "Submit")
    node = node_of(D0, tiers)
    node.on(begin(Role.DECODE), 1)
    node.on(DropAttempt(KEY), 2)
    assert told(node, P1, PromptComputed(KEY, 7), 3) == [], "it is nobody's to give back"


# What it has.


@pytest.mark.parametrize("gone", [False, True])
def test_what_another_node_wants_stays_until_it_has_enough_or_is_gone(gone: bool) -> None:
    key = RequestId("f")
    node, end = (
        node_of(P0),
        Gone(P1, "cut") if gone else LetterReceived(P1, FetchDone(key)),
    )
    kept(node, NAMES[:3])
    assert told(node, P1, FetchRequest(key, NAMES, 1), 1) == [Give(key, P1, NAMES, 1, 3, 0)]
    assert node.on(Gone(D0, "cut"), 2) == []
    with pytest.raises(AssertionError):
        node.check_idle()
    assert node.on(end, 2) == [EndGive(key, P1)]
    node.check_idle()
    assert told(node_of(P0, None), P1, FetchRequest(key, NAMES, 1), 1) == [Give(key, P1, NAMES, 1, 1, 0)]


def test_what_lies_on_the_ssd_at_the_start_is_known_and_a_role_taken_at_once() -> None:
    node = node_of(P0, (2, 4))
    assert BlocksStored in map(type, node.on(PrefixesRecovered((NAMES,)), 1))
    assert node.on(Convert(P0, Role.DECODE), 2) == [RoleChanged(P0, Role.DECODE)]
    assert node.role is Role.DECODE
    assert node_of(P0, None).on(PrefixesRecovered((NAMES,)), 1) == []


# Whatever comes.


class Random:
    """An adapter that is told anything, at any time, and what is true of it all along."""

    def __init__(self, seed: int, tiers: tuple[int, int] | None) -> None:
        self.draw = random.Random(seed)
        self.tiers, self.now, self.number = tiers, 1, 0
        self.node = node_of(P0, tiers, transfer_ns=1000)
        self.live: set[RequestId] = set()
        self.keys: list[RequestId] = [RequestId("unknown#1")]
        self.ends: Counter[RequestId] = Counter()
        self.fetching: set[RequestId] = set()
        self.given: set[RequestId] = set()
        self.copies: Counter[BlockName] = Counter()
        self.believed: set[BlockName] = set()

    def tell(self, event: Event) -> None:
        for action in self.node.on(event, self.now):
            match action:
                case ReleaseResources():
                    assert action.key in self.live, "it ended already"
                    self.live.discard(action.key)
                    self.ends[action.key] += 1
                case Fetch():
                    assert action.key not in self.fetching
                    self.fetching.add(action.key)
                case EndFetch():
                    assert action.key in self.fetching
                case Submit(key, _, params) | SendLetter(_, PromptComputed(key, _, params)):
                    assert key in self.live and not (self.tiers and params)
                    if isinstance(action, SendLetter):
                        assert action.peer == D0
                        self.given.add(key)
                case Discard():
                    assert action.params.decode() in self.keys
                case BlocksStored():
                    self.believed |= set(action.names)
                case BlocksEvicted():
                    assert set(action.names) <= self.believed
                    self.believed -= set(action.names)
                case _:
                    pass

    def chain(self) -> tuple[int, ...]:
        seed = self.draw.randrange(3) * 1000
        return tuple(range(seed, seed + self.draw.randrange(1, 9)))

    def begin(self) -> None:
        self.number += 1
        names, part = self.chain(), self.draw.choice(list(Role))
        prefill = D0 if part is Role.DECODE else P0
        decode = D0 if part is Role.PREFILL else P0
        fields: dict[str, object] = {}
        if self.draw.randrange(2):
            start = self.draw.randrange(len(names))
            order = FetchOrder(P1, start, self.draw.randrange(start, len(names)) + 1)
            fields["recall" if part is Role.DECODE else "fetch"] = order
        key = RequestId(f"r{self.number}#1")
        if not self.draw.randrange(4):
            self.tell(LetterReceived(D0, PromptComputed(key, 1, self.params(key))))
        if not self.draw.randrange(9):
            self.tell(DropAttempt(key))
        self.live.add(key)
        self.keys.append(key)
        route = route_of(f"r{self.number}", prefill, decode, **fields)
        tenant = self.draw.choice([Tenant("acme"), Tenant("globex")])
        self.tell(StartAttempt(key, part, route, len(names) * SIZE + 1, len(names) * SIZE + 9, names, tenant))

    def params(self, key: RequestId) -> bytes:
        return b"" if self.tiers else key.encode()

    def fetch_ended(self) -> None:
        if self.fetching:
            key = self.draw.choice(sorted(self.fetching))
            self.fetching.discard(key)
            self.tell(BlocksFetched(key, self.draw.randrange(9) if self.draw.randrange(3) else 0))

    def dropped(self) -> None:
        held = sorted(self.copies)
        if held:
            gone = tuple(self.draw.sample(held, self.draw.randrange(1, len(held) + 1)))
            self.copies -= Counter(gone)
            self.tell(EngineBlocks(removed=gone))

    def held(self) -> None:
        names = self.chain()
        self.copies.update(names)
        self.tell(EngineBlocks(names))

    def cleared(self) -> None:
        self.copies.clear()
        self.tell(EngineBlocks(cleared=True))

    def step(self) -> None:
        draw, key = self.draw, self.draw.choice(self.keys[-6:])
        self.now += draw.choice([1, 100, 2000, SEVERED_NS, SETTLE_NS])
        other = draw.choice(sorted(self.fetching) or [key])
        draw.choice(
            [
                self.begin, self.begin, self.fetch_ended, self.fetch_ended, self.held, self.dropped, self.cleared,
                lambda: self.tell(DropAttempt(key)),
                lambda: self.tell(LetterReceived(draw.choice([P1, D0]), PromptComputed(key, 1, self.params(key)))),
                lambda: self.tell(EnginePrefilled(key, 1, self.params(key))),
                lambda: self.tell(EnginePrefilled(key, 1, self.params(key))),
                lambda: self.tell(SavesDone(key)),
                lambda: self.tell(AnswerComplete(key)) if self.node.num_running else None,
                lambda: self.tell(Broken(key, "why")) if self.node.num_running else None,
                lambda: self.tell(
                    LetterReceived(draw.choice([P1, D0]), HandoverConfirmed(key, bool(draw.randrange(2))))
                ),
                lambda: self.tell(Gone(draw.choice([P1, D0]), "why")),
                lambda: self.tell(BlocksFetched(other, 0, ended=False)),
                lambda: self.tell(Progress(other, fetched=True)),
                lambda: self.tell(SlotsFilled(RequestId("fill"), self.chain())),
                lambda: self.tell(BlocksLost(self.chain()[-1:])),
                lambda: self.tell(Woken()),
            ]
        )()  # fmt: skip

    def check(self) -> None:
        tiers = self.node.tiers
        kept = set(tiers.dram.held) | set(tiers.ssd.held) if tiers is not None else set()
        assert self.believed == kept | set(self.copies), "what the head believes is not so"
        assert self.live == {key for key in self.keys if key in self.node}

    def drain(self) -> None:
        for key in self.keys:
            self.tell(DropAttempt(key))
        while self.fetching:
            self.fetch_ended()
        for key in sorted(self.given):
            self.tell(LetterReceived(D0, HandoverConfirmed(key)))
        self.check()
        self.node.check_idle()
        assert not self.live and set(self.ends.values()) <= {1}
        assert len(self.ends) == self.number, "an attempt did not end"


@given(st.integers(0, 1 << 32), st.sampled_from([None, (4, 0), (4, 6), (30, 30)]))
def test_whatever_comes_all_ends_once_and_adds_up(seed: int, tiers: tuple[int, int] | None) -> None:
    world = Random(seed, tiers)
    for _ in range(80):
        world.step()
        world.check()
    world.drain()
