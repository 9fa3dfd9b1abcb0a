"""Decides for a server known by its HTTP API alone, which plans its batches and keeps its KV by itself: the blocks that
its prefix cache is believed to hold, from the prompts sent to it.

The belief is an LRU of blocks like the server's own, of a capacity that is corrected by what answers say of cached
tokens: a prompt found cached less than believed shrinks it, one found cached more grows it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal

from isthmus.core.attempts import BlocksEvicted, BlocksStored
from isthmus.core.scheduler import Chain, Entry, TierCache
from isthmus.core.types import NOBODY, BlockName, NodeId, Tenant

GUESSED_BLOCKS = 1 << 14
"""Capacity of a server that does not tell it."""
LEAST_BLOCKS = 64
STEP = 1 / 16
"""Share of the capacity by which one answer corrects it."""
DOUBT = 0.25
"""Least difference between the cached shares of a prompt, told and believed, that corrects the capacity: prompts are
counted in bytes here and in tokens there."""

MOST_ENDS = 1 << 14
"""Answers that are remembered to have followed a prompt."""

Reports = list[BlocksStored | BlocksEvicted]


class PlainServer:
    """The belief about one server's prefix cache. `num_blocks`: its capacity; 0 if the server does not tell it."""

    def __init__(self, node: NodeId, num_blocks: int) -> None:
        self.node = node
        self._most_blocks = num_blocks or GUESSED_BLOCKS * 4
        self.capacity_from: Literal["told", "guessed", "learnt"] = "told" if num_blocks else "guessed"
        self._tiers = TierCache(num_blocks or GUESSED_BLOCKS)

    @property
    def capacity_blocks(self) -> int:
        """Blocks that the cache is believed to hold at most."""
        return self._tiers.dram.capacity_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks that the cache is believed to hold now."""
        return len(self._tiers.dram.held)

    def match(self, names: Sequence[BlockName]) -> int:
        """Returns the number of leading blocks believed to be cached."""
        return self._tiers.match(names)[0]

    def computed(self, names: Sequence[BlockName], tenant: Tenant = NOBODY) -> Reports:
        """Takes a prompt that the server has computed. Returns what changed of the belief, for the conductor."""
        change = self._tiers.put(names, tenant) if names else None
        reports: Reports = []
        if change is not None and change.evicted:
            reports.append(BlocksEvicted(self.node, change.evicted))
        if change is not None and change.stored:
            reports.append(BlocksStored(self.node, change.stored))
        return reports

    def forget(self) -> Reports:
        """Forgets all blocks. Returns what changed."""
        gone = tuple(self._tiers.dram.held)
        self._tiers = TierCache(self.capacity_blocks)
        return [BlocksEvicted(self.node, gone)] if gone else []

    def entries(self) -> list[Entry]:
        """Returns what is believed to be cached: `restore` of its `chains_of` makes the belief anew, but for tenants'
        shares. Does not mutate."""
        return self._tiers.dram.eviction.entries()

    def restore(self, capacity_blocks: int, chains: Iterable[Chain]) -> Reports:
        """Takes up what an earlier belief knew: its capacity, and its chains. Returns what changed."""
        self._correct(capacity_blocks)
        return [report for chain in chains for report in self.computed(chain)]

    def told(self, believed: float, cached: float, doubt: float = 0.0) -> None:
        """Corrects the capacity by one answer. Shares of its prompt: `believed` to be cached when it was sent, `cached`
        as the server says, and `doubt`, which the server does not cache though it has computed it before."""
        if cached < believed - max(DOUBT, doubt):
            self._correct(round(self.capacity_blocks * (1 - STEP)))
        elif cached > believed + DOUBT:
            self._correct(round(self.capacity_blocks * (1 + STEP)))

    def _correct(self, capacity_blocks: int) -> None:
        """Takes another capacity, within its limits. One that differs was learnt, now or in an earlier run."""
        corrected = min(self._most_blocks, max(LEAST_BLOCKS, capacity_blocks))
        if corrected != self.capacity_blocks:
            self._tiers.dram.capacity_blocks, self.capacity_from = corrected, "learnt"

    def check(self) -> None:
        """Checks the belief's order and conservation; walks over everything."""
        self._tiers.check()


class Answers:
    """How much was generated behind which prompts, and where: a server has that cached as well, and a conversation goes
    on with it. Its text is not known before."""

    def __init__(self) -> None:
        self._ends: OrderedDict[BlockName, dict[NodeId, int]] = OrderedDict()

    def ended(self, node: NodeId, names: Sequence[BlockName], num_blocks: int) -> None:
        """Notes that a node computed `num_blocks` behind a prompt."""
        if not names or not num_blocks:
            return
        self._ends.setdefault(names[-1], {})[node] = num_blocks
        self._ends.move_to_end(names[-1])
        if len(self._ends) > MOST_ENDS:
            self._ends.popitem(last=False)

    def behind(self, names: Sequence[BlockName]) -> tuple[int, dict[NodeId, int]]:
        """Returns the length in blocks of the longest prompt that this one goes on from, and the blocks behind it by
        node; (0, {}) without one."""
        for at in range(len(names), 0, -1):
            found = self._ends.get(names[at - 1])
            if found is not None:
                return at, found
        return 0, {}
