"""SSDs that fail: their blocks are lost when they are next read, and new blocks are lost at once.

A failure does not change a node's directory of its disk: the node learns of lost blocks one by one, as in the live
store.
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
    """Blocks read ahead and needed by runs, tracked only if some disk is going to fail."""

    def __init__(self, faults: Faults) -> None:
        self.are_at_risk = bool(faults.disks)
        self._faults = faults
        self.unwritten: dict[int, set[BlockName]] = {}
        """Node slot with a failed disk -> blocks that are in its DRAM alone."""
        self._read: dict[tuple[int, RequestId], Sequence[BlockName]] = {}
        """Blocks read ahead for waiting prompts."""
        self._ahead: defaultdict[int, ReadAhead] = defaultdict(ReadAhead)
        self._loads: dict[tuple[int, RequestId], Sequence[BlockName]] = {}

    def change(self, nodes: Sequence[SimNode], now: int) -> None:
        """Applies faults that begin or end now. Blocks that could not be written are written when the fault ends."""
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
        """Notes the blocks read for a prompt; returns those that the failed disk lost. Blocks read ahead before are
        fine."""
        if not self.are_at_risk:
            return ()
        lost = self.unreadable(node, names)
        self._read[node.slot, key] = here = [name for name in names if name not in lost]
        self._ahead[node.slot].update(here)
        return lost

    def unreadable(self, node: SimNode, names: Sequence[BlockName]) -> Sequence[BlockName]:
        """Of blocks on the disk: those that cannot be read now."""
        ahead = self._ahead[node.slot]
        return [name for name in names if name not in ahead] if self.fails(node) else ()

    def load(self, node: SimNode, key: RequestId, names: Sequence[BlockName]) -> None:
        """Notes the blocks that a run of this attempt will load."""
        if self.are_at_risk:
            self._loads[node.slot, key] = names

    def over(self, node: SimNode, key: RequestId) -> None:
        """Forgets an attempt whose blocks are loaded or no longer needed."""
        self._loads.pop((node.slot, key), None)
        self._ahead[node.slot].unread(self._read.pop((node.slot, key), ()))

    def look(self, node: SimNode, run: Run) -> None:
        """Sets `node.missing` for the prompts of a run whose blocks cannot all be loaded."""
        for piece in run.chunks if self.fails(node) else ():
            names = self._loads.get((node.slot, piece.request), ())
            lost = self.missing(node, names)
            if lost:
                node.missing[piece.request] = len(names) - len(lost)

    def missed(self, node: SimNode, key: RequestId) -> Sequence[BlockName]:
        """Blocks whose loss broke a run off; forgets the attempt."""
        lost = self.missing(node, self._loads.get((node.slot, key), ()))
        self.over(node, key)
        return lost

    def missing(self, node: SimNode, names: Sequence[BlockName]) -> Sequence[BlockName]:
        """The rest of a prefix from its first block that cannot be loaded."""
        tiers, ahead = node.decider.tiers, self._ahead[node.slot]
        if not self.fails(node) or tiers is None:
            return ()
        held = tiers.dram.held
        return names[len(list(takewhile(lambda name: name in held or name in ahead, names))) :]
