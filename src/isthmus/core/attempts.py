"""What the conductor says to nodes of an attempt, and what they report: the same values in every room and on the wire.

A leaf below all that decides. `conductor` answers with a `Route` and hears the reports; `node` is told the route, in
a `StartAttempt`, and reports; the live cluster sends both as they are.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from isthmus.core.reuse import Packing, Passage, Selection
from isthmus.core.types import DECODE, NOBODY, BlockName, NodeId, RequestId, Role, Sampling, Tenant, Tier


def key_of(request: RequestId, attempt: int) -> RequestId:
    """What nodes call an attempt, so that two attempts of one request never share state."""
    return RequestId(f"{request}#{attempt}")


class FetchOrder(msgspec.Struct, frozen=True):
    """Copy the request's blocks `[start, stop)` from another node's cache, or in a recall from the node's own; `[0,
    start)` are at hand.

    `until_ns`: when the conductor expects them; `codec`: in which form they travel.
    """

    source: NodeId
    start: int
    stop: int
    until_ns: int = 0
    codec: str = "none"


class Holding(msgspec.Struct, frozen=True):
    """The next `num_blocks` of an attempt's leading blocks lie, or are to lie, in the engines' memory of `holders`,
    which attend to them there: all KV heads with one; of several each has an equal part of the heads, in their order
    (Lamina, section on its attention workers)."""

    holders: tuple[NodeId, ...]
    num_blocks: int


class Share(msgspec.Struct, frozen=True):
    """What a holder has of an attempt: blocks from number `first` of the request on, of each part number `part` of
    `parts` of the heads."""

    first: int = 0
    part: int = 0
    parts: int = 1


class Donor(msgspec.Struct, frozen=True):
    """A prompt whose KV another one is assembled from: the one of request `request`, the first of whose blocks are
    `names`; of these `[first, len(names))` are needed. `fetch`: where they are fetched from, unless the prefill node
    has them."""

    request: RequestId
    names: tuple[BlockName, ...]
    first: int = 0
    fetch: FetchOrder | None = None


class Assembly(msgspec.Struct, frozen=True):
    """Of a prompt what is not cached is assembled from donors' KV: as `selection` says. `passages`: the same text,
    where it stands in both; of what is not in any the engine looks for tokens of the first donor that are alike, if the
    selection says so (SemShareKV). `num_reused`: tokens that the conductor counts on; `num_layers`: that keep KV.
    `packing`: what of the prompt's KV is kept."""

    selection: Selection
    donors: tuple[Donor, ...]
    passages: tuple[Passage, ...] = ()
    num_reused: int = 0
    num_layers: int = 0
    packing: Packing | None = None


class Route(msgspec.Struct, frozen=True, tag=True):
    """Prefill and decode a request on these nodes; the same node twice means that its KV does not move.

    `attempt` counts from 1. Later attempts go on from the tokens already generated. `num_cached`: leading
    blocks the conductor counts on, fetched ones included; `work_ns`: node time it expects the prefill to take;
    `deadline_ns`: when the first token was promised, 0 without a promise; `codec`: in which form its KV goes to where
    it decodes.

    `handover_start`: leading blocks that are not handed over, since the decode node has them or gets them in its own
    cluster: with `recall`, from a node there, or its own cache where `recall.source` is itself.

    `holdings`: where its leading blocks are to lie instead of on these two nodes, in the order of its tokens. Where
    there is `growth`, these nodes are to have all full blocks behind those of others, also what fills while it decodes.

    `taken`: an earlier attempt whose home is gone, 0 for none: what its holders keep is gone on with.

    `assembly`: what follows its cached blocks is put together from other prompts' KV; then `num_cached` blocks, and no
    others, have a name.
    """

    request: RequestId
    attempt: int
    prefill: NodeId
    decode: NodeId
    fetch: FetchOrder | None = None
    num_cached: int = 0
    work_ns: int = 0
    deadline_ns: int = 0
    codec: str = "none"
    handover_start: int = 0
    recall: FetchOrder | None = None
    holdings: tuple[Holding, ...] = ()
    growth: tuple[NodeId, ...] = ()
    taken: int = 0
    assembly: Assembly | None = None


def assembly_of(route: Route) -> Assembly | None:
    """How a prompt is assembled, as both its nodes see it. With KV at holders it is not; nor is one to be packed where
    some of it is recalled, for that is not packed."""
    assembly = route.assembly
    if assembly is None or route.holdings or route.growth or route.taken:
        return None
    return None if assembly.packing is not None and route.handover_start else assembly


def holdings_of(route: Route, num_tokens: int, block_size: int) -> tuple[Holding, ...]:
    """Where an attempt's leading blocks are to lie when it begins with so many tokens: with growth all full ones but
    the last token's, whatever of them an earlier attempt generated."""
    holdings, growth = route.holdings, route.growth
    if not growth:
        return holdings
    if holdings and holdings[-1].holders == growth:
        holdings = holdings[:-1]
    rest = (num_tokens - 1) // block_size - sum([holding.num_blocks for holding in holdings])
    return (*holdings, Holding(growth, rest)) if rest else holdings


def num_left_out(route: Route, num_tokens: int, block_size: int) -> int:
    """Leading blocks that the hand-over of an attempt leaves out: those that the decode node gets in its own cluster,
    that lie with holders, or that are dropped when the prompt is packed."""
    if not (route.holdings or route.growth or route.assembly):
        return route.handover_start
    away = sum([holding.num_blocks for holding in holdings_of(route, num_tokens, block_size)])
    assembly = assembly_of(route)
    packing = assembly.packing if assembly is not None else None
    return route.handover_start + away + (packing.num_dropped if packing is not None else 0)


# What nodes are told.


class StartAttempt(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Take part in an attempt, as its route says. `num_tokens` are known; the answer ends at `stop_length` in all.

    `part`: PREFILL computes the prompt and hands its KV over to `route.decode`; DECODE receives it and goes on; MIXED
    does both here. `names`: of the prompt's full blocks. `tenant`: in whose share of the node it is computed and kept.

    The rest is for who computes; whoever decides has none of it, nor has the simulator. `now_ns`: the clock of the
    head, of which the times in `route` are. `tokens`: prompt and what earlier attempts generated; the first
    `num_prompt` are the client's prompt. `salt`: of the request's caches. `donors`: to assemble the prompt, of each of
    the route's donors the tokens of the blocks that are needed.
    """

    key: RequestId
    part: Role
    route: Route
    num_tokens: int
    stop_length: int
    names: tuple[BlockName, ...] = ()
    tenant: Tenant = NOBODY
    now_ns: int = 0
    tokens: tuple[int, ...] = ()
    num_prompt: int = 0
    sampling: Sampling = Sampling()
    salt: str = ""
    donors: tuple[tuple[int, ...], ...] = ()

    @property
    def fetch(self) -> FetchOrder | None:
        """What is fetched from another node for this part."""
        if self.part is not DECODE:
            return self.route.fetch
        recall = self.route.recall
        return recall if recall is not None and recall.source != self.route.decode else None

    @property
    def peer(self) -> NodeId:
        """The other node of its hand-over."""
        return self.route.prefill if self.part is DECODE else self.route.decode

    def to_decide(self, now_ns: int) -> StartAttempt:
        """What the one who decides is told at a node whose clock says `now_ns`: times by that clock, no tokens."""
        ahead, route, fetch = now_ns - self.now_ns, self.route, self.route.fetch
        if fetch is not None:
            fetch = replace(fetch, until_ns=fetch.until_ns + ahead)
        deadline = max(1, route.deadline_ns + ahead) if route.deadline_ns else 0
        route = replace(route, fetch=fetch, deadline_ns=deadline)
        parts = self.key, self.part, route, self.num_tokens, self.stop_length, self.names, self.tenant
        return StartAttempt(*parts)


class DropAttempt(msgspec.Struct, frozen=True, tag=True):
    """Drop an attempt and free its blocks."""

    key: RequestId


class Lend(msgspec.Struct, frozen=True, tag=True):
    """To the `home` of an attempt: `num_blocks` more of its leading blocks are to lie with `holder` from now on, if
    that has room. Answered by `HoldingsChanged`."""

    request: RequestId
    attempt: int
    home: NodeId
    holder: NodeId
    num_blocks: int

    @property
    def key(self) -> RequestId:
        return key_of(self.request, self.attempt)


class Repay(msgspec.Struct, frozen=True, tag=True):
    """To the `home` of an attempt: the last `num_blocks` of its blocks that lie with `holder`, which has the last of
    its holdings, are to come home, if there is memory for them. Answered by `HoldingsChanged` when they have, or
    cannot."""

    request: RequestId
    attempt: int
    home: NodeId
    holder: NodeId
    num_blocks: int

    @property
    def key(self) -> RequestId:
        return key_of(self.request, self.attempt)


class Convert(msgspec.Struct, frozen=True, tag=True):
    """A node, on which nothing of its old role is under way, takes this role and keeps its cache; then says
    `RoleChanged`."""

    node: NodeId
    role: Role


Order = StartAttempt | DropAttempt | Lend | Repay | Convert

# What nodes report.


class FetchFinished(msgspec.Struct, frozen=True, tag=True):
    """The blocks that an attempt's route fetches are at its prefill node, or will never be."""

    request: RequestId
    attempt: int


class PrefillFinished(msgspec.Struct, frozen=True, tag=True):
    """All KV of this attempt is where it decodes: the prefill node is free of it."""

    request: RequestId
    attempt: int


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """A node could not go on with an attempt (transfer broken, seal wrong); another attempt may succeed, unless it is
    `final`: the reason lies in the request. `no_room`: it may when memory is free again."""

    request: RequestId
    attempt: int
    reason: str
    final: bool = False
    no_room: bool = False


class BlocksStored(msgspec.Struct, frozen=True, tag=True):
    """These blocks are now in `tier` of a node's cache, wherever in it they were before."""

    node: NodeId
    names: tuple[BlockName, ...]
    tier: Tier = Tier.MEMORY


class BlocksEvicted(msgspec.Struct, frozen=True, tag=True):
    """These blocks are in no tier of a node's cache any more."""

    node: NodeId
    names: tuple[BlockName, ...]


class RoleChanged(msgspec.Struct, frozen=True, tag=True):
    """A node does what `Convert` asked: it has this role now, and its cache still."""

    node: NodeId
    role: Role


class HoldingsChanged(msgspec.Struct, frozen=True, tag=True):
    """Where the leading blocks of an attempt lie now, or are on their way to: what a `Lend` or a `Repay` came to. If it
    came to nothing, as they lay before."""

    request: RequestId
    attempt: int
    holdings: tuple[Holding, ...]


class MemoryEntry(msgspec.Struct, frozen=True):
    """What an attempt has of its home's memory: `num_blocks`, of which `num_moving` are on their way to holders; none
    when it is over there. `decodes`: some of them may go elsewhere, or come back."""

    request: RequestId
    attempt: int
    num_blocks: int = 0
    num_moving: int = 0
    decodes: bool = False
    holdings: tuple[Holding, ...] = ()


class MemoryUsed(msgspec.Struct, frozen=True, tag=True):
    """What a node's memory is used for, where that changed since the last report.

    `num_available`: blocks that nobody has, `num_spare` of them kept for requests that run; `num_wanted`: by
    `num_waiting` requests that wait for memory; `entries`: of attempts, those that changed.
    """

    node: NodeId
    num_available: int
    num_spare: int
    num_wanted: int
    num_waiting: int
    entries: tuple[MemoryEntry, ...] = ()


Report = (
    FetchFinished
    | PrefillFinished
    | RequestFailed
    | BlocksStored
    | BlocksEvicted
    | RoleChanged
    | HoldingsChanged
    | MemoryUsed
)
