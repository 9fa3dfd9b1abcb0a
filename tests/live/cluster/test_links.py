"""Links between clusters: how the process of one comes back, at which addresses nodes reach each other, and what their
reports say of a link, all together."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from isthmus.core.conductor import LinkRule, LinkState
from isthmus.core.errors import UnavailableError
from isthmus.core.types import NS_PER_S, NodeId
from isthmus.live.cluster import launcher
from isthmus.live.cluster.links import AddressBook, LinkProcess, LinkStats
from isthmus.live.cluster.shaper import LinkShape, LinkSpec, Point
from isthmus.live.peers.messages import Neighbours
from tests.served import LIMIT_S


class Waits:
    """In place of sleeping: how long somebody wants to, until it may go on."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[float] = asyncio.Queue()
        self._go_on = asyncio.Semaphore(0)

    async def sleep(self, wait_s: float) -> None:
        self.asked.put_nowait(wait_s)
        await self._go_on.acquire()

    async def next(self) -> float:
        return await asyncio.wait_for(self.asked.get(), LIMIT_S)

    def go_on(self) -> None:
        self._go_on.release()


@contextlib.asynccontextmanager
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[LinkProcess, Waits]]:
    waits = Waits()
    monkeypatch.setattr(launcher, "sleep", waits.sleep)
    link = LinkProcess(("west", "east"), LinkSpec(LinkShape(delay_s=0.0), ((0,), (0, 0))))
    await link.start()
    watch = asyncio.create_task(link.watch())
    try:
        yield link, waits
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await link.stop()
        assert link._process is not None and link._process.returncode is not None


async def passes(port: int, server: asyncio.Server, came: asyncio.Event) -> bool:
    """Whether a connection to this port reaches the server."""
    came.clear()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        said = await asyncio.wait_for(reader.read(1), LIMIT_S)
    except ConnectionError:
        return False
    writer.close()
    return said == b"!" and came.is_set()


