"""Reuse of computed prefixes: from the engine's memory (`PoolPrefixes`), or from tiers beside it (`TierPrefixes`).

Both have the same methods, which add actions for the node's store and reports for the conductor to `actions`.
"""

from __future__ import annotations

from isthmus.core.attempts import BlocksEvicted, BlocksStored
from isthmus.core.scheduler import events
from isthmus.core.scheduler.events import Actions
from isthmus.core.scheduler.memory import Memory
from isthmus.core.scheduler.pool import Blocks
from isthmus.core.scheduler.sequence import CachedPrefix, Sequence
from isthmus.core.scheduler.tiers import Change, TierCache
from isthmus.core.types import DISK, NOBODY, BlockName, NodeId, RequestId, Tenant

Names = tuple[BlockName, ...]


def _num_full(sequence: Sequence, size: int) -> int:
    """Leading blocks whose KV is that of their names: full ones, and of an assembled prompt the cached ones."""
    exact = sequence.computed if sequence.assembly is None else sequence.cached
    return min(exact // size, len(sequence.names))


class PoolPrefixes:
    """Prefixes in the pool: a block keeps its name until it is evicted for another sequence."""

    def __init__(self, memory: Memory, block_size: int) -> None:
        self._memory, self._size = memory, block_size

    def find(self, sequence: Sequence, prompts: list[Sequence]) -> CachedPrefix | None:
        """The cached prefix of a sequence, at least one token short, since the last one yields the logits. None: it is
        to wait for one of `prompts`, which are being computed."""
        memory = self._memory
        found = memory.pool.match(sequence.names[: memory.at_home(sequence) - 1])
        blocks, state = memory.states.in_pool(sequence.names, found)
        return CachedPrefix(len(blocks) * self._size, len(found), blocks, state)

    def is_here(self, sequence: Sequence) -> bool:
        """Whether the prefix for which it was routed here is."""
        return True

    def computed(self, sequence: Sequence, samples: bool, actions: Actions) -> Names:
        """Names full blocks after a chunk, and snapshots after the last one, which `samples`. Returns new names."""
        memory, pool, names, stored = self._memory, self._memory.pool, sequence.names, []
        if sequence.named < len(names):
            full = _num_full(sequence, self._size)
            span, here = slice(sequence.named, full), sequence.num_absent
            blocks = sequence.blocks[sequence.named - here : full - here]
            named = zip(blocks, names[span], strict=True)
            stored = [name for block, name in named if pool.store(block, name, sequence.tenant)]
            sequence.named = full
        if samples and sequence.snapshots:
            for snapshot in sequence.take_cached_snapshots():
                named = zip(snapshot.blocks, memory.states.parts(names, snapshot.depth), strict=True)
                stored += [name for block, name in named if pool.store(block, name, sequence.tenant)]
                memory.give_back(sequence.request, snapshot.blocks)
        return tuple(stored)

    def keep(
        self, names: Names, actions: Actions, request: RequestId, blocks: Blocks = (), tenant: Tenant = NOBODY
    ) -> bool:
        return False

    def answered(self, sequence: Sequence, names: Names, actions: Actions) -> None: ...
    def lose(self, names: Names, actions: Actions) -> None: ...
    def recover(self, chains: tuple[Names, ...], actions: Actions) -> None: ...
    def arrive(self, sequence: Sequence) -> None: ...
    def unpin(self, sequence: Sequence) -> None: ...


class TierKeeper:
    """Turns changes of a node's tiers into actions for its store and reports for the conductor."""

    def __init__(self, tiers: TierCache, node: NodeId) -> None:
        self._tiers, self._node = tiers, node

    def keep(
        self, names: Names, actions: Actions, request: RequestId, blocks: Blocks = (), tenant: Tenant = NOBODY
    ) -> bool:
        """Keeps a prefix in the tenant's share. `blocks`: of the engine, which hold it, computed for `request`; without
        them its new blocks were fetched into the store for that. Returns whether blocks of the engine are saved."""
        if not names:
            return False
        change = self._tiers.put(names, tenant)
        start, fresh = change.start, len(change.stored) + len(change.sunk)
        new: events.SaveBlocks | events.AdoptBlocks | None = None
        span = slice(start, start + fresh)
        if fresh and blocks:
            head = names[start - 1] if start else None
            new = events.SaveBlocks(request, names[span], head, tuple(blocks[span]), len(change.sunk))
        elif fresh:
            new = events.AdoptBlocks(request, names[span])
        self._tell(change, actions, new)
        return isinstance(new, events.SaveBlocks)

    def lose(self, names: Names, actions: Actions) -> None:
        """Drops blocks whose bytes are gone or damaged, in any tier, and all that follow them."""
        self._tell(self._tiers.remove(names), actions)

    def recover(self, chains: tuple[Names, ...], actions: Actions) -> None:
        """Keeps chains found whole on the SSD when the node started, and drops what has no room or no head."""
        for chain in chains:
            self._tell(self._tiers.restore(chain), actions)
        useless = [name for chain in chains for name in chain if not self._tiers.holds(name)]
        if useless:
            actions.append(events.DropBlocks(tuple(dict.fromkeys(useless))))

    def _tell(
        self, change: Change, actions: Actions, new: events.SaveBlocks | events.AdoptBlocks | None = None
    ) -> None:
        """Adds actions in the order in which they can be done: room is made first, and what moves from the SSD to DRAM
        comes before what takes its place. `new`: the action for all new blocks."""
        node = self._node
        if change.evicted:
            actions += (events.DropBlocks(change.evicted), BlocksEvicted(node, change.evicted))
        if change.promoted:
            actions += (events.Promote(change.promoted), BlocksStored(node, change.promoted))
        if change.demoted:
            actions += (events.Demote(change.demoted), BlocksStored(node, change.demoted, DISK))
        if isinstance(new, events.SaveBlocks):
            actions += (new, BlocksStored(node, new.names))
        elif new is not None:
            actions.append(new)
            if change.stored:
                actions.append(BlocksStored(node, change.stored))
            if change.sunk:
                actions.append(events.Demote(change.sunk))
        if change.sunk:
            actions.append(BlocksStored(node, change.sunk, DISK))


class TierPrefixes(TierKeeper):
    """Prefixes in tiers: loaded into the engine before use, and saved when their prompt is computed."""

    def __init__(self, tiers: TierCache, memory: Memory, block_size: int, node: NodeId) -> None:
        super().__init__(tiers, node)
        self._memory, self._size = memory, block_size

    def arrive(self, sequence: Sequence) -> None:
        """Pins the prefix for which it was routed here, until it is loaded."""
        present, wanted = self._tiers.match(sequence.names)[0], sequence.num_cached
        expected = present if present < wanted else wanted
        fetched = sequence.fetch.stop if sequence.fetch is not None else 0
        self._pin(sequence, expected if expected > fetched else fetched)

    def find(self, sequence: Sequence, prompts: list[Sequence]) -> CachedPrefix | None:
        """As `PoolPrefixes.find`; blocks that a fetch will bring count as here."""
        states, names, size = self._memory.states, sequence.names, self._size
        if sequence.remote.num_planned:  # only a window of its blocks is in the engine
            names = names[: self._memory.at_home(sequence) - 1]
        present, on_disk = self._tiers.match(names)
        fetch = sequence.fetch
        arrives = fetch is not None and fetch.start <= present < fetch.stop <= len(names)
        if fetch is not None and arrives and states.leaves_some(fetch.stop, sequence.length):
            found = usable = fetch.stop
        else:
            found = present
            usable, on_disk = states.in_tiers(self._tiers, sequence, present, on_disk)
        if usable > sequence.num_pinned:
            self._pin(sequence, usable)
        if usable < min(sequence.num_cached, len(names)):
            name = names[usable]
            if any(usable < len(prompt.names) and prompt.names[usable] == name for prompt in prompts):
                return None
        tokens = usable * size if usable * size < sequence.length else sequence.length - 1
        return CachedPrefix(tokens, found, loads=tokens > 0, num_on_disk=on_disk)

    def is_here(self, sequence: Sequence) -> bool:
        """Whether the prefix for which it was routed here is; else it would compute what a request before it leaves."""
        wanted = sequence.num_cached
        return sequence.num_pinned >= wanted or self._tiers.match(sequence.names)[0] >= wanted

    def computed(self, sequence: Sequence, samples: bool, actions: Actions) -> Names:
        """Keeps the prompt and its snapshots after the last chunk; of a prompt whose blocks go to holders, full blocks
        after each chunk."""
        request, blocks, memory, here = sequence.request, sequence.table, self._memory, sequence.num_absent
        if samples or sequence.remote.num_planned:
            full = _num_full(sequence, self._size)
            if self._holds(sequence.names[:here]):
                self.keep(sequence.names[:full], actions, request, blocks, sequence.tenant)
        if samples:
            self.unpin(sequence)
            if sequence.snapshots:
                for snapshot in sequence.take_cached_snapshots():
                    depth = snapshot.depth
                    if self._holds(sequence.names[: min(here, depth)]):
                        chain = memory.states.chain(sequence.names, depth)
                        held = blocks[:depth] + snapshot.blocks
                        self.keep(chain, actions, request, held, sequence.tenant)
                    memory.give_back(request, snapshot.blocks)
        return ()

    def answered(self, sequence: Sequence, names: Names, actions: Actions) -> None:
        """Keeps the full blocks, which have these names, of prompt and complete answer."""
        if self._holds(names[: sequence.num_absent]):
            self.keep(names, actions, sequence.request, sequence.table, sequence.tenant)

    def _holds(self, names: Names) -> bool:
        """Whether the cache has these blocks, which are with holders and cannot be saved."""
        return not names or self._tiers.match(names)[0] == len(names)

    def keep(
        self, names: Names, actions: Actions, request: RequestId, blocks: Blocks = (), tenant: Tenant = NOBODY
    ) -> bool:
        saves = super().keep(names, actions, request, blocks, tenant)
        if saves:
            self._memory.saving(request)
        return saves

    def unpin(self, sequence: Sequence) -> None:
        """Unpins its prefix, which is in the engine, or needed no more."""
        if sequence.pinned:
            self._tiers.unpin(sequence.pinned)
            sequence.pinned, sequence.num_pinned = (), 0

    def _pin(self, sequence: Sequence, num_blocks: int) -> None:
        """Pins so many leading blocks and the state after them, in place of what it had pinned."""
        names = self._memory.states.chain(sequence.names, num_blocks)
        self._tiers.pin(names)
        if sequence.pinned:
            self.unpin(sequence)
        sequence.pinned, sequence.num_pinned = names, num_blocks


Prefixes = PoolPrefixes | TierPrefixes
