"""The nodes of a deployment as the simulator sees them before the first request."""

from __future__ import annotations

from isthmus.cost import compile_cost
from isthmus.deploy import NodeFacts
from isthmus.node import Node
from isthmus.scheduler import BlockPool, CountingPool, Scheduler
from isthmus.sim.deployment import Deployment
from isthmus.sim.node import SimNode
from isthmus.types import Role


def build_node(deployment: Deployment, slot: int) -> SimNode:
    """The node number `slot` without its links."""
    facts = deployment.nodes[slot]
    return SimNode(facts, slot, brain_of(deployment, facts), compile_cost(facts.cost))


def brain_of(deployment: Deployment, facts: NodeFacts) -> Node:
    """What decides there, of a node that holds nothing yet."""
    pool: BlockPool | CountingPool
    tiers = facts.tiers() if deployment.has_cache(facts) else None
    decodes = facts.role is Role.DECODE and not deployment.rules.convert
    if tiers is not None or decodes or not deployment.has_names:
        pool = CountingPool(facts.kv_blocks)
    else:
        pool = BlockPool(facts.kv_blocks)
    scheduler = Scheduler(facts.limits(facts.role), tiers, pool, facts.target, facts.node)
    limits = {role: facts.limits(role) for role in Role}
    return Node(limits, scheduler, stages=facts.pipeline)
