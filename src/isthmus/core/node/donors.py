"""Prompts that are assembled from other prompts' KV: what a node needs of these before, and keeps until it is through.

Donors' blocks come into the node's cache first, fetched under keys of their own, while the prompt keeps its place in
the queue; what it needs of them is then loaded into blocks of the engine beside its own (`Sequence.scratch`).
"""

from __future__ import annotations

from isthmus.core.node import events
from isthmus.core.node.attempt import Attempt
from isthmus.core.scheduler import Scheduler
from isthmus.core.types import BlockName, RequestId


class DonorFetches:
    """Of the attempts of one node."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._fetches: dict[RequestId, Attempt] = {}  # by the key of the fetch
        self._pinned: dict[RequestId, list[tuple[BlockName, ...]]] = {}

    def begin(self, attempt: Attempt) -> list[events.Fetch]:
        """What is fetched of its donors first."""
        assembly, found = attempt.assembly, list[events.Fetch]()
        for number, donor in enumerate(assembly.donors if assembly is not None else ()):
            if donor.fetch is not None:
                key = RequestId(f"{attempt.request}~{number}")
                order = donor.fetch
                names = donor.names[: order.stop]
                found.append(
                    events.Fetch(
                        key, order.source, names, order.start, codec=order.codec, tenant=attempt.tenant
                    )
                )
                self._fetches[key] = attempt
        return found

    def fetched(self, key: RequestId) -> Attempt | None:
        """A fetch is over. Returns the attempt that waited for it last."""
        attempt = self._fetches.pop(key, None)
        return None if attempt is None or attempt in self._fetches.values() else attempt

    def enter(self, attempt: Attempt) -> bool:
        """Its donors stay from now on. False: not all of them are here."""
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
        """It needs none of them any more. Idempotent."""
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
