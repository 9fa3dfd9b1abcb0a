"""Decides for a server that publishes what its prefix cache has: those blocks, exactly, in place of a belief
(`plain_server`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from isthmus.core.attempts import BlocksEvicted, BlocksStored
from isthmus.core.node.events import EngineBlocks
from isthmus.core.node.plain_server import Reports
from isthmus.core.types import BlockName, NodeId


class HeardBlocks:
    """The blocks that one server says it has. It has each as often as it says so: equal blocks are not merged there."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self._copies: Counter[BlockName] = Counter()

    @property
    def num_blocks(self) -> int:
        """Distinct blocks."""
        return len(self._copies)

    def match(self, names: Sequence[BlockName]) -> int:
        """Returns the number of leading blocks that are cached."""
        return len(list(takewhile(self._copies.__contains__, names)))

    def on(self, event: EngineBlocks) -> Reports:
        """Takes what the server says. Returns what changed, for the conductor."""
        copies = self._copies
        if event.cleared:
            return self.forget()
        stored = tuple([name for name in dict.fromkeys(event.stored) if name not in copies])
        copies.update(event.stored)
        evicted = []
        for name in event.removed:
            left = copies.pop(name, 0) - 1
            if left > 0:
                copies[name] = left
            elif left == 0:
                evicted.append(name)
        reports: Reports = [BlocksStored(self.node, stored)] if stored else []
        return [*reports, BlocksEvicted(self.node, tuple(evicted))] if evicted else reports

    def forget(self) -> Reports:
        """Forgets all. Returns what changed."""
        gone, self._copies = tuple(self._copies), Counter()
        return [BlocksEvicted(self.node, gone)] if gone else []

    def check(self) -> None:
        """Checks that no block is kept of which there is no copy."""
        assert all(copies > 0 for copies in self._copies.values()), "a block without a copy is kept"
