"""Prefixes that a node fetches from other nodes' caches, prefixes that it gives, and donors of assembled prompts."""

from __future__ import annotations

from isthmus.core.node import events
from isthmus.core.node.attempts import Attempt
from isthmus.core.node.letters import FetchDone, FetchRequest
from isthmus.core.scheduler import Actions, Scheduler, TierCache
from isthmus.core.types import BlockName, NodeId, RequestId


class Fetches:
    """Fetches in progress. A given prefix stays pinned until its reader has it, or is gone.

    `tiers`: the node's cache, None without one. `transfer_ns`: how long a fetch that began may bring nothing.
    """

    def __init__(self, tiers: TierCache | None, transfer_ns: int) -> None:
        self._tiers, self._transfer_ns = tiers, transfer_ns
        self._fetches: dict[RequestId, events.Fetch] = {}
        self._moved_ns: dict[RequestId, int] = {}  # when bytes last came, or were asked for
        self._given: dict[tuple[RequestId, NodeId], tuple[BlockName, ...]] = {}

    # From other nodes.

    def begin(self, fetch: events.Fetch, actions: Actions) -> None:
        self._fetches[fetch.key] = fetch
        want = FetchRequest(fetch.key, fetch.names, fetch.start, fetch.whole)
        actions += [events.SendLetter(fetch.source, want), fetch]

    def moved(self, key: RequestId, now: int) -> None:
        if key in self._fetches:
            self._moved_ns[key] = now

    def came(self, event: events.BlocksFetched, actions: Actions) -> tuple[events.Fetch, int] | None:
        """The fetch, and how many of its leading blocks are here now that `[start, stop)` came: blocks before `start`
        may have been evicted. None for an unknown fetch, of a node that had this name before."""
        key, stop = event.key, event.stop
        fetch = self._fetches.get(key)
        if fetch is None:
            return None
        if event.ended:
            del self._fetches[key]
            self._moved_ns.pop(key, None)
            actions.append(events.SendLetter(fetch.source, FetchDone(key)))
        tiers, start = self._tiers, fetch.start
        held = tiers.match(fetch.names[:start])[0] if tiers is not None else start
        return fetch, held if held < start else stop

    def end(self, key: RequestId, actions: Actions) -> None:
        """Ends a fetch that nobody waits for, though a run may wait for its end."""
        if key in self._fetches:
            actions.append(events.EndFetch(key))

    def end_late(self, now: int, actions: Actions) -> None:
        """Ends fetches that brought nothing for `transfer_ns`."""
        late = now - self._transfer_ns
        actions += [events.EndFetch(key) for key, moved_ns in self._moved_ns.items() if moved_ns < late]

    # To other nodes.

    def wanted(self, peer: NodeId, want: FetchRequest, now: int, actions: Actions) -> None:
        names, start = want.names, want.start
        found, on_disk = self._tiers.match(names) if self._tiers is not None else (0, 0)
        if found <= start or start < 0 or (want.whole and found < len(names)):
            found = start
        elif self._tiers is not None:
            if not self._tiers.is_chain(names[:found]):
                return  # void: pins are counted along chains
            self._let_go(want.key, peer)  # a second request replaces the first
            self._given[want.key, peer] = names[:found]
            self._tiers.pin(names[:found])
        on_disk = min(on_disk, found - start)
        actions.append(events.Give(want.key, peer, names, start, found, on_disk))

    def enough(self, peer: NodeId, said: FetchDone, now: int, actions: Actions) -> None:
        self._let_go(said.key, peer)
        actions.append(events.EndGive(said.key, peer))

    def _let_go(self, key: RequestId, peer: NodeId) -> None:
        names = self._given.pop((key, peer), None)
        if self._tiers is not None and names is not None:
            self._tiers.unpin(names)

    def gone(self, peer: NodeId, now: int, actions: Actions) -> None:
        """Ends fetches from a lost peer, and unpins what it fetched."""
        actions += [events.EndFetch(key) for key, fetch in self._fetches.items() if fetch.source == peer]
        for key, _ in [at for at in self._given if at[1] == peer]:
            self.enough(peer, FetchDone(key), now, actions)

    def check_idle(self) -> None:
        assert not self._fetches, "a fetch never ended"
        assert not self._given, "another node never had enough"


class DonorFetches:
    """Donors of prompts that are assembled from other prompts' KV: fetched before, pinned until the prompt is computed.

    Donors' blocks come into the node's cache under keys of their own while the prompt keeps its place in the queue; the
    needed ones are then loaded into `Sequence.scratch`, blocks of the engine beside the prompt's.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._fetches: dict[RequestId, Attempt] = {}  # by the key of the fetch
        self._pinned: dict[RequestId, list[tuple[BlockName, ...]]] = {}

    def begin(self, attempt: Attempt) -> list[events.Fetch]:
        """The fetches that bring its donors' blocks."""
        assembly, found = attempt.assembly, list[events.Fetch]()
        for number, donor in enumerate(assembly.donors if assembly is not None else ()):
            if donor.fetch is not None:
                key = RequestId(f"{attempt.request}~{number}")
                found.append(events.fetch_of(key, donor.fetch, donor.names, attempt.tenant))
                self._fetches[key] = attempt
        return found

    def fetched(self, key: RequestId) -> Attempt | None:
        """Removes a fetch that is over. Returns its attempt if that waits for no other fetch."""
        attempt = self._fetches.pop(key, None)
        return None if attempt is None or attempt in self._fetches.values() else attempt

    def enter(self, attempt: Attempt) -> bool:
        """Pins its donors' blocks. Returns False, and pins nothing, if not all of them are here."""
        assembly, tiers = attempt.assembly, self._scheduler.tiers
        assert assembly is not None and tiers is not None
        chains = [donor.names for donor in assembly.donors]
        if any(tiers.match(names)[0] < len(names) for names in chains):
            return False
        for names in chains:
            tiers.pin(names)
        self._pinned[attempt.request] = chains
        return True

    def end(self, attempt: Attempt) -> list[events.EndFetch]:
        """Unpins its donors' blocks, and ends their fetches. Idempotent."""
        if not self._fetches and not self._pinned:
            return []
        tiers = self._scheduler.tiers
        for names in self._pinned.pop(attempt.request, ()):
            assert tiers is not None
            tiers.unpin(names)
        waited = [key for key, waits in self._fetches.items() if waits is attempt]
        for key in waited:
            del self._fetches[key]
        return [events.EndFetch(key) for key in waited]

    def check_idle(self) -> None:
        assert not self._fetches and not self._pinned, "an attempt's donors were not let go of"
