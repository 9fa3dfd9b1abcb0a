"""One attempt on one node: what is to be done beside computing it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from isthmus.core.attempts import HoldingsChanged, MemoryEntry, MemoryUsed, RequestFailed, Share, assembly_of
from isthmus.core.node import events
from isthmus.core.node.events import LoadBlocks, ReceiveHandover, SendLetter, StartAttempt, Wake
from isthmus.core.node.letters import HandoverGranted, HandoverSpan, ReserveRequest
from isthmus.core.scheduler import Actions, Scheduler, Sequence
from isthmus.core.scheduler.sequence import DECODING
from isthmus.core.types import DECODE, MIXED, NS_PER_MS, NodeId, RequestId


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


# The attempts of one node, by key: each begins once, may be given up, and fails with one report.


SEVERED_NS = 250 * NS_PER_MS
"""Grace period before a node reports a lost peer. The head usually notices first; without the period one node's death
would use up two attempts."""
MAX_EARLY = 4096
"""Letters of attempts that have not begun; more are of attempts that never will."""


class Begun(Protocol):
    """What every attempt knows. `due_ns`: when it is given up for `reason`, or goes on; 0 for never."""

    begin: StartAttempt
    due_ns: int
    reason: str


A = TypeVar("A", bound=Begun)


class Attempts(dict[RequestId, A], Generic[A]):
    """Of the node that is called `node`."""

    def __init__(self, node: NodeId) -> None:
        super().__init__()
        self._node = node
        self._early: OrderedDict[tuple[NodeId, RequestId], Any] = OrderedDict()

    def add(self, attempt: A) -> None:
        key = attempt.begin.key
        assert key not in self, f"{key} began twice"
        self[key] = attempt

    def give_up(self, attempt: A, peer: NodeId, reason: str, now: int, actions: Actions) -> None:
        """Its peer is gone: it fails after a while, unless the head has decided otherwise."""
        attempt.due_ns, attempt.reason = now + SEVERED_NS, f"the session with {peer} ended: {reason}"
        actions.append(Wake(attempt.due_ns))

    def due(self, now: int) -> list[A]:
        return [attempt for attempt in self.values() if 0 < attempt.due_ns <= now]

    def failure(self, attempt: A, reason: str, *, final: bool = False, no_room: bool = False) -> RequestFailed:
        """What the conductor hears, who may try again. `final`: the reason lies in the request, not in this node."""
        route = attempt.begin.route
        reason = reason if final else f"{self._node}: {reason}"
        return RequestFailed(route.request, route.attempt, reason, final=final, no_room=no_room)

    # Letters that came before the head's word of their attempt: two sessions have no common order.

    def put_early(self, peer: NodeId, letter: Any) -> None:
        self._early[peer, letter.key] = letter
        if len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)

    def take_early(self, peer: NodeId, key: RequestId) -> Any | None:
        """What `peer` said of an attempt that begins or ends now."""
        return self._early.pop((peer, key), None)


# What a node says of its memory while memory is lent: what changed, once in a while (Infinite-LLM, heartbeats).
#
# The next report is due a period after the one before, and then comes by itself if anything happened since. Where
# nothing happens there is none.


class MemoryUsage:
    """What was said, and when the next is due."""

    def __init__(self, scheduler: Scheduler, period_ns: int) -> None:
        self._scheduler, self._period_ns = scheduler, period_ns
        self._due_ns, self._is_due = 0, False
        self._told: dict[RequestId, MemoryEntry] = {}
        self._told_node = self._node()  # which follows from its capacity

    def tell(self, attempts: Mapping[RequestId, Attempt], now: int, actions: Actions) -> None:
        """After each event."""
        if now < self._due_ns:
            if not self._is_due:
                self._is_due = True
                actions.append(events.Wake(self._due_ns))
            return
        entries = {key: _entry(attempt) for key, attempt in attempts.items()}
        changed = [entry for key, entry in entries.items() if self._told.get(key) != entry]
        gone = [
            MemoryEntry(each.request, each.attempt) for key, each in self._told.items() if key not in entries
        ]
        node = self._node()
        if not (changed or gone or node != self._told_node):
            return
        self._told, self._told_node = entries, node
        actions.append(MemoryUsed(self._scheduler.node, *node, (*gone, *changed)))
        self._due_ns, self._is_due = now + self._period_ns, False

    def _node(self) -> tuple[int, int, int, int]:
        scheduler = self._scheduler
        return scheduler.pool.available, scheduler.num_spare, scheduler.num_wanted, scheduler.num_waiting


def _entry(attempt: Attempt) -> MemoryEntry:
    route = attempt.begin.route
    movable = attempt.state is DECODING and attempt.packing is None
    remote = attempt.remote
    moving = remote.num_planned - remote.num_there
    num_blocks = len(attempt.blocks) + len(attempt.scratch)
    return MemoryEntry(route.request, route.attempt, num_blocks, moving, movable, remote.planned)
