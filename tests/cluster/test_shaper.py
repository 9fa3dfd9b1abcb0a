"""The proxy's arithmetic without time, and a proxy in a process of its own that bytes pass through whole."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from benchmarks.wan import serve
from isthmus.bench.child import Child
from isthmus.bench.transfer_peers import Direction, Sockets, touched, verify
from isthmus.cluster.shaper import BACKLOG_S, LinkPorts, LinkSpec, Pipe, Point, Shape, shape_of
from isthmus.cluster.shaper import Direction as LinkDirection
from tests.served import command

KIB = 1024
WAIT_S = 60
"""Only so that a bug ends a test."""


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    """Sender, the proxy's two sockets, receiver."""
    found = [*socket.socketpair(), *socket.socketpair()]
    for each in found:
        each.setblocking(False)
    yield found
    for each in found:
        each.close()


def test_the_rate_is_shared() -> None:
    link = LinkDirection(Shape(rate=1000.0))
    assert [link.leave_s(now, 100) for now in (0.0, 0.0, 0.05, 1.0)] == pytest.approx([0.1, 0.2, 0.3, 1.1])
    assert LinkDirection(Shape()).leave_s(3.0, 1 << 30) == 3.0


def test_bytes_wait_for_the_delay_and_free_the_window_one_delay_later(ends: list[socket.socket]) -> None:
    sender, taken, handed, receiver = ends
    shape = Shape(delay_s=0.5, window=64 * KIB)
    pipe = Pipe(shape, LinkDirection(shape), taken, handed)
    sender.send(bytes(range(256)) * 256)  # as much as the window
    pipe.take(10.0)
    while pipe.wants_input(10.0):
        pipe.take(10.0)
    assert pipe.next_s(10.0) == 10.5 and not pipe.wants_output(10.49) and pipe.wants_output(10.5)
    pipe.hand_on(10.5)
    assert receiver.recv(1 << 20) == bytes(range(256)) * 256
    assert not pipe.wants_input(10.5) and pipe.next_s(10.5) == 11.0
    pipe.acknowledge(10.99)
    assert not pipe.wants_input(10.99)
    pipe.acknowledge(11.0)
    assert pipe.wants_input(11.0) and pipe.next_s(11.0) is None


def test_a_stall_holds_up_one_lane_once(ends: list[socket.socket]) -> None:
    sender, taken, handed, _ = ends
    shape = Shape(delay_s=0.0, stall_s=2.0)
    pipe = Pipe(shape, LinkDirection(shape), taken, handed)
    pipe.stall_after = 10
    sender.send(bytes(11))
    pipe.take(1.0)
    assert not pipe.wants_output(2.9) and pipe.next_s(2.9) == 3.0
    pipe.hand_on(3.0)
    sender.send(bytes(11))
    pipe.take(4.0)
    assert pipe.wants_output(4.0)


def test_jitter_never_reorders(ends: list[socket.socket]) -> None:
    sender, taken, handed, receiver = ends
    shape = Shape(delay_s=0.1, jitter_s=1.0, seed=3)
    pipe = Pipe(shape, LinkDirection(shape), taken, handed)
    for index in range(20):
        sender.send(bytes([index]))
        pipe.take(0.001 * index)
    due = [each for each, _ in pipe._due]
    assert due == sorted(due) and due[-1] > 0.5
    pipe.hand_on(10.0)
    assert receiver.recv(100) == bytes(range(20))


@pytest.mark.parametrize(
    "shape", [Shape(delay_s=0.001, rate=50e6, window=16 * KIB), Shape(0.0, jitter_s=0.001, stall_s=0.05)]
)
def test_bytes_pass_whole(shape: Shape) -> None:
    memory = touched(200_000)
    with contextlib.ExitStack() as stack:

        def through(port: int) -> int:
            return int(stack.enter_context(contextlib.closing(Child(serve, shape, port))).hello)

        with contextlib.closing(Sockets(memory, 3, through)) as peer:
            for direction in Direction:
                verify(peer, direction, 200_000, 4096)


def test_an_end_is_passed_on_and_the_other_direction_goes_on() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        proxy = stack.enter_context(contextlib.closing(Child(serve, Shape(0.001), server.getsockname()[1])))
        near = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.hello), timeout=WAIT_S))
        server.settimeout(WAIT_S)
        far, _ = server.accept()
        far.settimeout(WAIT_S)
        near.sendall(b"question")
        near.shutdown(socket.SHUT_WR)
        assert far.recv(100) == b"question" and far.recv(100) == b""
        far.sendall(b"answer")
        assert near.recv(100) == b"answer"
        far.close()
        assert near.recv(100) == b""


def test_a_direction_takes_in_no_more_than_it_can_soon_carry() -> None:
    direction = LinkDirection(Shape(rate=1000.0))
    assert direction.room_s <= 5.0
    direction.leave_s(5.0, 100)
    assert direction.room_s == pytest.approx(5.1 - BACKLOG_S)


class Ends:
    """A link, and a server behind one of its ports."""

    def __init__(self, stack: contextlib.ExitStack, shape: Shape) -> None:
        self.server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.link = stack.enter_context(link_process(shape))
        self.port = self.link.ports.ports[1][0]
        self.link.say(Point(self.port, f"127.0.0.1:{self.server.getsockname()[1]}"))

    def passes(self, port: int | None = None) -> bool:
        """Whether a new connection reaches the server; if not, it must be reset."""
        with socket.create_connection(("127.0.0.1", port or self.port), timeout=WAIT_S) as near:
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
    def __init__(self, process: subprocess.Popen[bytes], ports: LinkPorts) -> None:
        self.process, self.ports = process, ports

    def say(self, point: Point) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(point) + b"\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def link_process(shape: Shape) -> Iterator[LinkChild]:
    with subprocess.Popen(
        command("link", "--name", "a-b"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(LinkSpec(shape, (1, 2))) + b"\n")
        process.stdin.flush()
        ports = msgspec.json.decode(process.stdout.readline(), type=LinkPorts)
        yield LinkChild(process, ports)
        process.stdin.close()
        assert process.wait(WAIT_S) == 0, "it must end with its launcher"


def broken(each: socket.socket) -> bool:
    """Reset, or ended."""
    try:
        return each.recv(10) == b""
    except ConnectionError:
        return True


def test_a_link_is_cut_and_restored_by_a_signal() -> None:
    with contextlib.ExitStack() as stack:
        ends = Ends(stack, Shape(0.001, rate=1e9))
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


def test_a_port_leads_where_it_is_pointed_and_nowhere_else() -> None:
    with contextlib.ExitStack() as stack:
        ends = Ends(stack, Shape(0.0))
        assert ends.passes()
        assert not ends.passes(ends.link.ports.ports[0][0])
        ends.link.say(Point(ends.port, ""))
        while ends.passes():
            pass  # until the command has got there


def test_the_window_never_limits_the_rate_of_a_link() -> None:
    assert shape_of(10**9 // 8, 20_000_000) == Shape(delay_s=0.01, rate=1.25e8, window=5_000_000)
    assert shape_of(10**9, 0).window == 4 << 20
    assert shape_of(10**10, 10**9).window == 64 << 20
