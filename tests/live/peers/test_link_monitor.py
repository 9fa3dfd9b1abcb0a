"""What a node sees of its links, in virtual time: sessions are stood for, and do what a test says."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.core.conductor import LinkState
from isthmus.core.types import NodeId
from isthmus.live.peers.link_monitor import KEEP_S, LOOK_S, TALK_BYTES, LinkMonitor
from isthmus.live.peers.messages import Neighbours, Probe
from tests.virtual import ManualLoop

LINK_S = 2.0
N0, N1 = NodeId("n0"), NodeId("n1")
NEAR, ALSO = {N0: "n0:1"}, {N0: "n0:1", N1: "n1:1"}


class Line:
    """Stands for a session."""

    def __init__(self) -> None:
        self.bytes_out = self.unacked = self.queued = self.unwritten = self.retransmits = 0
        self.closed = self.ended = self.suspended = False
        self.probes: list[Callable[[bool], object]] = []
        self.num_probes = 0
        self.aborted: list[str] = []

    def stat(self) -> Any:
        return SimpleNamespace(
            bytes_out=self.bytes_out, unacked_bytes=self.unacked, queued_bytes=self.queued,
            retransmits=self.retransmits,
        )  # fmt: skip

    @property
    def lanes(self) -> list[Any]:
        return [SimpleNamespace(unwritten_bytes=self.unwritten)]

    def send(self, message: Any, done: Callable[[bool], object]) -> None:
        assert message == Probe()
        self.num_probes += 1
        self.probes.append(done)

    def answer(self, arrived: bool = True) -> None:
        probes, self.probes = self.probes, []
        for done in probes:
            done(arrived)

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)
        self.end()

    def end(self) -> None:
        self.closed = self.ended = True


class Scene:
    """A monitor, and the sessions that were opened. `refuses`: nobody can be reached."""

    def __init__(self, link_s: float | None = LINK_S) -> None:
        self.open: dict[NodeId, Line] = {}
        self.asked: list[NodeId] = []
        self.refuses = False
        self.tasks: list[asyncio.Task[None]] = []
        self.monitor = LinkMonitor(self, link_s, self.spawn)  # type: ignore[arg-type]

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.get_running_loop().create_task(work))
        return self.tasks[-1]

    def open_to(self, node: NodeId) -> Line | None:
        line = self.open.get(node)
        return None if line is None or line.closed else line

    async def get(self, node: NodeId) -> Line:
        self.asked.append(node)
        await asyncio.sleep(LOOK_S / 4)
        if self.refuses:
            raise ConnectionRefusedError("nobody listens")
        self.open[node] = Line()
        return self.open[node]

    def linked(self, addresses: dict[NodeId, str], cluster: str = "far") -> None:
        self.monitor.linked(Neighbours(cluster, addresses))

    @property
    def report(self) -> LinkState:
        (one,) = self.monitor.report()
        return one


def scene(work: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test of a monitor, on a loop in virtual time; `link_s` among its parameters is that of the monitor."""
    _, *others = inspect.signature(work).parameters.values()

    @wraps(work)
    def test(**given: Any) -> None:
        async def main() -> None:
            made = Scene(given.get("link_s", LINK_S))
            await work(made, **given)
            for task in made.tasks:
                task.cancel()
            await asyncio.gather(*made.tasks, return_exceptions=True)

        with asyncio.Runner(loop_factory=ManualLoop) as runner:
            runner.run(main())

    test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
    return test


async def near(some: Scene) -> Line:
    """A link over which a session was opened."""
    some.linked(NEAR)
    await asyncio.sleep(3 * LOOK_S)
    return some.open[N0]


@scene
async def test_there_is_always_a_session_and_it_is_asked_for_a_sign_of_life(some: Scene) -> None:
    line = await near(some)
    assert some.asked == [N0]
    for asked in range(1, 6):
        await asyncio.sleep(KEEP_S)
        assert line.num_probes == asked and len(line.probes) == 1
        await asyncio.sleep(2 * LOOK_S)
        line.answer()
    assert some.asked == [N0] and not line.aborted
    assert some.report.up


