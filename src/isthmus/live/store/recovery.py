"""Which of the records found at the start are of use. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from isthmus.core.types import BlockName
from isthmus.live.store.record import Header

Found = tuple[int, Header]
"""A place in the log and the header there."""


def whole_chains(found: Iterable[Found]) -> list[Found]:
    """The latest record of each name whose chain of parents is complete; parents first, else as they were written.

    Others stay out: without its head a block cannot be attended to.
    """
    latest: dict[BlockName, Found] = {}
    for one in sorted(found, key=lambda one: one[1].sequence):
        latest[one[1].name] = one
    following: dict[BlockName | None, list[Found]] = {}
    for one in latest.values():
        following.setdefault(one[1].parent, []).append(one)
    ready = [(header.sequence, place, header) for place, header in following.get(None, ())]
    heapq.heapify(ready)
    chains = []
    while ready:
        _, place, header = heapq.heappop(ready)
        chains.append((place, header))
        for next_place, following_header in following.get(header.name, ()):
            heapq.heappush(ready, (following_header.sequence, next_place, following_header))
    return chains
