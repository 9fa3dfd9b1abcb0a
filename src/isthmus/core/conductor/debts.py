"""Debts between nodes' KV memories, and the `isthmus` rule of lending.

Every rule begins with `repayments` and moves blocks of a debtor's longest request; the two of Infinite-LLM are plug-ins
(`isthmus.lab.papers.infinite_llm.lending`). No node lends and borrows at the same time, so debts make no chains. Debts
are the sums of blocks that requests have elsewhere, and are stored nowhere else.

All counts are blocks. A `NodeMemory` is made for one plan and updated by it: blocks to lend count as gone; blocks to
return have their room at home and are still with the holder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.core.attempts import Lend, Repay
from isthmus.core.conductor.view import NodeView, RequestView
from isthmus.core.cost import Part, Path, slowest

Plan = list[Lend | Repay]

_PS = 1e12


@dataclass(eq=False, slots=True)
class Resident:
    """A request that decodes at home, with `num_blocks` there behind those of its `holders`, in order. No block of it
    is on its way."""

    request: RequestView
    num_blocks: int
    holders: Sequence[tuple[NodeMemory, int]] = ()

    @property
    def returnable(self) -> int:
        """Blocks of its last holder that can come home: the rest of the request must fit there to its end."""
        facts, home = self.request.arrived, self.request.decode
        if not self.holders or home is None:
            return 0
        whole = -(-(facts.num_tokens + facts.max_tokens) // home.block_size)
        away = sum([count for _, count in self.holders])
        least = whole - home.capacity_tokens // home.block_size
        return max(0, min(self.holders[-1][1], away - least))

    @property
    def movable(self) -> int:
        """All but the block that is being filled."""
        return max(0, self.num_blocks - 1)

    def may_go_to(self, holder: NodeMemory) -> bool:
        """Whether blocks may be added at a holder: those with one holder must be consecutive."""
        return all(other is not holder for other, _ in self.holders[:-1])


@dataclass(eq=False, slots=True)
class NodeMemory:
    """The KV memory of one node."""

    node: NodeView
    free: int = 0  # after all moves under way
    spare: int = 0  # of `free`, kept for running requests
    wanted: int = 0  # by waiting requests
    waiting: int = 0  # requests that wait for memory
    batch: int = 0  # requests that decode
    here: int = 0  # blocks of these at home
    lent: int = 0  # blocks of others' KV
    borrows: bool = (
        True  # may borrow: it has lacked memory for a while, and reported since the last plan for it
    )
    owed: dict[NodeMemory, int] = field(default_factory=dict)  # blocks of its own requests, by holder
    residents: list[Resident] = field(default_factory=list)

    def reserve(self, share: float) -> int:
        """Blocks kept for its own requests to grow."""
        return int(self.node.capacity_tokens // self.node.block_size * share)

    def room(self, reserve: float) -> int:
        """Blocks that it can lend beyond its reserve; none if it lacks memory or has borrowed."""
        return 0 if self.lacking or self.owed else max(0, self.free - self.spare - self.reserve(reserve))

    @property
    def lacking(self) -> int:
        """Blocks missing for waiting and running requests."""
        return max(0, self.wanted + self.spare - self.free)

    @property
    def may_borrow(self) -> bool:
        return bool(self.lacking and self.borrows and not self.lent and self.residents)

    @property
    def longest(self) -> Resident:
        return max(self.residents, key=lambda resident: resident.num_blocks)

    @property
    def needs(self) -> int:
        """Mean blocks of a waiting request."""
        return max(1, -(-self.wanted // max(1, self.waiting)))

    def creditors(self, memories: Sequence[NodeMemory], reserve: float) -> list[tuple[NodeMemory, int]]:
        """Nodes that can lend for its longest request, with their room."""
        resident = self.longest
        others = [each for each in memories if each is not self and resident.may_go_to(each)]
        return [(each, room) for each in others if (room := each.room(reserve))]

    def lend(self, holder: NodeMemory, count: int) -> Lend:
        """Moves `count` blocks of its longest request to a holder."""
        resident = self.longest
        assert 0 < count <= resident.movable and count <= holder.free and resident.may_go_to(holder)
        self.residents.remove(resident)
        self.here, self.free = self.here - count, self.free + count
        holder.free, holder.lent = holder.free - count, holder.lent + count
        self.owed[holder] = self.owed.get(holder, 0) + count
        request = resident.request
        return Lend(request.arrived.request, request.attempt, self.node.node, holder.node.node, count)

    def repay(self, resident: Resident, count: int) -> Repay:
        """Brings `count` blocks of a resident home from its last holder; owed until they arrive."""
        holder, there = resident.holders[-1]
        assert 0 < count <= resident.returnable <= there and count <= self.free
        self.residents.remove(resident)
        self.free -= count
        request = resident.request
        return Repay(request.arrived.request, request.attempt, self.node.node, holder.node.node, count)


def repayments(memories: Sequence[NodeMemory], reserve: float) -> Plan:
    """Returns blocks that a creditor needs itself, if the debtor has room, and blocks that a debtor has room for again:
    a whole holding, or at least the debtor's reserve, so that few blocks are not sent to and fro."""
    plan: Plan = []
    for creditor in memories:
        if creditor.lacking and creditor.lent:
            plan += _called_in(creditor, memories)
    for debtor in memories:
        if not debtor.owed or debtor.lacking:
            continue
        least = debtor.spare + debtor.reserve(reserve)
        for resident in [each for each in debtor.residents if each.returnable]:
            count = min(resident.returnable, debtor.free - least)
            if count >= min(resident.returnable, max(1, least)):
                plan.append(debtor.repay(resident, count))
    return plan


