"""A link between two clusters of one machine: a TCP proxy with the delay and the rate of a long path.

No kernel module is needed, but then a connection here is two connections over loopback, and neither of them feels
the delay. What bounds a real connection over a long path is that it may have only so many bytes on the way,
`window` bytes in each round trip (an untuned kernel's is 4 MiB). So the proxy bounds exactly that: a byte counts as
on the way from when it is taken in until one delay after it is handed on, as its acknowledgement would arrive.

All connections of a direction share its rate. What it cannot carry soon is left with the senders, so no more than
`BACKLOG_S` of it waits here, and connections that want more than there is get the same each.

One thread, one process: `isthmus link`, started by the launcher, and a child of the benchmark `wan`. The first reads
its spec as one JSON line on standard input, writes it with the ports it listens at, and then reads where they lead, a
JSON line each, until its input ends: it dies with its launcher, as a node does. Operators can cut the link with SIGUSR1
and restore it with SIGUSR2.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable

import msgspec

from isthmus.core.errors import StartError

CHUNK_BYTES = 4 << 10, 256 << 10
"""Least and most bytes of one read; between them, as much as the link carries in `BACKLOG_S`."""
TICK_S = 0.0003
"""Pause between polls: reads are fewer and larger, and delays up to this much longer."""
BACKLOG_S = 0.03
"""Backlog allowed at the link, as time at its rate: keeps the link busy while this process waits for a processor."""
CONNECT_S = 1.0
MIN_WINDOW, MAX_WINDOW = 4 << 20, 64 << 20
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value with which closing a socket resets its connection."""


class LinkShape(msgspec.Struct, frozen=True):
    """Properties of an emulated link."""

    delay_s: float = 0.03  # of each direction
    rate: float | None = None  # bytes/s of each direction, shared by all connections; None: unlimited
    window: int = 4 << 20  # bytes in flight of one connection
    jitter_s: float = 0.0  # most random extra delay of a chunk; chunks stay in order
    stall_s: float = 0.0  # how long the first connection stalls, once, after `stall_after` bytes
    stall_after: int = 0
    seed: int = 0


class LinkDirection:
    """One direction of the link: chunks leave one after another at its rate."""

    def __init__(self, shape: LinkShape) -> None:
        self._rate, self._free_s = shape.rate, 0.0

    @property
    def room_s(self) -> float:
        """When the direction takes more bytes in."""
        return self._free_s - BACKLOG_S

    def leave_s(self, now_s: float, count: int) -> float:
        """Returns when the last of `count` bytes that arrive now has left."""
        if self._rate is None:
            return now_s
        self._free_s = max(now_s, self._free_s) + count / self._rate
        return self._free_s


