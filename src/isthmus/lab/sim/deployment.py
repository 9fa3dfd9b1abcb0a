"""A deployment to simulate: nodes and common settings, made from the configuration."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.config import Config
from isthmus.core.conductor import Rules
from isthmus.core.types import NS_PER_S, Role, Shares
from isthmus.facts import NodeFacts, at_home, nodes_of, rules_of, shares_of
from isthmus.lab.sim.faults import Faults

FAR = 1 << 30
"""Iterations and chunks planned ahead by a simulated scheduler: no limit, which changes no result."""


class Deployment(msgspec.Struct, frozen=True):
    """All nodes and their common settings."""

    nodes: tuple[NodeFacts, ...]
    rules: Rules
    link_ns: int = 3 * NS_PER_S  # longest pause of a transfer between clusters before its session ends
    rejoin_ns: int = 30 * NS_PER_S  # longest wait of a request for a node
    faults: Faults = Faults()
    shares: Shares = Shares()  # of the tenants that a workload names
    has_names: bool = True  # prompts may share blocks; else none are kept
    has_answers: bool = False  # block names of answers are known too

    @property
    def block_size(self) -> int:
        """Tokens per block, the same on all nodes."""
        return self.nodes[0].block_size

    def has_cache(self, facts: NodeFacts) -> bool:
        """Whether a node can ever cache a block: one that only decodes cannot, unless answers have names."""
        keeps = facts.role is not Role.DECODE or self.rules.convert or self.has_answers
        return keeps and facts.cache_blocks > 0


def deployment_of(config: Config, block_size: int, folder: Path = Path()) -> Deployment:
    """The configured nodes, for a workload with blocks of `block_size` tokens. Paths are relative to `folder`.

    Raises ConfigError as `nodes_of`.
    """
    config = at_home(config, folder)
    limits = config.limits
    nodes = nodes_of(config, block_size, model=Path(config.model) if config.model else None)
    return Deployment(
        nodes=tuple(msgspec.structs.replace(facts, max_steps=FAR, max_chunks=FAR) for facts in nodes),
        rules=rules_of(config),
        link_ns=int(limits.link_s * NS_PER_S),
        rejoin_ns=int(limits.rejoin_s * NS_PER_S),
        shares=shares_of(config),
    )
