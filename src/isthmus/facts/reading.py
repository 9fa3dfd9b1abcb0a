"""Reads a configuration into facts of nodes.

Block sizes come from the engine's KV layout; in the simulator and for the emulated engine, from the cost model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from isthmus.config import CacheConfig, Config, RoleConfig
from isthmus.core.blocks import MAX_SNAPSHOTS, KVLayout
from isthmus.core.cost import Analytic, Cost, Curve, Handling, compile_cost, hardware_named
from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S, NodeId, Role
from isthmus.facts.facts import (
    NodeFacts,
    Rates,
    Sequences,
    bytes_per_s,
    chunking_of,
    codec_dtype,
    cost_of,
    gpus_of,
    hardware_of,
)
from isthmus.facts.places import ClusterPlace, places_of, role_config

MIN_SLOTS = 8
TRANSIT = 8
"""One DRAM slot of a cache in this number is for blocks in transit."""
MAX_EMULATED_TOKENS = 1 << 23
"""KV tokens of an emulated node when `engine.kv_memory` is not given: a small model must not fill the host's memory."""

EMULATED_HEADS = 2
"""KV heads of the emulated engine, where the model has as many that they can be cut in two."""


def nodes_of(
    config: Config,
    block_size: int,
    *,
    model: Path | None = None,
    costs: Mapping[Role, Cost] | None = None,
    layout: KVLayout | None = None,
) -> tuple[NodeFacts, ...]:
    """All nodes, by cluster and role. `model`: its folder or config.json; `costs`: by role, in place of the configured
    cost models.

    Raises ConfigError for nodes that cannot serve anything, for a model, hardware or curve that cannot be used, for
    memory that holds too little, and for clusters of different models.
    """
    if config.servers:
        raise ConfigError("servers: they run already, and are no nodes; `isthmus route` and `serve` take them")
    found: list[NodeFacts] = []
    known: dict[tuple[str, Role], NodeFacts] = {}
    for place in places_of(config):
        cluster, key = place.cluster, (place.cluster.name, place.role)
        if key not in known:
            nodes = role_config(cluster.config, place.role)
            cost = costs[place.role] if costs is not None else cost_of(cluster.config, nodes, model)
            known[key] = role_facts(cluster, place.role, cost, block_size, layout)
        found.append(msgspec.structs.replace(known[key], node=place.node))
    _check_one_model(found)
    return tuple(found)


