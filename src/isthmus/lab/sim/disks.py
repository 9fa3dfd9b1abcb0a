"""SSDs that fail: what was on them is lost when somebody wants it, and what is to go there at once.

What a node knows of its disk does not change when it fails: it learns of it block by block, as the live store does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile

from isthmus.core.scheduler import ReadAhead, Run
from isthmus.core.types import BlockName, RequestId
from isthmus.lab.sim.faults import Faults
from isthmus.lab.sim.node import SimNode


class Disks:
    """Nothing is kept here unless a disk is going to fail."""

    def __init__(self, faults: Faults) -> None:
        self.are_at_risk = bool(faults.disks)
        self._faults = faults
        self.unwritten: dict[int, set[BlockName]] = {}
        """By slot, of each node whose disk does not work: what is in DRAM alone."""
        self._read: dict[tuple[int, RequestId], Sequence[BlockName]] = {}
        """What was read ahead for prompts that wait."""
        self._ahead: defaultdict[int, ReadAhead] = defaultdict(ReadAhead)
        self._loads: dict[tuple[int, RequestId], Sequence[BlockName]] = {}

    def change(self, nodes: Sequence[SimNode], now: int) -> None:
        """A fault begins or ends. What could not be written is written then."""
        for node in nodes if self.are_at_risk else ():
            if self._faults.has_disk(node.names, now):
                self.unwritten.pop(node.slot, None)
            elif node.facts.ssd_blocks:
                self.unwritten.setdefault(node.slot, set())

    def fails(self, node: SimNode) -> bool:
        return node.slot in self.unwritten

    def settled(self, node: SimNode, names: Sequence[BlockName]) -> None:
        self._ahead[node.slot].settle(names)

    def read(self, node: SimNode, key: RequestId, names: Sequence[BlockName]) -> Sequence[BlockName]:
        """Which of what a prompt wants of it the disk does not give: others may have read some already."""
        if not self.are_at_risk:
            return ()
        lost = self.unreadable(node, names)
        self._read[node.slot, key] = here = [name for name in names if name not in lost]
        self._ahead[node.slot].update(here)
        return lost

    def unreadable(self, node: SimNode, names: Sequence[BlockName]) -> Sequence[BlockName]:
        """Of blocks on the disk."""
        ahead = self._ahead[node.slot]
        return [name for name in names if name not in ahead] if self.fails(node) else ()

    def load(self, node: SimNode, key: RequestId, names: Sequence[BlockName]) -> None:
        """A run will need these."""
        if self.are_at_risk:
            self._loads[node.slot, key] = names

    def over(self, node: SimNode, key: RequestId) -> None:
        """It is loaded, or not wanted any more."""
        self._loads.pop((node.slot, key), None)
        self._ahead[node.slot].unread(self._read.pop((node.slot, key), ()))

    def look(self, node: SimNode, run: Run) -> None:
        """Whether what a run needs can be loaded now; what cannot is `missing`."""
        for piece in run.chunks if self.fails(node) else ():
            names = self._loads.get((node.slot, piece.request), ())
            lost = self.missing(node, names)
            if lost:
                node.missing[piece.request] = len(names) - len(lost)

    def missed(self, node: SimNode, key: RequestId) -> Sequence[BlockName]:
        """A run has broken off since these could not be loaded."""
        lost = self.missing(node, self._loads.get((node.slot, key), ()))
        self.over(node, key)
        return lost

    def missing(self, node: SimNode, names: Sequence[BlockName]) -> Sequence[BlockName]:
        """What follows the part of a prefix that can be loaded."""
        tiers, ahead = node.decider.tiers, self._ahead[node.slot]
        if not self.fails(node) or tiers is None:
            return ()
        held = tiers.dram.held
        return names[len(list(takewhile(lambda name: name in held or name in ahead, names))) :]
