"""Two sessions joined by nothing but this test: every byte, timer and loss happens when the test says so."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from isthmus.core.errors import ProtocolError
from isthmus.live.messenger import Priority, Sending, Session, Terms
from isthmus.live.messenger.lane import Lane


class Parcel(msgspec.Struct, frozen=True, tag=True):
    """Number `number` of its side; its payload is taken in two pieces, the first of `first` bytes."""

    number: int
    first: int = 0


def content(number: int, size: int) -> bytes:
    return bytes((number * 31 + at * 7 + at // 251) % 256 for at in range(size))


class Cancellable:
    def __init__(self, function: Callable[[], object]) -> None:
        self.function: Callable[[], object] | None = function

    def cancel(self) -> None:
        self.function = None

    def __call__(self) -> None:
        if self.function is not None:
            self.function()


class Clock:
    """Time and what is to be done, of both sides."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.soon: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[int, int, Cancellable]] = []
        self._order = count()

    def later(self, delay_s: float, function: Callable[[], object]) -> Cancellable:
        timer = Cancellable(function)
        heapq.heappush(self._timers, (self.now_ns + round(delay_s * 1e9), next(self._order), timer))
        return timer

    def run_soon(self) -> bool:
        ran = bool(self.soon)
        while self.soon:
            self.soon.popleft()()
        return ran

    def pass_time(self, delay_s: float) -> None:
        until = self.now_ns + round(delay_s * 1e9)
        while self._timers and self._timers[0][0] <= until:
            self.now_ns, _, timer = heapq.heappop(self._timers)
            timer()
            self.run_soon()
        self.now_ns = until


@dataclass
class Sent:
    """A message that was sent, and what its sender heard of it."""

    sending: Sending
    size: int
    priority: Priority
    memory: bytearray
    heard: list[bool] = field(default_factory=list)
    cancelled: bool = False


@dataclass
class Placed:
    """Memory that was given for a payload. When it comes back, it is painted over: nobody may write to it then."""

    message: Parcel
    memory: bytearray
    returned: str = ""

    def give_back(self, how: str) -> None:
        assert not self.returned, f"memory of {self.message} was returned twice: {self.returned}, {how}"
        self.returned = how
        self.memory[:] = b"\xee" * len(self.memory)

    def check(self) -> None:
        if self.returned:
            assert self.memory == b"\xee" * len(self.memory), f"written to after it was {self.returned}"


class Side:
    """One session with its owner and its port."""

    ack_delay_s = 0.001

    def __init__(self, clock: Clock, terms: Terms, first_s: float | None) -> None:
        self.clock = clock
        self.session = Session(Parcel, self, self, terms, first_s)
        self.sent: list[Sent] = []
        self.placed: dict[int, Placed] = {}
        self.delivered: list[tuple[int, int]] = []  # (priority of sending is not known here) number, size
        self.voided: list[int] = []
        self.reasons: list[str] = []
        self.finishing: list[Lane] = []
        self.gone: list[Lane] = []
        self.react: Callable[[Parcel], None] | None = None

    # Sending.

    def send(self, size: int, priority: Priority, number: int, first: int = 0) -> Sent:
        memory = bytearray(content(number, size))
        view = memoryview(memory)
        cut = size // 3
        heard: list[bool] = []
        sending = self.session.send(
            Parcel(number, first), view[:cut], view[cut:], priority=priority, done=heard.append
        )
        sent = Sent(sending, size, priority, memory, heard)
        self.sent.append(sent)
        return sent

    def cancel(self, sent: Sent) -> None:
        """Afterwards its memory is used for something else."""
        sent.sending.cancel()
        assert len(sent.heard) == 1
        if not sent.heard[0]:
            sent.cancelled = True
            sent.memory[:] = b"\xdd" * len(sent.memory)

    # As the owner.

    def on_message(self, session: Session, message: Parcel) -> None:
        assert not self.reasons, "a message came after the end"
        placed = self.placed.get(message.number)
        if placed is not None:
            assert placed.memory == content(message.number, len(placed.memory)), (
                "the payload is not what was sent"
            )
            placed.give_back("delivered")
        self.delivered.append((message.number, len(placed.memory) if placed else 0))
        if self.react is not None:
            self.react(message)

    def place(self, session: Session, message: Parcel, size: int) -> Sequence[memoryview]:
        assert message.number not in self.placed, "placed twice"
        placed = self.placed[message.number] = Placed(message, bytearray(size))
        view = memoryview(placed.memory)
        return [view[: message.first], view[message.first :]]

    def on_void(self, session: Session, message: Parcel) -> None:
        self.placed[message.number].give_back("voided")
        self.voided.append(message.number)

    def on_close(self, session: Session, reason: str) -> None:
        self.reasons.append(reason)

    def refuse(self, number: int) -> bool:
        placed = self.placed[number]
        if self.session.refuse(placed.message):
            placed.give_back("refused")
            return True
        return False

    # As the port.

    def now_ns(self) -> int:
        return self.clock.now_ns

    def soon(self, function: Callable[[], object]) -> None:
        self.clock.soon.append(function)

    def later(self, delay_s: float, function: Callable[[], object]) -> Cancellable:
        return self.clock.later(delay_s, function)

    def wake(self) -> None:
        """The test writes when it likes."""

    def finish(self, lane: Lane) -> None:
        self.finishing.append(lane)

    def retransmits(self) -> int:
        return 0

    def abort(self, lane: Lane) -> None:
        self.gone.append(lane)

    def ended(self) -> None:
        pass


