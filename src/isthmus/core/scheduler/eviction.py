"""Which blocks go first when a tier is full: those that were used longest ago.

A block goes before the block it follows: each use of a block is a use of all before it, and a chain is touched from its
tail to its head. So leaves go first without a search for leaves, and what is held stays closed under prefixes.

Of several tenants whoever holds most next to its weight gives blocks up, those that it used longest ago. A share is no
wall: a lone tenant fills everything, and gives back what others need as they come. All chains that begin with one block
are one tenant's, since a tenant's names are salted; so what each tenant holds is closed under prefixes, and stays so
whoever gives.

Owns that order alone: capacities and tiers are `tiers.py`'s business, pins its user's.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Mapping
from itertools import filterfalse, groupby, islice, repeat
from typing import Any

from isthmus.core.types import NOBODY, BlockName

Chain = tuple[BlockName, ...]
"""Names of a prompt's blocks, from its first block on."""

Entry = tuple[BlockName, Any]
"""A block, and what its tier's order knows of it: for the same order in another tier."""


class RecencyEviction:
    """The order in which a tier's blocks go: least recently used first. A chain is touched from its tail to its head.

    The other way round the head would be the oldest of its chain: first to go, and all behind it out of reach.
    """

    def __init__(self) -> None:
        self.held: OrderedDict[BlockName, Chain] = OrderedDict()
        """Oldest use first. Each with the chain it came with, which says what it follows."""

    def use(self, chain: Chain, num_held: int) -> None:
        """Mutates: the chain is used. Its first `num_held` blocks are held, the others come in."""
        deque(map(self.held.setdefault, chain[num_held:][::-1], repeat(chain)), 0)  # all of them new
        deque(map(self.held.move_to_end, chain[:num_held][::-1]), 0)

    def evict(self, count: int, pins: Container[BlockName], spared: Chain) -> list[Entry]:
        """Mutates: takes out up to `count` blocks, in the order of eviction; none that is pinned or `spared`.

        `spared` is what was used or admitted last.
        """
        held = self.held
        others = islice(held, len(held) - len(spared))  # what is spared is the youngest
        names = list(islice(filterfalse(pins.__contains__, others), count))
        return list(zip(names, map(held.pop, names), strict=True))

    def remove(self, names: Iterable[BlockName]) -> list[Entry]:
        """Mutates: takes out these blocks, all of them held."""
        return [(name, self.held.pop(name)) for name in names]

    def admit(self, entries: Iterable[Entry]) -> None:
        """Mutates: takes in what left another tier, in that order."""
        self.held.update(entries)

    def heads(self) -> dict[BlockName, BlockName | None]:
        """For each block held the block it follows in its chain. Does not mutate; walks over everything."""
        found: dict[BlockName, BlockName | None] = {}
        for name, chain in self.held.items():
            if name not in found:  # else a chain before it had it
                heads = zip(chain, (None, *chain), strict=False)
                found |= {block: head for block, head in heads if block in self.held}
        return found

    def trees(self) -> dict[BlockName, list[BlockName]]:
        """The blocks held by the first block of their chains, each before the block it follows. Does not mutate; walks
        over everything."""
        found: dict[BlockName, list[BlockName]] = {}
        for name, chain in self.held.items():
            found.setdefault(chain[0], []).append(name)
        return found


def surplus(sizes: Mapping[str, int], weights: Mapping[str, float], count: int) -> dict[str, int]:
    """How many of `count` blocks each tenant gives, so that those most above their share come down to one level.

    `sizes`: the blocks of each; the level is a number of blocks for each unit of weight.
    """
    order = sorted([name for name in sizes if sizes[name]], key=lambda name: -sizes[name] / weights[name])
    size, weight = 0, 0.0
    for at, name in enumerate(order):
        size, weight = size + sizes[name], weight + weights[name]
        below = sizes[order[at + 1]] / weights[order[at + 1]] if at + 1 < len(order) else 0.0
        if size - weight * below >= count:
            order = order[: at + 1]
            break
    level = max(0.0, size - count) / weight if order else 0.0
    left = {name: min(sizes[name], math.ceil(weights[name] * level)) for name in order}
    for _ in range(min(count, size) - sum([sizes[name] - left[name] for name in order])):  # lost in rounding
        left[max(order, key=lambda name: left[name] / weights[name])] -= 1
    return {name: sizes[name] - left[name] for name in order}


