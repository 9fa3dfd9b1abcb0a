"""Memory that nodes lend each other: what is known of it from their reports, and when a plan is made.

A node says now and then what changed of its memory (`MemoryUsed`). With each report the policy plans for the nodes of
its cluster: blocks of requests that decode go to other nodes (`Lend`) and come home again (`Repay`). What was planned
counts as done until the home says what it came to (`HoldingsChanged`); a refusal leaves all as it was until the next
plan. Who owes whom is the sum of what requests have elsewhere. Nodes of role attention, and what lies with them, stay
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from isthmus.core.attempts import Holding, Lend, MemoryEntry, MemoryUsed, Repay
from isthmus.core.conductor.clusters import Cluster
from isthmus.core.conductor.debts import NodeMemory, Plan, Resident, isthmus
from isthmus.core.conductor.rules import Rules
from isthmus.core.conductor.view import HeldBlocks, NodeView, RequestView, View
from isthmus.core.types import RequestId, Role

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
