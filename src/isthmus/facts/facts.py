"""What one node is, whoever runs it: a process of the live cluster or an object of the simulator."""

from __future__ import annotations

import msgspec

from isthmus.core.conductor import NodeJoined, Paths
from isthmus.core.cost import Cost, compile_cost
from isthmus.core.node import TRANSFER_NS, Node
from isthmus.core.scheduler import (
    BlockPool,
    Chunking,
    CountingPool,
    Scheduler,
    SchedulerLimits,
    TbtTarget,
    TierCache,
)
from isthmus.core.types import NodeId, Role

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
