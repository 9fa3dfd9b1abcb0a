"""One cluster as the conductor sees it: its prefill and decode pools, and what is learned of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from isthmus.core.attempts import Assembly, FetchOrder
from isthmus.core.blocks import state_name
from isthmus.core.conductor.copies import ClusterLink, Copy, Link, end
from isthmus.core.conductor.events import LinkRule, NodeJoined, RequestArrived
from isthmus.core.conductor.index import PrefixIndex
from isthmus.core.conductor.learning import Calibration, OutputLengths, Recent
from isthmus.core.cost import Curve, NodeCost, compile_cost
from isthmus.core.types import BlockName, NodeId, RequestId, Role


class Cluster:
    """The nodes of one cluster that take work, in the order they joined.

    `prefills`: those that a request may prefill on; `decodes`: those that only decode.
    `lender_mask`: others whose cache can be fetched from: nodes that only decode, or are about to change their role.
    `has_mixed`, `has_prefill`: whether `prefills` has nodes of these roles; `prefills_alike`: all are of one kind.
    `smallest_prefill`, `smallest_decode`: the least capacity, tokens; 0 without a node. `calibration`, `recent`: of
    prefills placed here.
    """

    __slots__ = (
        "calibration", "decodes", "has_attention", "has_mixed", "has_prefill", "lender_mask", "name", "prefill_mask",
        "prefills", "prefills_alike", "recent", "smallest_decode", "smallest_prefill",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.calibration, self.recent = Calibration(), Recent()
        self.sort(())

    def sort(self, nodes: Sequence[NodeView], *, serves_others: bool = False) -> None:
        """Mixed nodes prefill always; prefill nodes only when something can decode, here or (`serves_others`) there."""
        working = [node for node in nodes if not node.draining]
        self.decodes = [node for node in working if node.role is Role.DECODE]
        prefill = bool(self.decodes) or serves_others
        roles = (Role.MIXED, Role.PREFILL) if prefill else (Role.MIXED,)
        self.prefills = [node for node in working if node.role in roles]
        self.prefill_mask = sum(node.bit for node in self.prefills)
        lenders = [node for node in nodes if node.role is Role.DECODE or node.draining]
        self.lender_mask = sum(node.bit for node in lenders if node.paths.network and node.cache_blocks)
        self.has_prefill = any(node.role is Role.PREFILL for node in self.prefills)
        self.has_attention = any(node.role is Role.ATTENTION for node in working)
        self.has_mixed = any(node.role is Role.MIXED for node in self.prefills)
        self.prefills_alike = len({node.kind for node in self.prefills}) == 1
        self.smallest_prefill = min((node.capacity_tokens for node in self.prefills), default=0)
        self.smallest_decode = min((node.capacity_tokens for node in self.decodes), default=0)

    @property
    def senders(self) -> list[NodeView]:
        """Those that prefill for other clusters: no mixed nodes.

        What is computed waits for room where it decodes, in the order of the routes. A mixed node breaks that order
        when it pre-empts: the first in its queue then waits for blocks of others, which wait for room that the next
        ones in the queue have reserved.
        """
        return [node for node in self.prefills if node.role is Role.PREFILL]

    @property
    def mixed(self) -> list[NodeView]:
        return [node for node in self.prefills if node.role is Role.MIXED]


# The conductor's picture of all clusters: nodes, their queues, batches and caches; requests and their place.


UNKNOWN = Curve(
    kv_token_bytes=1,
    num_layers=1,
    prefill_token_s=1e-4,
    decode_fixed_s=1e-2,
    decode_sequence_s=1e-3,
    decode_context_s=1e-7,
    origin="a stand-in",
)
"""Stands in for the cost of a node that told none; calibration scales it to what is measured."""


class NodeView:
    """One node: what waits for prefill there, what decodes there, and its links."""

    __slots__ = (
        "batch", "bit", "block_bytes", "block_size", "cache_blocks", "capacity_tokens", "cluster", "context",
        "cost", "decodes", "draining", "evictions", "expected_blocks", "free_ns", "hands_over_on_link", "kind",
        "kv_dtype", "kv_heads", "lends", "lent_blocks", "link_in", "link_out", "max_sequences", "node", "paths",
        "prefills", "reuse_layers", "role", "service_ns", "slot", "state_blocks", "state_bytes", "work_ns",
    )  # fmt: skip

    def __init__(self, joined: NodeJoined, slot: int, kind: int, cost: NodeCost, cluster: Cluster) -> None:
        self.node, self.role, self.cost, self.cluster = joined.node, joined.role, cost, cluster
        self.slot, self.bit = slot, 1 << slot  # its place in the index's masks
        self.kind = kind  # nodes of one kind take the same time for the same work
        self.draining = False  # it finishes what it has and gets nothing new
        self.capacity_tokens, self.block_size = joined.capacity_tokens, joined.block_size
        self.max_sequences = joined.max_sequences
        # Of a sequence's recurrent state; a snapshot keeps it in so many blocks.
        self.state_bytes, self.state_blocks = cost.state_bytes, joined.state_blocks
        self.block_bytes = cost.kv_token_bytes * joined.block_size
        self.cache_blocks = joined.cache_blocks
        self.paths, self.kv_dtype = joined.paths, joined.kv_dtype
        self.hands_over_on_link = joined.paths.network > 0 and not joined.paths.handover
        self.link_in, self.link_out = Link(joined.paths.network), Link(joined.paths.network)
        self.prefills: dict[RequestId, RequestView] = {}
        self.work_ns = 0  # of requests whose first token is not out
        self.free_ns = 0  # when that will be done
        self.service_ns = 0  # when it turned to the first of them
        self.decodes: dict[RequestId, RequestView] = {}
        self.batch = self.context = 0  # requests placed here to decode, and their tokens
        self.evictions = 0
        self.lends, self.lent_blocks = joined.lends, 0  # to requests that are computed elsewhere
        self.expected_blocks = 0  # that their answers will add
        self.kv_heads, self.reuse_layers = joined.kv_heads, joined.reuse_layers

    def prefill_ns(self, num_tokens: int, num_blocks: int) -> int:
        """By the cost model, with so many leading blocks cached; at least one token is computed in any case, which
        yields the first output token."""
        cached = min(num_blocks * self.block_size, num_tokens - 1)
        return self.cost.prefill_ns(num_tokens - cached, cached)


class HeldBlocks(NamedTuple):
    """The next blocks of a request, which these nodes have: of several each an equal part of the heads."""

    holders: tuple[NodeView, ...]
    num_blocks: int

    @property
    def room(self) -> int:
        """Blocks of the memory of each."""
        return -(-self.num_blocks // len(self.holders))


class Kept(NamedTuple):
    """What holders keep for a while of an attempt whose home is gone."""

    attempt: int
    held: Sequence[HeldBlocks]
    growth: tuple[NodeView, ...]

    @property
    def holders(self) -> dict[NodeView, None]:
        """Each once, in order."""
        return dict.fromkeys([*self.growth, *[node for held in self.held for node in held.holders]])


@dataclass(slots=True, eq=False)
class Placement:
    """Where a request shall go, and what that is predicted to take: what a policy answers."""

    prefill: NodeView
    cached: int  # leading blocks that are counted on
    own: int  # of these, what the node has itself, or will have when its queue is computed
    work_ns: int  # node time of the prefill
    ttft_ns: int  # until the first token
    decode: NodeView = field(init=False)  # the prefill node, if nobody says otherwise
    compute_ns: int = 0  # of these, computing by the cost model; 0: it waits for KV rather than computes
    deepest: int = 0  # leading blocks that any node has or will have
    uncached: int = 0  # tokens by which it was judged whether to offload
    # What is fetched for the prefill, and over which link if `source` is in another cluster.
    fetch: FetchOrder | None = None
    fetch_bytes: int = 0
    source: NodeView | None = None
    across: ClusterLink | None = None
    # What is not handed over, as in `Route`; `lender`: another node that the decode node gets it from.
    handover_start: int = 0
    recall: FetchOrder | None = None
    lender: NodeView | None = None
    held: Sequence[HeldBlocks] = ()  # where its leading blocks lie instead
    growth: tuple[NodeView, ...] = ()  # where all that fills is to lie
    taken: int = 0  # which attempt's KV there is gone on with
    assembly: Assembly | None = None  # of other prompts' KV; then what it is made of has no names
    donated: Sequence[tuple[NodeView, int]] = ()  # whom that is fetched from, and bytes

    def __post_init__(self) -> None:
        self.decode = self.prefill

    @property
    def named(self) -> int:
        """Blocks that will have names where it is prefilled: all, or what is cached of an assembled prompt."""
        return 1 << 62 if self.assembly is None else self.cached


class RequestState(Enum):
    """WAITING: for a node or for memory, and no attempt is under way. PREFILLING: its prompt is not computed.
    HANDING_OVER: it is, and not all KV of it is where it decodes. DECODING: all KV is there."""

    __hash__ = object.__hash__  # there is one of each, and an enumeration's own takes long

    WAITING = auto()
    PREFILLING = auto()
    HANDING_OVER = auto()
    DECODING = auto()


WAITING, PREFILLING, HANDING_OVER, DECODING = RequestState  # looking a member up in its class takes long

# What moves a request on, from where to where; from elsewhere is a bug of ours. It ends from WAITING: whatever ends it
# first withdraws its attempt. docs/architecture.md has the picture.
ROUTED = {WAITING: PREFILLING}
PREFILLED = {PREFILLING: HANDING_OVER}
HANDED_OVER = {HANDING_OVER: DECODING}
WITHDRAWN = {PREFILLING: WAITING, HANDING_OVER: WAITING, DECODING: WAITING}


@dataclass(slots=True, eq=False)
class RequestView:
    """One accepted request: its facts, the attempt under way, and what it was assigned with, to be taken back."""

    arrived: RequestArrived
    arrived_ns: int
    state: RequestState = WAITING
    attempt: int = 0
    answering: int = 0  # the last attempt that gave a token, 0 before any
    work_ns: int = 0
    compute_ns: int = 0
    losses: int = 0  # attempts that ended since a node or a link went
    prefill: NodeView | None = None
    decode: NodeView | None = None
    expected_ns: int = 0  # when its first token was predicted
    decode_ns: int = -1  # when its KV was whole where it decodes, -1 before
    reason: str = ""  # why its last attempt ended, or there was none yet
    refused: int = 0  # attempts that ended since a node had no memory for it
    waits: int = 0  # how often it began to wait for memory, with nobody before it
    copies: tuple[Copy, ...] = ()  # what is fetched for its prefill
    is_exact: bool = True  # nothing of its KV is another prompt's
    coming: Sequence[BlockName] = ()  # blocks that its prefill node will have
    across: ClusterLink | None = None  # the link between clusters that its hand-over crosses,
    owed: int = 0  # with so many bytes
    lender: NodeView | None = None  # whom its decode node gets a part of the prefix from
    held: Sequence[HeldBlocks] = ()  # where its leading blocks lie
    growth: tuple[NodeView, ...] = ()  # where all that fills is to lie
    expected_blocks: int = 0  # that its answer is expected to add at each of these
    kept: Kept | None = None  # what is left of an attempt whose home is gone
    borrows: HeldBlocks | None = None  # whom it asks for more, and for how much
    returns: bool = False  # some of it comes home

    def involves(self, node: NodeId) -> bool:
        """Whether a node prefills or decodes the attempt under way."""
        prefill, decode = self.prefill, self.decode
        return (prefill is not None and prefill.node == node) or (decode is not None and decode.node == node)

    @property
    def is_silent(self) -> bool:
        """No token of the attempt under way has come."""
        return self.answering != self.attempt

    @property
    def lent(self) -> tuple[HeldBlocks, ...]:
        """What it has elsewhere, or asks for."""
        return (*self.held, self.borrows) if self.borrows is not None else tuple(self.held)

    @property
    def away_tokens(self) -> int:
        """Of its prompt, those that lie with holders."""
        return sum([held.num_blocks * held.holders[0].block_size for held in self.held])

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        """The nodes that may hold something of it, each once."""
        prefill, decode = self.prefill, self.decode
        if prefill is None or decode is None or prefill is decode:
            only = prefill or decode
            return () if only is None else (only,)
        return prefill, decode


class View:
    """Nodes in the order they joined, and accepted requests in the order they came.

    `prefills`, `decodes`: the nodes a request may prefill or only decode on, in all clusters; `alone`: the only
    cluster, None when there are several. `links`: between clusters, by source and target. `block_size`,
    `state_blocks`: of the one model that all nodes serve. `num_routed`: routes so far.
    """

    def __init__(self, links: Sequence[LinkRule] = ()) -> None:
        self.nodes: dict[NodeId, NodeView] = {}
        self.requests: dict[RequestId, RequestView] = {}
        self.index = PrefixIndex()
        self.outputs = OutputLengths()
        self.clusters: dict[str, Cluster] = {}
        self.alone: Cluster | None = Cluster("")
        self.links = {(rule.source, rule.target): ClusterLink(rule) for rule in links}
        self.prefills: list[NodeView] = []
        self.decodes: list[NodeView] = []
        self.block_size = 1
        self.state_blocks = 0
        self.num_routed = 0
        self._slots: list[NodeView | None] = []
        self._kinds: list[object] = []

    # Nodes.

    def join(self, joined: NodeJoined) -> NodeView:
        slot = self._slots.index(None) if None in self._slots else len(self._slots)
        if slot == len(self._slots):
            self._slots.append(None)
        facts = joined.cost or UNKNOWN
        kind = (facts, joined.paths, joined.block_size)
        if kind not in self._kinds:
            self._kinds.append(kind)
        if joined.cluster not in self.clusters:
            self.clusters[joined.cluster] = Cluster(joined.cluster)
            self.alone = self.clusters[joined.cluster] if len(self.clusters) == 1 else None
        cluster = self.clusters[joined.cluster]
        node = NodeView(joined, slot, self._kinds.index(kind), compile_cost(facts), cluster)
        self._slots[slot] = self.nodes[joined.node] = node
        self.block_size, self.state_blocks = joined.block_size, max(self.state_blocks, joined.state_blocks)
        self.sort_roles()
        return node

    def leave(self, node: NodeView) -> None:
        """Forgets a node and what it held. Its requests must be unassigned by the caller."""
        del self.nodes[node.node]
        self.index.drop(node.bit)
        self._slots[node.slot] = None
        self.sort_roles()

    def sort_roles(self) -> None:
        """To be called whenever a node came, left, began to drain or changed its role."""
        nodes: dict[Cluster, list[NodeView]] = {cluster: [] for cluster in self.clusters.values()}
        for node in self.nodes.values():
            nodes[node.cluster].append(node)
        homes = {
            node.cluster.name
            for node in self.nodes.values()
            if node.role is not Role.PREFILL and not node.draining
        }
        served = {source for source, target in self.links if target in homes}
        for cluster, members in nodes.items():
            cluster.sort(members, serves_others=cluster.name in served)
        self.prefills = [node for cluster in nodes for node in cluster.prefills]
        self.decodes = [node for cluster in nodes for node in cluster.decodes]

    def across(self, source: NodeView, target: NodeView) -> ClusterLink | None:
        """The link from one node's cluster to the other's; None within one."""
        if source.cluster is target.cluster:
            return None
        return self.links[source.cluster.name, target.cluster.name]

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def node_at(self, slot: int) -> NodeView:
        node = self._slots[slot]
        assert node is not None, "the index named a node that left"
        return node

    def members(self, cluster: Cluster) -> list[NodeView]:
        return [node for node in self.nodes.values() if node.cluster is cluster]

    def largest(self, *roles: Role) -> int:
        """Tokens that the largest node of these roles can hold; 0 without one."""
        return max((node.capacity_tokens for node in self.nodes.values() if node.role in roles), default=0)

    # Requests: what is assigned is taken back exactly.

    def assign(self, request: RequestView, placement: Placement, kv_bytes: int, now: int) -> None:
        """Adds a request to its nodes' queues and batches, and its blocks to what will be cached. `kv_bytes`: that it
        hands over, without its recurrent state."""
        prefill, decode, facts = placement.prefill, placement.decode, request.arrived
        request.prefill, request.decode = prefill, decode
        request.state = ROUTED[request.state]
        request.work_ns, request.compute_ns = placement.work_ns, placement.compute_ns
        request.decode_ns, request.expected_ns = -1, now + placement.ttft_ns
        if not prefill.prefills:
            prefill.service_ns = now
        prefill.prefills[facts.request] = request
        prefill.work_ns += request.work_ns
        prefill.free_ns = (prefill.free_ns if prefill.free_ns > now else now) + request.work_ns
        request.is_exact = placement.assembly is None
        request.coming = _coming(facts, placement)
        self.index.expect(prefill.bit, request.coming)
        decode.decodes[facts.request] = request
        decode.batch += 1
        decode.context += facts.num_tokens
        if decode is not prefill:
            self._assign_handover(request, placement, kv_bytes + prefill.state_bytes, now)
        request.held, request.growth = placement.held, placement.growth
        for held in request.held:
            for node in held.holders:
                node.lent_blocks += held.room
        if request.growth:
            answer = min(facts.max_tokens, round(self.outputs.mean))
            request.expected_blocks = -(-answer // (decode.block_size * len(request.growth)))
            for node in request.growth:
                node.expected_blocks += request.expected_blocks
        self.num_routed += 1

    def borrow(self, request: RequestView, node: NodeView, num_blocks: int) -> None:
        """It is to ask for so much more; until the answer that counts as lent."""
        assert request.borrows is None
        request.borrows = HeldBlocks((node,), num_blocks)
        node.lent_blocks += num_blocks

    def spread(self, request: RequestView, held: Sequence[HeldBlocks]) -> None:
        """Its leading blocks lie there now, and it asks nobody for more."""
        self._vacate(request)
        request.held = held
        for each in held:
            for node in each.holders:
                node.lent_blocks += each.room

    def _vacate(self, request: RequestView) -> None:
        for each in request.lent:
            for node in each.holders:
                node.lent_blocks -= each.room
        request.held, request.borrows, request.returns = (), None, False

    def _assign_handover(self, request: RequestView, placement: Placement, num_bytes: int, now: int) -> None:
        prefill, decode, lender = placement.prefill, placement.decode, placement.lender
        if prefill.hands_over_on_link:
            prefill.link_out.use(num_bytes, now)
        across = self.across(prefill, decode)
        if across is not None:
            across.use(num_bytes, now)
            across.owed += num_bytes
            request.across, request.owed = across, num_bytes
        request.lender = lender
        if lender is not None and placement.recall is not None:
            recalled = (placement.recall.stop - placement.recall.start) * lender.block_bytes
            lender.link_out.use(recalled, now)
            decode.link_in.use(recalled, now)

    def first_token(self, request: RequestView, now: int) -> None:
        """The prefill is done: the node turns to its next request. Idempotent."""
        node = request.prefill
        if request.state is not PREFILLING or node is None:
            return
        if request.compute_ns:
            node.cluster.calibration.add(now - node.service_ns, request.compute_ns)
        request.state = PREFILLED[request.state]
        self._leave_queue(request, node)
        node.service_ns = now
        node.free_ns = now + node.work_ns
        if request.decode is node:  # its KV need not move
            self.handed_over(request, now)

    def handed_over(self, request: RequestView, now: int) -> None:
        """All its KV is where it decodes. Idempotent."""
        if request.state is HANDING_OVER:
            request.state = HANDED_OVER[request.state]
            request.decode_ns = now
            self._crossed(request)

    def unassign(self, request: RequestView, now: int) -> None:
        """Takes a request off its nodes; what it had copied so far stays where it is."""
        prefill, decode, facts = request.prefill, request.decode, request.arrived
        if prefill is not None and request.state is PREFILLING:
            in_service = next(iter(prefill.prefills.values())) is request
            self._leave_queue(request, prefill)
            if in_service:  # the node turns to its next request
                prefill.service_ns, prefill.free_ns = now, now + prefill.work_ns
            else:
                prefill.free_ns -= request.work_ns
        if decode is not None:
            del decode.decodes[facts.request]
            decode.batch -= 1
            decode.context -= facts.num_tokens
        self.end_copy(request)
        self._crossed(request)
        self._vacate(request)
        for node in request.growth:
            node.expected_blocks -= request.expected_blocks
        request.prefill, request.decode, request.growth = None, None, ()
        request.state = WITHDRAWN[request.state]

    def _crossed(self, request: RequestView) -> None:
        """Nothing of it is on its way to where it decodes any more."""
        if request.across is not None:
            request.across.owed -= request.owed
        request.across, request.owed, request.lender = None, 0, None

    def end_copy(self, request: RequestView) -> None:
        for copy in request.copies:
            end(copy)
        request.copies = ()

    def _leave_queue(self, request: RequestView, node: NodeView) -> None:
        del node.prefills[request.arrived.request]
        node.work_ns -= request.work_ns
        self.index.unexpect(node.bit, request.coming)
        request.coming = ()

    def requests_on(self, node: NodeView) -> Iterable[RequestView]:
        """Requests that need `node` still: its prefill, and whom a prefix is recalled from, until its KV is handed
        over; its decode and holders of its blocks always."""
        for request in list(self.requests.values()):
            handing = request.state is not DECODING and (request.prefill is node or request.lender is node)
            holds = node in request.growth or any(node in held.holders for held in request.held)
            if request.decode is node or handing or holds:
                yield request

    def check(self) -> None:
        """Loads are the sums over requests."""
        self.index.check()
        requests = list(self.requests.values())
        lent = [each for request in requests for each in request.lent]
        for node in self.nodes.values():
            queued = [r for r in requests if r.state is PREFILLING and r.prefill is node]
            decoding = [r for r in requests if r.decode is node]
            assert len(queued) == len(node.prefills) and all(r.arrived.request in node.prefills for r in queued)
            assert node.work_ns == sum(request.work_ns for request in queued)
            assert node.batch == len(decoding) == len(node.decodes)
            assert node.context == sum(request.arrived.num_tokens for request in decoding)
            assert node.lent_blocks == sum([each.room for each in lent if node in each.holders])
            growing = [r.expected_blocks for r in requests if node in r.growth]
            assert node.expected_blocks == sum(growing)
            for copy in (*node.link_in.copies, *node.link_out.copies):
                assert any(copy in r.copies for r in requests), "a copy that nobody wants"
        for link in self.links.values():
            crossing = [r for r in requests if r.across is link]
            assert all(request.state in (PREFILLING, HANDING_OVER) for request in crossing)
            assert link.owed == sum(request.owed for request in crossing)
            assert all(any(copy in r.copies for r in requests) for copy in link.copies)


def _coming(request: RequestArrived, placement: Placement) -> Sequence[BlockName]:
    """Names of blocks that its prefill node has not yet and will have: of a hybrid model also the snapshot that its
    scheduler takes at the end of the last block with a token after it."""
    names, node = request.names[placement.own : placement.named], placement.prefill
    last = (request.num_tokens - 1) // node.block_size
    if not node.state_blocks or last <= placement.own or last > len(request.names):
        return names
    return *names, state_name(request.names[last - 1], node.state_blocks - 1, node.state_blocks)
