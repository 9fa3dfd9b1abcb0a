"""The nodes of a deployment as the simulator and the conductor see them before the first request."""

from __future__ import annotations

from isthmus.conductor import NodeJoined, Paths
from isthmus.cost import compile_cost
from isthmus.cost.transfer import NONE, codec_speeds
from isthmus.deploy import codec_dtype
from isthmus.scheduler import BlockPool, CountingPool, Limits, Scheduler, TierCache
from isthmus.sim.deployment import Deployment, NodeSpec
from isthmus.sim.node import SimNode
from isthmus.types import Role


def build_node(deployment: Deployment, slot: int) -> SimNode:
    """The node number `slot` without its links."""
    spec = deployment.nodes[slot]
    return SimNode(spec, slot, _scheduler(deployment, spec), compile_cost(spec.cost))


def joined(deployment: Deployment, spec: NodeSpec) -> NodeJoined:
    """What the conductor hears of a node."""
    paths = spec.rates.paths(has_disk=spec.ssd_blocks > 0) if _has_cache(spec) else Paths()
    return NodeJoined(
        spec.node,
        spec.role,
        capacity_tokens=spec.kv_blocks * deployment.block_size,
        block_size=deployment.block_size,
        cost=spec.cost,
        paths=paths,
        cache_blocks=spec.dram_blocks + spec.ssd_blocks,
        kv_dtype=codec_dtype(spec.cost),
    )


def kept(node: SimNode, codec: str, block_size: int) -> float:
    """Bytes that cross a link for each byte of the node's KV. Encoding itself takes no time here."""
    return 1.0 if codec == NONE else codec_speeds(codec_dtype(node.spec.cost), block_size)[codec].kept


def _scheduler(deployment: Deployment, spec: NodeSpec) -> Scheduler:
    limits = Limits(
        num_blocks=spec.kv_blocks,
        block_size=deployment.block_size,
        token_budget=deployment.token_budget,
        prompt_batch=deployment.prompt_batch,
        max_sequences=deployment.max_sequences,
        max_steps=deployment.max_steps,
        max_chunks=deployment.max_chunks if spec.role is Role.PREFILL else 1,
        order=deployment.order,
    )
    if _has_cache(spec):
        tiers = TierCache(spec.dram_blocks, spec.ssd_blocks, deployment.eviction)
        return Scheduler(limits, tiers, CountingPool(spec.kv_blocks))
    if spec.role is Role.DECODE:
        return Scheduler(limits, None, CountingPool(spec.kv_blocks))
    return Scheduler(limits, None, BlockPool(spec.kv_blocks))


def _has_cache(spec: NodeSpec) -> bool:
    """Beside its engine's memory; a node that only decodes needs none."""
    return spec.role is not Role.DECODE and spec.dram_blocks + spec.ssd_blocks > 0
