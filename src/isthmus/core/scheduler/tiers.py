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
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import filterfalse, groupby, islice, repeat, takewhile
from operator import itemgetter
from typing import Any

import msgspec

from isthmus.core.types import NOBODY, BlockName, Tenant

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


# Which blocks a node keeps, and in which tier: DRAM over SSD.
#
# A block is in one tier at a time. What is used is in DRAM; what DRAM has no room for is demoted to the SSD; what
# the SSD has no room for has left the node. Chains go from their tails, so the node holds no block without all
# blocks before it, and DRAM holds none whose head is on the SSD.
#
# Knows names only: no bytes, no slots, no clock.


_name: Callable[[Entry], BlockName] = itemgetter(0)


class Change(msgspec.Struct, frozen=True):
    """What one call changed on the node."""

    start: int = 0
    """So many leading blocks of the chain were here before."""
    stored: tuple[BlockName, ...] = ()
    """New on this node, in DRAM: those of the chain from `start` on."""
    sunk: tuple[BlockName, ...] = ()
    """New on this node, on the SSD: DRAM had no room for them. They follow `stored`."""
    evicted: tuple[BlockName, ...] = ()
    """Left this node altogether."""
    demoted: tuple[BlockName, ...] = ()
    """On the SSD now and in DRAM before."""
    promoted: tuple[BlockName, ...] = ()
    """In DRAM now and on the SSD before: each is one block read there."""


