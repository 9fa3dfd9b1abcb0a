"""The desk in front of a conductor, judged by what a carrier of its answers has to count on."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.attempts import DropAttempt, Route, StartAttempt, key_of
from isthmus.core.conductor import (
    Abort,
    Action,
    Answer,
    Conductor,
    Convert,
    Desk,
    Event,
    Fail,
    FirstToken,
    Hold,
    HoldExpired,
    Lend,
    NodeJoined,
    NodeLeft,
    Refuse,
    Repay,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    Rules,
    SendOrder,
    view,
)
from isthmus.core.types import BlockName, NodeId, RequestId, Role, Tenant

from .cluster import Cluster
from .test_conductor import play

A, P, D, M = RequestId("a"), NodeId("p"), NodeId("d"), NodeId("m")
SIZE = 16
REJOIN_MS = 5000


def joined(node: NodeId, role: Role) -> NodeJoined:
    return NodeJoined(node, role, 1000, SIZE)


def arrived(num_tokens: int = 40, max_tokens: int = 10, names: tuple[BlockName, ...] = ()) -> RequestArrived:
    return RequestArrived(A, "t", num_tokens, max_tokens, names, weight=2.0)


class Orders:
    """In place of a conductor: answers with the next of what was written."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.view = list(answers), Conductor(Rules()).view

    def on(self, event: Event, now: int) -> list[object]:
        return [self.answers.pop(0)]


def answers(order: object) -> list[Answer]:
    return [*Desk(Orders(order), REJOIN_MS).on(LEFT, 0)]  # type: ignore[arg-type]


LEFT = NodeLeft(M)


def desk(*nodes: NodeJoined, **rules: int) -> Desk:
    made = Desk(Conductor(Rules(**rules)), REJOIN_MS)  # type: ignore[arg-type]
    for each in nodes:
        assert not made.on(each, 0)
    return made


def parts(some: Desk, event: RequestArrived, num_generated: int = 0) -> list[tuple[NodeId, StartAttempt]]:
    (route,) = [answer for answer in some.on(event, 1) if isinstance(answer, Route)]
    return some.parts(route, num_generated)


PAIR = joined(P, Role.PREFILL), joined(D, Role.DECODE)


# What nodes are told.


def test_the_decode_node_is_told_first_and_a_mixed_one_once() -> None:
    told = parts(desk(*PAIR), arrived())
    assert [(node, begin.part) for node, begin in told] == [(D, Role.DECODE), (P, Role.PREFILL)]
    ((node, begin),) = parts(desk(joined(M, Role.MIXED)), arrived())
    assert (node, begin.part, begin.key, begin.tenant) == (M, Role.MIXED, "a#1", Tenant("t", 2.0))


@pytest.mark.parametrize(
    ("event", "num_generated", "num_tokens", "stop", "num_names"),
    [
        (arrived(40, 10, (1, 2, 3)), 0, 40, 50, 3),  # a trace names the unfinished block, too
        (arrived(40, 10, (1, 2, 3)), 7, 47, 50, 2),  # which is another one with tokens behind it
        (arrived(48, 10, (1, 2, 3)), 7, 55, 58, 3),
        (arrived(2, 0), 0, 2, 3, 0),  # scored alone: one token ends that
    ],
)
def test_a_later_attempt_goes_on_from_what_the_client_has(
    event: RequestArrived, num_generated: int, num_tokens: int, stop: int, num_names: int
) -> None:
    for _, begin in parts(desk(*PAIR), event, num_generated):
        assert (begin.num_tokens, begin.stop_length, len(begin.names)) == (num_tokens, stop, num_names)


def test_loans_and_new_roles_are_told_to_the_nodes_they_are_for() -> None:
    for order in (Lend(A, 2, P, D, 3), Repay(A, 2, P, D, 3), Convert(P, Role.DECODE)):
        assert answers(order) == [SendOrder(P, order)]


# What ends.


def test_an_end_is_heard_once_and_its_nodes_forget() -> None:
    some, forget = desk(*PAIR), DropAttempt(RequestId("a#1"))
    some.on(arrived(), 1)
    ended = RequestEnded(A, 10)
    assert some.on(ended, 2) == [Abort(A, 1, (P, D)), SendOrder(P, forget), SendOrder(D, forget), ended]
    assert some.on(ended, 3) == () == some.on(RequestCancelled(A), 3)


