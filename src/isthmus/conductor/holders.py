"""Which nodes hold the leading blocks of a request whose KV does not all lie where it is computed (DistAttention).

A prompt that is longer than the memory of its nodes goes to those that have most room in their cluster, as much of it
as must; with nodes of role attention every prompt goes to them (Lamina, but by tokens and not by heads). A holder may
say no, since it knows better what it has: then the attempt fails and the next is placed anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    """Where the blocks go for which there is no memory at home; where there are nodes of role attention, all full
    blocks of the prompt, to each of these an equal part. None if there is no room for them now."""
    size, length = prefill.block_size, request.num_tokens + request.max_tokens
    least = max(length - at_home(prefill.capacity_tokens), length - decode.capacity_tokens)
    blocks, most = max(0, -(-least // size)), (request.num_tokens - 1) // size
    if blocks > most:
        return None  # the answer lies at home, and is too long
    others = [
        (free_tokens(node) // size, node)
        for node in view.members(decode.cluster)
        if node.lends and node not in (prefill, decode) and not node.draining
    ]
    attending = sorted([each for each in others if each[1].role is Role.ATTENTION], key=lambda each: each[0])
    found: list[tuple[NodeView, int]] = []
    for at, (room, node) in enumerate(attending):
        taken = num_blocks(found)
        count = min(room, -(-(most - taken) // (len(attending) - at)))
        if count > 0:
            found.append((node, count))
    lending = sorted([each for each in others if each[1].role is not Role.ATTENTION], key=lambda each: -each[0])
    for room, node in lending:
        count = min(room, blocks - num_blocks(found))
        if count > 0:
            found.append((node, count))
    return tuple(found) if num_blocks(found) >= blocks else None


def num_blocks(held: Sequence[tuple[NodeView, int]]) -> int:
    return sum([count for _, count in held])


def free_tokens(node: NodeView) -> int:
    """Of a node's memory what no request is known to need, or may come to need: answers count as long as they may be,
    and of prompts that go elsewhere what is filled at a time."""
    used, window = node.lent_blocks * node.block_size, node.capacity_tokens - at_home(node.capacity_tokens)
    for request in node.prefills.values():
        away = request.away_tokens
        used += request.arrived.num_tokens - away + min(away, window)
    for name, request in node.decodes.items():
        if name not in node.prefills:
            used += request.arrived.num_tokens + request.arrived.max_tokens - request.away_tokens
    return max(0, node.capacity_tokens - used)
