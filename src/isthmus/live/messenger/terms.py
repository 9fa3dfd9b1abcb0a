"""What the sides of a session agree on, and what it counts."""

from __future__ import annotations

from typing import Annotated

import msgspec


class Terms(msgspec.Struct, frozen=True):
    """What one side offers; what holds is agreed at the start.

    `window`: bytes the other side may have in flight to this one; `resume_s`: how long a session outlives its
    last connection, the shorter of both; `capabilities`: names, and those that both have are agreed.
    """

    window: Annotated[int, msgspec.Meta(ge=1)] = 256 << 20
    resume_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    capabilities: tuple[str, ...] = ()

    def agreed(self, theirs: Terms) -> Terms:
        """As both will act: the window is the other side's."""
        common = tuple(sorted(set(self.capabilities) & set(theirs.capabilities)))
        return Terms(theirs.window, min(self.resume_s, theirs.resume_s), common)


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
