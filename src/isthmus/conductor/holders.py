"""Which nodes hold the leading blocks of a request whose KV does not all lie where it is computed (DistAttention).

A prompt that is longer than the memory of its nodes goes to those that have most room in their cluster, as much of it
as must. A holder may say no, since it knows better what it has: then the attempt fails and the next is placed anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.conductor.events import NodeJoined, RequestArrived
from isthmus.conductor.view import NodeView, View
from isthmus.types import Role

Held = tuple[tuple[NodeView, int], ...]
"""Holders in the order of the request's tokens, with so many blocks each."""


def at_home(capacity_tokens: int) -> int:
    """Tokens of a prompt that a node can have while it computes it: a part of its memory is for what is filled and
    goes elsewhere (`scheduler.memory`)."""
    return capacity_tokens * 3 // 4


def longest(nodes: Iterable[NodeJoined | NodeView]) -> int:
    """Tokens of the longest request, prompt and answer, for which nodes of one cluster have memory together; 0 where
    none is computed and answered."""
    lending = [node for node in nodes if node.lends]
    total, largest = sum([node.capacity_tokens for node in lending]), 0
    for first in lending:
        if first.role is Role.MIXED:
            largest = max(largest, total - first.capacity_tokens + at_home(first.capacity_tokens))
        elif first.role is Role.PREFILL:
            for then in [node for node in lending if node.role is Role.DECODE]:
                here = min(at_home(first.capacity_tokens), then.capacity_tokens)
                largest = max(largest, total - first.capacity_tokens - then.capacity_tokens + here)
    return largest


def spread(view: View, request: RequestArrived, prefill: NodeView, decode: NodeView) -> Held | None:
    """Where the blocks go for which there is no memory at home; None if there is no room for them now."""
    size, length = prefill.block_size, request.num_tokens + request.max_tokens
    least = max(length - at_home(prefill.capacity_tokens), length - decode.capacity_tokens)
    blocks = -(-least // size)
    if blocks > (request.num_tokens - 1) // size:
        return None  # the answer lies at home, and is too long
    others = [
        (free_tokens(node) // size, node)
        for node in view.nodes.values()
        if node.cluster is decode.cluster and node.lends and node not in (prefill, decode) and not node.draining
    ]
    others.sort(key=lambda each: -each[0])
    found: list[tuple[NodeView, int]] = []
    for room, node in others:
        count = min(room, blocks)
        if count > 0:
            found.append((node, count))
            blocks -= count
    return tuple(found) if blocks <= 0 else None


def free_tokens(node: NodeView) -> int:
    """Of a node's memory what no request is known to need; prompts that wait there count."""
    own = [request for request in node.prefills.values() if request.arrived.request not in node.decodes]
    placed = [*own, *node.decodes.values()]
    used = sum([request.arrived.num_tokens - request.away_tokens for request in placed])
    return max(0, node.capacity_tokens - used - node.lent_blocks * node.block_size)
