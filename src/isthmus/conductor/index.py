"""The prefix index: which nodes hold a block, in which tier, and which will once queued prefills are done.

A node is a bit. One walk along a prompt's blocks answers for every node at once: the mask of nodes that still
match shrinks, and whoever falls out matched that far. Names are opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from isthmus.types import BlockName

Levels = list[tuple[int, int]]
"""(number of leading blocks, mask of the nodes that match exactly so many), fewest first."""


class PrefixIndex:
    """Masks by name. `num_blocks`: distinct blocks held somewhere."""

    __slots__ = ("_coming", "_disk", "_held")

    def __init__(self) -> None:
        self._held: dict[BlockName, int] = {}
        self._disk: dict[BlockName, int] = {}  # the part of `_held` that lies on disk only
        self._coming: dict[BlockName, int] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._held)

    @property
    def uses_disk(self) -> bool:
        return bool(self._disk)

    def store(self, bit: int, names: Iterable[BlockName]) -> None:
        """The node has these blocks in memory."""
        held, get = self._held, self._held.get
        for name in names:
            held[name] = get(name, 0) | bit
        if self._disk:
            _clear(self._disk, bit, names)

    def demote(self, bit: int, names: Iterable[BlockName]) -> None:
        """The node has these blocks on disk, and no longer in memory."""
        held, disk = self._held, self._disk
        for name in names:
            held[name] = held.get(name, 0) | bit
            disk[name] = disk.get(name, 0) | bit

    def evict(self, bit: int, names: Iterable[BlockName]) -> list[BlockName]:
        """The node has these blocks no more. Returns those that no node has."""
        if self._disk:
            _clear(self._disk, bit, names)
        return _clear(self._held, bit, names)

    def promise(self, bit: int, names: Iterable[BlockName]) -> None:
        """The node will have these blocks when a prefill that waits there is done."""
        coming, get = self._coming, self._coming.get
        for name in names:
            coming[name] = get(name, 0) | bit

    def unpromise(self, bit: int, names: Iterable[BlockName]) -> None:
        _clear(self._coming, bit, names)

    def drop(self, bit: int) -> None:
        """Forgets a node."""
        for masks in (self._held, self._disk, self._coming):
            _clear(masks, bit, list(masks))

    def match(self, names: Sequence[BlockName], nodes: int) -> Levels:
        """How far each of `nodes` (a mask) has the prefix, in any tier."""
        return _walk(names, nodes, self._held.get)

    def match_expected(self, names: Sequence[BlockName], nodes: int) -> Levels:
        """How far each of `nodes` has the prefix or will have it."""
        if not self._coming:
            return self.match(names, nodes)
        held, coming = self._held.get, self._coming.get
        levels: Levels = []
        depth = 0
        for name in names:
            still = nodes & (held(name, 0) | coming(name, 0))
            if still != nodes:
                levels.append((depth, nodes & ~still))
                if not still:
                    return levels
                nodes = still
            depth += 1
        levels.append((depth, nodes))
        return levels

    def num_on_disk(self, bit: int, names: Iterable[BlockName]) -> int:
        """How many of these blocks the node has on disk only."""
        get = self._disk.get
        return sum(1 for name in names if get(name, 0) & bit)

    def check(self) -> None:
        for masks in (self._held, self._disk, self._coming):
            assert all(mask > 0 for mask in masks.values()), "a block without a holder is kept"
        for name, mask in self._disk.items():
            assert mask & ~self._held.get(name, 0) == 0, "a block on disk is not held"


def _clear(masks: dict[BlockName, int], bit: int, names: Iterable[BlockName]) -> list[BlockName]:
    """Takes one bit out of each; returns the names that have none left."""
    gone = []
    get = masks.get
    for name in names:
        mask = get(name, 0)
        if mask & bit:
            if mask == bit:
                del masks[name]
                gone.append(name)
            else:
                masks[name] = mask ^ bit
    return gone


def _walk(names: Sequence[BlockName], nodes: int, get: Callable[[BlockName, int], int]) -> Levels:
    levels: Levels = []
    depth = 0
    for name in names:
        still = nodes & get(name, 0)
        if still != nodes:
            levels.append((depth, nodes & ~still))
            if not still:
                return levels
            nodes = still
        depth += 1
    levels.append((depth, nodes))
    return levels


def bits(mask: int) -> Iterator[int]:
    """Numbers of the nodes in a mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
