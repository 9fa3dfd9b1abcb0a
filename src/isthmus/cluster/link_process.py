"""The process that carries one link between clusters of this machine, from inside and from its launcher's side.

It reads its orders as one JSON line on standard input, answers with the ports it listens at, and then takes commands,
a JSON line each, until its input ends: it dies with its launcher, as a node does. Operators can cut the link with
SIGUSR1 and restore it with SIGUSR2.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import sys

import msgspec

from isthmus.cluster.shaper import Port, Proxy, Shape
from isthmus.config import child_environment
from isthmus.errors import StartError

START_S = 30.0
MIN_WINDOW, MAX_WINDOW = 4 << 20, 64 << 20


class LinkOrders(msgspec.Struct, frozen=True):
    """`ports`: how many of each direction."""

    shape: Shape
    ports: tuple[int, int]


class LinkPorts(msgspec.Struct, frozen=True):
    """Where the link is entered, in each direction."""

    ports: tuple[tuple[int, ...], tuple[int, ...]]


class Point(msgspec.Struct, frozen=True, tag=True):
    """Connections to `port` lead to `target`, `host:port`, or nowhere if that is empty."""

    port: int
    target: str


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Every connection is reset, and so is every new one."""


class Slow(msgspec.Struct, frozen=True, tag=True):
    """Only this share of the rate is left; at 0 nothing passes and nobody is told."""

    factor: float


class Restore(msgspec.Struct, frozen=True, tag=True):
    """The link is as it was."""


Command = Point | Cut | Slow | Restore


def shape_of(bytes_per_s: int, rtt_ns: int) -> Shape:
    """The window of one connection is twice what is on the way at the full rate, so that it is not what limits."""
    window = min(MAX_WINDOW, max(MIN_WINDOW, 2 * bytes_per_s * rtt_ns // 10**9))
    return Shape(delay_s=rtt_ns / 2e9, rate=float(bytes_per_s), window=window)


class LinkProcess:
    """The link between the clusters `between`, in a process that this one started."""

    def __init__(self, between: tuple[str, str], process: asyncio.subprocess.Process, ports: LinkPorts) -> None:
        self.between = between
        self._process, self._spare = process, {0: list(ports.ports[0]), 1: list(ports.ports[1])}

    @staticmethod
    async def start(between: tuple[str, str], orders: LinkOrders) -> LinkProcess:
        """Raises StartError."""
        name = "-".join(between)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "isthmus", "link", "--name", name),  # the name is for `ps`
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(1),
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
            return LinkProcess(between, process, msgspec.json.decode(line, type=LinkPorts))
        except (msgspec.DecodeError, TimeoutError):
            process.kill()
            await process.wait()
            raise StartError(f"the process of the link between {' and '.join(between)} did not start") from None

    def open(self, towards: str, target: str) -> int | None:
        """A port that leads to `target`, in the cluster `towards`; None when there are no more."""
        spare = self._spare[self.between.index(towards)]
        if not spare:
            return None
        port = spare.pop(0)
        self.command(Point(port, target))
        return port

    def close(self, towards: str, port: int) -> None:
        self.command(Point(port, ""))
        self._spare[self.between.index(towards)].append(port)

    def command(self, command: Command) -> None:
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(msgspec.json.encode(command) + b"\n")

    async def ended(self) -> str:
        """Waits until it ends by itself; what it ended with."""
        return f"exit status {await self._process.wait()}"

    async def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(START_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


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
        self._decode = msgspec.json.Decoder(Command).decode
        self.signals, self._sink = socket.socketpair()
        self._sink.setblocking(False)
        signal.set_wakeup_fd(self._sink.fileno())
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)  # what matters is what the wake-up says

    def read(self) -> bool:
        data = os.read(self._fileno, 1 << 16)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._obey(self._decode(line))
        return bool(data)

    def _obey(self, command: Command) -> None:
        match command:
            case Point():
                host, _, number = command.target.rpartition(":")
                self._proxy.point(command.port, (host, int(number)) if command.target else None)
            case Cut():
                self._proxy.cut()
            case Slow():
                self._proxy.slow(command.factor)
            case Restore():
                self._proxy.restore()

    def signalled(self) -> bool:
        # Of two signals that come together the kernel may deliver the later one first: then the link is restored.
        for number in sorted(self.signals.recv(64)):
            if number == signal.SIGUSR1:
                self._proxy.cut()
            elif number == signal.SIGUSR2:
                self._proxy.restore()
        return True
