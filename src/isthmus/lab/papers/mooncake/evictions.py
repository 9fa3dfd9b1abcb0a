"""Which blocks of one pool go first by the policies that Mooncake compares with least recently used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import count

from isthmus.core.types import BlockName


class RankedBlock:
    """What the ranks are made of."""

    __slots__ = ("depth", "last_store", "last_use", "reach", "uses")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        """How many blocks come before it in its chain."""
        self.uses = 0
        self.last_use = 0
        self.last_store = 0
        """When this block, or one that follows it, last came in."""
        self.reach = 0
        """Length in blocks of the longest chain that used it."""


Rank = tuple[int, ...]


def first_in(block: RankedBlock) -> Rank:
    """A block counts as old as the newest that follows it: before that it cannot go anyhow."""
    return block.last_store, -block.depth


def least_used(block: RankedBlock) -> Rank:
    return block.uses, block.last_use, -block.depth


def least_used_keep_late(block: RankedBlock) -> Rank:
    """Favours what comes late in its prompt. That is of use with all before it only, so long prompts stay."""
    return block.uses, block.reach, block.last_use, -block.depth


def least_used_keep_early(block: RankedBlock) -> Rank:
    """Favours what comes early in its prompt."""
    return block.uses, -block.depth, block.last_use


RANKS: dict[str, Callable[[RankedBlock], Rank]] = {
    "lfu": least_used,
    "fifo": first_in,
    "length_aware": least_used_keep_late,
    "length_aware_early": least_used_keep_early,
}


def ranked_hits(
    chains: Sequence[Sequence[BlockName]], capacity: int, rank: Callable[[RankedBlock], Rank]
) -> Iterator[int]:
    """Blocks found of each chain in turn in a pool of `capacity` blocks; each is looked up and then stored.

    Of what is too much the lowest rank goes first, and of a chain that alone is too long its end. A block's rank never
    falls, and is always below that of the block it follows, so that no block is held without it.
    """
    held: dict[BlockName, RankedBlock] = {}
    heap: list[tuple[Rank, int, BlockName]] = []
    """At least one entry for each block held. One out of date is too low, so it is met and put right."""
    serial = count()  # keeps comparison away from the names
    for now, names in enumerate(chains, 1):
        found = next((at for at, name in enumerate(names) if name not in held), len(names))
        yield found
        for depth in range(found, len(names)):
            held[names[depth]] = RankedBlock(depth)
        for name in names:
            block = held[name]
            block.uses += 1
            block.last_use = now
            block.reach = max(block.reach, len(names))
            if found < len(names):
                block.last_store = now
        for name in names[found:]:
            heappush(heap, (rank(held[name]), next(serial), name))
        own, passed = set(names), []
        while len(held) > capacity and heap:
            low, at, name = heap[0]
            known = held.get(name)
            if known is not None and low != (right := rank(known)):
                heapreplace(heap, (right, at, name))
            elif known is not None and name in own:
                passed.append(heappop(heap))
            else:
                heappop(heap)
                held.pop(name, None)
        for entry in passed:
            heappush(heap, entry)
        for name in names[: -max(0, len(held) - capacity) - 1 : -1]:
            del held[name]
