"""Weighted fair queueing among the tenants that wait for one node.

Each tenant has a counter of served tokens over its weight (the virtual token counters of "Fairness in Serving Large
Language Models", OSDI 2024), and the least comes first. A tenant that had nobody in the queue begins again where the
others are (as in start-time fair queueing), so that no tenant saves turns up. A lone tenant's tokens are not counted.

A request that passes others may hold memory for which another node waits, since a prompt is computed on one node and
received on another. In the order of arrival no ring of waiting nodes arises, since the oldest request gets what it
needs on both. So all requests that passed others together leave enough for any one that they passed.
"""

from __future__ import annotations

from collections import abc
from itertools import islice

from isthmus.core.scheduler.events import SchedulerLimits
from isthmus.core.scheduler.sequence import Sequence
from isthmus.core.types import RequestId, Tenant


class Turns:
    """The counters of one node in one role, and the requests that hold memory after passing others."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.is_shared = False  # there is more than one tenant
        self._lone: str | None = None
        self._served: dict[str, float] = {}  # tokens over weight
        self._reached = 0.0  # the counter of the tenant whose turn it was last
        self._waiting: abc.Collection[str] = ()  # tenants that were in the queue last time
        self._ahead: dict[RequestId, int] = {}  # blocks of requests that passed others
        self._max_sequences = limits.max_sequences
        self._room = (
            limits.num_blocks - limits.num_blocks // 8
        )  # the rest may be kept free for running requests

    def arrive(self, tenant: Tenant) -> None:
        """Notes the tenant of a request that is about to wait."""
        if tenant.name != self._lone:
            self.is_shared = self._lone is not None
            self._lone = tenant.name if self._lone is None else self._lone

    def indexes(self, queue: abc.Sequence[Sequence]) -> list[int]:
        """Indexes in the queue, which is not empty, of the tenant whose turn it is. A pre-empted request stands first
        there, and goes first."""
        if queue[0].age:
            return [0]
        found: dict[str, list[int]] = {}
        for index, sequence in enumerate(queue):
            found.setdefault(sequence.tenant.name, []).append(index)
        for name in found:
            if name not in self._waiting:
                self._served[name] = max(self._served.get(name, 0.0), self._reached)
        self._waiting = found.keys()
        return found[min(found, key=self._served.__getitem__)]  # of equal ones, the first in the queue

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts a request's turn, of so many tokens."""
        if self.is_shared:
            self._reached = max(self._reached, self._served.get(sequence.tenant.name, 0.0))
            self.serve(sequence, num_tokens)

    def serve(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts tokens beside its turn."""
        if self.is_shared:
            tenant = sequence.tenant
            self._served[tenant.name] = self._served.get(tenant.name, 0.0) + num_tokens / tenant.weight

    def may_pass(
        self, queue: abc.Sequence[Sequence], index: int, blocks: abc.Callable[[Sequence], int], *, holds: bool
    ) -> bool:
        """Whether requests that passed others leave enough for the one at `index`; and, if it `holds` memory for which
        another node may wait, enough beside it for any one before it. `blocks`: number that a request needs."""
        taken = sum(self._ahead.values()) + blocks(queue[index])
        if holds:
            taken += max([blocks(each) for each in islice(queue, index)])
        return taken <= self._room and len(self._ahead) + holds < self._max_sequences

    @property
    def has_ahead(self) -> bool:
        """Whether a request that passed others holds memory for which another node may wait."""
        return bool(self._ahead)

    def passed(self, sequence: Sequence, num_blocks: int) -> None:
        """Notes that a request passed others, and holds so many blocks until `gone`."""
        self._ahead[sequence.request] = num_blocks

    def gone(self, sequence: Sequence) -> None:
        """Notes that a request holds no memory for which another node may wait. An unknown one is no error."""
        self._ahead.pop(sequence.request, None)