def role_facts(
    cluster: ClusterPlace, role: Role, cost: Cost, block_size: int, layout: KVLayout | None = None
) -> NodeFacts:
    """Facts that all nodes of a role share; `node` is empty. Raises ConfigError for too little memory."""
    config, nodes = cluster.config, role_config(cluster.config, role)
    engine, sequences = config.engine, _sequences(config)
    live = sequences.of(role) if role is not Role.ATTENTION else 0  # attention nodes have no states
    if config.offload.convert != "none":  # the node may take any role
        live = max(sequences.prefill, sequences.decode, sequences.mixed)
    size = _Sizes.of(cost, block_size, layout, nodes.pipeline)
    kv_blocks = _kv_blocks(config, role, cost, size, live)
    dram_slots, ssd_blocks = _cache_blocks(config.cache, size.block_bytes) if live else (0, 0)
    transit = max(1, dram_slots // TRANSIT) if dram_slots else 0
    handling = cost.handling
    if isinstance(cost, Curve):
        cost = cost.with_kv_work(leaves=role is Role.PREFILL, saved=dram_slots > 0)
    return NodeFacts(
        node=NodeId(""),
        role=role,
        cost=cost,
        kv_blocks=kv_blocks,
        block_size=block_size,
        dram_blocks=dram_slots - transit,
        ssd_blocks=ssd_blocks,
        rates=_rates(config, nodes, handling),
        transit_blocks=transit,
        state_blocks=size.state_blocks,
        live_states=live,
        pipeline=nodes.pipeline,
        cluster=cluster.name,
        # A curve does not say; it was most likely measured with 16 bits.
        kv_dtype=layout.dtype if layout is not None else codec_dtype(cost, engine.dtype or "bfloat16"),
        kv_heads=_kv_heads(config, cost, layout),
        chunking=chunking_of(config, nodes),
        token_budget=engine.token_budget,
        prompt_batch=engine.prompt_batch or engine.token_budget,
        sequences=sequences,
        order=config.scheduling.order,
        batches=engine.batches or 1,
        report_ns=_report_ns(config, nodes.pipeline),
        reuse_layers=_reuse_layers(cost, layout) if dram_slots and nodes.pipeline == 1 else 0,
    )


def _rates(config: Config, nodes: RoleConfig, handling: Handling) -> Rates:
    """Links of a pipeline group add up: each machine moves its own layers. A link is no faster than the core that
    handles all KV on it."""
    hardware = hardware_of(config, nodes) or hardware_named("cpu")
    gpus, network = gpus_of(config, nodes), config.network
    rail, memory, copy_s = network.handover_gbps, int(hardware.pcie_bw * gpus), handling.load_byte_s
    return Rates(
        network=handling.narrowed(bytes_per_s(network.node_gbps, int(hardware.nic_bw * gpus))) * nodes.pipeline,
        handover=handling.narrowed(bytes_per_s(rail, 0)) * nodes.pipeline,
        memory=(min(memory, round(1 / copy_s)) if copy_s else memory) * nodes.pipeline,
        disk_read=int(hardware.ssd_read_bw) * nodes.pipeline,
        disk_write=int(hardware.ssd_write_bw) * nodes.pipeline,
        rtt_ns=round(1000 * network.rtt_us),
    )


def _kv_heads(config: Config, cost: Cost, layout: KVLayout | None) -> int:
    """Parts into which the KV of a token can be cut."""
    if layout is not None:
        return layout.num_kv_heads if layout.vectors == 2 else 1
    heads = cost.model.kv_shards if isinstance(cost, Analytic) else 1
    if config.engine.kind == "emulated":
        return EMULATED_HEADS if heads % EMULATED_HEADS == 0 or not isinstance(cost, Analytic) else 1
    return heads


def _reuse_layers(cost: Cost, layout: KVLayout | None) -> int:
    """Layers whose K and V can be moved to other positions: all that keep KV, or none."""
    if layout is not None:
        return layout.num_layers if layout.vectors == 2 and not layout.state_blocks else 0
    if not isinstance(cost, Analytic):
        return compile_cost(cost).num_layers
    model = cost.model
    moves = not (model.latent or model.state_bytes or model.window_elements)
    return (model.kv_layers or model.num_layers) if moves else 0


def _report_ns(config: Config, pipeline: int) -> int:
    """Interval of memory reports; 0 where nothing is lent, as by a pipeline group."""
    asks = config.lending.policy != "none" and pipeline == 1
    return max(1, int(config.lending.period_s * NS_PER_S)) if asks else 0


def _sequences(config: Config) -> Sequences:
    roles, most = config.roles, config.engine.max_sequences
    limits = [each.max_sequences or most for each in (roles.prefill, roles.decode, roles.mixed)]
    return Sequences(*limits)


def kv_memory_of(config: Config, role: Role, cost: Cost) -> int:
    """KV bytes on each machine of a role: as configured, else, on an accelerator, the memory that working memory and
    weights (attention nodes have none) leave. Raises ConfigError if that is unknown."""
    nodes = role_config(config, role)
    if nodes.kv_memory is not None:
        return nodes.kv_memory
    hardware = hardware_of(config, nodes)
    if "kv_memory" in config.engine.model_fields_set or hardware is None or hardware.name == "cpu":
        return config.engine.kv_memory
    if isinstance(cost, Analytic):
        tokens = cost.lent_capacity_tokens if role is Role.ATTENTION else cost.kv_capacity_tokens
        return tokens * cost.kv_token_bytes
    raise ConfigError(
        "engine.kv_memory: give it, for a cost curve does not say how much memory the weights leave"
    )


class _Sizes(msgspec.Struct, frozen=True):
    """Bytes on one machine, in a pipeline group on the one with the most layers. `state_bytes`: of a request's live
    recurrent state; `state_blocks`: filled by a snapshot of it."""

    block_size: int
    block_bytes: int
    state_bytes: int
    state_blocks: int

    @staticmethod
    def of(cost: Cost, block_size: int, layout: KVLayout | None, stages: int) -> _Sizes:
        model = compile_cost(cost)
        block_bytes, state_bytes = model.kv_token_bytes * block_size, model.state_bytes
        layers = model.num_layers
        if layout is not None:
            block_bytes, state_bytes, layers = layout.block_bytes, layout.state_bytes, layout.num_layers
        most = -(-layers // stages)
        own = [-(-num_bytes * most // layers) for num_bytes in (block_bytes, state_bytes)]
        return _Sizes(block_size, own[0], own[1], -(-state_bytes // block_bytes))


def _kv_blocks(config: Config, role: Role, cost: Cost, size: _Sizes, live: int) -> int:
    """Blocks that the KV memory of a node holds beside the states of `live` requests."""
    memory = kv_memory_of(config, role, cost)
    live_bytes = size.state_bytes * live
    num_blocks, least = (memory - live_bytes) // size.block_bytes, 2 + MAX_SNAPSHOTS * size.state_blocks
    if num_blocks < least:
        beside = f" beside the states of {live} sequences ({live_bytes} bytes)" if live_bytes else ""
        own = "kv_memory" in role_config(config, role).model_fields_set
        key = f"roles.{role.value}.kv_memory" if own else "engine.kv_memory"
        raise ConfigError(
            f"{key} {memory} bytes holds fewer than {least} blocks of {size.block_bytes} bytes{beside}; "
            f"give at least {live_bytes + least * size.block_bytes}"
        )
    if config.engine.kind == "emulated" and "kv_memory" not in config.engine.model_fields_set:
        return min(num_blocks, MAX_EMULATED_TOKENS // size.block_size)
    return num_blocks


def _cache_blocks(cache: CacheConfig, block_bytes: int) -> tuple[int, int]:
    """Blocks that a node's DRAM and SSD hold, none where no cache is configured."""
    if not cache.dram and not cache.ssd:
        return 0, 0
    dram, ssd = cache.dram // block_bytes, cache.ssd // block_bytes
    if dram < MIN_SLOTS:
        raise ConfigError(
            f"cache.dram: {cache.dram} bytes hold fewer than {MIN_SLOTS} blocks of {block_bytes} bytes; give "
            f"at least {MIN_SLOTS * block_bytes}"
        )
    if cache.ssd and not ssd:
        raise ConfigError(f"cache.ssd: {cache.ssd} bytes hold no block of {block_bytes} bytes; give more")
    return dram, ssd


def _check_one_model(nodes: list[NodeFacts]) -> None:
    """Raises ConfigError for clusters with KV of different sizes: KV moves between clusters."""
    first, *others = nodes
    cost = compile_cost(first.cost)
    for facts in others:
        other = compile_cost(facts.cost)
        for name in ("kv_token_bytes", "state_bytes"):
            if facts.cluster != first.cluster and getattr(other, name) != getattr(cost, name):
                raise ConfigError(
                    f"clusters: {name} is {getattr(cost, name)} in {first.cluster} and {getattr(other, name)} in "
                    f"{facts.cluster}; all clusters serve one model"
                )
