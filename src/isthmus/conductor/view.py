"""The conductor's picture of the cluster: nodes, their load and cached blocks; requests and their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.conductor.events import NodeJoined, RequestArrived
from isthmus.types import BlockName, NodeId, RequestId, Role


class NodeView:
    """One node. Loads are in tokens: `prefill_tokens` still to compute, `decode_tokens` of context held."""

    __slots__ = (
        "_block_size",
        "blocks",
        "capacity_tokens",
        "decode_tokens",
        "node",
        "prefill_tokens",
        "role",
    )

    def __init__(self, joined: NodeJoined) -> None:
        self.node, self.role = joined.node, joined.role
        self.capacity_tokens, self._block_size = joined.capacity_tokens, joined.block_size
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.blocks: set[BlockName] = set()

    def cached_tokens(self, names: Sequence[BlockName], num_tokens: int) -> int:
        """Tokens of the longest cached prefix; at least one token is always left to compute."""
        matched = 0
        for name in names:
            if name not in self.blocks:
                break
            matched += 1
        return min(matched, (num_tokens - 1) // self._block_size) * self._block_size


class RequestView:
    """One accepted request: its facts, the attempt under way, and the load it was booked with.

    `held`: its last attempt ended, for `reason`, and no node could take the next one yet.
    """

    __slots__ = ("arrived", "attempt", "booked_tokens", "decode", "held", "prefill", "prefilling", "reason")

    def __init__(self, arrived: RequestArrived) -> None:
        self.arrived = arrived
        self.attempt = 0
        self.prefill: NodeId | None = None
        self.decode: NodeId | None = None
        self.prefilling = False
        self.booked_tokens = 0
        self.held = False
        self.reason = ""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes that may hold something of it, each once."""
        return tuple(dict.fromkeys(node for node in (self.prefill, self.decode) if node is not None))


class ClusterView:
    """Nodes in the order they joined, and accepted requests in the order they came."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, NodeView] = {}
        self.requests: dict[RequestId, RequestView] = {}

    def with_role(self, *roles: Role) -> list[NodeView]:
        return [node for node in self.nodes.values() if node.role in roles]

    def largest(self, *roles: Role) -> int:
        """Tokens that the largest node of these roles can hold; 0 without one."""
        return max((node.capacity_tokens for node in self.with_role(*roles)), default=0)

    def book(self, request: RequestView, prefill: NodeView, decode: NodeView) -> None:
        """Adds a request's load to its nodes; `unbook` takes back exactly what was added."""
        facts = request.arrived
        request.booked_tokens = facts.num_tokens - prefill.cached_tokens(facts.names, facts.num_tokens)
        request.prefill, request.decode, request.prefilling = prefill.node, decode.node, True
        prefill.prefill_tokens += request.booked_tokens
        decode.decode_tokens += facts.num_tokens + facts.max_tokens

    def prefill_done(self, request: RequestView) -> None:
        """Takes the prefill load off. Idempotent."""
        if request.prefilling and request.prefill in self.nodes:
            self.nodes[request.prefill].prefill_tokens -= request.booked_tokens
        request.prefilling = False

    def unbook(self, request: RequestView) -> None:
        self.prefill_done(request)
        if request.decode in self.nodes:
            facts = request.arrived
            self.nodes[request.decode].decode_tokens -= facts.num_tokens + facts.max_tokens
        request.prefill = request.decode = None

    def requests_on(self, node: NodeId) -> Iterable[RequestView]:
        """Requests that need `node` still: its prefill until that is done, its decode always."""
        for request in list(self.requests.values()):
            if request.decode == node or (request.prefilling and request.prefill == node):
                yield request

    def check(self) -> None:
        """Loads are the sums over requests."""
        for node in self.nodes.values():
            prefilling = [r for r in self.requests.values() if r.prefilling and r.prefill == node.node]
            decoding = [r.arrived for r in self.requests.values() if r.decode == node.node]
            assert node.prefill_tokens == sum(request.booked_tokens for request in prefilling)
            assert node.decode_tokens == sum(facts.num_tokens + facts.max_tokens for facts in decoding)
