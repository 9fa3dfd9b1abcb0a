"""One cluster as the conductor sees it: its prefill and decode pools, and what is learned of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isthmus.core.conductor.learning import Calibration, Recent
from isthmus.core.types import Role

if TYPE_CHECKING:
    from isthmus.core.conductor.view import NodeView


class Cluster:
    """The nodes of one cluster that take work, in the order they joined.

    `prefills`: those that a request may prefill on; `decodes`: those that only decode.
    `lender_mask`: others whose cache can be fetched from: nodes that only decode, or are about to change their role.
    `has_mixed`, `has_prefill`: whether `prefills` has nodes of these roles; `prefills_alike`: all are of one kind.
    `smallest_prefill`, `smallest_decode`: the least capacity, tokens; 0 without a node. `calibration`, `recent`: of
    prefills placed here.
    """

    __slots__ = (
        "calibration", "decodes", "has_attention", "has_mixed", "has_prefill", "lender_mask", "name", "prefill_mask",
        "prefills", "prefills_alike", "recent", "smallest_decode", "smallest_prefill",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.calibration, self.recent = Calibration(), Recent()
        self.sort(())

    def sort(self, nodes: Sequence[NodeView], *, serves_others: bool = False) -> None:
        """Mixed nodes prefill always; prefill nodes only when something can decode, here or (`serves_others`) there."""
        working = [node for node in nodes if not node.draining]
        self.decodes = [node for node in working if node.role is Role.DECODE]
        prefill = bool(self.decodes) or serves_others
        roles = (Role.MIXED, Role.PREFILL) if prefill else (Role.MIXED,)
        self.prefills = [node for node in working if node.role in roles]
        self.prefill_mask = sum(node.bit for node in self.prefills)
        lenders = [node for node in nodes if node.role is Role.DECODE or node.draining]
        self.lender_mask = sum(node.bit for node in lenders if node.paths.network and node.cache_blocks)
        self.has_prefill = any(node.role is Role.PREFILL for node in self.prefills)
        self.has_attention = any(node.role is Role.ATTENTION for node in working)
        self.has_mixed = any(node.role is Role.MIXED for node in self.prefills)
        self.prefills_alike = len({node.kind for node in self.prefills}) == 1
        self.smallest_prefill = min((node.capacity_tokens for node in self.prefills), default=0)
        self.smallest_decode = min((node.capacity_tokens for node in self.decodes), default=0)

    @property
    def senders(self) -> list[NodeView]:
        """Those that prefill for other clusters: no mixed nodes.

        What is computed waits for room where it decodes, in the order of the routes. A mixed node breaks that order
        when it pre-empts: the first in its queue then waits for blocks of others, which wait for room that the next
        ones in the queue have reserved.
        """
        return [node for node in self.prefills if node.role is Role.PREFILL]

    @property
    def mixed(self) -> list[NodeView]:
        return [node for node in self.prefills if node.role is Role.MIXED]
