"""What the head tells nodes, clients and operators. Around it is a scene of `test_trust`, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from msgspec.structs import replace

from isthmus.core import conductor
from isthmus.core.attempts import RoleChanged
from isthmus.core.conductor import LinkRule, LinksMeasured, LinkState
from isthmus.core.errors import OverloadedError, RequestError, UnavailableError
from isthmus.core.node import events
from isthmus.core.types import NS_PER_MS, Job, NodeId, RequestId, Role, Sampling
from isthmus.live.cluster.links import AddressBook
from isthmus.live.peers import messages
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
