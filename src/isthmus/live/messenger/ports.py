"""Interfaces around a session: its owner (`Handler`), and its binding to sockets or memory (`Port`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec

from isthmus.live.messenger.lane import Lane
from isthmus.live.messenger.streams import Stream

if TYPE_CHECKING:
    from isthmus.live.messenger.session import Session


class Handler(Protocol):
    """Owner of a session. All calls come from the event loop.

    Messages of one priority come in the order of sending. With several connections a message may be placed while
    earlier ones are still on their way.
    """

    def on_message(self, session: Session, message: Any, /) -> None:
        """Takes a whole message; its payload, if any, lies in the memory that `place` gave."""

    def place(self, session: Session, message: Any, size: int, /) -> Sequence[memoryview]:
        """Returns memory of exactly `size` bytes for the payload of `message`, as one or more pieces."""

    def on_void(self, session: Session, message: Any, /) -> None:
        """Takes memory back that `place` gave: the payload will not come."""

    def on_close(self, session: Session, reason: str, /) -> None:
        """Hears that the session ended; nothing more comes."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Port(Protocol):
    """Services that a session needs. `ack_delay_s`: how long an acknowledgement waits for a frame to travel with."""

    ack_delay_s: float

    def now_ns(self) -> int: ...

    def soon(self, function: Callable[[], object]) -> object: ...

    def later(self, delay_s: float, function: Callable[[], object]) -> Timer: ...

    def wake(self) -> None:
        """Lets lanes write: at least one has something."""

    def retransmits(self) -> int:
        """Counts TCP segments that were sent again."""

    def finish(self, lane: Lane) -> None:
        """Writes what is unwritten, then ends this connection and calls `lane_down`."""

    def abort(self, lane: Lane) -> None:
        """Ends this connection now, without calling `lane_down`."""

    def ended(self) -> None:
        """Gives up the session's resources: it is over."""

    async def line(self) -> Stream:
        """Opens a connection in this session's name that is not one of its lanes. Raises OSError, TimeoutError."""


class Timers:
    """Timers of a session, by name; at most one of each name is running."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._running: dict[str, Timer] = {}

    def after(self, delay_s: float, name: str, function: Callable[[], object]) -> None:
        """Starts a timer, unless one of this name is running."""
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


class Terms(msgspec.Struct, frozen=True):
    """Limits that one side of a session offers. `window`: bytes that the other side may have in flight to it;
    `resume_s`: how long the session outlives its last connection, the shorter of both sides' offers."""

    window: Annotated[int, msgspec.Meta(ge=1)] = 256 << 20
    resume_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


STANDARD = Terms()


class Stat(msgspec.Struct, frozen=True):
    """`queued_bytes` wait for a connection, `unacked_bytes` are on one. `resent`: slices that went twice; `voided`:
    payloads that never came; `retransmits`: TCP segments sent again over the connections that are up, 0 where the
    kernel does not tell."""

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
