"""What work costs on a node, and what it runs on: curves, hardware and the model's own facts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from isthmus.config import Config, RoleConfig
from isthmus.core.conductor import NodeJoined, Paths
from isthmus.core.cost import (
    HARDWARE,
    Analytic,
    Cost,
    Hardware,
    compile_cost,
    curve_of,
    engine_coefficients,
    facts_of,
    hardware_named,
)
from isthmus.core.errors import ConfigError
from isthmus.core.node import TRANSFER_NS, Node
from isthmus.core.scheduler import (
    CPU_TILE,
    TILE,
    BlockPool,
    Chunking,
    CountingPool,
    Scheduler,
    SchedulerLimits,
    TbtTarget,
    TierCache,
)
from isthmus.core.types import NodeId, Role
from isthmus.model_files import open_files
from isthmus.yaml_file import read_document

PROFILES = Path(__file__).parent.parent / "core" / "cost" / "profiles"
"""Published measurements that `engine.cost` may name."""
_COST_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_CODEC_DTYPES = {cost: codec for codec, cost in _COST_DTYPES.items()}


def hardware_of(config: Config, nodes: RoleConfig) -> Hardware | None:
    """What nodes of a role run on, if the configuration says. Raises ConfigError for an unknown name."""
    name = nodes.hardware or config.engine.hardware
    return None if name is None else hardware_named(name)


def chunking_of(config: Config, nodes: RoleConfig) -> Chunking:
    """How nodes of a role cut prompts."""
    scheduling, hardware = config.scheduling, hardware_of(config, nodes)
    on_gpu = hardware is not None and hardware.name != "cpu"
    return Chunking(
        scheduling.partial_prefills,
        config.slo.tbt_ms if scheduling.chunking == "tbt" else None,
        TILE if on_gpu else CPU_TILE,
    )


def gpus_of(config: Config, nodes: RoleConfig) -> int:
    return nodes.gpus or config.engine.gpus


def codec_dtype(cost: Cost, otherwise: str = "") -> str:
    """Of the KV that a cost model speaks of, as codecs name it; "" for what they do not take."""
    return _CODEC_DTYPES.get(cost.kv_dtype, "") if isinstance(cost, Analytic) else otherwise


def cost_of(config: Config, nodes: RoleConfig, model: Path | None) -> Cost:
    """What work takes on a node of a role: a measured curve where there is one, else the analytic model of the
    model's config.json (`model`: its folder, that file, or a GGUF file) on its hardware, this CPU when none is named.

    Raises ConfigError for a curve or hardware without a cost, and for the emulated engine without hardware; ModelError
    for a model without a cost.
    """
    engine = config.engine
    if engine.cost is not None:
        return curve_of(_curve_values(engine.cost))
    if engine.kind == "emulated" and hardware_of(config, nodes) is None:
        raise ConfigError(
            "the emulated engine needs engine.hardware (--hardware), e.g. h200, or a curve in engine.cost; "
            f"hardware: {', '.join(HARDWARE)}"
        )
    if model is None:
        raise ConfigError("engine.cost or model: give one; without it nobody knows what work costs")
    hardware = hardware_of(config, nodes) or hardware_named("cpu")
    facts = facts_of(*_described(model))
    weight_dtype = _COST_DTYPES[engine.dtype] if engine.dtype else facts.weight_dtype
    kv_dtype = "fp32" if weight_dtype == "fp32" else "bf16"
    dtypes = {"weight_dtype": weight_dtype, "kv_dtype": kv_dtype}
    coefficients = engine_coefficients("vllm", hardware, **dtypes)
    return Analytic(
        model=facts, hardware=hardware, coefficients=coefficients, num_gpus=gpus_of(config, nodes), **dtypes
    )


def _described(model: Path) -> tuple[Mapping[str, Any], str]:
    """The config.json of a model, and how messages name it."""
    if not model.is_dir() and model.suffix != ".gguf":
        return read_document(model).values, str(model)
    files = open_files(model)
    return files.required_object("config.json"), files.where("config.json")


def is_shipped(name: str) -> bool:
    """Whether a published profile has this name."""
    return (PROFILES / f"{name}.yaml").is_file()


def _curve_values(given: str | dict[str, Any]) -> Mapping[str, Any]:
    if isinstance(given, str):
        path = PROFILES / f"{given}.yaml" if is_shipped(given) else Path(given).expanduser()
        if not path.exists():
            names = sorted(each.stem for each in PROFILES.glob("*.yaml"))
            near = difflib.get_close_matches(path.name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{path}: cannot be read: no such file, and no published profile{hint}")
        given = read_document(path).values
    return {key: value for key, value in given.items() if not str(key).startswith("x-")}


# What one node is, whoever runs it: a process of the live cluster or an object of the simulator.


UNLIMITED = 1 << 50
"""Bytes per second of a link that nobody asked to limit."""


class Rates(msgspec.Struct, frozen=True):
    """One node's links in bytes per second. `handover`: its own rail for prefill to decode, 0 shares `network`.

    `rtt_ns`: of a question to another node of its cluster and the answer, what does not depend on their size.
    """

    network: int = UNLIMITED
    handover: int = 0
    memory: int = UNLIMITED
    disk_read: int = UNLIMITED
    disk_write: int = UNLIMITED
    rtt_ns: int = 66_600


def bytes_per_s(gbps: float | None, otherwise: int) -> int:
    return otherwise if gbps is None else int(gbps * 1e9 / 8)


class Sequences(msgspec.Struct, frozen=True):
    """How many requests a node of each role computes, or hands over, at once."""

    prefill: int = 64
    decode: int = 64
    mixed: int = 64

    def of(self, role: Role) -> int:
        """Nodes of role attention compute none; the scheduler wants a limit above 0."""
        limit: int = getattr(self, role.value, 1)
        return limit


class NodeFacts(msgspec.Struct, frozen=True):
    """One node; a pipeline group, whose machines each have a range of layers, is one.

    `kv_blocks`: of its engine's memory, beside the recurrent states of `live_states` requests. `dram_blocks`,
    `ssd_blocks`: that its cache keeps; `transit_blocks`: of DRAM for blocks on their way: being written, fetched, lent.
    `state_blocks`: that the recurrent state of a sequence fills. `pipeline`: machines of the group. `cluster`: where it
    stands, "" if there is only one. `kv_dtype`: of its KV, for codecs; "" for what they do not take. `kv_heads`: into
    so many parts the KV of a token can be cut. `token_budget`, `prompt_batch`, `order`, `max_steps`, `max_chunks`: as
    in the scheduler's `SchedulerLimits`; the last for prefill alone. `report_ns`: how often it says at most what its
    memory is used for, 0 for never. `reuse_layers`: that keep KV, if prompts are assembled from others' KV, else 0.
    """

    node: NodeId
    role: Role
    cost: Cost
    kv_blocks: int
    block_size: int
    dram_blocks: int = 0
    ssd_blocks: int = 0
    rates: Rates = Rates()
    transit_blocks: int = 0
    state_blocks: int = 0
    live_states: int = 64
    pipeline: int = 1
    cluster: str = ""
    kv_dtype: str = ""
    kv_heads: int = 1
    chunking: Chunking = Chunking()
    token_budget: int = 512
    prompt_batch: int = 1 << 30
    sequences: Sequences = Sequences()
    order: str = "fcfs"
    max_steps: int = 16
    max_chunks: int = 1
    batches: int = 1
    report_ns: int = 0
    reuse_layers: int = 0

    @property
    def max_sequences(self) -> int:
        """In the role that it has."""
        return self.sequences.of(self.role)

    @property
    def cache_blocks(self) -> int:
        """That its cache keeps, 0 without one."""
        return self.dram_blocks + self.ssd_blocks

    @property
    def num_slots(self) -> int:
        """Blocks that its DRAM holds, kept or on their way."""
        return self.dram_blocks + self.transit_blocks

    @property
    def paths(self) -> Paths:
        """How fast KV moves to and from it. Only from prefill to decode where there is no cache; and a pipeline group
        shares its cache with nobody."""
        rates = self.rates
        rail = rates.handover or rates.network
        if not self.cache_blocks:
            return Paths(handover=rail, rtt_ns=rates.rtt_ns)
        disk = rates.disk_read if self.ssd_blocks else 0
        if self.pipeline > 1:
            return Paths(0, rates.memory, disk, rail, rates.rtt_ns)
        # A link that is limited is shared with what is fetched.
        own_rail = rates.handover if rates.network < UNLIMITED else rail
        return Paths(rates.network, rates.memory, disk, own_rail, rates.rtt_ns)

    @property
    def target(self) -> TbtTarget | None:
        """What its chunks keep, if they keep any limit."""
        return self.chunking.target(compile_cost(self.cost).step_ps)

    def limits(self, role: Role) -> SchedulerLimits:
        """What its scheduler may use in a role, which may change."""
        return SchedulerLimits(
            num_blocks=self.kv_blocks,
            block_size=self.block_size,
            token_budget=self.token_budget,
            prompt_batch=self.prompt_batch,
            partial_prefills=self.chunking.partial_prefills,
            max_sequences=self.sequences.of(role),
            max_steps=self.max_steps,
            max_chunks=self.max_chunks if role is Role.PREFILL else 1,
            order=self.order,
            state_blocks=self.state_blocks,
        )

    def tiers(self) -> TierCache | None:
        """Its cache, empty; None where it has none."""
        return TierCache(self.dram_blocks, self.ssd_blocks) if self.cache_blocks else None

    def joined(self) -> NodeJoined:
        """What the conductor hears of it."""
        return NodeJoined(
            self.node,
            self.role,
            capacity_tokens=self.limits(self.role).capacity_tokens,
            block_size=self.block_size,
            cost=self.cost,
            paths=self.paths,
            cache_blocks=self.cache_blocks,
            kv_dtype=self.kv_dtype,
            cluster=self.cluster,
            max_sequences=self.max_sequences,
            state_blocks=self.state_blocks,
            lends=self.pipeline == 1,
            kv_heads=self.kv_heads,
            reuse_layers=self.reuse_layers,
        )

    def node_of(
        self, pool: BlockPool | CountingPool, *, cached: bool = True, transfer_ns: int = TRANSFER_NS
    ) -> Node:
        """Who decides for it, at its start. `cached`: whether it keeps its cache, if it has one. `transfer_ns`: how
        long what is transferred may bring nothing."""
        tiers = self.tiers() if cached else None
        scheduler = Scheduler(self.limits(self.role), tiers, pool, self.target, self.node)
        limits = {role: self.limits(role) for role in Role}
        return Node(
            limits,
            scheduler,
            stages=self.pipeline,
            kv_heads=self.kv_heads,
            transfer_ns=transfer_ns,
            report_ns=self.report_ns,
        )
