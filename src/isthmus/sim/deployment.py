"""A deployment to simulate: nodes with their costs and links, and the rules, made from the configuration."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.conductor import Rules
from isthmus.config import Config, RoleConfig
from isthmus.cost import Analytic, Cost, Hardware, compile_cost, hardware_named
from isthmus.deploy import (
    UNLIMITED,
    Cluster,
    Rates,
    at_home,
    bytes_per_s,
    chunking_of,
    clusters_of,
    codec_dtype,
    cost_of,
    gpus_of,
    hardware_of,
    rates_of,
    rules_of,
)
from isthmus.errors import ConfigError
from isthmus.scheduler import Chunking
from isthmus.sim.faults import Faults
from isthmus.types import NS_PER_S, NodeId, Role


class NodeSpec(msgspec.Struct, frozen=True):
    """One node. `kv_blocks`: blocks of its engine's memory; `dram_blocks`, `ssd_blocks`: of its cache.

    `pipeline`: so many machines work as this one node, each on a range of layers. `cluster`: where it stands, "" if
    there is only one. `kv_dtype`: of its KV, for codecs; "" for what they do not take.
    """

    node: NodeId
    role: Role
    cost: Cost
    kv_blocks: int
    dram_blocks: int = 0
    ssd_blocks: int = 0
    rates: Rates = Rates()
    pipeline: int = 1
    cluster: str = ""
    chunking: Chunking = Chunking()
    kv_dtype: str = ""


class Deployment(msgspec.Struct, frozen=True):
    """All nodes, and what they have in common. `max_chunks`, `max_steps`: how far a node's scheduler plans ahead,
    which changes no result.

    `max_sequences`: requests that one node computes or hands over at once; `role_sequences`: (cluster, role, limit)
    where a role has one of its own. `spine`: joins the nodes of a cluster, each has its own. `link_ns`: how long what
    crosses a link between clusters may stand still; `rejoin_ns`: how long a request waits for a node. `faults`: what
    goes wrong. `has_names`: prompts share blocks, or might; where none does, none need be kept.
    """

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
    link_ns: int = 3 * NS_PER_S
    rejoin_ns: int = 30 * NS_PER_S
    faults: Faults = Faults()
    role_sequences: tuple[tuple[str, Role, int], ...] = ()
    has_names: bool = True

    def max_sequences_of(self, spec: NodeSpec) -> int:
        """In the role that the node has."""
        for cluster, role, limit in self.role_sequences:
            if (cluster, role) == (spec.cluster, spec.role):
                return limit
        return self.max_sequences

    def has_cache(self, spec: NodeSpec) -> bool:
        """Beside its engine's memory; a node that only decodes, and always will, needs none."""
        may_prefill = spec.role is not Role.DECODE or self.rules.convert
        return may_prefill and spec.dram_blocks + spec.ssd_blocks > 0


def deployment_of(config: Config, block_size: int, folder: Path = Path()) -> Deployment:
    """The configured nodes, for a workload with blocks of `block_size` tokens. Paths are relative to `folder`.

    Raises ConfigError for a model, hardware or curve that cannot be used, and for a cluster that only prefills and has
    no link.
    """
    config = at_home(config, folder)
    nodes: list[NodeSpec] = []
    clusters = clusters_of(config)
    for cluster in clusters:
        for role in Role:
            nodes += _nodes(cluster, role, getattr(cluster.config.roles, role.value), block_size)
    if not nodes:
        where = "clusters" if config.clusters else "roles"
        raise ConfigError(f"{where}: no node is configured; set roles.prefill, roles.decode or roles.mixed")
    _check_linked(config)
    _check_one_model(nodes)
    if config.offload.convert == "auto" and any(spec.pipeline > 1 for spec in nodes):
        raise ConfigError(
            "offload.convert: nodes of roles.prefill.pipeline groups cannot be given another role"
        )
    engine, network, limits = config.engine, config.network, config.limits
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
        link_ns=int(limits.link_s * NS_PER_S),
        rejoin_ns=int(limits.rejoin_s * NS_PER_S),
        role_sequences=tuple(
            (cluster.name, role, limit)
            for cluster in clusters
            for role in Role
            if (limit := getattr(cluster.config.roles, role.value).max_sequences) is not None
        ),
    )


def _nodes(cluster: Cluster, role: Role, wanted: RoleConfig, block_size: int) -> list[NodeSpec]:
    if not wanted.count:
        return []
    config = cluster.config
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
        cluster=cluster.name,
        # A curve does not say; 16 bits are what it most likely was measured with.
        kv_dtype=codec_dtype(cost, config.engine.dtype or "bfloat16"),
        chunking=chunking_of(config, wanted),
    )
    return [
        msgspec.structs.replace(spec, node=cluster.node(role, number))
        for number in range(wanted.count // wanted.pipeline)
    ]


def _check_linked(config: Config) -> None:
    """A cluster that only prefills is of no use alone."""
    linked = {end for link in config.links for end in link.between}
    for name, cluster in config.clusters.items():
        roles = cluster.roles
        if roles.prefill.count and not roles.decode.count + roles.mixed.count and name not in linked:
            raise ConfigError(
                f"links: no link joins {name}, which only prefills, to another cluster; give it one, or leave it out"
            )


def _check_one_model(nodes: list[NodeSpec]) -> None:
    """KV goes from one cluster to another, so it is the same there."""
    first, *others = nodes
    cost = compile_cost(first.cost)
    for spec in others:
        other = compile_cost(spec.cost)
        for name in ("kv_token_bytes", "state_bytes"):
            if spec.cluster != first.cluster and getattr(other, name) != getattr(cost, name):
                raise ConfigError(
                    f"clusters: {name} is {getattr(cost, name)} in {first.cluster} and {getattr(other, name)} in "
                    f"{spec.cluster}; all clusters serve one model"
                )


def _kv_memory(config: Config, hardware: Hardware, gpus: int, cost: Cost) -> int:
    """As configured; otherwise, on an accelerator, what weights and working memory leave of its memory."""
    if "kv_memory" in config.engine.model_fields_set or hardware.name == "cpu":
        return config.engine.kv_memory
    if isinstance(cost, Analytic):
        return cost.kv_capacity_tokens * cost.kv_token_bytes
    raise ConfigError(
        "engine.kv_memory: give it, for a cost curve does not say how much memory the weights leave"
    )
