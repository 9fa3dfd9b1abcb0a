"""The prefix index: which nodes hold a block, in which tier, and which will once queued prefills are done.

A node is a bit. One walk along a prompt's blocks answers for every node at once: the mask of nodes that still
match shrinks, and whoever falls out matched that far. Names are opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat

from isthmus.core.blocks import state_name
from isthmus.core.types import BlockName

Levels = list[tuple[int, int]]
"""(number of leading blocks, mask of the nodes that match exactly so many), fewest first."""


class PrefixIndex:
    """Masks of nodes by block name. `users`: nodes that ever had a block, or will."""

    __slots__ = ("_coming", "_disk", "_held", "users")

    def __init__(self) -> None:
        self.users = 0
        self._held: dict[BlockName, int] = {}
        self._disk: dict[BlockName, int] = {}  # of `_held`, on disk only
        self._coming: dict[BlockName, int] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._held)

    @property
    def uses_disk(self) -> bool:
        return bool(self._disk)

    def store(self, bit: int, names: Sequence[BlockName]) -> None:
        """The node has these blocks in memory."""
        self.users |= bit
        _set(self._held, bit, names)
        if self._disk:
            _clear(self._disk, bit, names)

    def demote(self, bit: int, names: Sequence[BlockName]) -> None:
        """The node has these blocks on disk, and no longer in memory."""
        self.users |= bit
        _set(self._held, bit, names)
        _set(self._disk, bit, names)

    def evict(self, bit: int, names: Sequence[BlockName]) -> Sequence[BlockName]:
        """The node has these blocks no more. Returns those that no node has any more."""
        if self._disk:
            _clear(self._disk, bit, names)
        return _clear(self._held, bit, names)

    def expect(self, bit: int, names: Sequence[BlockName]) -> None:
        """The node will have these blocks when a prefill that waits there is done."""
        self.users |= bit
        _set(self._coming, bit, names)

    def unexpect(self, bit: int, names: Sequence[BlockName]) -> None:
        _clear(self._coming, bit, names)

    def drop(self, bit: int) -> None:
        """Forgets a node."""
        self.users &= ~bit
        for masks in (self._held, self._disk, self._coming):
            _clear(masks, bit, list(masks))

    def match(self, names: Sequence[BlockName], nodes: int) -> tuple[Levels, Levels]:
        """Leading blocks that each of `nodes` (a mask) has, in any tier; and those that it has or will have."""
        has, will = nodes, nodes  # `has` is a subset of `will`
        levels: Levels = []
        expected: Levels = []
        for depth, holders in enumerate(map(self._held.get, names, repeat(0))):
            if will & holders != will:
                still = will & (holders | self._coming.get(names[depth], 0))
                if still != will:
                    expected.append((depth, will & ~still))
                    will = still
                still = has & holders
                if still != has:
                    levels.append((depth, has & ~still))
                    has = still
                if not will:
                    return levels, expected
        if has:
            levels.append((len(names), has))
        if will:
            expected.append((len(names), will))
        return levels, expected

    def match_states(self, names: Sequence[BlockName], nodes: int, count: int) -> tuple[Levels, Levels]:
        """As `match`, up to the deepest block at whose end the node has, or will have, a recurrent state of `count`
        blocks as well. Tries blocks one by one from the end of the match back to the deepest state."""
        levels, expected = self.match(names, nodes)
        memo: dict[int, BlockName] = {}

        def last_part(depth: int) -> BlockName:
            if depth not in memo:  # a node with the last part of a state has all parts
                memo[depth] = state_name(names[depth - 1], count - 1, count)
            return memo[depth]

        held, coming = self._held, self._coming
        return (
            _lowered(levels, lambda depth: held.get(last_part(depth), 0)),
            _lowered(expected, lambda depth: held.get(last_part(depth), 0) | coming.get(last_part(depth), 0)),
        )

    def num_on_disk(self, bit: int, names: Iterable[BlockName]) -> int:
        """The number of these blocks that the node has on disk only."""
        get = self._disk.get
        return sum(1 for name in names if get(name, 0) & bit)

    def check(self) -> None:
        for masks in (self._held, self._disk, self._coming):
            assert min(masks.values(), default=1) > 0, "a block without a holder is kept"
        for name, mask in self._disk.items():
            assert mask & ~self._held.get(name, 0) == 0, "a block on disk is not held"


def deepest(levels: Levels, nodes: int) -> int:
    """The most leading blocks of any node of a mask."""
    return max([depth for depth, group in levels if group & nodes], default=0)


def _set(masks: dict[BlockName, int], bit: int, names: Sequence[BlockName]) -> None:
    """Adds one bit to each mask. Looks each name up once, since that is slow among a million."""
    values = list(map(masks.setdefault, names, repeat(bit)))
    if values.count(bit) < len(values):
        masks.update([(name, mask | bit) for name, mask in zip(names, values, strict=True) if mask != bit])


def _clear(masks: dict[BlockName, int], bit: int, names: Sequence[BlockName]) -> Sequence[BlockName]:
    """Takes one bit out of each mask; returns the names whose masks are empty then."""
    values = list(map(masks.pop, names, repeat(0)))
    if values.count(bit) == len(values):  # nobody else has any of them
        return names
    masks.update([(name, mask & ~bit) for name, mask in zip(names, values, strict=True) if mask & ~bit])
    return [name for name, mask in zip(names, values, strict=True) if mask == bit]


def _lowered(levels: Levels, holders: Callable[[int], int]) -> Levels:
    """The levels with each node lowered to the deepest depth, at most its own, of which it is a holder; else to 0."""
    found: Levels = []
    waiting = 0
    for at in range(len(levels) - 1, -1, -1):
        depth, group = levels[at]
        waiting |= group
        above = levels[at - 1][0] if at else 0
        while depth > above and waiting:
            there = waiting & holders(depth)
            if there:
                found.append((depth, there))
                waiting ^= there
            depth -= 1
    if waiting:
        found.append((0, waiting))
    found.reverse()
    return found


def bits(mask: int) -> Iterator[int]:
    """Numbers of the nodes in a mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
