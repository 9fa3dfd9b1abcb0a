"""Eviction policies that Mooncake and others compare with least recently used, for the tables alone."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from isthmus.core.scheduler.eviction import Chain, Entry, EvictionPolicy, RecencyEviction
from isthmus.core.types import BlockName


class Block:
    """What the ranks are made of."""

    __slots__ = ("chain", "depth", "last_store", "last_use", "reach", "uses")

    def __init__(self, chain: Chain, depth: int) -> None:
        self.chain = chain
        self.depth = depth
        """How many blocks come before it in its chain."""
        self.uses = 0
        self.last_use = 0
        self.last_store = 0
        """When this block, or one that follows it, last came in."""
        self.reach = 0
        """Length in blocks of the longest chain that used it."""


Rank = tuple[int, ...]


class RankEviction:
    """Lowest rank first. A block's rank never falls, and is always below that of the block it follows."""

    def __init__(self, rank: Callable[[Block], Rank]) -> None:
        self.held: dict[BlockName, Block] = {}
        self._rank = rank
        self._num_uses = 0
        # At least one entry for each block held. One out of date is too low, so it is met and put right.
        self._heap: list[tuple[Rank, int, BlockName]] = []
        self._serial = count()  # keeps comparison away from the names

    def use(self, chain: Chain, num_held: int) -> None:
        self._num_uses += 1
        held, now, length = self.held, self._num_uses, len(chain)
        for depth in range(num_held, length):
            held[chain[depth]] = Block(chain, depth)
        for name in chain:
            block = held[name]
            block.uses += 1
            block.last_use = now
            block.reach = max(block.reach, length)
            if num_held < length:
                block.last_store = now
        self._enter(chain[num_held:])

    def evict(self, count: int, pins: Container[BlockName], spared: Chain) -> list[Entry]:
        held, heap, rank_of, own = self.held, self._heap, self._rank, set(spared)
        evicted: list[Entry] = []
        passed = []
        while heap and len(evicted) < count:
            rank, serial, name = heap[0]
            block = held.get(name)
            if block is None:
                heappop(heap)
            elif rank != (now := rank_of(block)):
                heapreplace(heap, (now, serial, name))
            elif name in pins or name in own:
                passed.append(heappop(heap))
            else:
                heappop(heap)
                evicted.append((name, held.pop(name)))
        for entry in passed:
            heappush(heap, entry)
        return evicted

    def remove(self, names: Iterable[BlockName]) -> list[Entry]:
        return [(name, self.held.pop(name)) for name in names]

    def admit(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        self.held.update(entries)
        self._enter([name for name, _ in entries])

    def heads(self) -> dict[BlockName, BlockName | None]:
        return {
            name: block.chain[block.depth - 1] if block.depth else None for name, block in self.held.items()
        }

    def trees(self) -> dict[BlockName, list[BlockName]]:
        found: dict[BlockName, list[BlockName]] = {}
        for name, block in sorted(self.held.items(), key=lambda item: -item[1].depth):
            found.setdefault(block.chain[0], []).append(name)
        return found

    def _enter(self, names: Sequence[BlockName]) -> None:
        for name in names:
            heappush(self._heap, self._entry(name))
        if len(self._heap) > 2 * len(self.held) + 100:
            # Most of it stands for blocks that are gone, or stands twice.
            self._heap = [self._entry(name) for name in self.held]
            heapify(self._heap)

    def _entry(self, name: BlockName) -> tuple[Rank, int, BlockName]:
        return self._rank(self.held[name]), next(self._serial), name


def first_in(block: Block) -> Rank:
    """A block counts as old as the newest that follows it: before that it cannot go anyhow."""
    return block.last_store, -block.depth


def least_used(block: Block) -> Rank:
    return block.uses, block.last_use, -block.depth


def least_used_keep_late(block: Block) -> Rank:
    """Favours what comes late in its prompt. That is of use with all before it only, so long prompts stay."""
    return block.uses, block.reach, block.last_use, -block.depth


def least_used_keep_early(block: Block) -> Rank:
    """Favours what comes early in its prompt."""
    return block.uses, -block.depth, block.last_use


EVICTIONS: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": RecencyEviction,
    "lfu": lambda: RankEviction(least_used),
    "fifo": lambda: RankEviction(first_in),
    "length_aware": lambda: RankEviction(least_used_keep_late),
    "length_aware_early": lambda: RankEviction(least_used_keep_early),
}
