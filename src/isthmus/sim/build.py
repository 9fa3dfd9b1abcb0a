"""The nodes of a deployment as the simulator sees them before the first request."""

from __future__ import annotations

from isthmus.cost import compile_cost
from isthmus.deploy import NodeFacts
from isthmus.node import Node
from isthmus.scheduler import BlockPool, CountingPool
from isthmus.sim.deployment import Deployment
from isthmus.sim.node import SimNode
from isthmus.types import Role


def build_node(deployment: Deployment, slot: int) -> SimNode:
    """The node number `slot` without its links."""
    facts = deployment.nodes[slot]
    return SimNode(facts, slot, node_of(deployment, facts), compile_cost(facts.cost))


def node_of(deployment: Deployment, facts: NodeFacts) -> Node:
    """What decides there, of a node that holds nothing yet."""
    pool: BlockPool | CountingPool
    cached = deployment.has_cache(facts)
    decodes = facts.role is Role.DECODE and not deployment.rules.convert
    if cached or decodes or not deployment.has_names:
        pool = CountingPool(facts.kv_blocks)
    else:
        pool = BlockPool(facts.kv_blocks)
    return facts.node_of(pool, cached=cached)