async def test_a_link_comes_back_at_its_ports_with_its_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is opened and closed meanwhile counts, too; what is taken by somebody else is waited for, ever longer."""
    came = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        writer.write(b"!")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, watched(monkeypatch) as (link, waits):
        kept, left = link.open("east", target), link.open("east", target)
        assert kept is not None and left is not None and link.open("east", target) is None
        assert await passes(kept, server, came) and await passes(left, server, came)
        assert link._process is not None
        link._process.kill()
        assert await waits.next() == 1
        link.close("east", left)
        new = link.open("west", target)
        assert new is not None
        with socket.create_server(("127.0.0.1", kept)):
            for wait_s in (2, 4, 8, 16, 30, 30):
                waits.go_on()
                assert await waits.next() == wait_s
        waits.go_on()
        before = link._process
        while link._process is before or not await passes(kept, server, came):
            await asyncio.sleep(0.01)
        assert await passes(new, server, came) and not await passes(left, server, came)
        assert link.open("east", target) == left and await passes(left, server, came)
        link._process.kill()
        assert await waits.next() == 1, "it begins anew after a good start"


A, B, C, FAR = map(NodeId, "abcf")
LINKS = (LinkRule("west", "east", 1), LinkRule("east", "west", 1))


class FakeLink(LinkProcess):
    """Without a process. `said`: to it."""

    def __init__(self, towards_west: tuple[int, ...], towards_east: tuple[int, ...]) -> None:
        super().__init__(("west", "east"), LinkSpec(LinkShape(), (towards_west, towards_east)))
        self.said: list[Point] = []

    def point(self, point: Point) -> None:
        self.said.append(point)


def test_one_cluster() -> None:
    book = AddressBook()
    book.open(A, "", "h:1")
    book.open(B, "", "h:2")
    assert book.view("", "") == Neighbours("", {A: "h:1", B: "h:2"}) and not book.crosses(A, B)


def test_a_link_as_it_is() -> None:
    book = AddressBook(["east", "west", "north"], LINKS)
    book.open(A, "east", "h:1")
    book.open(FAR, "west", "h:9")
    assert book.crosses(A, FAR) and book.view("east", "west") == Neighbours("east", {A: "h:1"})
    assert book.view("east", "east") == Neighbours("east", {A: "h:1"})
    assert book.linked("east") == ["west"] and book.linked("north") == []
    assert book.view("west", "east") == Neighbours("west", {FAR: "h:9"})
    book.close(FAR)
    assert book.view("west", "east") == Neighbours("west", {})


def test_an_emulated_link_is_entered_at_a_port_for_each_node() -> None:
    book, link = AddressBook(["east", "west"], LINKS), FakeLink((11,), (21, 22))
    book.emulate(link)
    book.open(A, "east", "h:1")
    book.open(B, "east", "h:2")
    book.open(FAR, "west", "h:9")
    assert link.said == [Point(21, "h:1"), Point(22, "h:2"), Point(11, "h:9")]
    assert book.view("east", "east").addresses == {A: "h:1", B: "h:2"}
    assert book.view("east", "west").addresses == {A: "127.0.0.1:21", B: "127.0.0.1:22"}
    assert book.view("west", "east").addresses == {FAR: "127.0.0.1:11"}
    with pytest.raises(UnavailableError, match="the link between east and west has no port left"):
        book.open(C, "east", "h:3")
    book.close(A)
    book.open(C, "east", "h:3")
    assert link.said[3:] == [Point(21, ""), Point(21, "h:3")]
    assert book.view("east", "west").addresses == {B: "127.0.0.1:22", C: "127.0.0.1:21"}


RATED = (LinkRule("west", "east", 1000, 20), LinkRule("east", "west", 1000, 20))
ONE, TWO, THREE = NodeId("west-1"), NodeId("west-2"), NodeId("east-1")


def test_counters_add_up_and_are_told_once() -> None:
    stats = LinkStats(RATED)
    stats.take()
    stats.heard(ONE, "west", [LinkState("", "east", True, 100, 40, 7, 2, 30)], NS_PER_S)
    stats.heard(TWO, "west", [LinkState("", "east", True, 50, 60, 3, 1, 25)], NS_PER_S)
    stats.heard(ONE, "west", [LinkState("", "east", True, 300, 90, 0, 2, 28)], NS_PER_S)
    there, back = stats.take()
    assert there == LinkState("west", "east", True, 350, 90, 3, 3, 25), "busy as long as the busiest node"
    assert back == LinkState("east", "west", True)
    assert stats.take()[0] == LinkState("west", "east", True, 0, 0, 3, 0, 25)
    stats.heard(ONE, "west", [LinkState("", "east", True, 400, 90, 0, 2, 28)], 3 * NS_PER_S)
    assert stats.views()[0].bytes_per_s == 0, "as it was told"
    stats.take()
    view = stats.views()[0]
    assert (view.sent_bytes, view.bytes_per_s, view.rated_bytes_per_s, view.queued_bytes) == (450, 50, 1000, 3)


def test_a_node_that_comes_back_counts_from_nothing() -> None:
    stats = LinkStats(RATED)
    stats.heard(ONE, "west", [LinkState("", "east", True, 100)], NS_PER_S)
    stats.left(ONE)
    assert stats.take()[0].sent_bytes == 100, "what had crossed did cross"
    stats.heard(ONE, "west", [LinkState("", "east", True, 30)], NS_PER_S)
    assert stats.take()[0].sent_bytes == 30
    assert stats.views()[0].sent_bytes == 130


def test_a_link_is_up_while_anything_crosses_it_in_either_direction() -> None:
    stats = LinkStats(RATED)
    assert all(state.up for state in stats.take()), "nobody says otherwise"
    stats.heard(ONE, "west", [LinkState("", "east", False)], NS_PER_S)
    assert not any(state.up for state in stats.take())
    stats.heard(THREE, "east", [LinkState("", "west", True)], NS_PER_S)
    assert all(state.up for state in stats.take())
