"""The proxy's arithmetic without time, and a proxy in a process of its own that bytes pass through whole."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from benchmarks.wan import serve
from isthmus.bench.child import Child
from isthmus.bench.transfer_peers import Direction, Sockets, touched, verify
from isthmus.live.cluster import shaper
from isthmus.live.cluster.shaper import (
    BACKLOG_S,
    TICK_S,
    LinkDirection,
    LinkPipe,
    LinkPort,
    LinkShape,
    LinkSpec,
    Point,
    Proxy,
    shape_of,
)
from tests.served import command

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


def test_jitter_never_reorders(lane: Callable[..., Lane]) -> None:
    some = lane(delay_s=0.1, jitter_s=1.0, seed=3)
    for index in range(20):
        some.take(0.001 * index, bytes([index]))
    some.pipe.hand_on(0.5)
    assert some.pipe.wants_output(10.0), "none is late"
    some.pipe.hand_on(10.0)
    assert some.receiver.recv(100) == bytes(range(20))


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


def test_a_direction_takes_in_no_more_than_it_can_soon_carry() -> None:
    direction = LinkDirection(LinkShape(rate=1000.0))
    assert direction.room_s <= 5.0
    direction.leave_s(5.0, 100)
    assert direction.room_s == pytest.approx(5.1 - BACKLOG_S)


class Ends:
    """A link, and a server behind one of its ports."""

    def __init__(self, stack: contextlib.ExitStack, shape: LinkShape) -> None:
        self.server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.link = stack.enter_context(link_process(shape))
        self.port = self.link.ports.ports[1][0]
        self.link.say(Point(self.port, f"127.0.0.1:{self.server.getsockname()[1]}"))

    def passes(self, port: int | None = None) -> bool:
        """Whether a new connection reaches the server; if not, it must be reset."""
        try:
            near = socket.create_connection(("127.0.0.1", port or self.port), timeout=WAIT_S)
        except ConnectionResetError:  # before it was seen to be there
            return False
        with near:
            with contextlib.suppress(ConnectionError):
                near.sendall(b"question")
            if near in select.select([near, self.server], [], [], WAIT_S)[0]:
                assert broken(near)
                return False
            with self.server.accept()[0] as far:
                far.settimeout(WAIT_S)
                assert far.recv(100) == b"question"
            return True


class LinkChild:
    def __init__(self, process: subprocess.Popen[bytes], ports: LinkSpec) -> None:
        self.process, self.ports = process, ports

    def say(self, point: Point) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(point) + b"\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def link_process(shape: LinkShape) -> Iterator[LinkChild]:
    with subprocess.Popen(
        command("link", "--name", "a-b"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(LinkSpec(shape, ((0,), (0, 0)))) + b"\n")
        process.stdin.flush()
        ports = msgspec.json.decode(process.stdout.readline(), type=LinkSpec)
        yield LinkChild(process, ports)
        process.stdin.close()
        assert process.wait(WAIT_S) == 0, "it must end with its launcher"


def broken(each: socket.socket) -> bool:
    """Reset, or ended."""
    try:
        return each.recv(10) == b""
    except ConnectionError:
        return True


def test_a_link_is_cut_and_restored_by_a_signal(stack: contextlib.ExitStack) -> None:
    ends = Ends(stack, LinkShape(0.001, rate=1e9))
    assert list(map(len, ends.link.ports.ports)) == [1, 2]
    near = stack.enter_context(socket.create_connection(("127.0.0.1", ends.port), timeout=WAIT_S))
    far = stack.enter_context(ends.server.accept()[0])
    far.settimeout(WAIT_S)
    near.sendall(b"first")
    assert far.recv(100) == b"first"
    ends.link.process.send_signal(signal.SIGUSR1)
    assert broken(near) and broken(far)
    assert not ends.passes()
    ends.link.process.send_signal(signal.SIGUSR2)
    while not ends.passes():
        pass


def test_a_port_leads_where_it_is_pointed_and_nowhere_else(stack: contextlib.ExitStack) -> None:
    ends = Ends(stack, LinkShape(0.0))
    assert ends.passes()
    assert not ends.passes(ends.link.ports.ports[0][0])
    ends.link.say(Point(ends.port, ""))
    while ends.passes():
        pass  # until the command has got there


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


class Polled:
    """Stands for `select.poll`; `ready`: what it answers."""

    def __init__(self, *ready: tuple[int, int]) -> None:
        self.ready, self.asked, self.wait_ms = ready, dict[int, int](), list[float | None]()

    def register(self, fileno: int, events: int) -> None:
        self.asked[fileno] = events

    def poll(self, wait_ms: float | None) -> list[tuple[int, int]]:
        self.wait_ms.append(wait_ms)
        return list(self.ready)


class Wanting:
    """Stands for a `LinkPipe` between two descriptors; `next`: when something is to be done again."""

    def __init__(
        self, source: int, target: int, inward: bool, outward: bool, next: float | None = None
    ) -> None:
        self.source, self.target = (SimpleNamespace(fileno=lambda at=at: at) for at in (source, target))
        self.wants_input, self.wants_output = lambda _: inward, lambda _: outward
        self.next_s = lambda _: next


@pytest.mark.parametrize(
    ("pipes", "asked", "wait_ms"),
    [
        ([], {}, None),
        ([Wanting(1, 2, True, False), Wanting(2, 1, False, False)], {1: select.POLLIN}, None),
        ([Wanting(1, 2, True, True, 10.5), Wanting(2, 1, True, True, 10.25)], {1: 5, 2: 5}, 250.0),
        ([Wanting(1, 2, False, True, 9.0)], {2: select.POLLOUT}, 0.0),
    ],
)
def test_the_proxy_waits_for_what_is_of_use_and_no_longer_than_it_may(
    pipes: list[Any], asked: dict[int, int], wait_ms: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be busy for ever with a descriptor that is ready and of no use."""
    poll, slept = Polled((1, select.POLLIN), (2, select.POLLOUT), (3, select.POLLHUP)), list[float]()
    monkeypatch.setattr(select, "poll", lambda: poll)
    monkeypatch.setattr(shaper, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: 10.0))
    proxy = Proxy(LinkShape(), [port := LinkPort(0)])
    proxy._pipes = pipes
    proxy.watch(3, bool)
    assert proxy._wait() == {1, 3}
    assert poll.asked == {3: select.POLLIN, port.socket.fileno(): select.POLLIN} | asked
    assert poll.wait_ms == [wait_ms] and slept == [TICK_S if pipes else 0]
    port.socket.close()


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


