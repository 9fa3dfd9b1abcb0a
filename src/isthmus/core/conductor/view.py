"""The conductor's picture of all clusters: nodes, their queues, batches and caches; requests and their state."""

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
from isthmus.core.conductor.learning import FORGET_OWN, Calibration, OutputLengths, Recent, Speed, is_late
from isthmus.core.cost import Curve, NodeCost, compile_cost
from isthmus.core.types import BlockName, NodeId, RequestId, Role


class Cluster:
    """The nodes of one cluster that take work, in the order they joined.

    `prefills`: nodes that a request may prefill on; `decodes`: decode nodes. `lender_mask`: other nodes whose cache can
    be fetched from, decode or draining ones. `prefills_alike`: all of one kind. `smallest_prefill`, `smallest_decode`:
    the least capacity, in tokens, 0 without a node. `learns_speeds`: some nodes tell no cost, and have a speed of their
    own; `tokens`: the calibration of their time between tokens, in common.
    """

    __slots__ = (
        "calibration", "decodes", "has_attention", "has_mixed", "has_prefill", "learns_speeds", "lender_mask", "name",
        "prefill_mask", "prefills", "prefills_alike", "recent", "smallest_decode", "smallest_prefill", "tokens",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.calibration, self.recent = Calibration(), Recent()
        self.tokens = Calibration(FORGET_OWN)
        self.sort(())

    def sort(self, nodes: Sequence[NodeView], *, serves_others: bool = False) -> None:
        """Mixed nodes always prefill; prefill nodes only if a node decodes, here or in a cluster that this one
        serves."""
        working = [node for node in nodes if not node.draining]
        working = [node for node in working if not node.is_aside] or working
        self.learns_speeds = any(node.speed is not None for node in working)
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
        """Nodes that prefill for other clusters: no mixed ones.

        Computed prompts wait for room at their decode node in the order of the routes. A mixed node that pre-empts
        breaks this order: the first request in its queue then waits for blocks of others, and those for room that the
        next requests in the queue have reserved.
        """
        return [node for node in self.prefills if node.role is Role.PREFILL]

    @property
    def mixed(self) -> list[NodeView]:
        return [node for node in self.prefills if node.role is Role.MIXED]


UNKNOWN = Curve(
    kv_token_bytes=1,
    num_layers=1,
    prefill_token_s=1e-4,
    decode_fixed_s=1e-2,
    decode_sequence_s=1e-3,
    decode_context_s=1e-7,
    origin="a stand-in",
)
"""The cost of a node that reports none; calibration scales it to measured times."""


class NodeView:
    """One node: its prefill queue, its decode batch, and its links."""

    __slots__ = (
        "batch",
        "bit",
        "block_bytes",
        "block_size",
        "cache_blocks",
        "capacity_tokens",
        "cluster",
        "context",
        "cost",
        "decodes",
        "draining",
        "evictions",
        "expected_blocks",
        "free_ns",
        "hands_over_on_link",
        "is_aside",
        "kind",
        "kv_dtype",
        "kv_heads",
        "lends",
        "lent_blocks",
        "link_in",
        "link_out",
        "max_sequences",
        "node",
        "paths",
        "prefills",
        "reuse_layers",
        "role",
        "service_ns",
        "slot",
        "speed",
        "state_blocks",
        "state_bytes",
        "work_ns",
    )  # fmt: skip

    def __init__(self, joined: NodeJoined, slot: int, kind: int, cost: NodeCost, cluster: Cluster) -> None:
        self.node, self.role, self.cost, self.cluster = joined.node, joined.role, cost, cluster
        self.slot, self.bit = slot, 1 << slot  # its place in the index's masks
        self.kind = kind  # nodes of one kind take the same time for the same work
        self.draining = False  # finishes its work and gets no more
        self.is_aside = False  # gets no work while others can take it: it is far slower than it was
        self.speed = Speed(cluster.calibration) if joined.cost is None else None  # None: it tells its cost
        self.capacity_tokens, self.block_size = joined.capacity_tokens, joined.block_size
        self.max_sequences = joined.max_sequences
        self.state_bytes, self.state_blocks = cost.state_bytes, joined.state_blocks  # of a recurrent state
        self.block_bytes = cost.kv_token_bytes * joined.block_size
        self.cache_blocks = joined.cache_blocks
        self.paths, self.kv_dtype = joined.paths, joined.kv_dtype
        self.hands_over_on_link = joined.paths.network > 0 and not joined.paths.handover
        self.link_in, self.link_out = Link(joined.paths.network), Link(joined.paths.network)
        self.prefills: dict[RequestId, RequestView] = {}
        self.work_ns = 0  # of the prefill queue
        self.free_ns = 0  # when the queue will be computed
        self.service_ns = 0  # when the first request in the queue began
        self.decodes: dict[RequestId, RequestView] = {}
        self.batch = self.context = 0  # requests placed here to decode, and their prompt tokens
        self.evictions = 0
        self.lends, self.lent_blocks = joined.lends, 0  # KV memory lent to requests computed elsewhere
        self.expected_blocks = 0  # that the answers of those requests will add
        self.kv_heads, self.reuse_layers = joined.kv_heads, joined.reuse_layers

    def prefill_ns(self, num_tokens: int, num_blocks: int) -> int:
        """Prefill time by the cost model, with so many leading blocks cached. At least one token is computed, which
        yields the first output token."""
        cached = min(num_blocks * self.block_size, num_tokens - 1)
        return self.cost.prefill_ns(num_tokens - cached, cached)

    @property
    def num_delayed(self) -> int:
        """Requests that a prefill on this mixed node will delay: all that are there, since those that wait may wait for
        memory. A node that tells no cost has memory that nobody counts: there as many as decode now, since some of
        these end meanwhile and some of the queue begin."""
        return self.batch if self.speed is None else self.batch - len(self.prefills)

    @property
    def ratio(self) -> float:
        """Measured over estimated prefill time: its own where it tells no cost, else its cluster's."""
        return self.cluster.calibration.ratio if self.speed is None else self.speed.ratio

    @property
    def tokens(self) -> Calibration:
        """Measured over guessed time between tokens, as `ratio`."""
        speed = self.speed
        return speed.tokens if speed is not None and speed.tokens.is_taught else self.cluster.tokens

    @property
    def guessed_step_ns(self) -> float:
        """Time between tokens by the cost model, of one request alone."""
        return self.cost.decode_step_ps(1)[0] / 1000

    def late_ns(self, now: int) -> int:
        """How much later than expected the first prefill of its queue is; negative before that is expected."""
        first = next(iter(self.prefills.values()), None)
        return -1 if first is None else now - self.service_ns - first.work_ns

    def wait_ns(self, now: int) -> int:
        """Time until its queue is computed. One that is late is expected to take as long again as it is late: nothing
        else is known of a node that tells no cost."""
        if self.speed is None or not self.prefills:
            return max(0, self.free_ns - now)
        first = next(iter(self.prefills.values()))
        return abs(self.late_ns(now)) + self.work_ns - first.work_ns


class HeldBlocks(NamedTuple):
    """The next blocks of a request, held by these nodes: of several each has an equal part of the heads."""

    holders: tuple[NodeView, ...]
    num_blocks: int

    @property
    def room(self) -> int:
        """Blocks of memory taken on each holder."""
        return -(-self.num_blocks // len(self.holders))


class Kept(NamedTuple):
    """KV that holders keep for a while of an attempt whose home is gone."""

    attempt: int
    held: Sequence[HeldBlocks]
    growth: tuple[NodeView, ...]

    @property
    def holders(self) -> dict[NodeView, None]:
        """Each once, in order."""
        return dict.fromkeys([*self.growth, *[node for held in self.held for node in held.holders]])


@dataclass(slots=True, eq=False)
class Placement:
    """Where a request shall go, and the predicted time: the answer of a policy."""

    prefill: NodeView
    cached: int  # leading blocks counted on as cached, fetched ones included
    own: int  # of these, blocks that the node has itself, or will have when its queue is computed
    work_ns: int  # node time of the prefill
    ttft_ns: int  # until the first token
    decode: NodeView = field(init=False)  # the prefill node unless set
    compute_ns: int = 0  # of `work_ns` computing by the cost model; 0 if the node rather waits for KV
    deepest: int = 0  # leading blocks that any node has or will have
    uncached: int = 0  # tokens compared with the offload threshold
    # The fetch for the prefill, and the link it crosses if `source` is in another cluster.
    fetch: FetchOrder | None = None
    fetch_bytes: int = 0
    source: NodeView | None = None
    across: ClusterLink | None = None
    # As in `Route`; `lender`: another node that sends the recalled blocks.
    handover_start: int = 0
    recall: FetchOrder | None = None
    lender: NodeView | None = None
    held: Sequence[HeldBlocks] = ()  # leading blocks with holders
    growth: tuple[NodeView, ...] = ()  # holders of all blocks that fill later
    taken: int = 0  # the attempt whose kept KV this one goes on with
    assembly: Assembly | None = None
    donated: Sequence[tuple[NodeView, int]] = ()  # nodes that donors' KV is fetched from, and bytes

    def __post_init__(self) -> None:
        self.decode = self.prefill

    @property
    def named(self) -> int:
        """Leading blocks that the prefill node keeps by name: of an assembled prompt only the cached ones."""
        return 1 << 62 if self.assembly is None else self.cached


class RequestState(Enum):
    """WAITING: for a node or for memory, without an attempt under way. PREFILLING: until its prompt is computed.
    HANDING_OVER: until all its KV is at the decode node. DECODING: from then on."""

    __hash__ = object.__hash__  # quicker than that of an enumeration

    WAITING = auto()
    PREFILLING = auto()
    HANDING_OVER = auto()
    DECODING = auto()


WAITING, PREFILLING, HANDING_OVER, DECODING = RequestState  # quicker to look up than members of the class

# The state transitions; any other raises KeyError, a bug of ours. A request ends from WAITING, after its attempt was
# withdrawn. docs/architecture.md has the picture.
ROUTED = {WAITING: PREFILLING}
PREFILLED = {PREFILLING: HANDING_OVER}
HANDED_OVER = {HANDING_OVER: DECODING}
WITHDRAWN = {PREFILLING: WAITING, HANDING_OVER: WAITING, DECODING: WAITING}


@dataclass(slots=True, eq=False)
class RequestView:
    """One accepted request: its facts, its current attempt, and what `View.unassign` has to take back."""

    arrived: RequestArrived
    arrived_ns: int
    state: RequestState = WAITING
    attempt: int = 0
    answering: int = 0  # the last attempt that gave a token, 0 before any
    first_attempt: int = 0  # the attempt that gave the first token of its answer, none presumed; 0 before any
    work_ns: int = 0
    compute_ns: int = 0
    losses: int = 0  # attempts ended by the loss of a node or link
    prefill: NodeView | None = None
    decode: NodeView | None = None
    expected_ns: int = 0  # when its first token was predicted
    decode_ns: int = -1  # when all its KV was at the decode node, -1 before
    reason: str = ""  # why its last attempt ended, or it waits for a first one
    refused: int = 0  # attempts that found no memory on a node
    waits: int = 0  # times it began to wait for memory as the first in line
    copies: tuple[Copy, ...] = ()  # fetches for its prefill
    moves: int = 0  # attempts given up since their node was late
    is_presumed: bool = False  # its prompt counts as computed, though nothing has come of its answer
    began_ns: int = -1  # when the node turned to it, of an answer that is not streamed
    is_exact: bool = True  # no KV of other prompts
    coming: Sequence[BlockName] = ()  # blocks that its prefill node will have
    across: ClusterLink | None = None  # the link between clusters that its hand-over crosses
    owed: int = 0  # bytes of that hand-over
    lender: NodeView | None = None  # the node that its recall comes from
    held: Sequence[HeldBlocks] = ()  # leading blocks with holders
    growth: tuple[NodeView, ...] = ()  # holders of all blocks that fill later
    expected_blocks: int = 0  # that its answer is expected to add at each of `growth`
    kept: Kept | None = None  # KV left of an attempt whose home is gone
    borrows: HeldBlocks | None = None  # blocks asked for, not answered yet
    returns: bool = False  # blocks are on their way home

    def involves(self, node: NodeId) -> bool:
        """Whether a node prefills or decodes the attempt under way."""
        prefill, decode = self.prefill, self.decode
        return (prefill is not None and prefill.node == node) or (decode is not None and decode.node == node)

    @property
    def is_silent(self) -> bool:
        """Whether the current attempt has given no token yet."""
        return self.answering != self.attempt

    @property
    def goes_on(self) -> bool:
        """Whether an earlier attempt gave tokens. The current one computes them with the prompt, and nobody says how
        many they are: its prefill is neither late nor a measurement, and the end of its answer is none."""
        return 0 < self.first_attempt < self.attempt

    @property
    def lent(self) -> tuple[HeldBlocks, ...]:
        """Blocks with holders, and those asked for."""
        return (*self.held, self.borrows) if self.borrows is not None else tuple(self.held)

    @property
    def away_tokens(self) -> int:
        """Prompt tokens that lie with holders."""
        return sum([held.num_blocks * held.holders[0].block_size for held in self.held])

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        """Its prefill and decode node, each once."""
        prefill, decode = self.prefill, self.decode
        if prefill is None or decode is None or prefill is decode:
            only = prefill or decode
            return () if only is None else (only,)
        return prefill, decode


class View:
    """Nodes in the order they joined, and accepted requests in the order they came.

    `prefills`, `decodes`: as in `Cluster`, of all clusters; `alone`: the only cluster, None when there are several.
    `links`: by source and target cluster. `block_size`, `state_blocks`: of the one model that all nodes serve.
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
        # Of clusters whose nodes report no cost: one that was not tried yet is taken to be as quick as the others.
        self._unknown = Calibration()
        self._slots: list[NodeView | None] = []
        self._kinds: list[object] = []

    # Nodes.

    def join(self, joined: NodeJoined) -> NodeView:
        slot = self._slots.index(None) if None in self._slots else len(self._slots)
        if slot == len(self._slots):
            self._slots.append(None)
        facts = joined.cost or UNKNOWN
        own = joined.node if joined.cost is None else ""  # its speed is its own
        kind = (facts, joined.paths, joined.block_size, own)
        if kind not in self._kinds:
            self._kinds.append(kind)
        if joined.cluster not in self.clusters:
            self.clusters[joined.cluster] = Cluster(joined.cluster)
            if joined.cost is None:
                self.clusters[joined.cluster].calibration = self._unknown
            self.alone = self.clusters[joined.cluster] if len(self.clusters) == 1 else None
        cluster = self.clusters[joined.cluster]
        node = NodeView(joined, slot, self._kinds.index(kind), compile_cost(facts), cluster)
        self._slots[slot] = self.nodes[joined.node] = node
        self.block_size, self.state_blocks = joined.block_size, max(self.state_blocks, joined.state_blocks)
        self.sort_roles()
        return node

    def leave(self, node: NodeView) -> None:
        """Forgets a node and its blocks. The caller must unassign its requests."""
        del self.nodes[node.node]
        self.index.drop(node.bit)
        self._slots[node.slot] = None
        self.sort_roles()

    def set_aside(self, node: NodeView, *, is_aside: bool) -> None:
        node.is_aside = is_aside
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
        """Tokens that the largest node of these roles can hold that does not drain; 0 without one."""
        working = [node for node in self.nodes.values() if node.role in roles and not node.draining]
        return max([node.capacity_tokens for node in working], default=0)

    # Requests: `unassign` takes back exactly what `assign` added.

    def assign(self, request: RequestView, placement: Placement, kv_bytes: int, now: int) -> None:
        """Adds a request to its nodes' queues and batches, and its blocks to the index as expected. `kv_bytes`: of its
        hand-over, without a recurrent state."""
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
        """Notes that a request asks a holder for more blocks, which count as lent until the answer."""
        assert request.borrows is None
        request.borrows = HeldBlocks((node,), num_blocks)
        node.lent_blocks += num_blocks

    def spread(self, request: RequestView, held: Sequence[HeldBlocks]) -> None:
        """Notes where the leading blocks of a request lie now; it asks nobody for more."""
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

    def first_token(self, request: RequestView, now: int, *, teaches: bool = True) -> None:
        """Ends a prefill: the node turns to its next request. Idempotent. `teaches`: as in `FirstToken`."""
        node = request.prefill
        if request.state is not PREFILLING or node is None:
            return
        if teaches and request.compute_ns and not request.goes_on:
            node.cluster.calibration.add(now - node.service_ns, request.compute_ns)
            if node.speed is not None:
                took = now - node.service_ns
                node.speed.add(took, request.compute_ns)
                if not is_late(took - request.work_ns, request.work_ns):
                    node.speed.quick_ns = now
        request.began_ns = node.service_ns if request.is_presumed else -1
        request.state = PREFILLED[request.state]
        self._leave_queue(request, node)
        node.service_ns = now
        node.free_ns = now + node.work_ns
        if request.decode is node:  # its KV need not move
            self.handed_over(request, now)

    def handed_over(self, request: RequestView, now: int) -> None:
        """Ends a hand-over: all KV is at the decode node. Idempotent."""
        if request.state is HANDING_OVER:
            request.state = HANDED_OVER[request.state]
            request.decode_ns = now
            self._crossed(request)

    def answered(self, request: RequestView, num_generated: int, now: int) -> None:
        """Learns the speed of a node that tells no cost from a whole answer: of one that was streamed the time between
        tokens; of another what that leaves for the prefill, unless it is the smaller part. Of one that goes on from an
        earlier attempt nothing: the time is of its last part, the tokens are of all."""
        node = request.decode
        if request.goes_on:
            return
        if node is None or node.speed is None or request.state is not DECODING or num_generated < 1:
            return
        steps, tokens = (num_generated - 1) * node.guessed_step_ns, node.tokens
        if request.began_ns < 0:
            if steps:
                for learnt in (node.speed.tokens, node.cluster.tokens):
                    learnt.add(now - request.decode_ns, steps)
            return
        took = float(now - request.began_ns)
        if steps and not tokens.is_taught:  # both parts count alike
            estimated = float(request.compute_ns + steps)
        else:
            took, estimated = took - steps * tokens.ratio, float(request.compute_ns)
            if took < steps * tokens.ratio:
                return
        node.cluster.calibration.add(took, estimated)
        node.speed.add(took, estimated)

    def unassign(self, request: RequestView, now: int) -> None:
        """Takes a request off its nodes; blocks fetched so far stay cached."""
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
        request.is_presumed, request.began_ns = False, -1
        request.state = WITHDRAWN[request.state]

    def _crossed(self, request: RequestView) -> None:
        """Frees the link that a hand-over crossed, and forgets the source of its recall."""
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
        """Requests that still need `node`: as prefill node or source of a recall until the hand-over ends, as decode
        node or holder always."""
        for request in list(self.requests.values()):
            handing = request.state is not DECODING and (request.prefill is node or request.lender is node)
            holds = node in request.growth or any(node in held.holders for held in request.held)
            if request.decode is node or handing or holds:
                yield request

    def is_idle(self, node: NodeView) -> bool:
        """Whether no request needs `node`, and nothing is copied to it or from it."""
        if node.prefills or node.decodes or node.link_in.copies or node.link_out.copies:
            return False
        return not any(True for _ in self.requests_on(node))

    def check(self) -> None:
        """Asserts that loads of nodes and links are the sums over requests."""
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
    """Names of blocks that the prefill node will add to its cache: with a hybrid model also the snapshot at the end of
    the last block that a token follows."""
    names, node = request.names[placement.own : placement.named], placement.prefill
    last = (request.num_tokens - 1) // node.block_size
    if not node.state_blocks or last <= placement.own or last > len(request.names):
        return names
    return *names, state_name(request.names[last - 1], node.state_blocks - 1, node.state_blocks)
