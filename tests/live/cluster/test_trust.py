"""Whom head and nodes believe. A stranger is right in all but one thing, so that only the check of that turns him
away."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from inspect import Signature, signature
from typing import Any

import pytest
from msgspec.structs import replace

from isthmus.core.attempts import BlocksStored, MemoryUsed, PrefillFinished, RequestFailed, RoleChanged
from isthmus.core.conductor import RequestView, Rules
from isthmus.core.cost import Curve, compile_cost
from isthmus.core.errors import RequestError, StartError, UnavailableError
from isthmus.core.node import events
from isthmus.core.node.events import LetterReceived
from isthmus.core.node.letters import ClaimReply, FetchRequest, HandoverGranted, PromptComputed
from isthmus.core.types import (
    FinishReason,
    Generated,
    Job,
    ModelCard,
    NodeId,
    RequestId,
    Role,
    Sampling,
    TokenLogprobs,
)
from isthmus.facts import NodeFacts, Sequences
from isthmus.live.cluster.head import BEAT_MS, BEATS, POLL_S, Head
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.cluster.process import NodeOptions, Runtime
from isthmus.live.cluster.stage import StageNode
from isthmus.live.engine.emulated import EmulatedEngine, Recipe, layout_of
from isthmus.live.messenger import Session
from isthmus.live.peers import messages
from isthmus.live.peers.sessions import REFUSED
from tests.memory_network import MemoryNetwork
from tests.tape import MemoryTape
from tests.virtual import ManualLoop

CURVE = Curve(kv_token_bytes=16, num_layers=2, prefill_token_s=1e-6, decode_fixed_s=1e-6)
RECIPE = Recipe("model", layout_of(16), 1000)
SILENCE_S, REJOIN_S = 3.0, 5.0
CARD = ModelCard("model", 1000, 1000, created_s=0)
OWN = {REFUSED: {"head": 0}}
"""What the head says of itself."""


def facts(name: str, role: Role) -> NodeFacts:
    return NodeFacts(NodeId(name), role, CURVE, 64, 16, token_budget=64, sequences=Sequences(4, 4, 4))


def hello(name: str, role: Role, **others: Any) -> messages.NodeHello:
    said = messages.NodeHello(
        messages.PROTOCOL, facts(name, role).joined(), f"{name}:1", RECIPE.revision, RECIPE.layout, 1000
    )
    return replace(said, **others)


class Someone:
    """One end of a session, with what was said to it there and why it ended."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.reasons: list[str] = []
        self.session: Session

    def on_message(self, session: Session, message: Any) -> None:
        self.heard.append(message)

    def place(self, session: Session, message: Any, size: int) -> Sequence[memoryview]:
        return [memoryview(bytearray(size))]

    def on_void(self, session: Session, message: Any) -> None:
        """Nothing was placed."""

    def on_close(self, session: Session, reason: str) -> None:
        self.reasons.append(reason)

    def say(self, *said: Any) -> None:
        for message in said:
            self.session.send(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def end(self) -> str:
        """Why the session ended."""
        while not self.reasons:
            await asyncio.sleep(0.001)
        return self.reasons[0]


class Scene:
    """A head, and those who speak to it. In virtual time."""

    def __init__(self, **rules: Any) -> None:
        self.loop = asyncio.get_running_loop()
        assert isinstance(self.loop, ManualLoop)
        self.network = MemoryNetwork()
        self.head = Head(
            Rules(**rules), CARD, silence_s=SILENCE_S, rejoin_s=REJOIN_S, network=self.network,
            clock_ns=self.loop.clock_ns,
        )  # fmt: skip

    async def enter(self, *said: Any) -> Someone:
        """Somebody opens a session with the head and says this."""
        one = Someone()
        one.session = await self.network.connect("head:1", messages.NodeBound, one, timeout_s=1)
        one.say(*said)
        await self.settle()
        return one

    async def settle(self) -> None:
        for _ in range(20):  # of which each message takes a few
            await self.loop.settle()

    def members(self) -> list[str]:
        return [str(node) for node in self.head.nodes()]

    def attempt(self, name: str) -> int:
        """At this request, its last one."""
        return self.view_of(name).attempt

    def view_of(self, name: str) -> RequestView:
        return self.head._desk.conductor.view.requests[RequestId(name)]

    def submit(self, name: str, **others: Any) -> Any:
        given = {"sampling": Sampling()} | others
        return self.head.submit(Job(RequestId(name), tuple(range(40)), 10, **given))


def in_scene(**rules: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Runs a test whose first argument is a scene; `rules`: of its conductor."""

    def decorate(work: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def main(given: dict[str, Any]) -> None:
            made = Scene(**rules)
            await made.head.open("head", 1)
            await work(made, **given)
            await made.head.close()
            await made.settle()

        @wraps(work)
        def test(**given: Any) -> None:
            with asyncio.Runner(loop_factory=ManualLoop) as runner:
                runner.run(main(given))

        _, *others = signature(work).parameters.values()
        test.__signature__ = Signature(others)  # type: ignore[attr-defined]
        return test

    return decorate


# Nodes that join.

OTHERS = layout_of(8)
WRONG_NODES: dict[str, tuple[dict[str, Any], str]] = {
    "protocol": ({"protocol": messages.PROTOCOL + 1}, f"it speaks protocol {messages.PROTOCOL + 1}"),
    "name": ({"joined": facts("p", Role.DECODE).joined()}, "a node named p is here already"),
    "cluster": ({"joined": replace(facts("d", Role.DECODE).joined(), cluster="far")}, "no --cluster"),
    "length": ({"max_length": 999}, "its engine.max_length 999 is below"),
    "layout": ({"layout": OTHERS}, "its model revision or KV layout differs"),
    "revision": ({"revision": "other"}, "its model revision or KV layout differs"),
    "address": (
        {"address": "127.0.0.1:1"},
        "it is at 127.0.0.1:1 and p at p:1, and only one of them can be reached",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_NODES)
@in_scene()
async def test_a_node_that_is_wrong_in_one_thing_is_turned_away(some: Scene, wrong: str) -> None:
    changed, reason = WRONG_NODES[wrong]
    await some.enter(hello("p", Role.PREFILL))
    stranger = await some.enter(hello("d", Role.DECODE, **changed))
    assert reason in stranger.of(messages.NodeRefused)[0].reason
    assert not stranger.of(messages.NodeWelcome) and stranger.reasons
    assert some.members() == ["p"] and not some.head.healthy
    with pytest.raises(UnavailableError):
        some.submit("a")
    right = await some.enter(hello("d", Role.DECODE))
    assert right.of(messages.NodeWelcome) and not right.reasons
    assert some.members() == ["p", "d"] and some.head.healthy


def stage(number: int, **others: Any) -> messages.StageHello:
    said = messages.StageHello(messages.PROTOCOL, NodeId("g"), number, 3, f"g.{number}:1")
    return replace(said, **others)


WRONG_STAGES: dict[str, tuple[dict[str, Any], str]] = {
    "protocol": ({"protocol": messages.PROTOCOL + 1}, "it speaks protocol"),
    "negative": ({"stage": -1}, "there is no stage -1 among 3"),
    "too high": ({"stage": 3}, "there is no stage 3 among 3"),
    "taken": ({"stage": 1}, "stage 1 of g is here already"),
    "another number": ({"stages": 4}, "g has another number of stages"),
}


@pytest.mark.parametrize("wrong", WRONG_STAGES)
@in_scene()
async def test_a_stage_that_is_wrong_in_one_thing_is_turned_away(some: Scene, wrong: str) -> None:
    changed, reason = WRONG_STAGES[wrong]
    leader, later = await some.enter(stage(0)), await some.enter(stage(1))
    assert later.of(messages.NodeWelcome) and not leader.heard
    stranger = await some.enter(stage(2, **changed))
    assert reason in stranger.of(messages.NodeRefused)[0].reason and stranger.reasons
    assert not leader.heard, "the group seems to be whole"
    await some.enter(stage(2))
    assert leader.of(messages.GroupGathered) == [messages.GroupGathered(("g.1:1", "g.2:1"))]


SAID = [
    messages.Heartbeat({}),
    messages.Outputs(((RequestId("a"), 1, Generated(0, 7)),)),
    messages.Scores(RequestId("a"), 1, 0, ()),
    RequestFailed(RequestId("a"), 1, "it is mean"),
    BlocksStored(NodeId("p"), (b"name",)),
]


@pytest.mark.parametrize("said", SAID, ids=lambda said: type(said).__name__)
@in_scene()
async def test_nothing_is_heard_of_somebody_who_did_not_say_hello(some: Scene, said: Any) -> None:
    p, d = await some.enter(hello("p", Role.PREFILL)), await some.enter(hello("d", Role.DECODE))
    stream = some.submit("a")
    stranger = await some.enter(said)
    assert "a message came before Hello" in stranger.reasons[0]
    assert not stream.generated and stream.error is None and some.attempt("a") == 1
    assert not some.head._desk.conductor.view.index.num_blocks
    assert not p.reasons and not d.reasons


@in_scene()
async def test_a_node_says_hello_once(some: Scene) -> None:
    p = await some.enter(hello("p", Role.PREFILL), hello("other", Role.DECODE))
    assert "a second Hello" in p.reasons[0]
    later = await some.enter(stage(1), BlocksStored(NodeId("g"), (b"name",)))
    assert "from a later pipeline stage" in later.reasons[0]
    assert some.members() == []


# Nodes that are silent or leave.


LIES = {
    "role": RoleChanged(NodeId("d"), Role.PREFILL),
    "role of its own": RoleChanged(NodeId("liar"), Role.PREFILL),
    "memory": MemoryUsed(NodeId("d"), -1, -1, 0, 0),
    "stored": BlocksStored(NodeId("d"), (bytes(16),)),
    "token": messages.Outputs(((RequestId("a"), 1, Generated(0, 70)),)),
    "scores": messages.Scores(RequestId("a"), 1, 0, ()),
    "failed": RequestFailed(RequestId("a"), 1, "I say so", final=True),
    "handed over": PrefillFinished(RequestId("a"), 1),
    "nan": messages.Heartbeat({"kv_blocks": math.nan}),
    "lines": messages.Heartbeat({"x\n# HELP y": 1.0}),
    "many": messages.Heartbeat({f"x{number}": 1.0 for number in range(messages.MAX_METRICS + 1)}),
}


@pytest.mark.parametrize("lie", LIES)
@in_scene()
async def test_a_node_speaks_of_itself_and_of_its_own_requests_only(some: Scene, lie: str) -> None:
    p, _ = await some.enter(hello("p", Role.PREFILL)), await some.enter(hello("d", Role.DECODE))
    stream = some.submit("a")
    liar = await some.enter(hello("liar", Role.DECODE))
    liar.say(LIES[lie])
    await some.settle()
    assert len(liar.reasons) == 1 and some.members() == ["p", "d"]
    p.say(output(1, 0))
    await some.settle()
    assert stream.generated == (70,) and some.attempt("a") == 1 and some.head.healthy


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"capacity_tokens": -1}, {"kv_heads": 0}], ids=str)
@in_scene()
async def test_a_node_without_memory_for_anything_is_none(some: Scene, wrong: dict[str, int]) -> None:
    one = await some.enter(hello("p", Role.PREFILL, joined=replace(facts("p", Role.PREFILL).joined(), **wrong)))
    assert "could not be read" in one.reasons[0] and not some.members()


@in_scene()
async def test_a_silent_stage_takes_its_group_with_it(some: Scene) -> None:
    stages = [await some.enter(stage(number)) for number in range(3)]
    stages[0].say(hello("g", Role.PREFILL))
    for _ in range(8):
        await asyncio.sleep(SILENCE_S / 5)
        stages[0].say(messages.Heartbeat({}))
        stages[2].say(messages.Heartbeat({}))
    assert stages[1].reasons and some.members() == []
    assert stages[0].of(messages.Stop) and stages[2].of(messages.Stop)


@pytest.mark.parametrize("stood_s", [1.5, SILENCE_S + 0.5, 100.0])
@in_scene()
async def test_a_head_that_stood_still_reads_before_it_judges(some: Scene, stood_s: float) -> None:
    """Whoever says nothing after that either is missed as ever, in the time in which the head ran."""
    beating, silent = await some.enter(hello("p", Role.PREFILL)), await some.enter(hello("d", Role.DECODE))
    stages = [await some.enter(stage(number)) for number in range(2)]
    for _ in range(2):
        await asyncio.sleep(SILENCE_S / 5)
        for one in (beating, *stages):
            one.say(messages.Heartbeat({}))
    await some.settle()
    some.loop.stand_still(stood_s)
    await asyncio.sleep(0.7)
    assert some.members() == ["p", "d"] and not silent.reasons and not stages[1].reasons
    for _ in range(4):
        await asyncio.sleep(SILENCE_S / 5)
        for one in (beating, *stages):
            one.say(messages.Heartbeat({}))
    assert some.members() == ["p"] and "silent" in silent.reasons[0] and not stages[1].reasons


@in_scene()
async def test_where_all_are_silent_they_are_given_longer(some: Scene) -> None:
    nodes = [await some.enter(hello("p", Role.PREFILL)), await some.enter(hello("d", Role.DECODE))]
    await some.enter(stage(1))
    await asyncio.sleep(REJOIN_S - 0.6)
    assert some.members() == ["p", "d"]
    for one in nodes:
        one.say(messages.Heartbeat({}))
    await asyncio.sleep(REJOIN_S - 0.6)
    assert some.members() == ["p", "d"]
    await asyncio.sleep(1.2)
    assert some.members() == [] and not list(some.head._groups.followers())
    assert all(f"silent for {REJOIN_S:g} s" in one.reasons[0] for one in nodes)


@in_scene()
async def test_who_speaks_first_after_a_silence_of_all_is_not_the_only_one(some: Scene) -> None:
    """The others are given as long as ever, of the time in which somebody speaks."""
    first, later = await some.enter(hello("p", Role.PREFILL)), await some.enter(hello("d", Role.DECODE))
    never = await some.enter(hello("e", Role.DECODE))
    await asyncio.sleep(REJOIN_S - 0.6)
    for _ in range(2):
        first.say(messages.Heartbeat({}))
        await asyncio.sleep(BEAT_MS / 1000)
    assert some.members() == ["p", "d", "e"]
    for _ in range(5):
        first.say(messages.Heartbeat({}))
        later.say(messages.Heartbeat({}))
        await asyncio.sleep(BEAT_MS / 1000)
    assert some.members() == ["p", "d"] and "silent for 3 s" in never.reasons[0]


@in_scene()
async def test_the_end_of_an_old_session_takes_no_node_that_came_back(some: Scene) -> None:
    await some.enter(hello("p", Role.PREFILL))
    old = some.head._members[NodeId("p")].session
    some.head.leave(NodeId("p"), "silent")
    back = await some.enter(hello("p", Role.PREFILL))
    some.head.leave(NodeId("p"), "ended", old)
    assert some.members() == ["p"] and back.of(messages.NodeWelcome)


# Answers.


def output(attempt: int, index: int, **others: Any) -> messages.Outputs:
    return messages.Outputs(((RequestId("a"), attempt, Generated(index, 70 + index, **others)),))


@in_scene()
async def test_tokens_of_an_attempt_that_is_over_are_void(some: Scene) -> None:
    p, d = await some.enter(hello("p", Role.PREFILL)), await some.enter(hello("d", Role.DECODE))
    stream = some.submit("a")
    await some.settle()
    p.say(output(1, 0), RequestFailed(RequestId("a"), 1, "a seal did not match"))
    await some.settle()
    d.say(output(1, 1))
    await some.settle()
    assert stream.generated == (70,) and some.attempt("a") == 2
    begin = d.of(events.StartAttempt)[-1]
    assert (begin.tokens, begin.num_prompt) == ((*range(40), 70), 40)
    assert begin.stop_length == 50
    assert (
        [each.key for each in p.of(events.DropAttempt)] == ["a#1"] == [e.key for e in d.of(events.DropAttempt)]
    )
    p.say(output(2, 1))
    await some.settle()
    assert stream.generated == (70, 71)


def scores(attempt: int, first: int, stop: int) -> messages.Scores:
    told = [TokenLogprobs(-attempt - number / 64, (), 1) for number in range(first, stop)]
    return messages.Scores(RequestId("a"), attempt, first, tuple(told))


ASKS = Sampling(prompt_logprobs=0)


@in_scene()
async def test_scores_of_an_attempt_that_is_over_are_void(some: Scene) -> None:
    """Those of the next one count, and only with the first token; no cache is asked for such a prompt."""
    p, _ = await some.enter(hello("p", Role.PREFILL)), await some.enter(hello("d", Role.DECODE))
    stream = some.submit("a", sampling=ASKS)
    await some.settle()
    p.say(scores(1, 0, 30), RequestFailed(RequestId("a"), 1, "a seal did not match"), scores(1, 30, 39))
    await some.settle()
    p.say(scores(2, 0, 20), scores(2, 20, 39), scores(1, 0, 39), output(2, 0))
    await some.settle()
    [first] = await anext(aiter(stream))
    assert first.prompt_logprobs == scores(2, 0, 39).logprobs
    assert [begin.names for begin in p.of(events.StartAttempt)] == [(), ()]
    p.say(scores(2, 0, 39))  # of a request that is over or nobody knows of: no fault of theirs
    stream.cancel()
    p.say(scores(2, 0, 39))
    await some.settle()
    assert not p.reasons


@pytest.mark.parametrize("said", [[scores(1, 1, 39)], [scores(1, 0, 38), output(1, 0)], [output(1, 0)]])
@in_scene()
async def test_a_node_that_leaves_scores_out_is_gone(some: Scene, said: list[Any]) -> None:
    p, _ = await some.enter(hello("p", Role.PREFILL)), await some.enter(hello("d", Role.DECODE))
    stream = some.submit("a", sampling=ASKS)
    await some.settle()
    p.say(*said)
    await some.settle()
    assert "scores" in p.reasons[0] and some.members() == ["d"] and not stream.generated


@in_scene()
async def test_tokens_that_still_come_while_a_request_waits_for_a_node_are_void(some: Scene) -> None:
    p, d = await some.enter(hello("p", Role.PREFILL)), await some.enter(hello("d", Role.DECODE))
    stream = some.submit("a")
    await some.settle()
    d.session.abort("killed")
    await some.settle()
    p.say(output(1, 0))
    await some.settle()
    assert stream.generated == () and stream.error is None
    await some.enter(hello("d", Role.DECODE))
    p.say(output(2, 0))
    await some.settle()
    assert stream.generated == (70,) and some.attempt("a") == 2


@in_scene()
async def test_a_request_waits_for_a_node_no_longer_than_it_may(some: Scene) -> None:
    await some.enter(hello("p", Role.PREFILL))
    d = await some.enter(hello("d", Role.DECODE))
    stream = some.submit("a")
    d.session.abort("killed")
    await asyncio.sleep(REJOIN_S - 1)
    assert stream.error is None
    await asyncio.sleep(2)
    assert isinstance(stream.error, UnavailableError) and "node d is gone" in str(stream.error)


@in_scene()
async def test_two_requests_of_one_name_are_not_mixed(some: Scene) -> None:
    await some.enter(hello("m", Role.MIXED))
    first = some.submit("a")
    with pytest.raises(RequestError, match="is in progress"):
        some.submit("a")
    assert first.error is None and some.attempt("a") == 1


@in_scene()
async def test_a_request_is_over_once_and_its_nodes_are_told(some: Scene) -> None:
    p, d = await some.enter(hello("p", Role.PREFILL)), await some.enter(hello("d", Role.DECODE))
    stream = some.submit("a")
    p.say(output(1, 0))
    d.say(output(1, 1, finish=FinishReason.STOP))
    d.say(output(1, 2))
    await some.settle()
    assert stream.generated == (70, 71) and not some.head._streams
    assert [each.key for each in d.of(events.DropAttempt)] == ["a#1"]
    stream.cancel()
    await some.settle()
    assert len(d.of(events.DropAttempt)) == 1


@in_scene()
async def test_closing_ends_what_is_under_way_and_stops_the_nodes(some: Scene) -> None:
    m, later = await some.enter(hello("m", Role.MIXED)), await some.enter(stage(1))
    stream = some.submit("a")
    await some.head.close()
    await some.settle()
    assert isinstance(stream.error, UnavailableError) and "shutting down" in str(stream.error)
    assert m.of(messages.Stop) and later.of(messages.Stop)
    with pytest.raises(OSError):
        await some.network.connect("head:1", messages.NodeBound, Someone(), timeout_s=1)


@in_scene()
async def test_times_of_a_route_are_put_into_the_clock_of_the_node(some: Scene) -> None:
    """The head's time goes with each begin."""
    m = await some.enter(hello("m", Role.MIXED))
    await asyncio.sleep(1.5)
    m.say(messages.Heartbeat({}))
    some.submit("a", ttft_ms=200)
    await some.settle()
    (begin,) = m.of(events.StartAttempt)
    assert begin.now_ns == 1_500_000_000
    assert begin.route.deadline_ns == 1_700_000_000


@in_scene()
async def test_gauges_are_the_latest_of_each_process_while_it_is_here(some: Scene) -> None:
    m, later = await some.enter(hello("m", Role.MIXED)), await some.enter(stage(1))
    m.say(messages.Heartbeat({"x": 1.0}), messages.Heartbeat({"x": 2.0}))
    later.say(messages.Heartbeat({"x": 3.0}))
    await some.settle()
    assert some.head.gauges() == OWN | {"x": {"m": 2.0, "g.1": 3.0}, BEATS: {"m": 2, "g.1": 1}}
    m.session.abort("killed")
    await some.settle()
    assert some.head.gauges() == OWN | {"x": {"g.1": 3.0}, BEATS: {"g.1": 1}}


@in_scene()
async def test_who_is_asked_how_it_is_answers_leaves_or_is_waited_for_no_longer(some: Scene) -> None:
    m, later = await some.enter(hello("m", Role.MIXED)), await some.enter(stage(1))
    for ends in (lambda: later.say(messages.Heartbeat({})), lambda: later.session.abort("killed")):
        polled = asyncio.create_task(some.head.poll())
        await some.settle()
        m.say(messages.Heartbeat({"x": 1.0}))
        await some.settle()
        assert not polled.done()
        ends()
        await some.settle()
        assert polled.done() and some.loop.time() == 0
    assert len(m.of(messages.Poll)) == 2
    await some.head.poll()
    assert some.loop.time() == POLL_S


# Nodes among each other.


@asynccontextmanager
async def joined(
    tape: MemoryTape | None = None, clock_ns: Callable[[], int] = time.monotonic_ns
) -> AsyncIterator[tuple[NodeProcess, asyncio.Task[str], MemoryNetwork]]:
    """A mixed node in a cluster of its own, how it ends, and its network. `tape`: of the node."""
    network = MemoryNetwork()
    head = Head(Rules(), CARD, silence_s=30, rejoin_s=30, network=network)
    engine = EmulatedEngine(RECIPE, compile_cost(CURVE), 64, max_length=1000)
    options = NodeOptions(facts("m", Role.MIXED), await head.open("head", 0), transfer_s=30)
    process = NodeProcess(engine, options, Runtime(network, clock_ns), tape=tape)  # type: ignore[arg-type]
    running = asyncio.create_task(process.run())
    async with asyncio.timeout(60):
        await head.wait_for([NodeId("m")])
        try:
            yield process, running, network
        finally:
            await head.close()
            await asyncio.wait([running])


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[NodeProcess, Someone]]:
    """A node that is in a cluster, and a stranger with a session to it."""
    stranger = Someone()
    async with joined() as (process, _, network):
        stranger.session = await network.connect(process._address, messages.PeerMessage, stranger, timeout_s=1)
        yield process, stranger


INTRODUCTION = messages.PeerHello(messages.PROTOCOL, NodeId("p"), RECIPE.revision, RECIPE.layout)
LETTER = HandoverGranted(RequestId("a#1"))
WRONG_PEERS: dict[str, list[Any]] = {
    "protocol": [replace(INTRODUCTION, protocol=messages.PROTOCOL - 1), LETTER],
    "revision": [replace(INTRODUCTION, revision="other"), LETTER],
    "layout": [replace(INTRODUCTION, layout=OTHERS), LETTER],
    "not introduced": [LETTER],
    "a probe is no introduction": [messages.Probe(), LETTER],
    "introduced twice": [INTRODUCTION, INTRODUCTION, LETTER],
    "a count below nothing": [INTRODUCTION, ClaimReply(RequestId("a#1"), -1), LETTER],
}


@pytest.mark.parametrize("said", [None, *WRONG_PEERS])
async def test_a_node_listens_to_nodes_of_its_cluster_only(said: str | None) -> None:
    async with listening() as (process, stranger):
        stranger.say(*(WRONG_PEERS[said] if said is not None else [INTRODUCTION, messages.Probe(), LETTER]))
        heard = list[Any]()
        process.mover._told = heard.append
        while not stranger.reasons and not heard:
            await asyncio.sleep(0.001)
        letters = [fact for fact in heard if isinstance(fact, LetterReceived)]
        assert letters == ([LetterReceived(INTRODUCTION.node, LETTER)] if said is None else [])
        assert (said is None) is not bool(stranger.reasons)


async def test_nobody_writes_into_a_node_before_it_knows_who_that_is() -> None:
    async with listening() as (_, stranger):
        head = messages.HandoverSlices(RequestId("a#1"), 0, 0, 16, (b"x" * 16,))
        stranger.session.send(head, memoryview(bytes(100)))
        assert "carried 100 bytes" in await stranger.end()


KEY, NAMES = RequestId("a#1"), (b"x" * 16,) * 4
STRANGE: dict[str, tuple[list[Any], list[Any]]] = {
    "for another kind of engine": ([PromptComputed(KEY, 0)], []),
    "blocks of a node that keeps none": (
        [FetchRequest(KEY, NAMES, 2), messages.Pull(KEY, 0, 4)], [messages.FetchServed(KEY, 0)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", STRANGE)
async def test_a_node_does_not_end_with_what_another_one_says(said: str) -> None:
    async with listening() as (_, stranger):
        letters, answers = STRANGE[said]
        end = FetchRequest(RequestId("last"), NAMES, 0), messages.Pull(RequestId("last"), 0, 4)
        stranger.say(INTRODUCTION, *letters, *end)
        while len(stranger.heard) <= len(answers):
            await asyncio.sleep(0.001)
            assert not stranger.reasons
        assert stranger.heard == [*answers, messages.FetchServed(RequestId("last"), 0)]


async def test_with_a_node_that_left_the_cluster_all_sessions_end() -> None:
    async with listening() as (process, stranger):
        stranger.say(INTRODUCTION)
        while process.peers.open_to(INTRODUCTION.node) is None:
            await asyncio.sleep(0.001)
        process.on_head(messages.Neighbours("", {INTRODUCTION.node: "p:1"}))
        assert process.peers.open_to(INTRODUCTION.node) is not None
        process.on_head(messages.Neighbours("", {}))
        assert process.peers.open_to(INTRODUCTION.node) is None
        assert "it left the cluster" in await stranger.end()


# Stages of a pipeline group.


def opening(**others: Any) -> messages.StageOpen:
    introduced = replace(INTRODUCTION, node=NodeId("g"))
    return replace(messages.StageOpen(introduced, 1, 64, 0, 0, ()), **others)


WRONG_OPENINGS: dict[str, list[Any]] = {
    "model": [opening(hello=replace(INTRODUCTION, node=NodeId("g"), revision="other"))],
    "group": [opening(hello=INTRODUCTION)],
    "stage": [opening(stage=2)],
    "nothing opened": [events.ReleaseResources(RequestId("a#1"))],
}


@asynccontextmanager
async def waiting() -> AsyncIterator[tuple[asyncio.Task[str], Callable[..., Awaitable[Someone]]]]:
    """The second stage of two, which waits for the first, and how somebody opens a session with it and says this."""
    network = MemoryNetwork()
    head = Head(Rules(), CARD, silence_s=30, rejoin_s=30, network=network)
    join = await head.open("head", 0)
    engine = EmulatedEngine(RECIPE, compile_cost(CURVE), 64, max_length=1000, layers=(1, 2))
    group = replace(facts("g", Role.PREFILL), pipeline=2)
    options = NodeOptions(group, join, transfer_s=30, stage=1)
    running = asyncio.create_task(StageNode(engine, options, Runtime(network)).run())
    while not (stages := list(head._groups.followers())):
        await asyncio.sleep(0.001)

    async def enter(*said: Any) -> Someone:
        one = Someone()
        one.session = await network.connect(stages[0].hello.address, messages.Upward, one, timeout_s=1)
        one.say(*said)
        return one

    try:
        async with asyncio.timeout(60):
            yield running, enter
    finally:
        await head.close()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("wrong", WRONG_OPENINGS)
async def test_a_stage_serves_its_own_group_only(wrong: str) -> None:
    async with waiting() as (running, enter):
        stranger = await enter(*WRONG_OPENINGS[wrong])
        await stranger.end()
        assert not stranger.heard and not running.done()
        leader = await enter(opening())
        while not leader.heard:
            await asyncio.sleep(0.001)
        assert leader.heard == [messages.StageFound(1, (), last=True)]
        second = await enter(opening())
        await second.end()
        assert not second.heard and not leader.reasons


@pytest.mark.parametrize("opened", [False, True])
async def test_a_stage_takes_payloads_with_batches_only_and_from_the_stage_before(opened: bool) -> None:
    async with waiting() as (running, enter):
        run = messages.StageRun(1, (), (7,), "uint8")
        stranger = await enter(*([opening()] if opened else []))
        stranger.session.send(opening() if opened else run, memoryview(bytes(7)))
        assert "carried 7 bytes" in await stranger.end()
        assert not opened or "session with the stage before ended" in await running


@pytest.mark.parametrize("more", [{"num_blocks": 65}, {"num_slots": 1}, {"num_records": 1}], ids=str)
async def test_a_stage_that_holds_less_than_the_first_does_not_serve(more: dict[str, int]) -> None:
    async with waiting() as (running, enter):
        await enter(opening(**more))
        with pytest.raises(StartError, match="pipeline stage 1 of g: it holds"):
            await running


@in_scene()
async def test_salts_part_the_names_of_tenants_in_the_head(some: Scene) -> None:
    await some.enter(hello("m", Role.MIXED))
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        some.submit(name, salt=salt)
    names = [some.view_of(name).arrived.names for name in "abc"]
    assert names[0] == names[2] and not set(names[0]) & set(names[1]) and len(names[0]) == 2
