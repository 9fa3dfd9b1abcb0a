"""All connections of one HTTP server: how many, in which phase and since when, and what was turned away of them.

A connection is in one `Phase` at a time, and all of one phase stand in the order in which they came to it: what has
been there longest is the first to be too late, and the first to go where room is needed.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from isthmus.core.errors import IsthmusError, UnavailableError
from isthmus.live.gateway.settings import HttpLimits

KEEP_ALIVE_S = 60.0
LINGER_S = 2.0
"""How long the rest of what a client sends is read and dropped after its last answer: a socket that is closed with
unread bytes resets the connection, and the answer may be lost."""
STALL_S, STALL_BYTES = 30.0, 64 * 1024
"""A client that takes less than so much of its answer in such a time keeps its place from others."""
SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to this size always fit: it is what one connection buffers."""


class Phase(enum.IntEnum):
    """What a connection does now."""

    IDLE = 0  # between requests
    HEADERS = 1  # its next request has begun, or its first is awaited
    BODY = 2
    ANSWER = 3
    LINGER = 4  # its last answer is sent, or nothing more is read of it


SERVED_NOTHING = (Phase.LINGER, Phase.IDLE, Phase.HEADERS, Phase.BODY)
"""Who goes first where room is needed, those of one phase in the order in which they came to it."""


class OpenConnection(Protocol):
    """A connection, as `Traffic` knows it. `body_bytes`: of its request bodies that are not whole yet."""

    phase: Phase
    body_bytes: int

    @property
    def unsent_bytes(self) -> int:
        """Of answers, which the client has not taken."""
        ...

    def refuse(self, reason: str, error: IsthmusError) -> None:
        """Reads no more of this client and answers `error`; an answer under way goes on, and is the last."""
        ...

    def too_late(self) -> None:
        """It has been in its phase for longer than that may last."""
        ...

    def drop(self) -> None:
        """Gives its place to another client."""
        ...

    def shutdown(self) -> None:
        """Ends it after the answer under way, if there is any; takes no further request."""
        ...

    def end(self) -> None:
        """The same, and forgets requests that wait for the answer before theirs."""
        ...

    def abort(self) -> None:
        """Closes it as it is."""
        ...


class Traffic:
    """All connections of one server. `refused`: what was turned away so far, by the limit that did it; `body_bytes`: of
    request bodies that are not whole yet; `clock`: in seconds."""

    def __init__(self, limits: HttpLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock = limits, clock
        self.refused: Counter[str] = Counter()
        self.body_bytes = 0
        self.stopping = False
        self._since: list[dict[OpenConnection, float]] = [{} for _ in Phase]
        """For each phase, by the time at which a connection came to it, the earliest first."""
        self._stalled: dict[OpenConnection, tuple[float, int]] = {}
        """Those that take no more for now, each with a time and what was unsent then."""
        self._deadlines_s = {
            Phase.IDLE: KEEP_ALIVE_S,
            Phase.HEADERS: limits.header_s,
            Phase.BODY: limits.body_s,
            Phase.LINGER: LINGER_S,
        }

    @property
    def num_connections(self) -> int:
        return sum(map(len, self._since))

    def connections(self) -> list[OpenConnection]:
        return [connection for phase in self._since for connection in phase]

    def enter(self, connection: OpenConnection, phase: Phase) -> None:
        """A connection comes to a phase, its first or another."""
        self._since[connection.phase].pop(connection, None)
        connection.phase = phase
        self._since[phase][connection] = self.clock()

    def leave(self, connection: OpenConnection) -> None:
        """A connection is closed. Idempotent."""
        self._since[connection.phase].pop(connection, None)
        self._stalled.pop(connection, None)

    def stall(self, connection: OpenConnection) -> None:
        """More is unsent than is to be written at once."""
        self._stalled[connection] = (self.clock(), connection.unsent_bytes)

    def flow(self, connection: OpenConnection) -> None:
        """More may be written again. Idempotent."""
        self._stalled.pop(connection, None)

    def sweep(self) -> None:
        """Ends what has been in its phase for too long; a byte now and then extends nothing."""
        now_s = self.clock()
        for phase, limit_s in self._deadlines_s.items():
            late = []
            for connection, since_s in self._since[phase].items():
                if now_s - since_s < limit_s:
                    break
                late.append(connection)
            for connection in late:
                connection.too_late()
        for connection, (since_s, unsent_bytes) in list(self._stalled.items()):
            if now_s - since_s < STALL_S:
                continue
            if connection.unsent_bytes > unsent_bytes - STALL_BYTES:
                self.refused["unread"] += 1
                connection.abort()
            else:
                self.stall(connection)

    def make_room(self) -> bool:
        """Whether one more connection may be taken; closes the one that has served nothing for longest, if need be."""
        while self.num_connections >= self.limits.connections:
            self.refused["connections"] += 1
            idle = (each for phase in SERVED_NOTHING for each in self._since[phase])
            victim = next(idle, None)
            if victim is None:
                return False
            victim.drop()
            if victim.phase is Phase.BODY:
                return True  # its refusal is on the way
        return True

    def take_body(self, num_bytes: int) -> None:
        """So much more of bodies has come; ends the large one that has been under way longest, if it is too much."""
        self.body_bytes += num_bytes
        while self.body_bytes > self.limits.bodies:
            large = (each for each in self._since[Phase.BODY] if each.body_bytes > SMALL_BODY_BYTES)
            victim = next(large, None)
            if victim is None:
                return
            victim.refuse(
                "bodies", UnavailableError("too many large request bodies are under way (limits.bodies)")
            )
