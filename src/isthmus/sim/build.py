"""The nodes of a deployment as the simulator and the conductor see them before the first request."""

from __future__ import annotations

from isthmus.conductor import NodeJoined, Paths
from isthmus.cost import compile_cost
from isthmus.cost.transfer import NONE, codec_speeds
from isthmus.scheduler import BlockPool, CountingPool, Limits, Scheduler, TierCache
from isthmus.sim.deployment import Deployment, NodeSpec
from isthmus.sim.node import SimNode
from isthmus.types import Role


def build_node(deployment: Deployment, slot: int) -> SimNode:
    """The node number `slot` without its links."""
    spec = deployment.nodes[slot]
    return SimNode(spec, slot, scheduler_of(deployment, spec), compile_cost(spec.cost))


def joined(deployment: Deployment, spec: NodeSpec) -> NodeJoined:
    """What the conductor hears of a node."""
    # Where there are several clusters, KV also comes to a decode node from caches of its own.
    copies = deployment.has_cache(spec) or (spec.cluster and spec.dram_blocks + spec.ssd_blocks > 0)
    paths = spec.rates.paths(has_disk=spec.ssd_blocks > 0) if copies else Paths()
    return NodeJoined(
        spec.node,
        spec.role,
        capacity_tokens=limits_of(deployment, spec).capacity_tokens,
        block_size=deployment.block_size,
        cost=spec.cost,
        paths=paths,
        cache_blocks=spec.dram_blocks + spec.ssd_blocks,
        kv_dtype=spec.kv_dtype,
        cluster=spec.cluster,
        max_sequences=deployment.max_sequences_of(spec),
        state_blocks=state_blocks(deployment, spec),
    )


def state_blocks(deployment: Deployment, spec: NodeSpec) -> int:
    """Blocks that the recurrent state of one sequence fills, 0 for models without."""
    cost = compile_cost(spec.cost)
    return -(-cost.state_bytes // (cost.kv_token_bytes * deployment.block_size))


def kept(node: SimNode, codec: str, block_size: int) -> float:
    """Bytes that cross a link for each byte of the node's KV. Encoding itself takes no time here."""
    return 1.0 if codec == NONE else codec_speeds(node.spec.kv_dtype, block_size)[codec].kept


def scheduler_of(deployment: Deployment, spec: NodeSpec, before: Scheduler | None = None) -> Scheduler:
    """A node's scheduler; `before`: the one it had in another role, whose cache it keeps."""
    limits = limits_of(deployment, spec)
    target = spec.chunking.target(compile_cost(spec.cost).step_ps)
    if before is not None and (before.tiers is not None or isinstance(before.pool, BlockPool)):
        return Scheduler(limits, before.tiers, before.pool, target)
    if deployment.has_cache(spec):
        tiers = TierCache(spec.dram_blocks, spec.ssd_blocks, deployment.eviction)
        return Scheduler(limits, tiers, CountingPool(spec.kv_blocks), target)
    if spec.role is Role.DECODE or not deployment.has_names:
        return Scheduler(limits, None, CountingPool(spec.kv_blocks), target)
    return Scheduler(limits, None, BlockPool(spec.kv_blocks), target)


def limits_of(deployment: Deployment, spec: NodeSpec) -> Limits:
    """What its scheduler may use."""
    return Limits(
        num_blocks=spec.kv_blocks,
        block_size=deployment.block_size,
        token_budget=deployment.token_budget,
        prompt_batch=deployment.prompt_batch,
        partial_prefills=spec.chunking.partial_prefills,
        max_sequences=deployment.max_sequences_of(spec),
        max_steps=deployment.max_steps,
        max_chunks=deployment.max_chunks if spec.role is Role.PREFILL else 1,
        order=deployment.order,
        state_blocks=state_blocks(deployment, spec),
    )