class Running:
    """A proxy, a server, and a port on each side that leads to it."""

    pipes: list[LinkPipe]

    def __init__(self, stack: contextlib.ExitStack, shape: LinkShape) -> None:
        self._stack = stack
        self.server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.server.settimeout(WAIT_S)
        self.proxy = Proxy(shape, [LinkPort(towards, self.server.getsockname()[:2]) for towards in (0, 1)])
        ended, self._end = socket.socketpair()
        self.proxy.watch(ended.fileno(), lambda: False)
        self._thread = threading.Thread(target=self.proxy.run)
        self._thread.start()
        stack.callback(lambda: [each.close() for each in (ended, *[port.socket for port in self.proxy.ports])])
        stack.callback(self.stop)

    def stop(self) -> None:
        """`pipes`: there were then."""
        if self._thread.is_alive():
            self._end.close()
            self._thread.join(WAIT_S)
            assert not self._thread.is_alive()
            self.pipes = list(self.proxy._pipes)
            self.proxy.cut()

    def connect(self, towards: int) -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection."""
        near = self.reach(towards)
        far = self._stack.enter_context(self.server.accept()[0])
        far.settimeout(WAIT_S)
        return near, far

    def reach(self, towards: int) -> socket.socket:
        address = "127.0.0.1", self.proxy.ports[towards].number
        return self._stack.enter_context(socket.create_connection(address, timeout=WAIT_S))


def test_a_connection_is_forgotten_when_both_its_ends_are_over(stack: contextlib.ExitStack) -> None:
    running = Running(stack, LinkShape(0.0))
    near, far = running.connect(0)
    near.sendall(b"question")
    assert far.recv(100) == b"question"
    pipes = list(running.proxy._pipes)
    assert all(pipe.target.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for pipe in pipes)
    near.shutdown(socket.SHUT_WR)
    assert far.recv(100) == b""
    far.sendall(b"answer")
    assert near.recv(100) == b"answer" and len(pipes) == 2
    far.close()
    assert near.recv(100) == b""
    running.stop()
    assert running.pipes == []
    assert [pipe.source.fileno() for pipe in pipes] == [-1, -1]


def test_a_connection_that_one_end_resets_is_forgotten(stack: contextlib.ExitStack) -> None:
    running = Running(stack, LinkShape(0.0))
    near, far = running.connect(0)
    shaper._reset(near)
    assert broken(far)
    far.close()
    other, _ = running.connect(0)
    other.sendall(b"question")
    until_s = time.monotonic() + WAIT_S
    while len(running.proxy._pipes) > 2:
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_each_direction_has_a_rate_of_its_own_whoever_opened_the_connection() -> None:
    for towards in (0, 1):
        with contextlib.ExitStack() as stack:
            running = Running(stack, LinkShape(0.0, rate=1e9))
            near, far = running.connect(towards)
            near.sendall(b"question")
            assert far.recv(100) == b"question"
            running.stop()
            used = [direction._free_s > 0 for direction in running.proxy._directions]
            assert used == [towards == 0, towards == 1]


def test_only_the_first_connection_stalls_and_only_on_its_way_there(stack: contextlib.ExitStack) -> None:
    running = Running(stack, LinkShape(0.0, stall_s=5.0, stall_after=100))
    for _ in range(2):
        near, far = running.connect(1)
        near.sendall(b"question")
        far.recv(100)
        far.sendall(b"answer")
        near.recv(100)
    running.stop()
    assert [pipe.stall_after for pipe in running.pipes] == [100, None, None, None]


def test_where_nobody_listens_a_connection_is_reset_and_the_others_go_on(stack: contextlib.ExitStack) -> None:
    running = Running(stack, LinkShape(0.0))
    near, far = running.connect(0)
    silent = stack.enter_context(socket.socket())
    silent.bind(("127.0.0.1", 0))  # its port is nobody else's meanwhile
    running.proxy.point(running.proxy.ports[1].number, silent.getsockname()[:2])
    with pytest.raises(ConnectionResetError):
        running.reach(1).recv(10)
    near.sendall(b"question")
    assert far.recv(100) == b"question"


def test_who_went_away_before_he_was_let_in_stops_nobody() -> None:
    proxy = Proxy(LinkShape(), [port := LinkPort(0, ("127.0.0.1", 1))])
    proxy._accept(port)
    assert proxy._pipes == []
    port.socket.close()


# What a launcher and operators say.


@pytest.fixture
def commands() -> Iterator[tuple[Proxy, Any, int]]:
    """Of a proxy with one port, and where a launcher would write."""
    reads, writes = os.pipe()
    proxy = Proxy(LinkShape(), [LinkPort(0)])
    made = shaper._Commands(proxy, reads)
    yield proxy, made, writes
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    for each in (made.signals, made._sink, proxy.ports[0].socket):
        each.close()
    os.close(reads)
    with contextlib.suppress(OSError):
        os.close(writes)


def test_a_command_counts_when_its_line_is_whole_and_the_end_ends_the_proxy(
    commands: tuple[Proxy, Any, int],
) -> None:
    proxy, made, writes = commands
    (port,) = proxy.ports
    there, nowhere = (
        msgspec.json.encode(Point(port.number, target)) + b"\n" for target in ("127.0.0.1:77", "")
    )
    os.write(writes, there[:9])
    assert made.read() and port.target is None
    os.write(writes, there[9:] + nowhere[:5])
    assert made.read() and port.target == ("127.0.0.1", 77)
    os.write(writes, nowhere[5:])
    assert made.read() and port.target is None
    os.close(writes)
    assert not made.read()


def test_of_two_signals_at_once_the_link_is_restored(commands: tuple[Proxy, Any, int]) -> None:
    proxy, made, _ = commands
    for numbers, is_cut in (
        ([signal.SIGUSR1], True),
        ([signal.SIGUSR2], False),
        ([signal.SIGUSR2, signal.SIGUSR1], False),
        ([signal.SIGUSR1], True),
        ([signal.SIGTERM], True),
    ):
        made._sink.send(bytes(numbers))
        assert made.signalled() and proxy._is_cut == is_cut
    signal.raise_signal(signal.SIGUSR2)
    assert made.signalled() and not proxy._is_cut


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = other.getsockname()[1]
        spec = msgspec.json.encode(LinkSpec(LinkShape(), ((number,), ()))) + b"\n"
        done = subprocess.run(command("link"), input=spec, capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == 4 and done.stdout == b""
    assert f"the link cannot listen at 127.0.0.1:{number}: Address already in use" in done.stderr.decode()
    assert len(done.stderr.splitlines()) == 1


def test_without_a_launcher_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        with pytest.raises(SystemExit) as ended:
            shaper.main()
        assert ended.value.code == 1
