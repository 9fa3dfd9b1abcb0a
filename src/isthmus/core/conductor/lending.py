"""KV memory of other nodes: holders of long prompts' leading blocks, and loans between nodes.

The part of a prompt for which its nodes have no memory goes to the nodes of the cluster with most room (DistAttention);
with nodes of role attention every prompt goes to them, shared by KV heads where there are enough (Lamina). A holder may
refuse, since it knows its memory better: then the attempt fails and the next is placed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from isthmus.core.attempts import Holding, Lend, MemoryEntry, MemoryUsed, Repay
from isthmus.core.conductor.debts import NodeMemory, Plan, Resident, isthmus
from isthmus.core.conductor.events import NodeJoined, RequestArrived, Rules
from isthmus.core.conductor.view import Cluster, HeldBlocks, NodeView, RequestView, View
from isthmus.core.types import RequestId, Role

AnyNode = NodeJoined | NodeView


def at_home(capacity_tokens: int) -> int:
    """Prompt tokens that a node can keep while it computes the prompt; the rest of its memory is for blocks that fill
    and move to holders (`scheduler.pool`)."""
    return capacity_tokens * 3 // 4


def longest(nodes: Iterable[AnyNode]) -> int:
    """Tokens of the longest request, prompt and answer, that the nodes of one cluster hold together; 0 if they cannot
    prefill and decode."""
    lending = [node for node in nodes if node.lends]
    total = sum([node.capacity_tokens for node in lending if node.role is not Role.ATTENTION])
    total += _shared_tokens([node for node in lending if node.role is Role.ATTENTION])
    largest = 0
    for first, then in _homes(lending):
        own = first.capacity_tokens + (then.capacity_tokens if then is not first else 0)
        largest = max(largest, total - own + min(at_home(first.capacity_tokens), then.capacity_tokens))
    return largest


def _homes(nodes: Sequence[AnyNode]) -> list[tuple[AnyNode, AnyNode]]:
    """Pairs of nodes that can (prefill, decode) a request; a mixed node is both."""
    decodes = [node for node in nodes if node.role is Role.DECODE]
    pairs = [(node, node) for node in nodes if node.role is Role.MIXED]
    return pairs + [(node, then) for node in nodes if node.role is Role.PREFILL for then in decodes]


def _shared_tokens(nodes: list[AnyNode]) -> int:
    """Tokens of one request that attention nodes hold together; if they share heads, the smallest one limits."""
    parts = _parts(nodes[0].kv_heads, len(nodes)) if nodes else 1
    rooms = sorted([node.capacity_tokens for node in nodes])
    return rooms[-parts] * parts if parts > 1 else sum(rooms)


def spread(
    view: View, request: RequestArrived, prefill: NodeView, decode: NodeView
) -> tuple[tuple[HeldBlocks, ...], tuple[NodeView, ...]] | None:
    """Holders of a request's leading blocks, and of blocks that fill later: of all full blocks with nodes of role
    attention, else of those that do not fit at home. None if there is no room now."""
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
        return None  # the answer must fit at home
    lending = sorted([each for each in others if each[1].role is not Role.ATTENTION], key=lambda each: -each[0])
    for room, node in lending:
        count = min(room, blocks - num_blocks(found))
        if count > 0:
            found.append(HeldBlocks((node,), count))
    return (tuple(found), ()) if num_blocks(found) >= blocks else None


def blocks_away(request: RequestArrived, prefill: AnyNode, decode: AnyNode) -> int:
    """Blocks of the prompt that do not fit at home beside the answer."""
    length = request.num_tokens + request.max_tokens
    least = max(length - at_home(prefill.capacity_tokens), length - decode.capacity_tokens)
    return max(0, -(-least // prefill.block_size))


def leaves_room(nodes: Sequence[NodeView], request: RequestArrived) -> bool:
    """Whether nodes of one cluster, if empty, have memory for the part of a request that must lie at home: without
    nodes of role attention the answer."""
    lending = [node for node in nodes if node.lends]
    if any(node.role is Role.ATTENTION for node in lending):
        return True
    prompt = request.num_tokens - 1
    return any(blocks_away(request, *home) <= prompt // home[0].block_size for home in _homes(lending))


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
    """Equal parts that the heads can be cut into, at most one a node."""
    return max([parts for parts in range(1, most + 1) if kv_heads % parts == 0])


def num_blocks(found: Sequence[HeldBlocks]) -> int:
    return sum([held.num_blocks for held in found])


def free_tokens(node: NodeView) -> int:
    """Tokens of a node's memory that no request needs or may need: answers count with their longest length, those that
    go to holders with the mean length there; prompts that go to holders count with the blocks that fill at a time."""
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


# Loans: with each `MemoryUsed` report the policy plans for the nodes of a cluster: blocks of decoding requests move to
# other nodes (`Lend`) and come home again (`Repay`). A planned move counts as done until its home reports
# `HoldingsChanged`. Nodes of role attention, and blocks that lie with them, take no part.

Policy = Callable[[Sequence[NodeMemory], float], Plan]
POLICIES: dict[str, Policy] = {"isthmus": isthmus}
"""By name; policies that a configuration names as FILE.py:FUNCTION are added."""


@dataclass(slots=True)
class _Said:
    """The last report of a node, in blocks, with the moves planned since."""

    available: int  # all before a report
    spare: int = 0
    wanted: int = 0
    waiting: int = 0
    entries: dict[tuple[RequestId, int], MemoryEntry] = field(default_factory=dict)  # by request and attempt
    planned: bool = False  # a move since its last report
    lacked: bool = False  # memory at the report before

    @property
    def may_borrow(self) -> bool:
        """Whether memory is missing for longer than a moment, or for running requests to grow."""
        return not self.planned and (self.lacked or not self.waiting)


class Lending:
    """Plans loans by the view, and updates its lent memory."""

    def __init__(self, view: View, rules: Rules) -> None:
        self._view, self._reserve = view, rules.lending_reserve
        self._policy = None if rules.lending == "none" else POLICIES[rules.lending]
        self._nodes: dict[NodeView, _Said] = {}

    def used(self, node: NodeView, event: MemoryUsed) -> Plan:
        """Takes a node's report and returns the plan for its cluster."""
        known = self._said(node)
        known.lacked = known.wanted + known.spare > known.available
        known.available, known.spare = event.num_available, event.num_spare
        known.wanted, known.waiting = event.num_wanted, event.num_waiting
        known.planned = False
        for entry in event.entries:
            key = entry.request, entry.attempt
            if entry.num_blocks or entry.holdings:
                known.entries[key] = entry
            else:
                known.entries.pop(key, None)
        if self._policy is None:
            return []
        plan = self._policy(self._memories(node.cluster), self._reserve)
        for step in plan:
            self._begin(step)
        return plan

    def _said(self, node: NodeView) -> _Said:
        return self._nodes.setdefault(node, _Said(node.capacity_tokens // node.block_size))

    def left(self, node: NodeView) -> None:
        self._nodes.pop(node, None)

    def spread(self, request: RequestView, holdings: Sequence[Holding]) -> None:
        """Takes the new holdings of a request, after a plan or by its home alone."""
        if request.borrows is not None:
            ([node], count), before = request.borrows, sum([held.num_blocks for held in request.held])
            granted = sum([each.num_blocks for each in holdings]) > before
            if not granted and node in self._nodes:
                self._nodes[node].available += count
        nodes, held = self._view.nodes, list[HeldBlocks]()
        for each in holdings:
            if all(holder in nodes for holder in each.holders):
                held.append(HeldBlocks(tuple([nodes[holder] for holder in each.holders]), each.num_blocks))
        self._view.spread(request, tuple(held))

    def _begin(self, step: Lend | Repay) -> None:
        view, home = self._view, self._view.nodes[step.home]
        self._nodes[home].planned = True
        if isinstance(step, Repay):
            view.requests[step.request].returns = True
            self._nodes[home].available -= step.num_blocks
            return
        holder = view.nodes[step.holder]
        view.borrow(view.requests[step.request], holder, step.num_blocks)
        self._nodes[holder].available -= step.num_blocks

    def _memories(self, cluster: Cluster) -> list[NodeMemory]:
        """Memories of all nodes that may lend and do not drain; one without a report has had no request."""
        nodes = [each for each in self._view.members(cluster) if each.lends and each.role is not Role.ATTENTION]
        memories = {node: NodeMemory(node) for node in nodes}
        working = [memory for node, memory in memories.items() if not node.draining]
        for memory in working:
            self._fill(memory, self._said(memory.node), memories)
        return working

    def _fill(self, memory: NodeMemory, said: _Said, memories: dict[NodeView, NodeMemory]) -> None:
        memory.free, memory.spare = said.available, said.spare
        memory.wanted, memory.waiting = said.wanted, said.waiting
        memory.lent, memory.borrows = memory.node.lent_blocks, said.may_borrow
        for (name, attempt), entry in said.entries.items():
            memory.free += entry.num_moving
            request = self._view.requests.get(name)
            if request is None or request.attempt != attempt:
                continue
            for held in request.lent:
                for holder in held.holders:
                    if holder in memories:
                        memory.owed[memories[holder]] = memory.owed.get(memories[holder], 0) + held.room
            if not entry.decodes:
                continue
            memory.batch += 1
            memory.here += entry.num_blocks - entry.num_moving
            rests = not (request.borrows or request.returns or entry.num_moving)
            if rests and all(len(held.holders) == 1 and held.holders[0] in memories for held in request.held):
                holders = [(memories[held.holders[0]], held.num_blocks) for held in request.held]
                memory.residents.append(Resident(request, entry.num_blocks, holders))
