"""The conductor's picture of the cluster: nodes, their queues, batches and caches; requests and their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.conductor.copies import Copy, Link, end
from isthmus.conductor.events import Fetch, NodeJoined, RequestArrived
from isthmus.conductor.index import PrefixIndex
from isthmus.conductor.learning import Calibration, OutputLengths, Recent
from isthmus.cost import Curve, NodeCost, compile_cost
from isthmus.types import BlockName, NodeId, RequestId, Role

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
    """One node: what waits for prefill there, what decodes there, and its links.

    `bit`: its place in the index's masks. `work_ns`: booked for requests whose first token is not out;
    `free_ns`: when that will be done. `kind`: nodes of one kind take the same time for the same work.
    `batch`, `context`: requests placed here to decode, and their tokens.
    """

    __slots__ = (
        "batch",
        "bit",
        "block_bytes",
        "block_size",
        "cache_blocks",
        "capacity_tokens",
        "context",
        "cost",
        "decodes",
        "evictions",
        "free_ns",
        "hands_over_on_link",
        "kind",
        "kv_dtype",
        "link_in",
        "link_out",
        "node",
        "paths",
        "prefills",
        "role",
        "service_ns",
        "slot",
        "work_ns",
    )

    def __init__(self, joined: NodeJoined, slot: int, kind: int, cost: NodeCost) -> None:
        self.node, self.role, self.slot, self.bit, self.kind = joined.node, joined.role, slot, 1 << slot, kind
        self.capacity_tokens, self.block_size = joined.capacity_tokens, joined.block_size
        self.cost = cost
        self.block_bytes = cost.kv_token_bytes * joined.block_size
        self.cache_blocks = joined.cache_blocks
        self.paths, self.kv_dtype = joined.paths, joined.kv_dtype
        self.hands_over_on_link = joined.paths.network > 0 and not joined.paths.handover
        self.link_in, self.link_out = Link(joined.paths.network), Link(joined.paths.network)
        self.prefills: dict[RequestId, RequestView] = {}
        self.decodes: dict[RequestId, RequestView] = {}
        self.work_ns = self.free_ns = self.service_ns = 0
        self.batch = self.context = self.evictions = 0


class Placement:
    """Where a request shall go. `cached`: leading blocks counted on, of which the node has or computes `held`.

    `work_ns`: node time of its prefill; `compute_ns`: what the cost model alone says of it, 0 when it waits for
    KV rather than computes; `ttft_ns`: until its first token. `fetch_bytes` come from `source`.
    `deepest`: leading blocks that any node has or will have.
    """

    __slots__ = (
        "cached",
        "compute_ns",
        "decode",
        "deepest",
        "fetch",
        "fetch_bytes",
        "held",
        "prefill",
        "source",
        "ttft_ns",
        "work_ns",
    )

    def __init__(self, prefill: NodeView, cached: int, held: int, work_ns: float, ttft_ns: float) -> None:
        self.prefill, self.cached, self.held = prefill, cached, held
        self.work_ns, self.ttft_ns = int(work_ns), int(ttft_ns)
        self.compute_ns = self.deepest = 0
        self.decode: NodeView = prefill
        self.fetch: Fetch | None = None
        self.fetch_bytes = 0
        self.source: NodeView | None = None


class RequestView:
    """One accepted request: its facts, the attempt under way, and what it was booked with.

    `expected_ns`: when its first token was predicted; `decode_ns`: when its KV was whole where it decodes, -1
    before. `prefill`, `decode`: its nodes, None when it has none; `prefilling`: its first token is not out;
    `handing_over`: its KV is not where it decodes. `held`: its last attempt ended, for `reason`, and no node
    could take the next one yet.
    """

    __slots__ = (
        "arrived",
        "arrived_ns",
        "attempt",
        "compute_ns",
        "copy",
        "decode",
        "decode_ns",
        "expected_ns",
        "handing_over",
        "held",
        "prefill",
        "prefilling",
        "promised",
        "reason",
        "streaming",
        "work_ns",
    )

    def __init__(self, arrived: RequestArrived, now: int) -> None:
        self.arrived, self.arrived_ns = arrived, now
        self.attempt = self.work_ns = self.compute_ns = self.expected_ns = 0
        self.prefill: NodeView | None = None
        self.decode: NodeView | None = None
        self.prefilling = self.handing_over = self.held = self.streaming = False
        self.decode_ns = -1
        self.copy: Copy | None = None
        self.promised: Sequence[BlockName] = ()
        self.reason = ""

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        """The nodes that may hold something of it, each once."""
        prefill, decode = self.prefill, self.decode
        if prefill is None or decode is None or prefill is decode:
            only = prefill or decode
            return () if only is None else (only,)
        return prefill, decode


class ClusterView:
    """Nodes in the order they joined, and accepted requests in the order they came.

    `prefills`, `decodes`: the nodes a request may prefill or decode on, and the smallest capacity (tokens) among
    them. `lender_mask`: nodes that only decode, and whose cache others can fetch from. `prefills_alike`: all
    prefill nodes are of one kind. `replicas`: copies ahead that are under
    way, by the last block of their prefix. `num_routed`: routes so far.
    """

    def __init__(self) -> None:
        self.nodes: dict[NodeId, NodeView] = {}
        self.requests: dict[RequestId, RequestView] = {}
        self.index = PrefixIndex()
        self.calibration = Calibration()
        self.recent = Recent()
        self.outputs = OutputLengths()
        self.replicas: dict[BlockName, Copy] = {}
        self.prefills: list[NodeView] = []
        self.decodes: list[NodeView] = []
        self.prefill_mask = self.lender_mask = 0
        self.prefills_alike = True
        self.has_mixed = False
        self.smallest_prefill = self.smallest_decode = 0
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
        node = NodeView(joined, slot, self._kinds.index(kind), compile_cost(facts))
        self._slots[slot] = self.nodes[joined.node] = node
        self._sort_roles()
        return node

    def leave(self, node: NodeView) -> None:
        """Forgets a node and what it held. Its requests must be unbooked by the caller."""
        del self.nodes[node.node]
        self.index.drop(node.bit)
        self._slots[node.slot] = None
        self._sort_roles()

    def _sort_roles(self) -> None:
        """Mixed nodes prefill always; prefill nodes only when something can decode."""
        nodes = self.nodes.values()
        self.decodes = [node for node in nodes if node.role is Role.DECODE]
        self.prefills = [
            node for node in nodes if node.role is Role.MIXED or (node.role is Role.PREFILL and self.decodes)
        ]
        self.prefill_mask = sum(node.bit for node in self.prefills)
        self.lender_mask = sum(node.bit for node in self.decodes if node.paths.network and node.cache_blocks)
        self.has_mixed = any(node.role is Role.MIXED for node in self.prefills)
        self.prefills_alike = len({node.kind for node in self.prefills}) == 1
        self.smallest_prefill = min((node.capacity_tokens for node in self.prefills), default=0)
        self.smallest_decode = min((node.capacity_tokens for node in self.decodes), default=0)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def node_at(self, slot: int) -> NodeView:
        node = self._slots[slot]
        assert node is not None, "the index named a node that left"
        return node

    def largest(self, *roles: Role) -> int:
        """Tokens that the largest node of these roles can hold; 0 without one."""
        return max((node.capacity_tokens for node in self.nodes.values() if node.role in roles), default=0)

    # Requests: each booking is taken back exactly.

    def book(self, request: RequestView, placement: Placement, now: int) -> None:
        """Adds a request to its nodes' queues and batches, and its blocks to what will be cached."""
        prefill, decode, facts = placement.prefill, placement.decode, request.arrived
        request.prefill, request.decode = prefill, decode
        request.prefilling = request.handing_over = True
        request.work_ns, request.compute_ns = placement.work_ns, placement.compute_ns
        request.decode_ns, request.expected_ns = -1, now + placement.ttft_ns
        if not prefill.prefills:
            prefill.service_ns = now
        prefill.prefills[facts.request] = request
        prefill.work_ns += request.work_ns
        prefill.free_ns = max(prefill.free_ns, now) + request.work_ns
        request.promised = facts.names[placement.held :]
        self.index.promise(prefill.bit, request.promised)
        decode.decodes[facts.request] = request
        decode.batch += 1
        decode.context += facts.num_tokens
        if decode is not prefill and prefill.hands_over_on_link:
            prefill.link_out.use(facts.num_tokens * prefill.cost.kv_token_bytes, now)
        self.num_routed += 1

    def first_token(self, request: RequestView, now: int) -> None:
        """The prefill is done: the node turns to its next request. Idempotent."""
        node = request.prefill
        if not request.prefilling or node is None:
            return
        if request.compute_ns:
            self.calibration.add(now - node.service_ns, request.compute_ns)
        self._leave_queue(request, node)
        node.service_ns = now
        node.free_ns = now + node.work_ns
        if request.decode is node:  # its KV need not move
            self.handed_over(request, now)

    def handed_over(self, request: RequestView, now: int) -> None:
        """All its KV is where it decodes. Idempotent."""
        if request.handing_over:
            request.handing_over = False
            request.decode_ns = now

    def unbook(self, request: RequestView, now: int) -> None:
        """Takes a request off its nodes; what it had copied so far stays where it is."""
        prefill, decode, facts = request.prefill, request.decode, request.arrived
        if prefill is not None and request.prefilling:
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
        request.prefill = request.decode = None
        request.handing_over = False

    def end_copy(self, request: RequestView) -> None:
        if request.copy is not None:
            end(request.copy)
            request.copy = None

    def _leave_queue(self, request: RequestView, node: NodeView) -> None:
        request.prefilling = False
        del node.prefills[request.arrived.request]
        node.work_ns -= request.work_ns
        self.index.unpromise(node.bit, request.promised)
        request.promised = ()

    def requests_on(self, node: NodeView) -> Iterable[RequestView]:
        """Requests that need `node` still: its prefill until its KV is handed over, its decode always."""
        for request in list(self.requests.values()):
            if request.decode is node or (request.handing_over and request.prefill is node):
                yield request

    def check(self) -> None:
        """Loads are the sums over requests."""
        self.index.check()
        for node in self.nodes.values():
            queued = [r for r in self.requests.values() if r.prefilling and r.prefill is node]
            decoding = [r for r in self.requests.values() if r.decode is node]
            assert len(queued) == len(node.prefills) and all(r.arrived.request in node.prefills for r in queued)
            assert node.work_ns == sum(request.work_ns for request in queued)
            assert node.batch == len(decoding) == len(node.decodes)
            assert node.context == sum(request.arrived.num_tokens for request in decoding)
            for copy in (*node.link_in.copies, *node.link_out.copies):
                owned = any(request.copy is copy for request in self.requests.values())
                assert owned or copy in self.replicas.values(), "a copy that nobody wants"
