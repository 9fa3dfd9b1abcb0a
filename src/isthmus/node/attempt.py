"""One attempt on one node: what is to be done beside computing it."""

from __future__ import annotations

from isthmus.attempts import FetchOrder
from isthmus.node.events import Begin, Grant, Load
from isthmus.node.extent import Extent
from isthmus.scheduler import Actions, Sequence
from isthmus.types import DECODE


class Attempt(Sequence):
    """`begin`: what the node was told; `extent`: what is handed over; `fetch`: what it gets from another node. `pinned`
    is, of what is received, all that its node has or gets itself, until that is in the engine.

    `started`: its first chunk was in a run; `granted`: its decode node has room; `sampled`: its first token is known.
    `received`, `recalled`: what is handed over, and what of the prompt is not, is in the engine. `moved_ns`: when bytes
    of it were last handed over, 0 before any; `given_up_ns`: when it is given up, 0: not at all, since `reason`.
    """

    __slots__ = (
        "begin", "extent", "fetch", "given_up_ns", "granted", "moved_ns", "reason", "recalled", "received",
        "sampled", "started",
    )  # fmt: skip

    def __init__(self, begin: Begin, extent: Extent, departs: bool) -> None:
        """`departs`: it leaves the batch when its prompt is computed."""
        Sequence.__init__(self, begin.key, begin.num_tokens, begin.stop_length)
        route = begin.route
        self.begin, self.extent = begin, extent
        self.fetch: FetchOrder | None = None
        self.started = self.granted = self.sampled = self.received = False
        self.recalled = not route.handover_start
        self.moved_ns = self.given_up_ns = 0
        self.reason = ""
        if route.fetch is not None or route.recall is not None:
            self.fetch = begin.fetch
            self.fetches = self.fetch is not None
        if begin.part is DECODE:  # what it has cached is loaded as it is received
            return
        names = self.names = begin.names
        self.departs, self.work_ns, self.deadline_ns = departs, route.work_ns, route.deadline_ns
        # Of a later attempt fewer blocks may have a name than the route, which is about the prompt alone, counts on.
        self.num_cached = min(route.num_cached, len(names))
        if self.fetch is not None:
            self.fetch_start, self.fetch_until_ns = self.fetch.start, self.fetch.until_ns
            self.fetch_stop = min(self.fetch.stop, len(names))

    def reserved(self) -> Actions:
        """Its KV may be sent, and what is cached of its prompt is loaded."""
        begin, extent, blocks = self.begin, self.extent, self.blocks
        if self.restore:
            blocks = blocks[: extent.states // extent.block_size] + self.restore
        actions: Actions = [Grant(begin.key, begin.peer, extent, blocks)]
        count = begin.route.handover_start
        if count:
            tokens = count * extent.block_size
            actions.append(
                Load(begin.key, begin.names[:count], blocks[:count], tokens, self.fetches, told=True)
            )
        return actions
