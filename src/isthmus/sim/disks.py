"""SSDs that fail: what was on them is lost when somebody wants it, and what is to go there at once.

What a node knows of its disk does not change when it fails: it learns of it block by block, as the live store does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from isthmus.sim.faults import Faults
from isthmus.sim.node import SimNode
from isthmus.types import BlockName, RequestId


class Disks:
    def __init__(self, faults: Faults) -> None:
        self.are_at_risk = bool(faults.disks)
        self._faults = faults
        self._unwritten: dict[int, set[BlockName]] = {}
        """Of each node whose disk does not work: what is in DRAM alone."""
        self.lost: dict[RequestId, Sequence[BlockName]] = {}
        """What prompts in a run wanted of a disk that failed."""
        self._read: set[tuple[int, RequestId]] = set()
        """Prompts of which the disk has given all it had."""

    def change(self, nodes: Sequence[SimNode], now: int) -> None:
        """A fault begins or ends. What could not be written is written then."""
        for node in nodes if self.are_at_risk else ():
            names = node.facts.node, node.facts.cluster
            if self._faults.has_disk(names, now):
                self._unwritten.pop(node.slot, None)
            elif node.facts.ssd_blocks:
                self._unwritten.setdefault(node.slot, set())

    def fails(self, node: SimNode) -> bool:
        return node.slot in self._unwritten

    def stored(self, node: SimNode, names: Sequence[BlockName]) -> None:
        """These are in DRAM."""
        if self.fails(node):
            self._unwritten[node.slot].update(names)

    def demoted(self, node: SimNode, names: Sequence[BlockName]) -> tuple[BlockName, ...]:
        """Which of them are lost, since only DRAM had them."""
        return tuple([name for name in names if name in self._unwritten.get(node.slot, ())])

    def read(self, node: SimNode, key: RequestId) -> bool:
        """Whether the disk gives what a prompt wants of it."""
        if not self.fails(node):
            self._read.add((node.slot, key))
        return not self.fails(node)

    def comes(self, node: SimNode, key: RequestId, names: Sequence[BlockName]) -> int:
        """How many leading blocks of a prefix can be loaded."""
        tiers = node.brain.tiers
        if not self.fails(node) or tiers is None or (node.slot, key) in self._read:
            return len(names)
        return len(list(takewhile(tiers.dram.held.__contains__, names)))
