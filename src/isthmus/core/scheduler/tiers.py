"""The cached blocks of a node in two tiers, DRAM over SSD, and their eviction. Knows names only: no bytes, no clock.

A block is in one tier at a time: used ones in DRAM, those for which DRAM has no room on the SSD. The least recently
used block goes first. A use of a block is a use of all before it, and a chain is touched from its tail to its head;
so leaves go first, the node holds no block without all before it, and DRAM none whose head is on the SSD.

Of several tenants the one that holds most next to its weight gives blocks up. A lone tenant fills everything, and gives
back as others come. Chains that begin with one block are one tenant's, since names are salted, so each tenant's blocks
are closed under prefixes.
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
"""A block, and its record in the order of a tier, which another tier's order takes over."""


class RecencyEviction:
    """A tier's blocks in the order of eviction, least recently used first."""

    def __init__(self) -> None:
        self.held: OrderedDict[BlockName, Chain] = OrderedDict()
        """Each block, oldest use first, with the chain in which it came."""

    def use(self, chain: Chain, num_held: int) -> None:
        """Mutates: touches a chain. Its first `num_held` blocks are held, the others come in."""
        deque(map(self.held.setdefault, chain[num_held:][::-1], repeat(chain)), 0)  # all of them new
        deque(map(self.held.move_to_end, chain[:num_held][::-1]), 0)

    def evict(self, count: int, pins: Container[BlockName], spared: Chain) -> list[Entry]:
        """Mutates: takes out up to `count` blocks in the order of eviction, none of `pins` or of `spared`, which were
        used or admitted last."""
        held = self.held
        others = islice(held, len(held) - len(spared))
        names = list(islice(filterfalse(pins.__contains__, others), count))
        return list(zip(names, map(held.pop, names), strict=True))

    def remove(self, names: Iterable[BlockName]) -> list[Entry]:
        """Mutates: takes these held blocks out."""
        return [(name, self.held.pop(name)) for name in names]

    def admit(self, entries: Iterable[Entry]) -> None:
        """Mutates: takes in blocks that left another tier, in that order."""
        self.held.update(entries)

    def chain_of(self, name: BlockName) -> Chain:
        """The chain that a held block came with."""
        return self.held[name]

    def heads(self) -> dict[BlockName, BlockName | None]:
        """For each held block the one it follows in its chain. Does not mutate; walks over everything."""
        found: dict[BlockName, BlockName | None] = {}
        for name, chain in self.held.items():
            if name not in found:  # not in a chain before
                heads = zip(chain, (None, *chain), strict=False)
                found |= {block: head for block, head in heads if block in self.held}
        return found

    def entries(self) -> list[Entry]:
        """All blocks with their records, in the order of eviction. Does not mutate."""
        return list(self.held.items())

    def trees(self) -> dict[BlockName, list[BlockName]]:
        """Held blocks by the first block of their chains, each before the one it follows. Does not mutate; walks over
        everything."""
        found: dict[BlockName, list[BlockName]] = {}
        for name, chain in self.held.items():
            found.setdefault(chain[0], []).append(name)
        return found


def chains_of(entries: Iterable[Entry]) -> list[Chain]:
    """Returns the chains of an order's entries that are no beginning of another, least recently used first."""
    found: list[Chain] = []
    seen: set[BlockName] = set()
    for name, chain in entries:
        if name not in seen:  # the last block of a chain goes first
            found.append(chain[: chain.index(name) + 1])
            seen.update(found[-1])
    return found


def surplus(sizes: Mapping[str, int], weights: Mapping[str, float], count: int) -> dict[str, int]:
    """Number of blocks that each tenant gives of `count`, so that those most above their share come down to one level
    of blocks per weight. `sizes`: blocks of each tenant."""
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
    """A tier's order of eviction for several tenants, with the methods of `RecencyEviction`.
    `first`: the order of `owner`, who had all until now. `weights`: of all tenants, common to all tiers of a node.

    `tenant`: whose chain is used or admitted next.
    """

    def __init__(self, first: RecencyEviction, owner: str, weights: Mapping[str, float]) -> None:
        self.held: dict[BlockName, str] = dict.fromkeys(first.held, owner)
        """The tenant of each block."""
        self.tenant = owner
        self._weights = weights
        self._orders = {owner: first}
        self._unclaimed: dict[BlockName, list[BlockName]] | None = None  # trees of nobody's blocks

    def sizes(self) -> dict[str, int]:
        """Blocks of each tenant. Does not mutate."""
        return {name: len(order.held) for name, order in self._orders.items()}

    def claim(self, root: BlockName) -> None:
        """Mutates: gives `tenant` all blocks of NOBODY that begin with this one: they were found on the SSD."""
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
        """As of `RecencyEviction`, from tenants as `surplus` says, and from others where they cannot give. Fewer than
        `count` where `spared` exceeds its tenant's share: its end is to go."""
        own, gone = self.held[spared[0]] if spared else None, list[Entry]()
        sizes = self.sizes()
        while len(gone) < count and sizes:
            for name, num_blocks in surplus(sizes, self._weights, count - len(gone)).items():
                found = self._orders[name].evict(num_blocks, pins, spared if name == own else ())
                gone += [(block, (name, info)) for block, info in found]
                sizes[name] -= len(found)
                if len(found) < num_blocks:
                    del sizes[name]  # the rest is in use
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

    def chain_of(self, name: BlockName) -> Chain:
        return self._orders[self.held[name]].chain_of(name)

    def entries(self) -> list[Entry]:
        """As of `RecencyEviction`, one tenant's after another's."""
        return [entry for order in self._orders.values() for entry in order.entries()]

    def heads(self) -> dict[BlockName, BlockName | None]:
        return {block: head for order in self._orders.values() for block, head in order.heads().items()}

    def _order(self, owner: str) -> RecencyEviction:
        if owner == NOBODY.name:
            self._unclaimed = None  # there is more of it
        return self._orders.setdefault(owner, RecencyEviction())


