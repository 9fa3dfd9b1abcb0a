"""What other nodes get of a node's cache stays where it is until they have it."""

from __future__ import annotations

from isthmus.node import events
from isthmus.scheduler import TierCache
from isthmus.types import BlockName, NodeId, RequestId


class Loans:
    """`tiers`: None where nothing is kept, so nobody gets anything."""

    def __init__(self, tiers: TierCache | None) -> None:
        self._tiers = tiers
        self._given: dict[tuple[RequestId, NodeId], tuple[BlockName, ...]] = {}

    def wanted(self, event: events.Wanted, actions: list[events.Action]) -> None:
        names, start = event.names, event.start
        found, on_disk = self._tiers.match(names) if self._tiers is not None else (0, 0)
        if found <= start or (event.whole and found < len(names)):
            found = start
        else:
            assert self._tiers is not None
            given = names[:found]
            self._tiers.pin(given)
            self._given[event.key, event.peer] = given
        on_disk = min(on_disk, found - start)
        actions.append(events.Give(event.key, event.peer, names, start, found, on_disk))

    def enough(self, event: events.Enough) -> None:
        names = self._given.pop((event.key, event.peer), ())
        if self._tiers is not None:
            self._tiers.unpin(names)

    def gone(self, peer: NodeId) -> None:
        """It needs nothing more."""
        for key, other in [at for at in self._given if at[1] == peer]:
            self.enough(events.Enough(key, other))

    def check_idle(self) -> None:
        assert not self._given, "a loan never ended"


def num_present(tiers: TierCache | None, fetch: events.Fetch, stop: int) -> int:
    """How many leading blocks are here, now that `[start, stop)` of a fetch came: what it was to follow may have
    gone."""
    held = tiers.match(fetch.names[: fetch.start])[0] if tiers is not None else fetch.start
    return held if held < fetch.start else stop
