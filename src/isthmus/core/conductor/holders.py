"""Which nodes hold the leading blocks of a request whose KV does not all lie where it is computed (DistAttention).

A prompt that is longer than the memory of its nodes goes to those that have most room in their cluster, as much of it
as must; with nodes of role attention every prompt goes to them, shared by KV heads where there are enough (Lamina). A
holder may say no, since it knows better what it has: then the attempt fails and the next is placed anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.core.conductor.events import NodeJoined, RequestArrived
from isthmus.core.conductor.view import HeldBlocks, NodeView, View
from isthmus.core.types import Role


def at_home(capacity_tokens: int) -> int:
    """Tokens of a prompt that a node can have while it computes it: a part of its memory is for what is filled and
    goes elsewhere (`scheduler.memory`)."""
    return capacity_tokens * 3 // 4


def longest(nodes: Iterable[NodeJoined | NodeView]) -> int:
    """Tokens of the longest request, prompt and answer, for which nodes of one cluster have memory together; 0 where
    none is computed and answered."""
    lending = [node for node in nodes if node.lends]
    total = sum([node.capacity_tokens for node in lending if node.role is not Role.ATTENTION])
    total += _shared_tokens([node for node in lending if node.role is Role.ATTENTION])
    largest = 0
    for first in lending:
        if first.role is Role.MIXED:
            largest = max(largest, total - first.capacity_tokens + at_home(first.capacity_tokens))
        elif first.role is Role.PREFILL:
            for then in [node for node in lending if node.role is Role.DECODE]:
                here = min(at_home(first.capacity_tokens), then.capacity_tokens)
                largest = max(largest, total - first.capacity_tokens - then.capacity_tokens + here)
    return largest


def _shared_tokens(nodes: list[NodeJoined | NodeView]) -> int:
    """Tokens of one request for which these have memory: where they share heads, as many as the smallest has."""
    parts = _parts(nodes[0].kv_heads, len(nodes)) if nodes else 1
    rooms = sorted([node.capacity_tokens for node in nodes])
    return rooms[-parts] * parts if parts > 1 else sum(rooms)


def spread(
    view: View, request: RequestArrived, prefill: NodeView, decode: NodeView
) -> tuple[tuple[HeldBlocks, ...], tuple[NodeView, ...]] | None:
    """Where the blocks go for which there is no memory at home, or with nodes of role attention all full ones, and with
    whom what fills later. None if there is no room for them now."""
    size, most = prefill.block_size, (request.num_tokens - 1) // prefill.block_size
    others = [
        (free_tokens(node) // size, node)
        for node in view.members(decode.cluster)
        if node.lends and node not in (prefill, decode) and not node.draining
    ]
    attending = [each for each in others if each[1].role is Role.ATTENTION]
    found, growth = _attending(attending, most, -(-request.max_tokens // size))
    if growth:
        return tuple(found), growth
    blocks = blocks_away(request, prefill, decode)
    if blocks > most:
        return None  # the answer lies at home, and is too long
    lending = sorted([each for each in others if each[1].role is not Role.ATTENTION], key=lambda each: -each[0])
    for room, node in lending:
        count = min(room, blocks - num_blocks(found))
        if count > 0:
            found.append(HeldBlocks((node,), count))
    return (tuple(found), ()) if num_blocks(found) >= blocks else None


def blocks_away(request: RequestArrived, prefill: NodeView, decode: NodeView) -> int:
    """So many blocks cannot lie at home, if the answer does."""
    length = request.num_tokens + request.max_tokens
    least = max(length - at_home(prefill.capacity_tokens), length - decode.capacity_tokens)
    return max(0, -(-least // prefill.block_size))


def leaves_room(nodes: Sequence[NodeView], request: RequestArrived) -> bool:
    """Whether there is, in one cluster, memory for what must lie at home, if nothing else is there: without nodes of
    role attention that is the answer."""
    lending = [node for node in nodes if node.lends]
    if any(node.role is Role.ATTENTION for node in lending):
        return True
    pairs = [(node, node) for node in lending if node.role is Role.MIXED]
    decodes = [node for node in lending if node.role is Role.DECODE]
    pairs += [(node, then) for node in lending if node.role is Role.PREFILL for then in decodes]
    return any(blocks_away(request, *each) <= (request.num_tokens - 1) // each[0].block_size for each in pairs)


def _attending(
    nodes: list[tuple[int, NodeView]], most: int, answer: int
) -> tuple[list[HeldBlocks], tuple[NodeView, ...]]:
    """So many blocks with nodes of role attention, of which the room is given; and, if all could be placed, with whom
    goes what follows them, up to `answer` blocks.

    Where heads can be shared, with as many as that goes for, those with most room, of each block a part; else an equal
    part of the blocks with each, and what follows with the one that has most room, if its memory is large enough.
    """
    if not nodes:
        return [], ()
    found: list[HeldBlocks] = []
    nodes = sorted(nodes, key=lambda each: each[0])
    parts = _parts(nodes[0][1].kv_heads, len(nodes))
    last = tuple([node for _, node in nodes[-parts:]])
    if parts > 1:
        count = min(most, nodes[-parts][0] * parts)
        found = [HeldBlocks(last, count)] if count else []
    else:
        for at, (room, node) in enumerate(nodes):
            count = min(room, -(-(most - num_blocks(found)) // (len(nodes) - at)))
            if count > 0:
                found.append(HeldBlocks((node,), count))
        _, largest = nodes[-1]
        there = found[-1].num_blocks if found and found[-1].holders == last else 0
        if (there + answer) * largest.block_size > largest.capacity_tokens:
            return found, ()
    return found, last if num_blocks(found) == most else ()


def _parts(kv_heads: int, most: int) -> int:
    """The most equal parts of the heads, for so many nodes."""
    return max([parts for parts in range(1, most + 1) if kv_heads % parts == 0])


def num_blocks(found: Sequence[HeldBlocks]) -> int:
    return sum([held.num_blocks for held in found])


def free_tokens(node: NodeView) -> int:
    """Of a node's memory what no request is known to need, or may come to need: answers count as long as they may be,
    those that go elsewhere there as long as answers are in the mean; of prompts that go elsewhere what is filled at a
    time."""
    used = (node.lent_blocks + node.expected_blocks) * node.block_size
    window = node.capacity_tokens - at_home(node.capacity_tokens)
    for request in node.prefills.values():
        away = request.away_tokens
        used += request.arrived.num_tokens - away + min(away, window)
    for name, request in node.decodes.items():
        if name in node.prefills:
            continue
        length = request.arrived.num_tokens + request.arrived.max_tokens
        used += 2 * node.block_size if request.growth else length - request.away_tokens
    return max(0, node.capacity_tokens - used)