class CacheTier:
    """One level: at most `capacity_blocks`, which go in the order of its `eviction`."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.eviction: RecencyEviction | SharedEviction = RecencyEviction()
        self.held: Mapping[BlockName, Any] = self.eviction.held

    def match(self, names: Sequence[BlockName], start: int = 0) -> int:
        """Up to which index the chain is here, from `start` on without a gap. Does not mutate."""
        rest = names[start:] if start else names
        return start + len(list(takewhile(self.held.__contains__, rest)))


class ReadAhead(Counter[BlockName]):
    """Blocks of the SSD that are in DRAM, or about to be, for so many loads that wait, until their tier is decided."""

    def unread(self, names: Sequence[BlockName]) -> list[BlockName]:
        """One load less waits for each. Returns, and forgets, those for which none waits any more."""
        known = [name for name in names if name in self]
        self.subtract(known)
        gone = [name for name in known if not self[name]]
        self.settle(gone)
        return gone

    def settle(self, names: Iterable[BlockName]) -> None:
        """It is decided in which tier these are."""
        for name in names:
            self.pop(name, None)


class TierCache:
    """DRAM over SSD of one node. A capacity of 0 blocks is no such tier.

    Names come as chains: each `names` below starts at the first block of a prompt.
    """

    def __init__(self, dram_blocks: int, ssd_blocks: int = 0) -> None:
        self.dram = CacheTier(dram_blocks)
        self.ssd = CacheTier(ssd_blocks)
        self._pins: dict[BlockName, int] = {}
        self._owner: Tenant | None = None  # of all that is kept, until a second tenant comes
        self._weights: dict[str, float] = {}
        self._shared: tuple[SharedEviction, ...] = ()  # of both tiers from then on

    def match(self, names: Sequence[BlockName]) -> tuple[int, int]:
        """Length of the longest prefix here, and how many blocks of it are on the SSD. Does not mutate."""
        in_dram = self.dram.match(names)
        found = self.ssd.match(names, in_dram) if self.ssd.held else in_dram
        return found, found - in_dram

    def holds(self, name: BlockName) -> bool:
        """In either tier."""
        return name in self.dram.held or name in self.ssd.held

    @property
    def num_pinned(self) -> int:
        """Distinct blocks that are pinned."""
        return len(self._pins)

    def pin(self, names: Sequence[BlockName]) -> None:
        """Keeps these blocks where they are, or in DRAM, until unpinned; counted. They need not be here yet."""
        pins = self._pins
        for at, name in enumerate(names):
            if name not in pins:  # nor is any that follows it
                pins.update(dict.fromkeys(names[at:], 1))
                return
            pins[name] += 1

    def unpin(self, names: Sequence[BlockName]) -> None:
        """Undoes one `pin` of the same names."""
        pins = self._pins
        counts = list(map(pins.__getitem__, names))
        shared = len(counts) - counts.count(1)
        deque(map(pins.pop, names[shared:]), 0)  # nobody else has pinned those at the end
        for name in names[:shared]:
            pins[name] -= 1

    def put(self, names: Sequence[BlockName], tenant: Tenant = NOBODY) -> Change:
        """Stores a finished prompt's chain: touches what is in DRAM, brings in the rest, evicts to make room.

        What DRAM cannot hold of it goes to the SSD, what neither can hold is not stored: always its tail. It is of the
        `tenant`, unless the chain's first block is another's already.
        """
        chain, dram, ssd = tuple(names), self.dram, self.ssd
        if tenant is not self._owner:
            self._turn_to(tenant, chain)
        in_dram = found = dram.match(chain)
        if ssd.held:
            found = ssd.match(chain, in_dram)
            dram.eviction.admit(ssd.eviction.remove(chain[in_dram:found]))
        dram.eviction.use(chain, found)
        surplus = len(dram.held) - dram.capacity_blocks
        if surplus <= 0:
            return Change(found, chain[found:], promoted=chain[in_dram:found])
        victims = dram.eviction.evict(surplus, self._pins, chain)
        fits = len(chain) - (surplus - len(victims))  # of the chain, in DRAM
        below = dram.eviction.remove(chain[fits:][::-1])
        if not ssd.capacity_blocks:
            return Change(found, chain[found:fits], evicted=tuple(map(_name, victims)))
        evicted, num_dropped = self._demote(victims, below)
        stays = len(chain) - num_dropped
        demoted = tuple(name for name, _ in victims if name in ssd.held)
        return Change(
            start=found,
            stored=chain[found:fits],
            sunk=chain[max(found, fits) : stays],
            evicted=evicted + chain[stays:found],
            demoted=demoted,
            promoted=chain[in_dram : min(found, fits)],
        )

    def restore(self, names: Sequence[BlockName]) -> Change:
        """Takes a chain back that was found on the SSD, as a node starts: as much of its head as finds room."""
        chain, ssd = tuple(names), self.ssd
        if NOBODY is not self._owner:
            self._turn_to(NOBODY, chain)
        found = ssd.match(chain)
        stays = found + ssd.capacity_blocks - len(ssd.held)
        ssd.eviction.use(chain[:stays], found)
        return Change(found, sunk=chain[found:stays])

    def remove(self, names: Iterable[BlockName]) -> Change:
        """Drops these blocks and all that follow them, pinned or not: without its head a block is of no use."""
        left = [name for name in names if name in self.dram.held or name in self.ssd.held]
        if not left:
            return Change()
        tails: dict[BlockName | None, list[BlockName]] = {}
        for tier in (self.dram, self.ssd):
            for name, head in tier.eviction.heads().items():
                tails.setdefault(head, []).append(name)
        lost = dict.fromkeys(left)
        while left:
            following = [name for name in tails.get(left.pop(), ()) if name not in lost]
            left += following
            lost.update(dict.fromkeys(following))
        for tier in (self.dram, self.ssd):
            tier.eviction.remove([name for name in lost if name in tier.held])
        return Change(evicted=tuple(lost))

    def sizes(self) -> dict[str, int]:
        """Blocks of each tenant in both tiers. Does not mutate."""
        if not self._shared:
            return {} if self._owner is None else {self._owner.name: len(self.dram.held) + len(self.ssd.held)}
        found: dict[str, int] = {}
        for shared in self._shared:
            for name, size in shared.sizes().items():
                found[name] = found.get(name, 0) + size
        return found

    def _turn_to(self, tenant: Tenant, chain: Chain) -> None:
        """The chain is about to be used by this tenant; with the second tenant the tiers become shared."""
        self._weights[tenant.name] = tenant.weight
        if not self._shared:
            if self._owner is None or self._owner.name == tenant.name:
                self._owner = tenant
                return
            self._share(self._owner.name)
        root = chain[:1]
        owner = next((shared.held[root[0]] for shared in self._shared if root and root[0] in shared.held), None)
        is_claimed = owner == NOBODY.name != tenant.name
        for shared in self._shared:
            shared.tenant = tenant.name if is_claimed or owner is None else owner
            if is_claimed:
                shared.claim(root[0])

    def _share(self, owner: str) -> None:
        """Until now all was this tenant's."""
        self._owner = None
        for tier in (self.dram, self.ssd):
            assert isinstance(tier.eviction, RecencyEviction)
            shared = SharedEviction(tier.eviction, owner, self._weights)
            tier.eviction, tier.held = shared, shared.held
            self._shared += (shared,)

    def check(self) -> None:
        """Capacity, conservation, closure under prefixes, and pins; walks over everything."""
        dram, ssd, pins = self.dram, self.ssd, self._pins
        assert not dram.held.keys() & ssd.held.keys(), "a block is in two tiers"
        for tier in (dram, ssd):
            assert len(tier.held) <= tier.capacity_blocks, "a tier is over its capacity"
            heads = tier.eviction.heads()
            assert heads.keys() == tier.held.keys(), "an order has lost a block"
            above = (dram.held,) if tier is dram else (dram.held, ssd.held)
            assert not {*heads.values()}.difference({None}, *above), "a block without its head"
            pinned = {heads[name] for name in pins if name in heads}
            assert not pinned.difference({None}, pins), "pins start at the first block"
        assert all(pins > 0 for pins in pins.values()), "a pin was dropped twice"

    def _demote(self, victims: list[Entry], below: list[Entry]) -> tuple[Chain, int]:
        """Hands over to the SSD DRAM's victims and, last block first, what it could not hold of a used chain.

        Returns what left the SSD to make room, and how many blocks at the chain's end found none.
        """
        eviction, used = self.ssd.eviction, tuple(map(_name, below))
        eviction.admit(victims)
        eviction.admit(below)
        surplus = len(eviction.held) - self.ssd.capacity_blocks
        if surplus <= 0:
            return (), 0
        evicted = eviction.evict(surplus, self._pins, used)
        num_dropped = surplus - len(evicted)
        eviction.remove(used[:num_dropped])
        return tuple(map(_name, evicted)), num_dropped
