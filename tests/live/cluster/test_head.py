"""What the head tells nodes, clients and operators, in a scene of `test_trust`; answer streams, and donor prompts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core import conductor
from isthmus.core.attempts import Assembly, Donor, RoleChanged, Route
from isthmus.core.conductor import LinkRule, LinksMeasured, LinkState
from isthmus.core.errors import OverloadedError, ProtocolError, RequestError, UnavailableError
from isthmus.core.node import events
from isthmus.core.reuse import CACHEBLEND, SIMILAR, similarity
from isthmus.core.types import (
    NS_PER_MS,
    FinishReason,
    Generated,
    Job,
    ModelCard,
    NodeId,
    RequestId,
    Reuse,
    Role,
    Sampling,
    TokenLogprobs,
)
from isthmus.live.cluster.donors import PART_ROWS, DonorTokens, parts_of, scope_of
from isthmus.live.cluster.links import AddressBook
from isthmus.live.cluster.streams import AnswerStream
from isthmus.live.engine.interface import SIGNATURE_BITS
from isthmus.live.peers import messages
from isthmus.live.peers.messages import Directions
from tests.live.cluster.test_links import FakeLink
from tests.live.cluster.test_trust import CARD, OWN, Scene, Someone, facts, hello, in_scene, output, stage
from tests.tape import MemoryTape

LINKS = (LinkRule("west", "east", 1000), LinkRule("east", "west", 1000))
P, D, M = NodeId("p"), NodeId("d"), NodeId("m")


def placed(name: str, role: Role, cluster: str) -> messages.NodeHello:
    return hello(name, role, joined=replace(facts(name, role).joined(), cluster=cluster))


def two_clusters(some: Scene) -> AddressBook:
    """West and east, with a link, and north, with none."""
    some.head._addresses = AddressBook(["west", "east", "north"], LINKS)
    return some.head._addresses


def reached(one: Someone) -> dict[str, set[str]]:
    """Whom it can reach, by cluster, as it was told last."""
    return {said.cluster: set(map(str, said.addresses)) for said in one.of(messages.Neighbours)}


# Who can be served.


@in_scene()
async def test_a_cluster_is_healthy_while_somebody_prefills_and_decodes(some: Scene) -> None:
    assert not some.head.healthy
    await some.enter(hello("d", Role.DECODE))
    assert not some.head.healthy
    m = await some.enter(hello("m", Role.MIXED))
    assert some.head.healthy
    m.session.abort("killed")
    await some.settle()
    assert not some.head.healthy
    await some.enter(hello("p", Role.PREFILL))
    assert some.head.healthy


@in_scene()
async def test_two_clusters_are_healthy_where_a_link_joins_prefill_and_decode(some: Scene) -> None:
    two_clusters(some)
    await some.enter(placed("p", Role.PREFILL, "west"))
    await some.enter(placed("n", Role.DECODE, "north"))
    assert not some.head.healthy
    await some.enter(placed("d", Role.DECODE, "east"))
    assert some.head.healthy


@in_scene(wait_ms=2000)
async def test_what_comes_before_the_first_node_waits_for_it(some: Scene) -> None:
    """Nobody knows then how blocks are named: it has none, and is computed whole."""
    stream = some.submit("a")
    await asyncio.sleep(1)
    assert stream.error is None and some.attempt("a") == 0
    await some.enter(hello("m", Role.MIXED))
    assert some.attempt("a") == 1 and not some.view_of("a").arrived.names
    await asyncio.sleep(2)
    assert stream.error is None


@in_scene(wait_ms=2000, retry_after_ms=2500)
async def test_a_node_that_is_away_is_waited_for_no_longer_than_that(some: Scene) -> None:
    await some.enter(hello("p", Role.PREFILL))
    stream = some.submit("a")
    await asyncio.sleep(1)
    assert stream.error is None
    await asyncio.sleep(2)
    assert isinstance(stream.error, UnavailableError) and stream.error.retry_after_s == 3
    assert some.head.refusals() == {"unavailable": 1} and not some.head._streams


@in_scene()
async def test_what_can_never_fit_is_the_clients_fault(some: Scene) -> None:
    await some.enter(hello("m", Role.MIXED))
    with pytest.raises(RequestError) as refused:
        some.head.submit(Job(RequestId("a"), tuple(range(900)), 200, Sampling()))
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_tokens")
    assert some.head.refusals() == {"too_long": 1} and not some.head._streams


@pytest.mark.parametrize(("retry_ms", "seconds"), [(1, 1), (1000, 1), (1001, 2), (2500, 3)])
def test_a_client_is_told_to_come_back_not_too_early(retry_ms: int, seconds: int) -> None:
    @in_scene(max_requests=1, retry_after_ms=retry_ms)
    async def work(some: Scene) -> None:
        await some.enter(hello("m", Role.MIXED))
        some.submit("a")
        with pytest.raises(OverloadedError) as refused:
            some.submit("b")
        assert refused.value.retry_after_s == seconds

    work()


@in_scene()
async def test_an_attempt_is_told_to_each_of_its_nodes_once(some: Scene) -> None:
    p, d = await some.enter(hello("p", Role.PREFILL)), await some.enter(hello("d", Role.DECODE))
    some.submit("a", salt="mine")
    await some.settle()
    for one, part in ((p, Role.PREFILL), (d, Role.DECODE)):
        (begin,) = one.of(events.StartAttempt)
        assert (begin.part, begin.salt, begin.tokens) == (part, "mine", tuple(range(40)))
    d.session.abort("killed")
    p.session.abort("killed")
    m = await some.enter(hello("m", Role.MIXED))
    assert [begin.part for begin in m.of(events.StartAttempt)] == [Role.MIXED]


# Whom nodes can reach.


@in_scene()
async def test_nodes_are_told_of_each_other_as_they_come_and_go(some: Scene) -> None:
    p = await some.enter(hello("p", Role.PREFILL))
    assert reached(p) == {"": {"p"}}
    d = await some.enter(hello("d", Role.DECODE))
    assert reached(p) == reached(d) == {"": {"p", "d"}}
    assert d.of(messages.Neighbours)[-1].addresses == {P: "p:1", D: "d:1"}
    d.session.abort("killed")
    await some.settle()
    assert reached(p) == {"": {"p"}}


@in_scene()
async def test_nodes_are_told_of_linked_clusters_and_of_no_others(some: Scene) -> None:
    two_clusters(some)
    north = await some.enter(placed("n", Role.PREFILL, "north"))
    west = await some.enter(placed("w", Role.PREFILL, "west"))
    east = await some.enter(placed("e", Role.DECODE, "east"))
    assert reached(north) == {"north": {"n"}}
    assert reached(west) == reached(east) == {"west": {"w"}, "east": {"e"}}
    assert len(north.of(messages.Neighbours)) == 1
    west.session.abort("killed")
    await some.settle()
    assert reached(east) == {"west": set(), "east": {"e"}}


@in_scene()
async def test_a_node_for_which_a_link_has_no_port_is_turned_away(some: Scene) -> None:
    two_clusters(some).emulate(FakeLink((11,), (21,)))
    await some.enter(placed("p", Role.PREFILL, "west"))
    second = await some.enter(placed("q", Role.PREFILL, "west"))
    assert "has no port left" in second.of(messages.NodeRefused)[0].reason and second.reasons
    assert some.members() == ["p"]


# What operators see, and what the conductor decides beside routes.


@in_scene(links=LINKS)
async def test_what_passes_between_clusters_is_shown_where_there_are_links(some: Scene) -> None:
    shown = some.head.offload()
    assert shown is not None and [view.source for view in shown.links] == ["west", "east"]


@in_scene()
async def test_a_node_that_is_to_take_another_role_is_told_and_shown(some: Scene) -> None:
    p = await some.enter(hello("p", Role.PREFILL))
    some.head._act(conductor.SendOrder(P, events.Convert(P, Role.DECODE)), 0)
    await some.settle()
    assert p.of(events.Convert) == [events.Convert(P, Role.DECODE)]
    assert some.head.nodes()[P][0] is Role.PREFILL, "not before it did"
    p.say(RoleChanged(P, Role.DECODE))
    await some.settle()
    assert some.head.nodes()[P][0] is Role.DECODE
    assert some.head._offload.conversions == 1
    assert some.head._desk.conductor.view.nodes[P].role is Role.DECODE


@pytest.mark.parametrize(("period_ms", "beat_ms"), [(400, 200), (10_000, 500), (1, 1)])
def test_nodes_report_twice_in_each_period_of_what_the_conductor_hears(period_ms: int, beat_ms: int) -> None:
    @in_scene(period_ns=period_ms * NS_PER_MS)
    async def work(some: Scene) -> None:
        m, later = await some.enter(hello("m", Role.MIXED)), await some.enter(stage(1))
        assert m.of(messages.NodeWelcome) == later.of(messages.NodeWelcome) == [messages.NodeWelcome(beat_ms)]

    work()


def measured(tape: MemoryTape) -> list[tuple[int, tuple[Any, ...]]]:
    """When the conductor heard of links, in ms, and how many bytes each had carried."""
    found = [(entry.at_ns, entry.event) for entry in tape.entries if isinstance(entry.event, LinksMeasured)]
    return [(at_ns // NS_PER_MS, tuple(link.sent_bytes for link in event.links)) for at_ns, event in found]


@in_scene(links=LINKS, period_ns=100 * NS_PER_MS)
async def test_the_conductor_hears_of_links_once_all_nodes_are_there(some: Scene) -> None:
    two_clusters(some)
    tape = MemoryTape()
    some.head._desk.log = tape.record
    waiting = asyncio.create_task(some.head.wait_for([P, D]))
    p = await some.enter(placed("p", Role.PREFILL, "west"))
    await asyncio.sleep(0.5)
    assert not waiting.done() and not measured(tape)
    await some.enter(placed("d", Role.DECODE, "east"))
    await waiting
    p.say(messages.Heartbeat({}, (LinkState("", "east", True, 700),)))
    await asyncio.sleep(0.25)
    assert measured(tape) == [(600, (700, 0)), (700, (0, 0))]


@in_scene()
async def test_a_task_of_the_head_that_fails_is_no_secret(
    some: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> None:
        raise ValueError("broken")

    some.head._start(fails())
    await some.settle()
    (said,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert said.exc_info is not None and str(said.exc_info[1]) == "broken"


@in_scene()
async def test_what_a_node_says_after_it_left_is_not_heard(some: Scene) -> None:
    m = await some.enter(hello("m", Role.MIXED))
    stream = some.submit("a")
    await some.settle()
    some.head.leave(M, "silent")
    m.say(output(1, 0), messages.Heartbeat({"x": 1.0}))
    await some.settle()
    assert stream.generated == () and some.head.gauges() == OWN and some.head.card == CARD
    await some.enter(hello("m", Role.MIXED))
    own = some.head.gauges()
    m.say(messages.Heartbeat({"x": 1.0}))
    await some.settle()
    assert some.head.gauges() == own, "it was taken for the one that has its name now"


JOB = Job(RequestId("a"), (1, 2, 3), 100, Sampling())


def stream(cancel: object = None) -> AnswerStream:
    return AnswerStream(JOB, cancel or (lambda request: None))  # type: ignore[arg-type]


def answer(length: int) -> list[Generated]:
    finish = {length - 1: FinishReason.STOP}
    return [Generated(index, 100 + index, finish.get(index)) for index in range(length)]


async def everything(from_: AnswerStream) -> list[Generated]:
    """Reads to the end; nothing here waits longer than the test lets it."""
    async with asyncio.timeout(60):
        return [token async for batch in from_ for token in batch]


@given(st.integers(1, 12).flatmap(lambda length: st.permutations(range(length))))
def test_tokens_come_out_in_order_whatever_order_they_come_in(order: Sequence[int]) -> None:
    one, tokens = stream(), answer(len(order))
    over = [one.deliver(tokens[index]) for index in order]
    assert over == [False] * (len(order) - 1) + [True]
    assert asyncio.run(everything(one)) == tokens
    assert one.generated == tuple(token.token for token in tokens)


async def test_a_batch_is_never_empty_and_nothing_is_held_back() -> None:
    one, tokens = stream(), answer(4)
    batches = one.__aiter__()
    one.deliver(tokens[0])
    assert await anext(batches) == [tokens[0]]
    one.deliver(tokens[2])
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    assert not waiting.done()
    one.deliver(tokens[1])
    assert await waiting == [tokens[1], tokens[2]]
    one.deliver(tokens[3])
    assert await anext(batches) == [tokens[3]]
    with pytest.raises(StopAsyncIteration):
        await anext(batches)


def test_a_new_attempt_goes_on_after_what_the_client_has() -> None:
    one, tokens = stream(), answer(5)
    one.deliver(tokens[0])
    one.deliver(tokens[1])
    one.deliver(tokens[3])  # 2 was lost with the node
    one.end_attempt()
    assert one.generated == (100, 101)
    again = [Generated(2, 7), Generated(3, 8), Generated(4, 9, FinishReason.LENGTH)]
    assert [one.deliver(token) for token in again] == [False, False, True]
    assert asyncio.run(everything(one)) == [*tokens[:2], *again]
    assert one.generated == (100, 101, 7, 8, 9)


SCORED = Job(RequestId("a"), (1, 2, 3, 4, 5), 100, Sampling(prompt_logprobs=0))


def scores_from(seed: int, first: int, stop: int) -> list[TokenLogprobs]:
    """Those of one attempt, from and to the token of these numbers."""
    return [TokenLogprobs(-seed - number / 8, (), 1) for number in range(first, stop)]


def scored(*told: tuple[int, list[TokenLogprobs]]) -> AnswerStream:
    made = AnswerStream(SCORED, lambda request: None)
    for each in told:
        made.score(*each)
    return made


def test_scores_of_the_prompt_come_once_and_whole_with_the_first_token() -> None:
    one, tokens = scored((0, scores_from(1, 0, 1)), (1, scores_from(1, 1, 4))), answer(3)
    for index in (1, 0, 0, 2):  # decode's token overtakes the first one, which comes twice
        one.deliver(tokens[index])
    found = asyncio.run(everything(one))
    assert found == [replace(tokens[0], prompt_logprobs=tuple(scores_from(1, 0, 4))), *tokens[1:]]


async def test_a_failure_is_raised_after_the_tokens_that_came() -> None:
    one = stream()
    one.deliver(answer(3)[0])
    one.fail(UnavailableError("node p1 is gone"))
    batches = one.__aiter__()
    assert await anext(batches) == answer(3)[:1]
    with pytest.raises(UnavailableError, match="node p1 is gone"):
        await anext(batches)


VOCAB_SIZE = PART_ROWS + 100
DONOR_CARD = ModelCard("m", 1000, VOCAB_SIZE, 0)
TABLE = np.random.default_rng(1).integers(-127, 128, (VOCAB_SIZE, SIGNATURE_BITS)).astype(np.int8)


def job(tokens: list[int], reuse: Reuse = Reuse.SEMANTIC, **fields: str) -> Job:
    name = RequestId(fields.pop("request", "r"))
    return Job(name, tuple(tokens), 1, Sampling(), reuse=reuse, **fields)


def ready() -> DonorTokens:
    donors = DonorTokens(DONOR_CARD)
    for part in parts_of(TABLE.tobytes()):
        donors.take(part)
    assert donors.ready
    return donors


def test_a_table_comes_in_parts_and_in_order() -> None:
    first, second = parts_of(TABLE.tobytes())
    signer = DonorTokens(DONOR_CARD)
    with pytest.raises(ProtocolError, match=f"from {PART_ROWS} on follow 0"):
        signer.take(second)
    signer.take(first)
    assert not signer.ready
    signer.take(first)  # another node begins anew
    signer.take(second)
    assert signer.ready
    for wrong in (Directions(VOCAB_SIZE, bytes(SIGNATURE_BITS)), Directions(0, b""), Directions(0, bytes(7))):
        with pytest.raises(ProtocolError):
            signer.take(wrong)


def test_signatures_are_of_distinct_tokens_and_alike_as_prompts_are() -> None:
    signer = ready()
    one, other = list(range(200)), list(range(3000, 3200))
    assert signer.sign(one) == signer.sign(one[::-1] * 3) and len(signer.sign(one)) == SIGNATURE_BITS // 8
    alike = similarity(signer.sign(one), signer.sign(one[:190] + other[:10]))
    assert SIMILAR < alike < 1
    assert similarity(signer.sign(one), signer.sign(other)) < 0.3


def test_what_the_conductor_is_told_says_nothing_of_an_exact_request() -> None:
    assert ready().content_of(job([1, 2, 3], Reuse.EXACT)) is None
    cannot = DonorTokens(ModelCard("m", 1000, VOCAB_SIZE, 0, no_reuse="its states hold at one position only"))
    assert cannot.ready and cannot.content_of(job([1, 2, 3])) is None


def test_tenants_and_salts_are_scopes_and_pieces_of_other_salts_never_match() -> None:
    scopes = {scope_of(tenant, salt) for tenant in ("", "a", "b") for salt in ("", "a", "b")}
    assert len(scopes) == 9
    donors, tokens = ready(), [token % 50 for token in range(500)]
    contents = [
        donors.content_of(job(tokens, tenant=t, salt=s)) for t, s in (("a", "x"), ("b", "x"), ("a", "y"))
    ]
    assert len({each.scope for each in contents if each is not None}) == 3
    pieces = [set(each.pieces) for each in contents if each is not None]
    assert pieces[0] == pieces[1] and not pieces[0] & pieces[2]
    assert contents[0] == donors.content_of(job(tokens, tenant="a", salt="x"))


def test_tokens_of_the_blocks_that_are_needed_go_with_a_task() -> None:
    donors = ready()
    donors.block_size = 4
    donors.keep(job(list(range(20)), request="d", salt="x"))
    route = Route(RequestId("r"), 1, NodeId("n"), NodeId("n"))
    assert donors.of(route, job([1])) == ()
    assembly = Assembly(CACHEBLEND, (Donor(RequestId("d"), (b"0", b"1", b"2"), 1),))
    routed = Route(RequestId("r"), 1, NodeId("n"), NodeId("n"), assembly=assembly)
    assert donors.of(routed, job([1], salt="x")) == (tuple(range(4, 12)),)
    with pytest.raises(AssertionError, match="another tenant"):
        donors.of(routed, job([1], salt="y"))
    donors.drop(RequestId("d"))
    assert not donors._kept


def test_who_left_before_all_was_told_is_asked_no_more() -> None:
    donors = DonorTokens(DONOR_CARD)
    donors.asked = NodeId("a")
    donors.left(NodeId("b"))
    assert donors.asked == "a"
    donors.left(NodeId("a"))
    assert donors.asked is None


@in_scene(links=LINKS)
async def test_each_new_threshold_is_shown_with_its_reason(some: Scene) -> None:
    for threshold, reason in ((1000, "solved"), (None, "the link is down")):
        some.head._act(conductor.ThresholdSet(threshold, reason), 0)
    shown = some.head.offload()
    assert shown is not None
    assert (shown.threshold, shown.reason, shown.changes) == (None, "the link is down", 2)
