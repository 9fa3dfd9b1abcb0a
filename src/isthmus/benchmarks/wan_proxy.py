"""A TCP proxy that behaves like a long path: delay, a rate that all connections share, jitter, a window, a stall.

No kernel module is needed, but then a connection here is two connections over loopback, and neither of them feels
the delay. What bounds a real connection over a long path is that it may have only so many bytes on the way,
`window` bytes in each round trip (an untuned kernel's is 4 MiB). So the proxy bounds exactly that: a byte counts as
on the way from when it is taken in until one delay after it is handed on, as its acknowledgement would arrive.

One thread, one process: `serve` is run as a `Child` of the benchmark.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from isthmus.benchmarks.child import Pipe

CHUNK_BYTES = 256 << 10
TICK_S = 0.0003
"""Looked at no more often: fewer and larger reads, for a delay that is up to this much longer."""


@dataclass(frozen=True)
class Wan:
    """`rate`: bytes/s in each direction, shared by all connections; None: no bound. `jitter_s`: each chunk is late by
    up to this much, in order. The first connection stands still, once, for `stall_s` after `stall_after` bytes."""

    delay_s: float = 0.03
    rate: float | None = None
    window: int = 4 << 20
    jitter_s: float = 0.0
    stall_s: float = 0.0
    stall_after: int = 0
    seed: int = 0


class Link:
    """One direction of the path: chunks leave one after another at its rate."""

    def __init__(self, path: Wan) -> None:
        self._rate, self._free_s = path.rate, 0.0

    def leave_s(self, now_s: float, count: int) -> float:
        """When the last of `count` bytes that arrive now has left."""
        if self._rate is None:
            return now_s
        self._free_s = max(now_s, self._free_s) + count / self._rate
        return self._free_s


class Lane:
    """One direction of one connection. Bytes on the way lie in a ring as large as the window."""

    def __init__(self, path: Wan, link: Link, source: socket.socket, target: socket.socket) -> None:
        self._path, self._link, self.source, self.target = path, link, source, target
        self._ring = memoryview(bytearray(path.window))
        self._taken = self._handed = self._acknowledged = 0  # bytes since the start
        self._due: deque[tuple[float, int]] = deque()  # when the bytes up to this count are to be handed on
        self._acknowledgements: deque[tuple[float, int]] = deque()
        self._random = random.Random(path.seed)
        self._last_due_s = self._stalled_until_s = 0.0
        self.stall_after: int | None = None
        self.ended = False  # the source sends no more

    @property
    def wants_input(self) -> bool:
        return not self.ended and self._taken - self._acknowledged < self._path.window

    def wants_output(self, now_s: float) -> bool:
        return bool(self._due) and self._due[0][0] <= now_s and self._stalled_until_s <= now_s

    @property
    def finished(self) -> bool:
        return self.ended and self._handed == self._taken

    def next_s(self) -> float | None:
        """When something is to be done again, if nothing arrives."""
        times = [max(self._due[0][0], self._stalled_until_s)] if self._due else []
        if self._acknowledgements:
            times.append(self._acknowledgements[0][0])
        return min(times, default=None)

    def take(self, now_s: float) -> None:
        """Takes in what the source has, as far as the window allows."""
        window = self._path.window
        first = self._taken % window
        room = min(CHUNK_BYTES, window - (self._taken - self._acknowledged), window - first)
        count = self.source.recv_into(self._ring[first : first + room])
        if count == 0:
            self.ended = True
            return
        self._taken += count
        late_s = self._random.uniform(0, self._path.jitter_s) if self._path.jitter_s else 0.0
        due_s = self._link.leave_s(now_s, count) + self._path.delay_s + late_s
        self._last_due_s = max(self._last_due_s, due_s)  # what is late holds up what is behind it
        self._due.append((self._last_due_s, self._taken))
        if self.stall_after is not None and self._taken > self.stall_after:
            self.stall_after, self._stalled_until_s = None, now_s + self._path.stall_s

    def hand_on(self, now_s: float) -> None:
        """Hands on what is due, as far as the target takes it."""
        while self._due and self._due[0][0] <= now_s:
            first = self._handed % self._path.window
            count = min(self._due[0][1] - self._handed, self._path.window - first)
            try:
                sent = self.target.send(self._ring[first : first + count])
            except BlockingIOError:
                return
            self._handed += sent
            self._acknowledgements.append((now_s + self._path.delay_s, self._handed))
            if self._handed == self._due[0][1]:
                self._due.popleft()

    def give_up(self) -> None:
        """One end is gone: what is on the way goes nowhere."""
        self.ended = True
        self._due.clear()
        self._taken = self._handed

    def acknowledge(self, now_s: float) -> None:
        while self._acknowledgements and self._acknowledgements[0][0] <= now_s:
            self._acknowledged = self._acknowledgements.popleft()[1]


class Proxy:
    """Connections from a listening socket to one port of this machine."""

    def __init__(self, path: Wan, server: socket.socket, port: int) -> None:
        self._path, self._server, self._port = path, server, port
        self._links = Link(path), Link(path)
        self._lanes: list[Lane] = []
        self._poll = select.epoll()
        self._poll.register(server, select.EPOLLIN)
        self._interest: dict[int, int] = {}
        self._sockets: dict[int, socket.socket] = {}

    def run(self, stop: Pipe) -> None:
        """Until something can be read from `stop`, or it is closed."""
        self._poll.register(stop.fileno(), select.EPOLLIN)
        while True:
            now_s = time.monotonic()
            times = [each for lane in self._lanes if (each := lane.next_s()) is not None]
            wait_s = max(0.0, min(times) - now_s) if times else None
            time.sleep(TICK_S if self._lanes else 0)
            ready = dict(self._poll.poll(wait_s))
            if stop.fileno() in ready:
                return
            if self._server.fileno() in ready:
                self._accept()
            now_s = time.monotonic()
            for lane in self._lanes:
                lane.acknowledge(now_s)
                self._serve(lane, ready.get(lane.source.fileno(), 0), now_s)
            self._forget_finished()
            self._watch(now_s)

    def _accept(self) -> None:
        near, _ = self._server.accept()
        far = socket.create_connection(("127.0.0.1", self._port))
        for each in (near, far):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets[each.fileno()] = each
        forth, back = Lane(self._path, self._links[0], near, far), Lane(self._path, self._links[1], far, near)
        if not self._lanes and self._path.stall_s:
            forth.stall_after = self._path.stall_after
        self._lanes += [forth, back]

    def _serve(self, lane: Lane, events: int, now_s: float) -> None:
        try:
            if lane.wants_output(now_s):
                lane.hand_on(now_s)
            if lane.wants_input and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                lane.take(now_s)
        except BlockingIOError:
            return
        except OSError:  # reset by either end
            lane.give_up()

    def _forget_finished(self) -> None:
        """Passes each end of a stream on; a connection is closed when both of its directions have ended."""
        for lane in [lane for lane in self._lanes if lane.finished]:
            self._lanes.remove(lane)
            with contextlib.suppress(OSError):
                lane.target.shutdown(socket.SHUT_WR)
            if not any(other.source is lane.target for other in self._lanes):
                self._close(lane.source)
                self._close(lane.target)

    def _close(self, link: socket.socket) -> None:
        number = link.fileno()
        if self._interest.pop(number, 0):
            self._poll.unregister(number)
        self._sockets.pop(number, None)
        link.close()

    def _watch(self, now_s: float) -> None:
        """Asks for exactly the events that can be used now: readable where the window has room, writable where
        something is due."""
        wanted = dict.fromkeys(self._sockets, 0)
        for lane in self._lanes:
            if lane.wants_input:
                wanted[lane.source.fileno()] |= select.EPOLLIN
            if lane.wants_output(now_s):
                wanted[lane.target.fileno()] |= select.EPOLLOUT
        for number, events in wanted.items():
            before = self._interest.get(number, 0)
            if events == before:
                continue
            if not events:
                self._poll.unregister(number)
            elif before:
                self._poll.modify(number, events)
            else:
                self._poll.register(number, events)
            self._interest[number] = events


def serve(pipe: Pipe, path: dict[str, Any], port: int) -> None:
    """In a process of its own: says the port it listens at, runs until the pipe is closed. `path`: fields of a Wan."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        Proxy(msgspec.convert(path, Wan), server, port).run(pipe)
