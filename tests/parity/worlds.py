"""One workload through both drivers of the conductor: the live cluster in virtual time, and the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from isthmus.cluster.recorder import Entry
from isthmus.cluster.virtual import VirtualCluster, VirtualRequest
from isthmus.conductor import Action, Event
from isthmus.config import Config
from isthmus.cost import Cost, compile_cost
from isthmus.deploy import Rates
from isthmus.scheduler import Limits
from isthmus.sim.deployment import Deployment, deployment_of
from isthmus.sim.workloads import Request, Workload
from isthmus.sim.world import World
from isthmus.types import Role

AT_ONCE = 1 << 62
"""Bytes per second: messages and KV take no time, as between the live cluster's nodes in one event loop."""


def live_log(config: Config, costs: Mapping[Role, Cost], requests: Sequence[VirtualRequest]) -> list[Entry]:
    """Every event of the conductor and its answer, from the live cluster."""
    return VirtualCluster(config, costs).run(requests).log


def simulated_log(
    config: Config, costs: Mapping[Role, Cost], requests: Sequence[VirtualRequest]
) -> list[Entry]:
    """The same from the simulator."""
    log: list[Entry] = []

    def hear(now: int, event: Event, actions: list[Action]) -> None:
        log.append(Entry(now, event, tuple(actions)))

    World(_deployment(config, costs), _workload(config, costs, requests), log=hear, check=True).run()
    return log


def _deployment(config: Config, costs: Mapping[Role, Cost]) -> Deployment:
    """As configured, on links that take no time. A live scheduler plans so many iterations and chunks ahead:
    each run's end is rounded to nanoseconds, so the simulator's runs must be the same ones."""
    made = deployment_of(config, config.engine.block_size)
    limits = Limits(num_blocks=0, block_size=0)
    rates = Rates(AT_ONCE, 0, AT_ONCE, AT_ONCE, AT_ONCE)
    nodes = tuple(
        msgspec.structs.replace(
            spec,
            cost=costs[spec.role],
            kv_blocks=config.engine.kv_memory
            // (compile_cost(costs[spec.role]).kv_token_bytes * config.engine.block_size),
            rates=rates,
        )
        for spec in made.nodes
    )
    return msgspec.structs.replace(made, nodes=nodes, max_steps=limits.max_steps, max_chunks=limits.max_chunks)


def _workload(config: Config, costs: Mapping[Role, Cost], requests: Sequence[VirtualRequest]) -> Workload:
    names = VirtualCluster(config, costs).names
    made = [
        Request(
            arrival_ns=request.arrival_ns,
            num_tokens=len(request.tokens),
            output_tokens=request.output_tokens,
            blocks=names(request.tokens, request.salt),
            priority=request.priority,
            ttft_slo_ms=request.ttft_ms,
            tbt_slo_ms=request.tbt_ms,
        )
        for request in requests
    ]
    return Workload("parity", config.engine.block_size, made)