def _called_in(creditor: NodeMemory, memories: Sequence[NodeMemory]) -> Plan:
    plan: Plan = []
    missing = creditor.lacking
    for debtor in memories:
        for resident in list(debtor.residents) if creditor in debtor.owed else ():
            if resident.holders and resident.holders[-1][0] is creditor and not debtor.lacking:
                count = min(missing, resident.returnable, debtor.free - debtor.spare)
                if count > 0:
                    plan.append(debtor.repay(resident, count))
                    missing -= count
    return plan


def isthmus(memories: Sequence[NodeMemory], reserve: float) -> Plan:
    """Lends each debtor the blocks it lacks, from the creditor with the highest gain in tokens per second, if above 0.

    The gain counts the iteration time by batch and context, the round trip to holders in each layer, attention at home
    and at holders at the same time, and guests' attention once in each iteration of *their* home. Without waiting
    requests, blocks move before a running request is pre-empted and computed anew.
    """
    plan = repayments(memories, reserve)
    for debtor in memories:
        options = []
        for creditor, room in debtor.creditors(memories, reserve) if debtor.may_borrow else ():
            count = min(debtor.lacking, room, debtor.longest.movable)
            if count > 0:
                options.append((_gained(debtor, creditor, count), creditor, count))
        most = max(options, key=lambda each: each[0], default=None)
        if most is not None and most[0] > 0:
            plan.append(debtor.lend(*most[1:]))
    return plan


def _gained(debtor: NodeMemory, creditor: NodeMemory, count: int) -> float:
    """Tokens per second of both nodes with `count` blocks at the creditor, waiting requests admitted in proportion.
    Without waiting requests, the difference to now: a pre-emption would cost about as much as the debtor's whole
    rate."""
    admitted = min(debtor.waiting, count / debtor.needs) if debtor.waiting else 0
    owed = {**debtor.owed, creditor: debtor.owed.get(creditor, 0) + count}
    here = debtor.here - count + round(admitted * debtor.needs)
    home_s, alone_s = _home_s(debtor, debtor.batch + round(admitted), here, owed), _iteration_s(creditor)
    there_s = alone_s + _attends_s(creditor, count) * alone_s / home_s
    after = (debtor.batch + admitted) / home_s + creditor.batch / there_s
    if not debtor.waiting:
        return after
    return after - (debtor.batch / _iteration_s(debtor) + creditor.batch / alone_s)


def _iteration_s(memory: NodeMemory) -> float:
    return _home_s(memory, memory.batch, memory.here, memory.owed) + _attends_s(memory, memory.lent)


def _attends_s(holder: NodeMemory, num_blocks: int) -> float:
    """A holder's time for others' blocks, in each of their iterations."""
    return holder.node.cost.attend_ps(1, num_blocks * holder.node.block_size) / _PS


def _home_s(home: NodeMemory, batch: int, here: int, owed: dict[NodeMemory, int]) -> float:
    """Time of an iteration, with attention at home and at holders at the same time."""
    cost, size = home.node.cost, home.node.block_size
    fixed, slope = cost.decode_step_ps(max(1, batch))
    attends = slope * here * size
    if owed:
        parts = [
            Part(_path(home, each), cost.queries.num_bytes(1), each.node.cost.attend_ps(1, blocks * size))
            for each, blocks in owed.items()
        ]
        attends = max(attends, slowest(parts, cost.queries.layers, _link(home)).whole)
    return (fixed + attends) / _PS


def _path(home: NodeMemory, holder: NodeMemory) -> Path:
    rtt_ns = max(home.node.paths.rtt_ns, holder.node.paths.rtt_ns)
    return Path(1000 * rtt_ns, min(_link(home), _link(holder)))


def _link(memory: NodeMemory) -> float:
    """Bytes per second; a stand-in where that is not known."""
    return memory.node.paths.network or memory.node.paths.handover or 1 << 40
