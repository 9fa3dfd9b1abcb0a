"""A deployment to simulate: nodes with their costs and links, and the rules, made from the configuration."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.conductor import Rules
from isthmus.config import Config, RoleConfig
from isthmus.cost import Analytic, Cost, Hardware, compile_cost, hardware_named
from isthmus.deploy import (
    UNLIMITED,
    Rates,
    at_home,
    bytes_per_s,
    cost_of,
    gpus_of,
    hardware_of,
    rates_of,
    rules_of,
)
from isthmus.errors import ConfigError
from isthmus.types import NodeId, Role


class NodeSpec(msgspec.Struct, frozen=True):
    """One node. `kv_blocks`: blocks of its engine's memory; `dram_blocks`, `ssd_blocks`: of its cache.

    `pipeline`: so many machines work as this one node, each on a range of layers.
    """

    node: NodeId
    role: Role
    cost: Cost
    kv_blocks: int
    dram_blocks: int = 0
    ssd_blocks: int = 0
    rates: Rates = Rates()
    pipeline: int = 1


class Deployment(msgspec.Struct, frozen=True):
    """All nodes, and what they have in common. `max_chunks`, `max_steps`: how far a node's scheduler plans ahead,
    which changes no result."""

    nodes: tuple[NodeSpec, ...]
    rules: Rules
    block_size: int
    token_budget: int = 512
    prompt_batch: int = 1 << 30
    max_sequences: int = 64
    order: str = "fcfs"
    eviction: str = "lru"
    spine: int = UNLIMITED
    max_steps: int = 1 << 30
    max_chunks: int = 1 << 30


def deployment_of(config: Config, block_size: int, folder: Path = Path()) -> Deployment:
    """The configured nodes, for a workload with blocks of `block_size` tokens. Paths are relative to `folder`.

    Raises ConfigError for a model, hardware or curve that cannot be used.
    """
    config = at_home(config, folder)
    nodes: list[NodeSpec] = []
    for role in Role:
        wanted: RoleConfig = getattr(config.roles, role.value)
        if wanted.count:
            nodes += _nodes(config, role, wanted, block_size)
    if not nodes:
        raise ConfigError("roles: no node is configured; set roles.prefill, roles.decode or roles.mixed")
    engine, network = config.engine, config.network
    return Deployment(
        nodes=tuple(nodes),
        rules=rules_of(config),
        block_size=block_size,
        token_budget=engine.token_budget,
        prompt_batch=engine.prompt_batch or 1 << 30,
        max_sequences=engine.max_sequences,
        order=config.scheduling.order,
        eviction=config.cache.eviction,
        spine=bytes_per_s(network.spine_gbps, UNLIMITED),
    )


def _nodes(config: Config, role: Role, wanted: RoleConfig, block_size: int) -> list[NodeSpec]:
    if wanted.pipeline > 1 and role is not Role.PREFILL:
        raise ConfigError(f"roles.{role}.pipeline: only prefill nodes form pipeline groups")
    if wanted.count % wanted.pipeline:
        raise ConfigError(f"roles.{role}: {wanted.count} nodes make no groups of {wanted.pipeline}")
    gpus = gpus_of(config, wanted)
    hardware = hardware_of(config, wanted) or hardware_named("cpu")
    cost = cost_of(config, wanted, Path(config.model) if config.model else None)
    compiled = compile_cost(cost)
    block_bytes = compiled.kv_token_bytes * block_size
    spec = NodeSpec(
        NodeId(""),
        role,
        cost,
        kv_blocks=max(2, _kv_memory(config, hardware, gpus, cost) * wanted.pipeline // block_bytes),
        dram_blocks=config.cache.dram * wanted.pipeline // block_bytes,
        ssd_blocks=config.cache.ssd * wanted.pipeline // block_bytes,
        rates=rates_of(config, wanted),
        pipeline=wanted.pipeline,
    )
    return [
        msgspec.structs.replace(spec, node=NodeId(f"{role}-{number}"))
        for number in range(wanted.count // wanted.pipeline)
    ]


def _kv_memory(config: Config, hardware: Hardware, gpus: int, cost: Cost) -> int:
    """As configured; otherwise, on an accelerator, what weights and working memory leave of its memory."""
    if "kv_memory" in config.engine.model_fields_set or hardware.name == "cpu":
        return config.engine.kv_memory
    if isinstance(cost, Analytic):
        return cost.kv_capacity_tokens * cost.kv_token_bytes
    raise ConfigError(
        "engine.kv_memory: give it, for a cost curve does not say how much memory the weights leave"
    )