def test_what_nobody_can_take_ends_at_once() -> None:
    some = desk()
    (refuse,) = some.on(arrived(), 1)
    assert isinstance(refuse, Refuse) and refuse.request == A
    some.check()


def test_a_request_waits_for_a_node_as_long_as_that_may_take_to_come_back() -> None:
    some = desk(joined(M, Role.MIXED))
    some.on(arrived(), 1)
    expired = HoldExpired(A, 1)
    assert some.on(NodeLeft(M), 2) == [Abort(A, 1, ()), Hold(A, 1, "node m is gone", REJOIN_MS)]
    assert not some.on(FirstToken(A, 1), 3), "its attempt is over"
    assert [type(answer) for answer in some.on(expired, 4)] == [Fail]
    some.check()


def test_the_wait_for_a_first_node_is_the_deployments() -> None:
    (wait,) = desk(wait_ms=70).on(arrived(), 1)
    assert isinstance(wait, Hold) and (wait.request, wait.attempt, wait.wait_ms) == (A, 0, 70)


# Any history.


class Carried(Cluster):
    """All that happens in it goes over a desk, whose answers are judged beside the conductor's actions."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.desk = Desk(self.conductor, REJOIN_MS, self._hear)
        self.heard: list[Action] = []
        self.open: set[RequestId] = set()
        self.waits: set[RequestId] = set()
        self.first: set[tuple[RequestId, int]] = set()

    def _hear(self, now: int, event: Event, actions: list[Action]) -> None:
        self.heard = actions
        if isinstance(event, FirstToken):
            route = self.routes.get(event.request)
            assert route is not None and route.attempt == event.attempt and event.request not in self.held
            assert (event.request, event.attempt) not in self.first, "a second first token"
            self.first.add((event.request, event.attempt))

    def _decide(self, event: Event) -> list[Action]:
        self.heard = []
        if isinstance(event, RequestArrived):
            self.open.add(event.request)
        if isinstance(event, HoldExpired):
            self.waits.discard(event.request)
        answers = list(self.desk.on(event, self.now))
        self.desk.check()
        for at, answer in enumerate(answers):
            match answer:
                case Route():
                    nodes = [node for node, _ in self.desk.parts(answer, 0)]
                    assert nodes == list(dict.fromkeys([answer.decode, answer.prefill]))
                    self.waits.discard(answer.request)
                case Abort(request, attempt, gone):
                    forget = DropAttempt(key_of(request, attempt))
                    assert answers[at + 1 : at + 1 + len(gone)] == [SendOrder(node, forget) for node in gone]
                case Hold():
                    self.waits.add(answer.request)
                case Refuse() | Fail() | RequestEnded() | RequestCancelled():
                    self.open.remove(answer.request)
        return self.heard

    def _check_books(self) -> None:
        super()._check_books()
        assert self.open == set(self.routes) | self.waiting
        assert self.held | self.waiting <= self.waits, "nobody goes on with a request that waits"


@settings(max_examples=100)
@given(st.integers(0, 1 << 30), st.integers(1, 4), st.sampled_from([0, 100]), st.sampled_from([3, 1000]))
def test_in_any_history_attempts_follow_each_other_and_each_request_ends_once(
    seed: int, max_attempts: int, wait_ms: int, max_requests: int
) -> None:
    some = Carried(Rules(max_attempts=max_attempts, wait_ms=wait_ms, max_requests=max_requests))
    for node, role in ((P, Role.PREFILL), (D, Role.DECODE), (M, Role.MIXED)):
        some.join(node, role)
    play(some, Random(seed), 60)
    some.drain()
    assert set(some.ended) == set(some.arrived) and not some.open


# The table.

STEPS = ("ROUTED", "PREFILLED", "HANDED_OVER", "WITHDRAWN")
PAGE = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text(encoding="utf8")


def test_the_page_has_the_picture_of_the_table() -> None:
    lines = ["stateDiagram-v2", "    [*] --> WAITING"]
    for step in STEPS:
        ways = getattr(view, step).items()
        lines += [f"    {state.name} --> {then.name}: {step.lower()}" for state, then in ways]
    lines.append("    WAITING --> [*]: refused, failed, cancelled, complete")
    assert re.findall(r"```mermaid\n(stateDiagram.*?)\n```", PAGE, re.DOTALL) == ["\n".join(lines)]
