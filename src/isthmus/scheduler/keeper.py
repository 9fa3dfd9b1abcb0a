"""What changes in a node's tiers, as actions for its store and reports for the conductor."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.attempts import BlocksEvicted, BlocksStored
from isthmus.scheduler import events
from isthmus.scheduler.events import Actions
from isthmus.scheduler.tiers import Change, TierCache
from isthmus.types import DISK, NOBODY, BlockName, NodeId, RequestId, Tenant

Names = tuple[BlockName, ...]


class Keeper:
    """What follows is added to `actions`."""

    def __init__(self, tiers: TierCache, node: NodeId) -> None:
        self._tiers, self._node = tiers, node

    def keep(
        self,
        names: Names,
        actions: Actions,
        request: RequestId,
        blocks: Sequence[int] = (),
        tenant: Tenant = NOBODY,
    ) -> bool:
        """A prefix for the cache to keep, in the tenant's share. `blocks` of the engine hold it, computed for
        `request`; without, what is new of it lies in the store already, put there for that. Whether blocks of the
        engine are to be saved."""
        if not names:
            return False
        change = self._tiers.put(names, tenant)
        start, fresh = change.start, len(change.stored) + len(change.sunk)
        new: events.Save | events.Adopt | None = None
        span = slice(start, start + fresh)
        if fresh and blocks:
            head = names[start - 1] if start else None
            new = events.Save(request, names[span], head, tuple(blocks[span]), len(change.sunk))
        elif fresh:
            new = events.Adopt(request, names[span])
        self._tell(change, actions, new)
        return isinstance(new, events.Save)

    def lose(self, names: Names, actions: Actions) -> None:
        """Their bytes are gone or damaged, in whichever tier they were."""
        self._tell(self._tiers.remove(names), actions)

    def recover(self, chains: tuple[Names, ...], actions: Actions) -> None:
        """They were found whole on the SSD when the node started. What is not kept, for want of room or of the block it
        follows, goes."""
        for chain in chains:
            self._tell(self._tiers.restore(chain), actions)
        useless = [name for chain in chains for name in chain if not self._tiers.holds(name)]
        if useless:
            actions.append(events.Drop(tuple(dict.fromkeys(useless))))

    def _tell(self, change: Change, actions: Actions, new: events.Save | events.Adopt | None = None) -> None:
        """In the order in which it can be done: room is made first. What goes from the SSD to DRAM comes before what
        takes its place there. `new`: how all comes that is."""
        node = self._node
        if change.evicted:
            actions += (events.Drop(change.evicted), BlocksEvicted(node, change.evicted))
        if change.promoted:
            actions += (events.Promote(change.promoted), BlocksStored(node, change.promoted))
        if change.demoted:
            actions += (events.Demote(change.demoted), BlocksStored(node, change.demoted, DISK))
        if isinstance(new, events.Save):
            actions += (new, BlocksStored(node, new.names))
        elif new is not None:
            actions.append(new)
            if change.stored:
                actions.append(BlocksStored(node, change.stored))
            if change.sunk:
                actions.append(events.Demote(change.sunk))
        if change.sunk:
            actions.append(BlocksStored(node, change.sunk, DISK))