@scene
async def test_one_sign_of_life_is_awaited_at_a_time_and_says_how_far_it_is(some: Scene) -> None:
    line = await near(some)
    assert some.report.rtt_ns == 0
    while not line.probes:
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(1.5)
    assert line.num_probes == 1
    line.answer()
    assert some.report.rtt_ns == pytest.approx(1.5e9, abs=2e7)
    while not line.probes:
        await asyncio.sleep(LOOK_S)
    line.answer(arrived=False)
    assert some.report.rtt_ns == pytest.approx(1.5e9, abs=2e7), "what did not arrive says nothing"


@scene
async def test_the_nearest_session_says_how_far_a_cluster_is(some: Scene) -> None:
    line, other = await near(some), Line()
    some.open[N1] = other
    some.linked(ALSO)
    while not (line.probes and other.probes):
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(0.25)
    other.answer()
    await asyncio.sleep(0.25)
    line.answer()
    assert some.report.rtt_ns == pytest.approx(0.25e9, abs=5e7)


@scene
async def test_a_session_that_stands_still_is_ended_and_another_is_opened(some: Scene) -> None:
    line = await near(some)
    while not line.probes:
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(LINK_S - 4 * LOOK_S)
    assert not line.aborted
    await asyncio.sleep(8 * LOOK_S)
    assert line.aborted == [f"nothing crossed the link to far for {LINK_S:g} s"]
    assert some.open[N0] is not line and not some.open[N0].closed
    assert some.report.up


@pytest.mark.parametrize("what", ["bytes_out", "queued", "unwritten", "suspended"])
@scene
async def test_what_moves_stands_not_still(some: Scene, what: str) -> None:
    """Bytes that the kernel takes count already."""
    line = await near(some)
    line.unacked = line.queued = line.unwritten = 1 << 20
    for _ in range(6):
        await asyncio.sleep(LINK_S / 2)
        setattr(line, what, True if what == "suspended" else getattr(line, what) + 1000)
    assert line.probes and not line.aborted
    if what == "suspended":
        line.suspended = False
    await asyncio.sleep(LINK_S + 4 * LOOK_S)
    assert line.aborted


@scene
async def test_without_a_question_nobody_is_missed(some: Scene) -> None:
    line = await near(some)
    for _ in range(20):
        await asyncio.sleep(KEEP_S)
        line.answer()
        line.unacked = line.bytes_out = 5000
    assert not line.aborted


@scene
async def test_what_crosses_is_counted_over_sessions_that_ended_too(some: Scene) -> None:
    line = await near(some)
    line.bytes_out, line.unacked, line.queued, line.retransmits = 500, 200, 70, 3
    await asyncio.sleep(2 * LOOK_S)
    assert (some.report.sent_bytes, some.report.queued_bytes, some.report.retransmits) == (300, 270, 3)
    line.bytes_out, line.unacked = 900, 100
    line.end()
    await asyncio.sleep(2 * LOOK_S)
    report = some.report
    assert (report.sent_bytes, report.queued_bytes, report.retransmits) == (300, 0, 3)
    again = some.open[N0]
    again.bytes_out, again.retransmits = 50, 2
    await asyncio.sleep(2 * LOOK_S)
    assert (some.report.sent_bytes, some.report.retransmits) == (350, 5)


@scene
async def test_a_session_that_is_closing_has_nothing_on_its_way_and_is_not_ended_twice(some: Scene) -> None:
    line = await near(some)
    line.bytes_out, line.unacked = 900, 500
    await asyncio.sleep(2 * LOOK_S)
    line.closed = True
    await asyncio.sleep(LINK_S + 1)
    assert not line.aborted and (some.report.sent_bytes, some.report.queued_bytes) == (400, 0)


@scene
async def test_a_link_is_busy_while_more_than_talk_is_on_its_way(some: Scene) -> None:
    line = await near(some)
    line.unacked = line.bytes_out = TALK_BYTES
    await asyncio.sleep(1)
    assert some.report.busy_ns == 0
    line.queued = 1
    await asyncio.sleep(0.5)
    line.queued = 0
    await asyncio.sleep(0.5)
    assert some.report.busy_ns == pytest.approx(0.5e9, abs=5e7)


