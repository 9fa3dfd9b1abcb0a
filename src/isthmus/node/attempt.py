"""One attempt on one node: what is to be done beside computing it."""

from __future__ import annotations

from isthmus.node.events import Begin, Grant, Load
from isthmus.node.extent import Extent
from isthmus.scheduler import Actions, Sequence
from isthmus.scheduler.sequence import EXPECTED, QUEUED
from isthmus.types import Role


class Attempt(Sequence):
    """`begin`: what the node was told; `extent`: what is handed over; `fetch`: what it gets from another node. `pinned`
    is, of what is received, all that its node has or gets itself, until that is in the engine.

    `started`: its first chunk was in a run; `granted`: its decode node has room; `sampled`: its first token is known.
    `received`, `recalled`: what is handed over, and what of the prompt is not, is in the engine. `moved_ns`: when bytes
    of it were last handed over, 0 before any; `lost_ns`: when it is given up, 0: not at all, since `reason`.
    """

    __slots__ = (
        "begin", "extent", "fetch", "granted", "lost_ns", "moved_ns", "reason", "recalled", "received", "sampled",
        "started",
    )  # fmt: skip

    def __init__(self, begin: Begin, extent: Extent, *, leaves: bool) -> None:
        """`leaves`: when its prompt is computed."""
        route = begin.route
        fetch = None if route.fetch is None and route.recall is None else begin.fetch
        self.begin, self.extent, self.fetch = begin, extent, fetch
        self.started = self.granted = self.sampled = self.received = False
        self.recalled = not route.handover_start
        self.moved_ns = self.lost_ns = 0
        self.reason = ""
        if begin.part is Role.DECODE:  # what it has cached is loaded as it is received
            super().__init__(
                begin.key, begin.num_tokens, begin.stop_length, state=EXPECTED, fetches=fetch is not None
            )
            return
        start, stop, until = (fetch.start, fetch.stop, fetch.until_ns) if fetch is not None else (0, 0, 0)
        names, count = begin.names, len(begin.names)
        super().__init__(
            begin.key, begin.num_tokens, begin.stop_length, names, leaves,
            min(route.num_cached, count), start, min(stop, count), until, route.work_ns, route.deadline_ns,
            state=QUEUED, fetches=fetch is not None,
        )  # fmt: skip

    def reserved(self) -> Actions:
        """Its KV may be sent, and what is cached of its prompt is loaded."""
        begin, extent, blocks = self.begin, self.extent, self.table
        if self.restore:
            blocks = blocks[: extent.states // extent.block_size] + tuple(self.restore)
        actions: Actions = [Grant(begin.key, begin.peer, extent, blocks)]
        count = begin.route.handover_start
        if count:
            tokens = count * extent.block_size
            actions.append(
                Load(begin.key, begin.names[:count], blocks[:count], tokens, self.fetches, told=True)
            )
        return actions