class Cable:
    """One connection: the lanes at its ends, and the bytes on their way from each."""

    def __init__(self, sides: tuple[Side, Side], number: int) -> None:
        self.sides = sides
        self.number = number
        self.lanes = [side.session.lane_up(number) for side in sides]
        self.wires = [bytearray(), bytearray()]  # written by end 0, by end 1
        self.open = [True, True]

    def write(self, end: int, most: int) -> int:
        lane, side = self.lanes[end], self.sides[end]
        if not self.open[end] or lane in side.gone or not lane.fill():
            return 0
        views = lane.views()
        data = b"".join(views)[:most]
        lane.wrote(len(data))
        self.wires[end] += data
        return len(data)

    def read(self, end: int, most: int) -> int:
        """Brings up to so many bytes that the other end wrote, in reads of that size."""
        side, lane, wire = self.sides[end], self.lanes[end], self.wires[1 - end]
        if not self.open[end] or lane in side.gone:
            return 0
        got = 0
        for view in lane.reader.buffers():
            part = wire[: min(len(view), most - got)]
            view[: len(part)] = part
            del wire[: len(part)]
            got += len(part)
        if not got:
            return 0
        try:
            lane.reader.advance(got)
        except ProtocolError as error:
            side.session.fail(str(error))
        return got

    def lose(self, end: int, reason: str = "lost") -> None:
        """One end learns that the connection is lost."""
        if self.open[end]:
            self.open[end] = False
            if self.lanes[end] not in self.sides[end].gone:
                self.sides[end].session.lane_down(self.lanes[end], reason)

    def settle(self) -> bool:
        """An end that finished and has written all, or was aborted, is lost to the other after what it wrote."""
        changed = False
        for end in (0, 1):
            side, lane = self.sides[end], self.lanes[end]
            if self.open[end] and lane in side.finishing and not lane.unwritten_bytes:
                self.lose(end, "")
                changed = True
            if lane in side.gone:
                self.open[end] = False
            if not self.open[end] and self.open[1 - end] and not self.wires[end]:
                self.lose(1 - end, "")
                changed = True
        return changed


class Pair:
    """Two sides and the cables between them. `first_s`: in which the first side, which opened the session, must say
    something; None: the second does not mind."""

    def __init__(self, terms: Terms, cables: int, first_s: float | None = None) -> None:
        self.clock = Clock()
        self.sides = Side(self.clock, terms, None), Side(self.clock, terms, first_s)
        for side, other in ((0, 1), (1, 0)):
            self.sides[side].session.agree(self.sides[other].session.terms)
        self.cables: list[Cable] = []
        for _ in range(cables):
            self.add_cable()

    def add_cable(self) -> Cable:
        cable = Cable(self.sides, len(self.cables))
        self.cables.append(cable)
        return cable

    @property
    def live(self) -> list[Cable]:
        return [cable for cable in self.cables if all(cable.open)]

    def settle(self, chunk: int = 1 << 30) -> None:
        """Everything that can still happen happens."""
        for _ in range(100_000):
            busy = self.clock.run_soon()
            for cable in self.cables:
                for end in (0, 1):
                    busy = bool(cable.write(end, chunk)) or busy
                    busy = bool(cable.read(end, chunk)) or busy
                busy = cable.settle() or busy
            if not busy:
                timers = [side.session._timers for side in self.sides]
                if not any(each.is_running("ack") for each in timers):
                    return
                self.clock.pass_time(0.001)
        raise AssertionError("it never comes to rest")

    def check(self) -> None:
        for side in self.sides:
            for placed in side.placed.values():
                placed.check()
            for sent in side.sent:
                assert len(sent.heard) <= 1
            waiting = sum(sent.size + len(sent.sending.header) for sent in side.sent if not sent.heard)
            assert 0 <= side.session.stat().queued_bytes <= waiting, "what nobody waits for is queued"
        for sender, receiver in (self.sides, self.sides[::-1]):
            numbers = [number for number, _ in receiver.delivered]
            assert len(numbers) == len(set(numbers)), "something was delivered twice"
            for priority in Priority:
                mine = [sent.sending for sent in sender.sent if sent.priority is priority]
                order = {number_of(sending): at for at, sending in enumerate(mine)}
                got = [order[number] for number in numbers if number in order]
                assert got == sorted(got), f"order of {priority!r}"


def number_of(sending: Sending) -> Any:
    return msgspec.msgpack.decode(sending.header, type=Parcel).number