class LinkPipe:
    """One direction of one connection. Bytes in flight are in a ring as large as the window."""

    def __init__(
        self, shape: LinkShape, direction: LinkDirection, source: socket.socket, target: socket.socket
    ) -> None:
        self._shape, self._direction, self.source, self.target = shape, direction, source, target
        self._ring = memoryview(bytearray(shape.window))
        self._taken = self._handed = self._acknowledged = 0  # bytes since the start
        self._due: deque[tuple[float, int]] = deque()  # when the bytes up to this count are to be handed on
        self._acknowledgements: deque[tuple[float, int]] = deque()
        self._random = random.Random(shape.seed)
        self._last_due_s = self._stalled_until_s = 0.0
        least, most = CHUNK_BYTES
        self._chunk_bytes = most if shape.rate is None else min(most, max(least, int(shape.rate * BACKLOG_S)))
        self.stall_after: int | None = None
        self.ended = False  # the source sends no more

    @property
    def has_room(self) -> bool:
        return not self.ended and self._taken - self._acknowledged < self._shape.window

    def wants_input(self, now_s: float) -> bool:
        return self.has_room and self._direction.room_s <= now_s

    def wants_output(self, now_s: float) -> bool:
        return bool(self._due) and self._due[0][0] <= now_s and self._stalled_until_s <= now_s

    @property
    def finished(self) -> bool:
        return self.ended and self._handed == self._taken

    def next_s(self, now_s: float) -> float | None:
        """Returns when the pipe has to be served next if no bytes arrive; None: never."""
        times = [max(self._due[0][0], self._stalled_until_s)] if self._due else []
        if self._acknowledgements:
            times.append(self._acknowledgements[0][0])
        if self.has_room and self._direction.room_s > now_s:
            times.append(self._direction.room_s)
        return min(times, default=None)

    def take(self, now_s: float) -> None:
        """Reads from the source, as far as the window allows."""
        window = self._shape.window
        first = self._taken % window
        room = min(self._chunk_bytes, window - (self._taken - self._acknowledged), window - first)
        count = self.source.recv_into(self._ring[first : first + room])
        if count == 0:
            self.ended = True
            return
        self._taken += count
        late_s = self._random.uniform(0, self._shape.jitter_s) if self._shape.jitter_s else 0.0
        due_s = self._direction.leave_s(now_s, count) + self._shape.delay_s + late_s
        self._last_due_s = max(self._last_due_s, due_s)  # a late chunk delays those behind it
        self._due.append((self._last_due_s, self._taken))
        if self.stall_after is not None and self._taken > self.stall_after:
            self.stall_after, self._stalled_until_s = None, now_s + self._shape.stall_s

    def hand_on(self, now_s: float) -> None:
        """Writes bytes that are due, as far as the target takes them."""
        while self._due and self._due[0][0] <= now_s:
            first = self._handed % self._shape.window
            count = min(self._due[0][1] - self._handed, self._shape.window - first)
            try:
                sent = self.target.send(self._ring[first : first + count])
            except BlockingIOError:
                return
            self._handed += sent
            self._acknowledgements.append((now_s + self._shape.delay_s, self._handed))
            if self._handed == self._due[0][1]:
                self._due.popleft()

    def give_up(self) -> None:
        """Discards bytes in flight after one end is gone."""
        self.ended = True
        self._due.clear()
        self._taken = self._handed

    def acknowledge(self, now_s: float) -> None:
        while self._acknowledgements and self._acknowledgements[0][0] <= now_s:
            self._acknowledged = self._acknowledgements.popleft()[1]


class LinkPort:
    """A port at one end of the link. `towards`: the direction, 0 or 1, of bytes sent to it; `target`: where connections
    lead, None: nowhere yet; `number`: 0 for any free one. Raises StartError if it is taken."""

    def __init__(self, towards: int, target: tuple[str, int] | None = None, number: int = 0) -> None:
        self.towards, self.target = towards, target
        try:
            self.socket = socket.create_server(("127.0.0.1", number))
        except OSError as error:
            raise StartError(
                f"the link cannot listen at 127.0.0.1:{number}: {os.strerror(error.errno or 0)}"
            ) from None
        self.socket.setblocking(False)

    @property
    def number(self) -> int:
        return int(self.socket.getsockname()[1])


