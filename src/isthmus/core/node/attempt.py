"""One attempt on one node: what is to be done beside computing it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from isthmus.core.attempts import HoldingsChanged, Share, assembly_of
from isthmus.core.node.events import LoadBlocks, ReceiveHandover, SendLetter, StartAttempt
from isthmus.core.node.extent import HandoverSpan
from isthmus.core.node.letters import HandoverGranted, ReserveRequest
from isthmus.core.scheduler import Actions, Sequence
from isthmus.core.types import DECODE, MIXED, NodeId


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt(Sequence):
    """A sequence for the scheduler; and what it waits for. `pinned` is, of what is received, all that its node has or
    gets itself, until that is in the engine."""

    begin: StartAttempt  # what the node was told
    extent: HandoverSpan  # what is handed over
    started: bool = False  # its first chunk was in a run
    granted: bool = False  # its decode node has room
    sampled: bool = False  # its first token is known
    received: bool = False  # what is handed over is in the engine
    recalled: bool = False  # what of the prompt is not handed over is, too
    moved_ns: int = 0  # when bytes of it were last handed over, 0 before any
    due_ns: int = 0  # when it is given up, for `reason`; 0: not at all
    reason: str = ""

    @classmethod
    def of(cls, begin: StartAttempt, extent: HandoverSpan, hands_over: bool) -> Attempt:
        """`hands_over`: it leaves the batch when its prompt is computed."""
        route, assembly = begin.route, assembly_of(begin.route)
        attempt = cls(begin.key, begin.num_tokens, begin.stop_length, begin=begin, extent=extent)
        attempt.tenant, attempt.is_exact = begin.tenant, assembly is None
        attempt.recalled = not route.handover_start
        if route.fetch is not None or route.recall is not None:
            attempt.fetch = begin.fetch
        if begin.part is DECODE:  # what it has cached is loaded as it is received
            if assembly is not None and assembly.packing is not None:
                attempt.pack(assembly.packing)
            return attempt
        names = begin.names
        if assembly is not None:  # what is assembled is not what its tokens are in the cache, so it has no name
            attempt.assembly, names = assembly, names[: route.num_cached]
        attempt.names, attempt.hands_over = names, hands_over
        attempt.work_ns, attempt.deadline_ns = route.work_ns, route.deadline_ns
        # Of a later attempt fewer blocks may have a name than the route, which is about the prompt alone, counts on.
        attempt.num_cached = min(route.num_cached, len(names))
        if attempt.fetch is not None and attempt.fetch.stop > len(names):
            attempt.fetch = msgspec.structs.replace(attempt.fetch, stop=len(names))
        return attempt

    @property
    def packs(self) -> bool:
        """Its prompt is packed when all of it is computed, and not before."""
        return self.assembly is not None and self.assembly.packing is not None

    @property
    def is_whole(self) -> bool:
        """Its prompt is computed, and all of it that is to lie elsewhere does."""
        return self.sampled and self.remote.is_there

    def reserve(self, asked: Iterable[tuple[NodeId, int, Share]]) -> Actions:
        """Asks these holders for room for so many blocks."""
        return [
            SendLetter(holder, ReserveRequest(self.request, count, share)) for holder, count, share in asked
        ]

    def admitted(self) -> Actions:
        """Where it decodes there may be no memory yet."""
        return self.reserve(self.remote.ask()) if self.granted or self.begin.part is MIXED else []

    def reserved(self) -> Actions:
        """Its KV may be sent, and what is cached of its prompt is loaded."""
        begin, extent, blocks = self.begin, self.extent, self.table
        if self.restore:
            blocks = blocks[: extent.states // extent.block_size] + self.restore
        received = ReceiveHandover(begin.key, begin.peer, extent, blocks)
        granted = SendLetter(begin.peer, HandoverGranted(begin.key))
        actions: Actions = [received, granted, *self.reserve(self.remote.ask())]
        count = begin.route.handover_start
        if count:
            names, tokens, arriving = begin.names[:count], count * extent.block_size, self.fetch is not None
            actions.append(LoadBlocks(begin.key, names, blocks[:count], tokens, arriving, told=True))
        return actions

    def spread(self) -> HoldingsChanged:
        """Where the conductor is to believe its KV."""
        return HoldingsChanged(self.begin.route.request, self.begin.route.attempt, self.remote.planned)
