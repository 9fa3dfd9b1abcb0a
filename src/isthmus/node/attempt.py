"""One attempt on one node: what is to be done beside computing it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many

from isthmus.attempts import FetchOrder, Holding, Share, assembly_of
from isthmus.node.events import Begin, Load, Receive, Tell
from isthmus.node.extent import Extent
from isthmus.node.letters import Granted, Reserve
from isthmus.scheduler import Actions, Sequence
from isthmus.types import DECODE, MIXED, NodeId


def shares(holdings: Many[Holding]) -> Iterator[tuple[NodeId, int, Share]]:
    """Each holder, how many blocks it is to have, and which share that is."""
    first = 0
    for holding in holdings:
        for part, holder in enumerate(holding.holders):
            yield holder, holding.num_blocks, Share(first, part, len(holding.holders))
        first += holding.num_blocks


class Attempt(Sequence):
    """A sequence for the scheduler; and what it waits for. `pinned` is, of what is received, all that its node has or
    gets itself, until that is in the engine."""

    __slots__ = (
        "ask_again_ns", "asked", "begin", "claimed", "extent", "fetch", "given_up_ns", "granted", "has_asked",
        "holders", "is_back", "landed", "more", "moved_ns", "reason", "recalled", "received", "returning", "sampled",
        "shipping_to", "started",
    )  # fmt: skip

    def __init__(self, begin: Begin, extent: Extent, departs: bool) -> None:
        """`departs`: it leaves the batch when its prompt is computed."""
        Sequence.__init__(self, begin.key, begin.num_tokens, begin.stop_length)
        route = begin.route
        self.begin, self.tenant = begin, begin.tenant  # what the node was told
        self.extent = extent  # what is handed over
        self.fetch: FetchOrder | None = None  # what it gets from another node
        self.started = False  # its first chunk was in a run
        self.granted = False  # its decode node has room
        self.sampled = False  # its first token is known
        self.asked: dict[NodeId, None] = {}  # holders whose answer is still to come
        self.more: Holding | None = None  # what they were asked for beside its holdings
        self.has_asked = False  # for the room that it begins with
        self.ask_again_ns = 0  # for more, after somebody had none
        self.claimed: dict[
            NodeId, int | None
        ] = {}  # what each keeps of the attempt before, None: is still to say
        self.holders: dict[NodeId, None] = {}  # all that were asked
        self.shipping_to: dict[NodeId, None] = {}  # who has not said that what is on its way there came
        self.landed = False  # what is shipped is there, and a run may still use it here
        self.returning = 0  # blocks that come back from its last holder
        self.is_back = False  # they are here, and a run may still use those there
        self.received = False  # what is handed over is in the engine
        self.recalled = not route.handover_start  # what of the prompt is not handed over is, too
        self.moved_ns = 0  # when bytes of it were last handed over, 0 before any
        self.given_up_ns = 0  # when it is given up, for `reason`; 0: not at all
        self.reason = ""
        if route.fetch is not None or route.recall is not None:
            self.fetch = begin.fetch
            self.fetches = self.fetch is not None
        assembly = assembly_of(route)
        self.is_exact = assembly is None
        if begin.part is DECODE:  # what it has cached is loaded as it is received
            if assembly is not None and assembly.packing is not None:
                self.pack(assembly.packing)
            return
        names = begin.names
        if assembly is not None:  # what is assembled is not what its tokens are in the cache, so it has no name
            self.assembly, names = assembly, names[: route.num_cached]
        self.names = names
        self.departs, self.work_ns, self.deadline_ns = departs, route.work_ns, route.deadline_ns
        # Of a later attempt fewer blocks may have a name than the route, which is about the prompt alone, counts on.
        self.num_cached = min(route.num_cached, len(names))
        if self.fetch is not None:
            self.fetch_start, self.fetch_until_ns = self.fetch.start, self.fetch.until_ns
            self.fetch_stop = min(self.fetch.stop, len(names))

    def ask(self) -> Actions:
        """It has memory: its holders are asked for room, once."""
        if not self.holdings or self.has_asked:
            return []
        self.has_asked = True
        found = list(shares(self.holdings))
        self.asked = {holder: None for holder, _, _ in found}
        self.holders |= self.asked
        return [Tell(holder, Reserve(self.begin.key, count, share)) for holder, count, share in found]

    def admitted(self) -> Actions:
        """Where it decodes there may be no memory yet."""
        return self.ask() if self.granted or self.begin.part is MIXED else []

    @property
    def lent(self) -> tuple[Holding, ...]:
        """What of its KV lies elsewhere, or is to. What was dropped when it was packed lies nowhere."""
        return self.holdings if self.packing is None else ()

    @property
    def packs(self) -> bool:
        """Its prompt is packed when all of it is computed, and not before."""
        return self.assembly is not None and self.assembly.packing is not None

    @property
    def is_whole(self) -> bool:
        """Its prompt is computed, and all of it that is to lie elsewhere does."""
        return self.sampled and self.num_held == self.num_away

    def reserved(self) -> Actions:
        """Its KV may be sent, and what is cached of its prompt is loaded."""
        begin, extent, blocks = self.begin, self.extent, self.table
        if self.restore:
            blocks = blocks[: extent.states // extent.block_size] + self.restore
        received = Receive(begin.key, begin.peer, extent, blocks)
        actions: Actions = [received, Tell(begin.peer, Granted(begin.key)), *self.ask()]
        count = begin.route.handover_start
        if count:
            tokens = count * extent.block_size
            actions.append(
                Load(begin.key, begin.names[:count], blocks[:count], tokens, self.fetches, told=True)
            )
        return actions