class SharedEviction:
    """The order in which a tier's blocks go that several tenants share; its methods are those of `RecencyEviction`.
    `first`: the order of `owner`, who had all until now. `weights`: of all tenants, common to all tiers of a node.

    `tenant`: whose chain is used or admitted next.
    """

    def __init__(self, first: RecencyEviction, owner: str, weights: Mapping[str, float]) -> None:
        self.held: dict[BlockName, str] = dict.fromkeys(first.held, owner)
        """Whose each block is."""
        self.tenant = owner
        self._weights = weights
        self._orders = {owner: first}
        self._unclaimed: dict[BlockName, list[BlockName]] | None = None  # trees of nobody's blocks

    def sizes(self) -> dict[str, int]:
        """Blocks of each tenant. Does not mutate."""
        return {name: len(order.held) for name, order in self._orders.items()}

    def claim(self, root: BlockName) -> None:
        """Mutates: all of nobody's that begins with this block is `tenant`'s: it is what a node found on its SSD."""
        if self._unclaimed is None:
            self._unclaimed = self._orders[NOBODY.name].trees() if NOBODY.name in self._orders else {}
        names = [name for name in self._unclaimed.pop(root, ()) if self.held.get(name) == NOBODY.name]
        if names:
            self._order(self.tenant).admit(self._orders[NOBODY.name].remove(names))
            self.held.update(dict.fromkeys(names, self.tenant))

    def use(self, chain: Chain, num_held: int) -> None:
        self._order(self.tenant).use(chain, num_held)
        self.held.update(dict.fromkeys(chain[num_held:], self.tenant))

    def evict(self, count: int, pins: Container[BlockName], spared: Chain) -> list[Entry]:
        """Tenants give as `surplus` says, and more where others cannot. It is fewer than `count`
        where what is `spared` is more than its tenant's share: the end of that goes."""
        own, gone = self.held[spared[0]] if spared else None, list[Entry]()
        sizes = self.sizes()
        while len(gone) < count and sizes:
            for name, num_blocks in surplus(sizes, self._weights, count - len(gone)).items():
                found = self._orders[name].evict(num_blocks, pins, spared if name == own else ())
                gone += [(block, (name, info)) for block, info in found]
                sizes[name] -= len(found)
                if len(found) < num_blocks:
                    del sizes[name]  # the rest of it is in use
                    if name == own:
                        count -= min(num_blocks - len(found), len(spared))
            sizes = {name: size for name, size in sizes.items() if size}
        for block, _ in gone:
            del self.held[block]
        return gone

    def remove(self, names: Iterable[BlockName]) -> list[Entry]:
        gone: list[Entry] = []
        for owner, blocks in groupby(names, key=self.held.__getitem__):
            gone += [(block, (owner, info)) for block, info in self._orders[owner].remove([*blocks])]
        for block, _ in gone:
            del self.held[block]
        return gone

    def admit(self, entries: Iterable[Entry]) -> None:
        for owner, found in groupby(entries, key=lambda entry: entry[1][0]):
            blocks = [(block, info) for block, (_, info) in found]
            self._order(owner).admit(blocks)
            self.held.update(dict.fromkeys([block for block, _ in blocks], owner))

    def heads(self) -> dict[BlockName, BlockName | None]:
        return {block: head for order in self._orders.values() for block, head in order.heads().items()}

    def _order(self, owner: str) -> RecencyEviction:
        if owner == NOBODY.name:
            self._unclaimed = None  # there is more of it
        return self._orders.setdefault(owner, RecencyEviction())
