"""Whom a session serves and what it stands on: its owner above, the binding to sockets or memory below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec

from isthmus.live.messenger.lane import Lane
from isthmus.live.messenger.streams import Stream

if TYPE_CHECKING:
    from isthmus.live.messenger.session import Session


class Handler(Protocol):
    """What a session's owner does. All calls come from the event loop.

    Messages of one priority come in the order of sending. With several connections a message may be placed while
    earlier ones are still on their way.
    """

    def on_message(self, session: Session, message: Any, /) -> None:
        """A whole message is here, its payload (if any) in the memory that `place` gave."""

    def place(self, session: Session, message: Any, size: int, /) -> Sequence[memoryview]:
        """Memory of exactly `size` bytes for the payload of `message`, as one or more pieces."""

    def on_void(self, session: Session, message: Any, /) -> None:
        """The payload of a message that was placed will not come: its memory is the owner's again."""

    def on_close(self, session: Session, reason: str, /) -> None:
        """The session ended; nothing more comes."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Port(Protocol):
    """What a session needs of its binding. `ack_delay_s`: how long an acknowledgement of a payload waits for
    something to travel with."""

    ack_delay_s: float

    def now_ns(self) -> int: ...

    def soon(self, function: Callable[[], object]) -> object: ...

    def later(self, delay_s: float, function: Callable[[], object]) -> Timer: ...

    def wake(self) -> None:
        """Some lane has something to write."""

    def retransmits(self) -> int:
        """Segments that TCP sent again."""

    def finish(self, lane: Lane) -> None:
        """Write what is unwritten, then end this connection and tell `lane_down`."""

    def abort(self, lane: Lane) -> None:
        """End this connection now; `lane_down` need not be told."""

    def ended(self) -> None:
        """The session is over: give up what belongs to it."""

    async def line(self) -> Stream:
        """A connection that begins in this session's name and is not the session's. Raises OSError, TimeoutError."""


class Timers:
    """Calls to be made later, by name; of each at most one is under way."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._running: dict[str, Timer] = {}

    def after(self, delay_s: float, name: str, function: Callable[[], object]) -> None:
        """Calls it later, once, however often this is asked meanwhile."""
        if name not in self._running:
            self._running[name] = self._port.later(delay_s, lambda: self._due(name, function))

    def is_running(self, name: str) -> bool:
        return name in self._running

    def stop(self, name: str) -> None:
        timer = self._running.pop(name, None)
        if timer is not None:
            timer.cancel()

    def stop_all(self) -> None:
        for name in list(self._running):
            self.stop(name)

    def _due(self, name: str, function: Callable[[], object]) -> None:
        self._running.pop(name, None)
        function()


# What the sides of a session agree on, and what it counts.


class Terms(msgspec.Struct, frozen=True):
    """Limits that one side of a session offers. `window`: bytes that the other side may have in flight to it;
    `resume_s`: how long the session outlives its last connection, the shorter of both sides' offers."""

    window: Annotated[int, msgspec.Meta(ge=1)] = 256 << 20
    resume_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


STANDARD = Terms()


class Stat(msgspec.Struct, frozen=True):
    """`queued_bytes` wait for a connection, `unacked_bytes` are on one; `resent` and `voided` count messages' slices
    that went twice and payloads that never came; `retransmits`, segments that TCP sent again, over connections that
    are up, 0 where it does not tell."""

    lanes: int
    lanes_lost: int
    bytes_in: int
    bytes_out: int
    messages_in: int
    messages_out: int
    queued_bytes: int
    unacked_bytes: int
    resent: int
    voided: int
    retransmits: int = 0