_name: Callable[[Entry], BlockName] = itemgetter(0)


class Change(msgspec.Struct, frozen=True):
    """What one call changed on the node."""

    start: int = 0  # leading blocks of the chain that were here before
    stored: tuple[BlockName, ...] = ()  # new in DRAM: those of the chain from `start` on
    sunk: tuple[BlockName, ...] = ()  # new on the SSD, since DRAM had no room; they follow `stored`
    evicted: tuple[BlockName, ...] = ()  # left this node
    demoted: tuple[BlockName, ...] = ()  # moved from DRAM to the SSD
    promoted: tuple[BlockName, ...] = ()  # moved from the SSD, where each is read, to DRAM


class CacheTier:
    """One tier of at most `capacity_blocks`."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.eviction: RecencyEviction | SharedEviction = RecencyEviction()
        self.held: Mapping[BlockName, Any] = self.eviction.held

    def match(self, names: Sequence[BlockName], start: int = 0) -> int:
        """Index up to which the chain is here, from `start` on without a gap. Does not mutate."""
        rest = names[start:] if start else names
        return start + len(list(takewhile(self.held.__contains__, rest)))


class ReadAhead(Counter[BlockName]):
    """Blocks read ahead from the SSD to DRAM, with the number of loads that wait for each, until their tier is
    decided."""

    def unread(self, names: Sequence[BlockName]) -> list[BlockName]:
        """Counts one load less for each. Returns, and forgets, blocks for which no load waits."""
        known = [name for name in names if name in self]
        self.subtract(known)
        gone = [name for name in known if not self[name]]
        self.settle(gone)
        return gone

    def settle(self, names: Iterable[BlockName]) -> None:
        """Forgets blocks whose tier is decided."""
        for name in names:
            self.pop(name, None)


class TierCache:
    """The tiers of one node; one of 0 blocks is absent. Each `names` below starts at the first block of a prompt."""

    def __init__(self, dram_blocks: int, ssd_blocks: int = 0) -> None:
        self.dram = CacheTier(dram_blocks)
        self.ssd = CacheTier(ssd_blocks)
        self._pins: dict[BlockName, int] = {}
        self._owner: Tenant | None = None  # the lone tenant, until a second one comes
        self._weights: dict[str, float] = {}
        self._shared: tuple[SharedEviction, ...] = ()  # orders of both tiers, from a second tenant on

    def match(self, names: Sequence[BlockName]) -> tuple[int, int]:
        """Length of the longest prefix here, and how many blocks of it are on the SSD. Does not mutate."""
        in_dram = self.dram.match(names)
        found = self.ssd.match(names, in_dram) if self.ssd.held else in_dram
        return found, found - in_dram

    def is_chain(self, names: Chain) -> bool:
        """Whether these blocks, all of them here, begin a chain in its order. Does not mutate."""
        tier = self.dram if names[-1] in self.dram.held else self.ssd
        return tier.eviction.chain_of(names[-1])[: len(names)] == names

    def holds(self, name: BlockName) -> bool:
        """Whether a block is in either tier."""
        return name in self.dram.held or name in self.ssd.held

    @property
    def num_pinned(self) -> int:
        """Number of distinct pinned blocks."""
        return len(self._pins)

    def pin(self, names: Sequence[BlockName]) -> None:
        """Keeps blocks, which need not be here yet, from eviction until unpinned as often."""
        pins = self._pins
        for at, name in enumerate(names):
            if name not in pins:  # nor are those that follow
                pins.update(dict.fromkeys(names[at:], 1))
                return
            pins[name] += 1

    def unpin(self, names: Sequence[BlockName]) -> None:
        """Undoes one `pin` of the same names."""
        pins = self._pins
        counts = list(map(pins.__getitem__, names))
        shared = len(counts) - counts.count(1)
        deque(map(pins.pop, names[shared:]), 0)  # pinned once: those at the end
        for name in names[:shared]:
            pins[name] -= 1

    def put(self, names: Sequence[BlockName], tenant: Tenant = NOBODY) -> Change:
        """Stores a computed prompt's chain in DRAM, and evicts to make room. Its tail goes to the SSD, or is not
        stored, where there is no room. It is the `tenant`'s, unless its first block is another's already."""
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
        """Takes in the head of a chain that was found on the SSD as the node started, as far as it has room."""
        chain, ssd = tuple(names), self.ssd
        if NOBODY is not self._owner:
            self._turn_to(NOBODY, chain)
        found = ssd.match(chain)
        stays = found + ssd.capacity_blocks - len(ssd.held)
        ssd.eviction.use(chain[:stays], found)
        return Change(found, sunk=chain[found:stays])

    def remove(self, names: Iterable[BlockName]) -> Change:
        """Drops blocks and all that follow them, pinned or not, since a block without its head is of no use."""
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
        """Prepares the orders for a chain that this tenant uses; the second tenant makes the tiers shared."""
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
        """Shares the tiers, all of whose blocks are this tenant's until now."""
        self._owner = None
        for tier in (self.dram, self.ssd):
            assert isinstance(tier.eviction, RecencyEviction)
            shared = SharedEviction(tier.eviction, owner, self._weights)
            tier.eviction, tier.held = shared, shared.held
            self._shared += (shared,)

    def check(self) -> None:
        """Checks capacity, conservation, closure under prefixes, and pins; walks over everything."""
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
        """Moves DRAM's victims to the SSD, and `below`, last block first, the tail of a used chain. Returns blocks that
        left the SSD, and the number of blocks at the chain's end that found no room."""
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
