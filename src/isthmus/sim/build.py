"""The nodes of a deployment as the simulator sees them before the first request."""

from __future__ import annotations

from isthmus.cost import compile_cost
from isthmus.cost.transfer import NONE, codec_speeds
from isthmus.deploy import NodeFacts
from isthmus.scheduler import BlockPool, CountingPool, Scheduler
from isthmus.sim.deployment import Deployment
from isthmus.sim.node import SimNode
from isthmus.types import Role


def build_node(deployment: Deployment, slot: int) -> SimNode:
    """The node number `slot` without its links."""
    facts = deployment.nodes[slot]
    return SimNode(facts, slot, scheduler_of(deployment, facts), compile_cost(facts.cost))


def kept(node: SimNode, codec: str) -> float:
    """Bytes that cross a link for each byte of the node's KV. Encoding itself takes no time here."""
    return 1.0 if codec == NONE else codec_speeds(node.facts.kv_dtype, node.facts.block_size)[codec].kept


def scheduler_of(deployment: Deployment, facts: NodeFacts, before: Scheduler | None = None) -> Scheduler:
    """A node's scheduler; `before`: the one it had in another role, whose cache it keeps."""
    limits, target = facts.limits(facts.role), facts.target
    if before is not None and (before.tiers is not None or isinstance(before.pool, BlockPool)):
        return Scheduler(limits, before.tiers, before.pool, target)
    if deployment.has_cache(facts):
        return Scheduler(limits, facts.tiers(), CountingPool(facts.kv_blocks), target)
    if facts.role is Role.DECODE or not deployment.has_names:
        return Scheduler(limits, None, CountingPool(facts.kv_blocks), target)
    return Scheduler(limits, None, BlockPool(facts.kv_blocks), target)
