"""Books of one sequence's KV on other nodes: which leading blocks lie, are planned to lie, or are on their way there.

    0            num_there      + shipment.num_blocks      num_planned
    ├──── there ─────┼──── on their way there ───┼─── planned ───┼─── stay here ───

The node writes to holders, and `Memory` gives blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from isthmus.core.attempts import Holding, Share
from isthmus.core.scheduler.pool import Blocks
from isthmus.core.types import NodeId

Holdings = tuple[Holding, ...]
Holders = tuple[NodeId, ...]
"""Nodes that share the blocks of a holding: an equal part of the heads lies with each."""


def shares(holdings: Iterable[Holding]) -> Iterator[tuple[NodeId, int, Share]]:
    """Each holder, its number of blocks, and its share."""
    first = 0
    for holding in holdings:
        for part, holder in enumerate(holding.holders):
            yield holder, holding.num_blocks, Share(first, part, len(holding.holders))
        first += holding.num_blocks


def num_blocks(holdings: Iterable[Holding]) -> int:
    return sum([holding.num_blocks for holding in holdings])


def leading(holdings: Holdings, left: int) -> Holdings:
    """The holdings of the first `left` blocks alone."""
    found = []
    for holding in holdings:
        count = min(left, holding.num_blocks)
        if count:
            found.append(Holding(holding.holders, count))
        left -= count
    return tuple(found)


def extended(holdings: Holdings, more: Holding) -> Holdings:
    """The holdings with `more` at the end, merged if the holders are the same."""
    if not holdings or holdings[-1].holders != more.holders:
        return (*holdings, more)
    return (*holdings[:-1], Holding(more.holders, holdings[-1].num_blocks + more.num_blocks))


@dataclass(slots=True)
class Shipment:
    """Blocks on their way to holders."""

    num_blocks: int
    to: dict[NodeId, None]  # holders that have not confirmed them


@dataclass(slots=True)
class Return:
    """KV on its way home from the last holder, into `blocks`."""

    blocks: Blocks
    is_here: bool = False  # all of it, while a run may still use that at the holder


@dataclass(slots=True, eq=False)
class RemoteKV:
    planned: Holdings = ()  # where its leading `num_planned` blocks are to lie
    growing: Holders = ()  # holders of blocks that fill while it decodes
    num_planned: int = field(init=False)
    there: Holdings = ()  # where its leading `num_there` blocks lie
    num_there: int = 0
    holders: dict[NodeId, None] = field(default_factory=dict)  # all ever asked: told when it is over
    waits: bool = field(init=False)  # for the room that it begins with
    asked: dict[NodeId, None] = field(default_factory=dict)  # asked for room, without a reply yet
    more: Holding | None = None  # room that was asked for beside the planned one
    ask_again_ns: int = 0  # earliest time to ask for more, after a refusal
    claimed: dict[NodeId, int | None] = field(
        default_factory=dict
    )  # blocks kept of the attempt before, None: no reply
    shipment: Shipment | None = None
    returning: Return | None = None

    def __post_init__(self) -> None:
        self.num_planned, self.waits = num_blocks(self.planned), bool(self.planned)

    @property
    def is_there(self) -> bool:
        """Whether all planned blocks lie with their holders."""
        return self.num_there == self.num_planned

    @property
    def is_under_way(self) -> bool:
        """Whether any of its KV moves, or will by itself."""
        return not self.is_there or self.returning is not None or bool(self.growing)

    def claim(self) -> list[tuple[NodeId, Share]]:
        """Whom to ask how much it keeps of the attempt before, and of which share."""
        found = [(holder, share) for holder, _, share in shares(self.planned)]
        self.claimed = {holder: None for holder, _ in found}
        self.holders = {holder: None for holder, _ in found}
        return found

    def found(self, holder: NodeId, num_blocks: int) -> int | None:
        """Notes a reply. Returns, with the last one, the number of leading blocks that all their holders have."""
        if self.claimed.get(holder, 0) is not None:
            return None
        self.claimed[holder] = num_blocks
        if None in self.claimed.values():
            return None
        count = 0
        for holding in self.planned:
            whole = min([holding.num_blocks, *[self.claimed[holder] or 0 for holder in holding.holders]])
            count += whole
            if whole < holding.num_blocks:
                break
        return count

    def ask(self, more: Holding | None = None) -> list[tuple[NodeId, int, Share]]:
        """Whom to ask for the planned room, once, or for `more`, and for how many blocks in all. Nobody, while a
        reply or a return is under way, or if a holder's blocks would not follow each other."""
        if self.asked or self.returning is not None or (more is None and not self.waits):
            return []
        holdings = self.planned if more is None else extended(self.planned, more)
        if more is not None:
            before = [holder for holding in holdings[:-1] for holder in holding.holders]
            if not set(before).isdisjoint(more.holders):
                return []
        holders = more.holders if more is not None else [holder for each in holdings for holder in each.holders]
        self.more, self.asked = more, dict.fromkeys(holders)
        self.holders |= self.asked
        return [each for each in shares(holdings) if each[0] in self.asked]

    def answered(self, holder: NodeId, granted: bool, again_ns: int) -> bool:
        """Notes a reply of one that was asked. Returns whether the attempt goes on: not without its planned room. It
        may ask for `more` again at `again_ns`."""
        del self.asked[holder]
        if not granted:
            if self.more is None:
                return False
            self.more, self.ask_again_ns = Holding(self.more.holders, 0), again_ns
        if not self.asked:
            if self.more is not None and self.more.num_blocks:
                self.planned = extended(self.planned, self.more)
                self.num_planned += self.more.num_blocks
            self.more, self.waits = None, False
        return True

    def has_some(self, holder: NodeId) -> bool:
        """Whether this holder has some of its KV, or, while more is asked for, is planned to."""
        holdings = self.there if self.more is None else self.planned
        return any(holder in holding.holders for holding in holdings)

    def next_span(self) -> tuple[Holders, int, int]:
        """Holders of the next block, the number of blocks that they have, and the first block that is not for them."""
        stop = 0
        for holding in self.planned:
            start, stop = stop, stop + holding.num_blocks
            if self.num_there < stop:
                return holding.holders, self.num_there - start, stop
        raise AssertionError("all that is to lie elsewhere does")

    def arrived(self, holder: NodeId, stop: int) -> None:
        """Notes that a holder has its first `stop` blocks."""
        shipment = self.shipment
        if shipment is not None and holder in shipment.to:
            _, first, _ = self.next_span()
            if stop >= first + shipment.num_blocks:
                del shipment.to[holder]

    def moved(self, num_blocks: int) -> None:
        """Counts a shipment as arrived."""
        self.shipment = None
        self.num_there += num_blocks
        self.there = leading(self.planned, self.num_there)

    def returned(self, num_blocks: int) -> None:
        """Counts the last remote blocks as returned."""
        assert self.is_there and self.shipment is None
        self.returning = None
        self.num_there = self.num_planned = self.num_there - num_blocks
        self.planned = self.there = leading(self.planned, self.num_there)

    def check(self) -> None:
        """Checks counts, and that nothing is shipped before there is room, or while KV comes back."""
        shipping = self.shipment.num_blocks if self.shipment is not None else 0
        assert self.num_planned == num_blocks(self.planned)
        assert self.there == leading(self.planned, self.num_there), "KV lies where it was not to lie"
        assert 0 <= self.num_there + shipping <= self.num_planned, "more is shipped than is to lie elsewhere"
        assert not self.waits or self.shipment is None, "KV is shipped where no room was granted"
        assert self.returning is None or (self.is_there and not self.asked and not self.growing)
        assert self.holders.keys() >= self.asked.keys(), "a holder would not hear that it is over"


ALL_HERE = RemoteKV()
"""Shared by sequences that never had KV elsewhere; never written to."""
