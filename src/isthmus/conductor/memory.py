"""The KV memory of each node as policies of lending see it: what is free, who lacks some, whose KV lies where.

All counts are blocks. A `Memory` is made for one plan and changes with it: what is to go counts as gone, and what is to
come home has its room there and is still where it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.conductor.events import Lend, Repay
from isthmus.conductor.view import NodeView, RequestView


class Resident:
    """A request that decodes at home: `num_blocks` there, and before them what `holders` have, in order. Nothing of it
    is on its way."""

    __slots__ = ("holders", "num_blocks", "request")

    def __init__(self, request: RequestView, num_blocks: int, holders: Sequence[tuple[Memory, int]]) -> None:
        self.request, self.num_blocks, self.holders = request, num_blocks, list(holders)

    @property
    def returnable(self) -> int:
        """Of what its last holder has: the whole request must fit at home in what is not elsewhere."""
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

    def may_go_to(self, holder: Memory) -> bool:
        """What lies with one holder follows each other."""
        return all(other is not holder for other, _ in self.holders[:-1])


class Memory:
    """Of one node. `free`: what nobody has, or will have when all that is on its way is there; `spare` of it is kept
    for requests that run; `wanted` by `waiting` requests that wait for memory; `batch`: requests that decode, with
    `here` blocks of theirs at home; `lent`: what holds others' KV; `owed`: of its own requests' KV, with whom and how
    much. `borrows`: whether it may: it has lacked memory for a while, and said so since the last plan for it.
    """

    __slots__ = (
        "batch", "borrows", "capacity", "free", "here", "lent", "node", "owed", "residents", "spare", "waiting",
        "wanted",
    )  # fmt: skip

    def __init__(self, node: NodeView) -> None:
        self.node = node
        self.capacity = node.capacity_tokens // node.block_size
        self.free = self.spare = self.wanted = self.waiting = self.batch = self.here = self.lent = 0
        self.borrows = True
        self.owed: dict[Memory, int] = {}
        self.residents: list[Resident] = []

    def room(self, reserve: int) -> int:
        """What it can lend: what it has beyond a reserve. Who lacks memory, or has borrowed some, lends none."""
        return 0 if self.lacking or self.owed else max(0, self.free - self.spare - reserve)

    @property
    def lacking(self) -> int:
        """Blocks that are missing for all that wait and what is to spare."""
        return max(0, self.wanted + self.spare - self.free)

    def lend(self, resident: Resident, holder: Memory, count: int) -> Lend:
        """So many of its resident's blocks go to a holder."""
        assert 0 < count <= resident.movable and count <= holder.free and resident.may_go_to(holder)
        self.residents.remove(resident)
        self.here -= count
        self.free += count
        holder.free -= count
        holder.lent += count
        self.owed[holder] = self.owed.get(holder, 0) + count
        request = resident.request
        return Lend(request.arrived.request, request.attempt, self.node.node, holder.node.node, count)

    def repay(self, resident: Resident, count: int) -> Repay:
        """So many of its resident's blocks come home from the last of its holders. Until they have, it owes them."""
        holder, there = resident.holders[-1]
        assert 0 < count <= resident.returnable <= there and count <= self.free
        self.residents.remove(resident)
        self.free -= count
        request = resident.request
        return Repay(request.arrived.request, request.attempt, self.node.node, holder.node.node, count)
