"""Links between clusters: processes, pipes, addresses at which nodes reach each other, and what is reported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from benchmarks.wan import serve
from isthmus.bench.child import Child
from isthmus.bench.transfer_peers import Direction, Sockets, touched, verify
from isthmus.core.conductor import LinkRule, LinkState
from isthmus.core.errors import UnavailableError
from isthmus.core.types import NS_PER_S, NodeId
from isthmus.live.cluster import launcher
from isthmus.live.cluster.links import AddressBook, LinkProcess, LinkStats
from isthmus.live.cluster.shaper import (
    BACKLOG_S,
    LinkDirection,
    LinkPipe,
    LinkShape,
    LinkSpec,
    Point,
    Proxy,
    shape_of,
)
from isthmus.live.peers.messages import Neighbours
from tests.served import LIMIT_S, command


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


KIB = 1024
WAIT_S = 60
"""Only so that a bug ends a test."""


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


class Lane:
    """A pipe, with a sender before it and a receiver behind it."""

    def __init__(self, shape: LinkShape) -> None:
        self.sender, taken = socket.socketpair()
        self.handed, self.receiver = socket.socketpair()
        self.ends = [self.sender, taken, self.handed, self.receiver]
        for each in self.ends:
            each.setblocking(False)
        self.direction = LinkDirection(shape)
        self.pipe = LinkPipe(shape, self.direction, taken, self.handed)

    def take(self, now_s: float, data: bytes) -> None:
        self.sender.send(data)
        self.pipe.take(now_s)


@pytest.fixture
def lane(stack: contextlib.ExitStack) -> Callable[..., Lane]:
    def made(**shape: Any) -> Lane:
        found = Lane(LinkShape(**{"delay_s": 0.0} | shape))
        for each in found.ends:
            stack.enter_context(each)
        return found

    return made


def test_the_rate_is_shared() -> None:
    link = LinkDirection(LinkShape(rate=1000.0))
    assert [link.leave_s(now, 100) for now in (0.0, 0.0, 0.05, 1.0)] == pytest.approx([0.1, 0.2, 0.3, 1.1])
    assert LinkDirection(LinkShape()).leave_s(3.0, 1 << 30) == 3.0


def test_bytes_wait_for_the_delay_and_free_the_window_one_delay_later(lane: Callable[..., Lane]) -> None:
    some, data = lane(delay_s=0.5, window=64 * KIB), bytes(range(256)) * 256  # as much as the window
    pipe = some.pipe
    some.take(10.0, data)
    while pipe.wants_input(10.0):
        pipe.take(10.0)
    assert pipe.next_s(10.0) == 10.5 and not pipe.wants_output(10.49) and pipe.wants_output(10.5)
    pipe.hand_on(10.5)
    assert some.receiver.recv(1 << 20) == data
    assert not pipe.wants_input(10.5) and pipe.next_s(10.5) == 11.0
    pipe.acknowledge(10.99)
    assert not pipe.wants_input(10.99)
    pipe.acknowledge(11.0)
    assert pipe.wants_input(11.0) and pipe.next_s(11.0) is None


def test_a_stall_holds_up_one_lane_once_after_more_than_so_many_bytes(lane: Callable[..., Lane]) -> None:
    some = lane(stall_s=2.0)
    some.pipe.stall_after = 10
    some.take(1.0, bytes(10))
    assert some.pipe.wants_output(1.0)
    some.take(1.0, bytes(1))
    assert not some.pipe.wants_output(2.9) and some.pipe.next_s(2.9) == 3.0
    some.pipe.hand_on(3.0)
    some.take(4.0, bytes(11))
    assert some.pipe.wants_output(4.0)


@pytest.mark.parametrize(
    "shape",
    [LinkShape(delay_s=0.001, rate=50e6, window=16 * KIB), LinkShape(0.0, jitter_s=0.001, stall_s=0.05)],
)
def test_bytes_pass_whole(shape: LinkShape) -> None:
    memory = touched(200_000)
    with contextlib.ExitStack() as stack:

        def through(port: int) -> int:
            return int(stack.enter_context(contextlib.closing(Child(serve, shape, port))).hello)

        with contextlib.closing(Sockets(memory, 3, through)) as peer:
            for direction in Direction:
                verify(peer, direction, 200_000, 4096)


def test_the_window_never_limits_the_rate_of_a_link() -> None:
    assert shape_of(10**9 // 8, 20_000_000) == LinkShape(delay_s=0.01, rate=1.25e8, window=5_000_000)
    assert shape_of(10**9, 0).window == 4 << 20
    assert shape_of(10**10, 10**9).window == 64 << 20


# One pipe more closely.


def test_nothing_is_taken_in_before_the_link_is_free_and_it_is_looked_at_then(
    lane: Callable[..., Lane],
) -> None:
    some = lane(delay_s=5.0, rate=1e6)
    some.direction.leave_s(10.0, 1_000_000)  # of other connections
    free_s = pytest.approx(11.0 - BACKLOG_S)
    assert not some.pipe.wants_input(10.9) and some.pipe.next_s(10.9) == free_s and some.pipe.wants_input(11.0)
    some.take(11.0, bytes(10))
    assert some.pipe.next_s(10.9) == free_s, "sooner than what is on the way"


def test_what_the_target_does_not_take_is_handed_on_later_in_order(lane: Callable[..., Lane]) -> None:
    some = lane(window=100_000)
    pipe = some.pipe
    some.handed.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * KIB)
    data, got, now_s = bytes(touched(300_000)), bytearray(), 1.0
    left = memoryview(data)
    while len(got) < len(data):
        now_s += 1
        with contextlib.suppress(BlockingIOError):
            left = left[some.sender.send(left) :] if left else left
        with contextlib.suppress(BlockingIOError):
            pipe.take(now_s) if pipe.wants_input(now_s) else None
        pipe.hand_on(now_s)
        with contextlib.suppress(BlockingIOError):
            got += some.receiver.recv(50_000)
        pipe.acknowledge(now_s)
    assert got == data and not pipe.finished
    some.sender.close()
    pipe.take(now_s)
    assert pipe.finished and not pipe.wants_input(now_s)


def test_of_a_connection_that_is_gone_nothing_is_handed_on(lane: Callable[..., Lane]) -> None:
    some = lane(delay_s=1.0)
    some.take(1.0, b"question")
    assert not some.pipe.finished
    some.pipe.give_up()
    assert some.pipe.finished and not some.pipe.wants_input(9.0) and not some.pipe.wants_output(9.0)
    some.pipe.hand_on(9.0)
    with pytest.raises(BlockingIOError):
        some.receiver.recv(10)


# The proxy in a thread of this process.


def test_connections_are_served_first_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the first one would get all that there is."""
    served = list[Any]()
    left, over = iter([set[int]()] * 6), os.open(os.devnull, os.O_RDONLY)
    proxy = Proxy(LinkShape(), [])
    monkeypatch.setattr(proxy, "_wait", lambda: next(left, {over}))
    monkeypatch.setattr(proxy, "_serve", lambda pipe, *_: served.append(pipe.name))
    monkeypatch.setattr(proxy, "_forget_finished", bool)
    source = SimpleNamespace(fileno=lambda: -1)
    proxy._pipes = [SimpleNamespace(name=name, source=source, acknowledge=bool) for name in "abc"]  # type: ignore[misc]
    proxy.watch(over, lambda: False)
    proxy.run()
    os.close(over)
    rounds = [served[at : at + 3] for at in range(0, len(served), 3)]
    assert [sorted(each) for each in rounds] == [["a", "b", "c"]] * 6
    assert sorted(each[0] for each in rounds) == ["a", "a", "b", "b", "c", "c"]


# What a launcher and operators say.


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = other.getsockname()[1]
        spec = msgspec.json.encode(LinkSpec(LinkShape(), ((number,), ()))) + b"\n"
        done = subprocess.run(command("link"), input=spec, capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == 4 and done.stdout == b""
    assert f"the link cannot listen at 127.0.0.1:{number}: Address already in use" in done.stderr.decode()
    assert len(done.stderr.splitlines()) == 1


def test_what_crosses_where_no_link_is_configured_is_ignored() -> None:
    stats = LinkStats(RATED)
    stats.heard(ONE, "west", [LinkState("", "north", True, 100)], NS_PER_S)
    assert stats.take()[0].sent_bytes == 0
