"""The process that carries one link between clusters of this machine.

It reads its orders as one JSON line on standard input, answers with the ports it listens at, and then hears where they
lead, a JSON line each, until its input ends: it dies with its launcher, as a node does. Operators can cut the link with
SIGUSR1 and restore it with SIGUSR2.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import sys

import msgspec

from isthmus.cluster.shaper import Port, Proxy, Shape

MIN_WINDOW, MAX_WINDOW = 4 << 20, 64 << 20


class LinkOrders(msgspec.Struct, frozen=True):
    """`ports`: how many of each direction."""

    shape: Shape
    ports: tuple[int, int]


class LinkPorts(msgspec.Struct, frozen=True):
    """Where the link is entered, in each direction."""

    ports: tuple[tuple[int, ...], tuple[int, ...]]


class Point(msgspec.Struct, frozen=True):
    """Connections to `port` lead to `target`, `host:port`, or nowhere if that is empty."""

    port: int
    target: str


def shape_of(bytes_per_s: int, rtt_ns: int) -> Shape:
    """The window of one connection is twice what is on the way at the full rate, so that it is not what limits."""
    window = min(MAX_WINDOW, max(MIN_WINDOW, 2 * bytes_per_s * rtt_ns // 10**9))
    return Shape(delay_s=rtt_ns / 2e9, rate=float(bytes_per_s), window=window)


def main() -> None:
    """The process itself."""
    control = io.FileIO(sys.stdin.fileno(), closefd=False)  # reads nothing ahead
    line = control.readline()
    if not line:
        sys.exit(1)  # the launcher died before it gave orders
    orders = msgspec.json.decode(line, type=LinkOrders)
    ports = [[Port(towards) for _ in range(count)] for towards, count in enumerate(orders.ports)]
    proxy = Proxy(orders.shape, [*ports[0], *ports[1]])
    commands = _Commands(proxy, control.fileno())
    proxy.watch(control.fileno(), commands.read)
    proxy.watch(commands.signals.fileno(), commands.signalled)
    there, back = ([port.number for port in each] for each in ports)
    print(msgspec.json.encode(LinkPorts((tuple(there), tuple(back)))).decode(), flush=True)
    proxy.run()


class _Commands:
    """From the launcher and from operators. Each method answers whether to go on."""

    def __init__(self, proxy: Proxy, fileno: int) -> None:
        self._proxy, self._fileno, self._partial = proxy, fileno, b""
        self._decode = msgspec.json.Decoder(Point).decode
        self.signals, self._sink = socket.socketpair()
        self._sink.setblocking(False)
        signal.set_wakeup_fd(self._sink.fileno())
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)  # what matters is what the wake-up says

    def read(self) -> bool:
        data = os.read(self._fileno, 1 << 16)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            point = self._decode(line)
            host, _, number = point.target.rpartition(":")
            self._proxy.point(point.port, (host, int(number)) if point.target else None)
        return bool(data)

    def signalled(self) -> bool:
        # Of two signals that come together the kernel may deliver the later one first: then the link is restored.
        for number in sorted(self.signals.recv(64)):
            if number == signal.SIGUSR1:
                self._proxy.cut()
            elif number == signal.SIGUSR2:
                self._proxy.restore()
        return True
