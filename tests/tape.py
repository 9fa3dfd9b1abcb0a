"""A recording that is kept in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from isthmus.core.conductor import Action, Event


class Entry(msgspec.Struct, frozen=True):
    """One event, when it came (ns, monotonic), and what the conductor answered."""

    at_ns: int
    event: Event
    actions: tuple[Action, ...]


class MemoryTape:
    """In the place of a `Recorder`."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def record(self, at_ns: int, event: Any, actions: Sequence[Any]) -> None:
        self.entries.append(Entry(at_ns, event, tuple(actions)))

    def close(self) -> None:
        """Nothing to close."""
