"""The attempts of one node, what each waits for beside its scheduler, and what the node reports of its memory."""

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
    """A sequence for the scheduler, and what the node knows of its hand-over. `pinned` of a decode part: the recalled
    prefix, until it is in the engine."""

    begin: StartAttempt  # what the node was told
    extent: HandoverSpan  # tokens whose KV is handed over
    started: bool = False  # its first chunk was in a run
    granted: bool = False  # its decode node has room
    sampled: bool = False  # its first token is known
    received: bool = False  # all of the hand-over is in the engine
    recalled: bool = False  # the prefix that the hand-over leaves out is in the engine
    moved_ns: int = 0  # when bytes of the hand-over last came, 0 before any
    due_ns: int = 0  # when it is given up, for `reason`; 0: never
    reason: str = ""

    @classmethod
    def of(cls, begin: StartAttempt, extent: HandoverSpan, hands_over: bool) -> Attempt:
        """An attempt as its route says. `hands_over`: it leaves the batch when its prompt is computed."""
        route, assembly = begin.route, assembly_of(begin.route)
        attempt = cls(begin.key, begin.num_tokens, begin.stop_length, begin=begin, extent=extent)
        attempt.tenant, attempt.is_exact = begin.tenant, assembly is None
        attempt.recalled = not route.handover_start
        if route.fetch is not None or route.recall is not None:
            attempt.fetch = begin.fetch
        if begin.part is DECODE:  # its cached prefix is loaded as it is received, not by the scheduler
            if assembly is not None and assembly.packing is not None:
                attempt.pack(assembly.packing)
            return attempt
        names = begin.names
        if assembly is not None:  # assembled KV is not exactly that of its tokens, so it gets no names
            attempt.assembly, names = assembly, names[: route.num_cached]
        attempt.names, attempt.hands_over = names, hands_over
        attempt.work_ns, attempt.deadline_ns = route.work_ns, route.deadline_ns
        # A later attempt may have fewer names than its route, which is about the prompt alone, counts on.
        attempt.num_cached = min(route.num_cached, len(names))
        if attempt.fetch is not None and attempt.fetch.stop > len(names):
            attempt.fetch = msgspec.structs.replace(attempt.fetch, stop=len(names))
        return attempt

    @property
    def packs(self) -> bool:
        """Whether its prompt is still to be packed, after all of it is computed."""
        return self.assembly is not None and self.assembly.packing is not None

    @property
    def is_whole(self) -> bool:
        """Whether its prompt is computed, and all KV planned for holders lies there."""
        return self.sampled and self.remote.is_there

    def reserve(self, asked: Iterable[tuple[NodeId, int, Share]]) -> Actions:
        """Letters that ask holders for room, for so many blocks each."""
        return [
            SendLetter(holder, ReserveRequest(self.request, count, share)) for holder, count, share in asked
        ]

    def admitted(self) -> Actions:
        """Asks holders for room, once its decode node has memory for the rest."""
        return self.reserve(self.remote.ask()) if self.granted or self.begin.part is MIXED else []

    def reserved(self) -> Actions:
        """Receives the hand-over into its blocks, grants it, and loads the recalled prefix."""
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
        """Tells the conductor where its KV lies, or is to lie."""
        return HoldingsChanged(self.begin.route.request, self.begin.route.attempt, self.remote.planned)


SEVERED_NS = 250 * NS_PER_MS
"""Grace period before a node reports a lost peer. The head usually notices first; without the period one node's death
would use up two attempts."""
MAX_EARLY = 4096
"""Most letters kept of attempts that have not begun; more would be of attempts that never will."""


class Begun(Protocol):
    """An attempt on a node of either kind. `due_ns`: when it is given up for `reason`, or goes on; 0 for never."""

    begin: StartAttempt
    due_ns: int
    reason: str


A = TypeVar("A", bound=Begun)


class Attempts(dict[RequestId, A], Generic[A]):
    """The attempts of the node called `node`, by key: each begins once, and fails with one report."""

    def __init__(self, node: NodeId) -> None:
        super().__init__()
        self._node = node
        self._early: OrderedDict[tuple[NodeId, RequestId], Any] = OrderedDict()

    def add(self, attempt: A) -> None:
        key = attempt.begin.key
        assert key not in self, f"{key} began twice"
        self[key] = attempt

    def give_up(self, attempt: A, peer: NodeId, reason: str, now: int, actions: Actions) -> None:
        """Lets an attempt whose peer is gone fail after SEVERED_NS, unless the head ends it before."""
        attempt.due_ns, attempt.reason = now + SEVERED_NS, f"the session with {peer} ended: {reason}"
        actions.append(Wake(attempt.due_ns))

    def due(self, now: int) -> list[A]:
        return [attempt for attempt in self.values() if 0 < attempt.due_ns <= now]

    def failure(self, attempt: A, reason: str, *, final: bool = False, no_room: bool = False) -> RequestFailed:
        """A report to the conductor, which may try again unless `final`: then the request is at fault, not the node."""
        route = attempt.begin.route
        reason = reason if final else f"{self._node}: {reason}"
        return RequestFailed(route.request, route.attempt, reason, final=final, no_room=no_room)

    # Letters that came before the head's `StartAttempt`: two sessions have no common order.

    def put_early(self, peer: NodeId, letter: Any) -> None:
        self._early[peer, letter.key] = letter
        if len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)

    def take_early(self, peer: NodeId, key: RequestId) -> Any | None:
        """Removes and returns a letter of `peer` about an attempt that begins or ends now."""
        return self._early.pop((peer, key), None)


class MemoryUsage:
    """Reports of what a node's memory is used for, while memory is lent (the heartbeats of Infinite-LLM).

    A report has what changed since the last one, and comes `period_ns` after it at the earliest; none without a change.
    """

    def __init__(self, scheduler: Scheduler, period_ns: int) -> None:
        self._scheduler, self._period_ns = scheduler, period_ns
        self._due_ns, self._is_due = 0, False
        self._told: dict[RequestId, MemoryEntry] = {}
        self._told_node = self._node()  # an idle node: follows from its capacity

    def tell(self, attempts: Mapping[RequestId, Attempt], now: int, actions: Actions) -> None:
        """Reports, or asks to be woken when the next report is due. Called after each event."""
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
