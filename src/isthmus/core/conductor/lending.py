"""Which nodes hold the leading blocks of a request whose KV does not all lie where it is computed (DistAttention).

A prompt that is longer than the memory of its nodes goes to those that have most room in their cluster, as much of it
as must; with nodes of role attention every prompt goes to them, shared by KV heads where there are enough (Lamina). A
holder may say no, since it knows better what it has: then the attempt fails and the next is placed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from isthmus.core.attempts import Holding, Lend, MemoryEntry, MemoryUsed, Repay
from isthmus.core.conductor.debts import NodeMemory, Plan, Resident, isthmus
from isthmus.core.conductor.events import NodeJoined, RequestArrived, Rules
from isthmus.core.conductor.view import Cluster, HeldBlocks, NodeView, RequestView, View
from isthmus.core.types import RequestId, Role


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


# Memory that nodes lend each other: what is known of it from their reports, and when a plan is made.
#
# A node says now and then what changed of its memory (`MemoryUsed`). With each report the policy plans for the nodes of
# its cluster: blocks of requests that decode go to other nodes (`Lend`) and come home again (`Repay`). What was planned
# counts as done until the home says what it came to (`HoldingsChanged`); a refusal leaves all as it was until the next
# plan. Who owes whom is the sum of what requests have elsewhere. Nodes of role attention, and what lies with them, stay
# as they are.


Policy = Callable[[Sequence[NodeMemory], float], Plan]
POLICIES: dict[str, Policy] = {"isthmus": isthmus}
"""By name, and those of the user's own that a configuration names."""


@dataclass(slots=True)
class _Said:
    """What a node said last, in blocks, and what was planned since."""

    available: int  # all, until it says otherwise
    spare: int = 0
    wanted: int = 0
    waiting: int = 0
    entries: dict[tuple[RequestId, int], MemoryEntry] = field(default_factory=dict)  # by request and attempt
    planned: bool = False  # something for it, since its last report
    lacked: bool = False  # it had too little memory at the report before

    @property
    def may_borrow(self) -> bool:
        """What is missing for a moment comes back by itself, but for what requests need to grow."""
        return not self.planned and (self.lacked or not self.waiting)


class Lending:
    """Plans by the view, and changes what it says of lent memory."""

    def __init__(self, view: View, rules: Rules) -> None:
        self._view, self._reserve = view, rules.lending_reserve
        self._policy = None if rules.lending == "none" else POLICIES[rules.lending]
        self._nodes: dict[NodeView, _Said] = {}

    def used(self, node: NodeView, event: MemoryUsed) -> Plan:
        """What a node said, and what follows for its cluster."""
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
        """What became of a plan for it, or of what its home did by itself."""
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
        """Of all nodes that may lend; who has said nothing yet has had no request."""
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