@scene
async def test_a_link_is_down_when_its_last_session_ends_and_nobody_can_be_reached(some: Scene) -> None:
    line = await near(some)
    some.refuses = True
    line.end()
    await asyncio.sleep(4 * LOOK_S)
    assert not some.report.up
    await asyncio.sleep(6)
    assert some.asked[:3] == [N0] * 3 and 5 <= len(some.asked) <= 6 / KEEP_S + 2, "again and again"
    assert not some.report.up
    some.refuses = False
    await asyncio.sleep(3 * KEEP_S)
    assert some.report.up and some.open[N0].probes


@scene
async def test_nodes_are_tried_in_turn_one_at_a_time(some: Scene) -> None:
    some.refuses = True
    some.linked(ALSO)
    await asyncio.sleep(5)
    assert set(some.asked) == {N0, N1}
    assert all(one != other for one, other in zip(some.asked, some.asked[1:], strict=False))
    assert len(some.asked) <= 5 / KEEP_S + 1


@scene
async def test_one_of_several_sessions_keeps_a_link_up(some: Scene) -> None:
    line, other = await near(some), Line()
    some.open[N1] = other
    some.linked(ALSO)
    await asyncio.sleep(2 * LOOK_S)
    line.end()
    some.refuses = True
    await asyncio.sleep(2 * LOOK_S)
    assert some.report.up


@scene
async def test_sessions_that_others_open_are_watched_if_they_are_of_a_linked_cluster(some: Scene) -> None:
    some.refuses = True
    some.linked(NEAR)
    line, stranger = Line(), Line()
    some.monitor.introduced(line, NodeId("n0"))  # type: ignore[arg-type]
    some.monitor.introduced(stranger, NodeId("here"))  # type: ignore[arg-type]
    await asyncio.sleep(KEEP_S + 2 * LOOK_S)
    assert line.num_probes == 1 and not stranger.num_probes
    assert not some.asked, "there is a session"
    assert some.report.up


@pytest.mark.parametrize("ended", [False, True])
@scene
async def test_a_session_may_be_reported_or_gone_before_it_is_looked_at(some: Scene, ended: bool) -> None:
    some.refuses = True
    some.linked(NEAR)
    line = Line()
    some.monitor.introduced(line, NodeId("n0"))  # type: ignore[arg-type]
    if ended:
        line.end()
        await asyncio.sleep(2 * LOOK_S)
    assert some.report == LinkState("", "far", up=not ended)


@scene
async def test_a_cluster_without_nodes_is_not_down(some: Scene) -> None:
    line = await near(some)
    some.linked({})
    line.end()
    await asyncio.sleep(1)
    assert some.report.up and some.asked == [N0]


@scene
async def test_several_clusters_are_apart_and_watched_once(some: Scene) -> None:
    some.linked(NEAR)
    some.linked({NodeId("m0"): "m0:1"}, "other")
    some.linked(NEAR)
    assert len(some.tasks) == 1
    await asyncio.sleep(4 * LOOK_S)
    some.open[NodeId("m0")].queued = 10
    await asyncio.sleep(2 * LOOK_S)
    assert [(one.target, one.queued_bytes) for one in some.monitor.report()] == [("far", 0), ("other", 10)]


@pytest.mark.parametrize("link_s", [None])
@scene
async def test_nothing_is_watched_where_no_time_is_given(some: Scene, link_s: None) -> None:
    some.linked(NEAR)
    await asyncio.sleep(5)
    assert not some.tasks and some.report == LinkState("", "far", up=True)
    some.linked({})
    assert some.report == LinkState("", "far", up=False)


@pytest.mark.parametrize("link_s", [LINK_S, 1.2])
@scene
async def test_a_monitor_that_stood_still_gives_no_link_up(some: Scene, link_s: float) -> None:
    line = await near(some)
    await asyncio.sleep(KEEP_S)
    assert line.probes
    asyncio.get_running_loop().stand_still(100)  # type: ignore[attr-defined]
    await asyncio.sleep(3 * LOOK_S)
    assert not line.aborted
    await asyncio.sleep(link_s + KEEP_S)
    assert line.aborted
