"""The proxy's arithmetic without time, and a proxy in a process of its own that bytes pass through whole."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from isthmus.benchmarks.child import Child
from isthmus.benchmarks.transfer_peers import Direction, Sockets, touched, verify
from isthmus.benchmarks.wan_proxy import Lane, Link, Wan, serve

KIB = 1024


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
    link = Link(Wan(rate=1000.0))
    assert [link.leave_s(now, 100) for now in (0.0, 0.0, 0.05, 1.0)] == pytest.approx([0.1, 0.2, 0.3, 1.1])
    assert Link(Wan()).leave_s(3.0, 1 << 30) == 3.0


def test_bytes_wait_for_the_delay_and_free_the_window_one_delay_later(ends: list[socket.socket]) -> None:
    sender, taken, handed, receiver = ends
    wan = Wan(delay_s=0.5, window=64 * KIB)
    lane = Lane(wan, Link(wan), taken, handed)
    sender.send(bytes(range(256)) * 256)  # as much as the window
    lane.take(10.0)
    while lane.wants_input:
        lane.take(10.0)
    assert lane.next_s() == 10.5 and not lane.wants_output(10.49) and lane.wants_output(10.5)
    lane.hand_on(10.5)
    assert receiver.recv(1 << 20) == bytes(range(256)) * 256
    assert not lane.wants_input and lane.next_s() == 11.0
    lane.acknowledge(10.99)
    assert not lane.wants_input
    lane.acknowledge(11.0)
    assert lane.wants_input and lane.next_s() is None


def test_a_stall_holds_up_one_lane_once(ends: list[socket.socket]) -> None:
    sender, taken, handed, _ = ends
    wan = Wan(delay_s=0.0, stall_s=2.0)
    lane = Lane(wan, Link(wan), taken, handed)
    lane.stall_after = 10
    sender.send(bytes(11))
    lane.take(1.0)
    assert not lane.wants_output(2.9) and lane.next_s() == 3.0
    lane.hand_on(3.0)
    sender.send(bytes(11))
    lane.take(4.0)
    assert lane.wants_output(4.0)


def test_jitter_never_reorders(ends: list[socket.socket]) -> None:
    sender, taken, handed, receiver = ends
    wan = Wan(delay_s=0.1, jitter_s=1.0, seed=3)
    lane = Lane(wan, Link(wan), taken, handed)
    for index in range(20):
        sender.send(bytes([index]))
        lane.take(0.001 * index)
    due = [each for each, _ in lane._due]
    assert due == sorted(due) and due[-1] > 0.5
    lane.hand_on(10.0)
    assert receiver.recv(100) == bytes(range(20))


@pytest.mark.parametrize(
    "wan", [Wan(delay_s=0.001, rate=50e6, window=16 * KIB), Wan(0.0, jitter_s=0.001, stall_s=0.05)]
)
def test_bytes_pass_whole(wan: Wan) -> None:
    memory = touched(200_000)
    with contextlib.ExitStack() as stack:

        def through(port: int) -> int:
            return int(stack.enter_context(contextlib.closing(Child(serve, wan, port))).hello)

        with contextlib.closing(Sockets(memory, 3, through)) as peer:
            for direction in Direction:
                verify(peer, direction, 200_000, 4096)


def test_an_end_is_passed_on_and_the_other_direction_goes_on() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        proxy = stack.enter_context(contextlib.closing(Child(serve, Wan(0.001), server.getsockname()[1])))
        near = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.hello), timeout=10))
        server.settimeout(10)
        far, _ = server.accept()
        far.settimeout(10)
        near.sendall(b"question")
        near.shutdown(socket.SHUT_WR)
        assert far.recv(100) == b"question" and far.recv(100) == b""
        far.sendall(b"answer")
        assert near.recv(100) == b"answer"
        far.close()
        assert near.recv(100) == b""