class Proxy:
    """Carries connections from `ports` to their targets, in the thread of `run`."""

    def __init__(self, shape: LinkShape, ports: list[LinkPort]) -> None:
        self._shape, self.ports = shape, ports
        self._directions = LinkDirection(shape), LinkDirection(shape)
        self._pipes: list[LinkPipe] = []
        self._turn = 0
        self._is_cut = False
        self._watched: dict[int, Callable[[], bool]] = {}

    def point(self, number: int, target: tuple[str, int] | None) -> None:
        """Sets the target of new connections to a port."""
        next(port for port in self.ports if port.number == number).target = target

    def cut(self) -> None:
        """Resets all connections, and new ones until `restore`."""
        self._is_cut = True
        for each in {pipe.source for pipe in self._pipes} | {pipe.target for pipe in self._pipes}:
            _reset(each)
        self._pipes.clear()

    def restore(self) -> None:
        self._is_cut = False

    def watch(self, fileno: int, heard: Callable[[], bool]) -> None:
        """Calls `heard` whenever a descriptor is readable; False ends the proxy."""
        self._watched[fileno] = heard

    def run(self) -> None:
        while True:
            readable = self._wait()
            if not all(heard() for fileno, heard in self._watched.items() if fileno in readable):
                return
            for port in self.ports:  # after the launcher's commands, which set targets
                if port.socket.fileno() in readable:
                    self._accept(port)
            now_s = time.monotonic()
            self._turn += 1
            for number in range(len(self._pipes)):
                pipe = self._pipes[(self._turn + number) % len(self._pipes)]
                pipe.acknowledge(now_s)
                self._serve(pipe, pipe.source.fileno() in readable, now_s)
            self._forget_finished()

    def _wait(self) -> set[int]:
        """Waits until something can be done; returns readable descriptors. Polls sources only where there is room,
        targets only for bytes that are due."""
        time.sleep(TICK_S if self._pipes else 0)
        now_s = time.monotonic()
        wanted = dict.fromkeys([*self._watched, *[port.socket.fileno() for port in self.ports]], select.POLLIN)
        for pipe in self._pipes:
            for each, event, is_wanted in (
                (pipe.source, select.POLLIN, pipe.wants_input(now_s)),
                (pipe.target, select.POLLOUT, pipe.wants_output(now_s)),
            ):
                if is_wanted:
                    wanted[each.fileno()] = wanted.get(each.fileno(), 0) | event
        poll = select.poll()
        for fileno, events in wanted.items():
            poll.register(fileno, events)
        times = [at_s for pipe in self._pipes if (at_s := pipe.next_s(now_s)) is not None]
        wait_ms = max(0.0, min(times) - now_s) * 1000 if times else None
        return {fileno for fileno, events in poll.poll(wait_ms) if events & ~select.POLLOUT}

    def _accept(self, port: LinkPort) -> None:
        try:
            near, _ = port.socket.accept()
        except OSError:  # it went away before
            return
        if self._is_cut or port.target is None:
            _reset(near)
            return
        try:
            far = socket.create_connection(port.target, CONNECT_S)
        except OSError:
            _reset(near)
            return
        for each in (near, far):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        forth = LinkPipe(self._shape, self._directions[port.towards], near, far)
        back = LinkPipe(self._shape, self._directions[1 - port.towards], far, near)
        if not self._pipes and self._shape.stall_s:
            forth.stall_after = self._shape.stall_after
        self._pipes += [forth, back]

    def _serve(self, pipe: LinkPipe, is_readable: bool, now_s: float) -> None:
        try:
            if pipe.wants_output(now_s):
                pipe.hand_on(now_s)
            if is_readable and pipe.wants_input(now_s):
                pipe.take(now_s)
        except BlockingIOError:
            return
        except OSError:  # reset by either end
            pipe.give_up()

    def _forget_finished(self) -> None:
        """Passes ends of streams on, and closes connections whose two directions have ended."""
        for pipe in [pipe for pipe in self._pipes if pipe.finished]:
            self._pipes.remove(pipe)
            with contextlib.suppress(OSError):
                pipe.target.shutdown(socket.SHUT_WR)
            if not any(other.source is pipe.target for other in self._pipes):
                pipe.source.close()
                pipe.target.close()


def _reset(each: socket.socket) -> None:
    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    each.close()


class LinkSpec(msgspec.Struct, frozen=True):
    """A link to be emulated. `ports`: of each direction, 0 for any free one."""

    shape: LinkShape
    ports: tuple[tuple[int, ...], tuple[int, ...]]


class Point(msgspec.Struct, frozen=True):
    """A command: connections to `port` lead to `target`, `host:port`, or nowhere if that is empty."""

    port: int
    target: str


def shape_of(bytes_per_s: int, rtt_ns: int) -> LinkShape:
    """Returns the shape of a link. A connection's window is twice the bandwidth-delay product, so it never limits."""
    window = min(MAX_WINDOW, max(MIN_WINDOW, 2 * bytes_per_s * rtt_ns // 10**9))
    return LinkShape(delay_s=rtt_ns / 2e9, rate=float(bytes_per_s), window=window)


def main() -> None:
    """Runs the process `isthmus link`."""
    control = io.FileIO(sys.stdin.fileno(), closefd=False)  # reads nothing ahead
    line = control.readline()
    if not line:
        sys.exit(1)  # the launcher died before it sent the spec
    spec = msgspec.json.decode(line, type=LinkSpec)
    ports = [[LinkPort(towards, number=number) for number in each] for towards, each in enumerate(spec.ports)]
    proxy = Proxy(spec.shape, [*ports[0], *ports[1]])
    commands = _Commands(proxy, control.fileno())
    proxy.watch(control.fileno(), commands.read)
    proxy.watch(commands.signals.fileno(), commands.signalled)
    there, back = (tuple([port.number for port in each]) for each in ports)
    print(msgspec.json.encode(LinkSpec(spec.shape, (there, back))).decode(), flush=True)
    proxy.run()


class _Commands:
    """Commands of the launcher and signals of operators. Each method returns whether to go on."""

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
