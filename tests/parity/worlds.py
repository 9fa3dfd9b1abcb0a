"""One workload through both drivers of the conductor: the live cluster in virtual time, and the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from isthmus.cluster.recorder import Entry
from isthmus.cluster.virtual import AT_ONCE, VirtualCluster, VirtualRequest
from isthmus.conductor import Action, Event
from isthmus.config import Config
from isthmus.cost import Cost
from isthmus.deploy import nodes_of
from isthmus.sim.deployment import Deployment, deployment_of
from isthmus.sim.workloads import Request, Workload
from isthmus.sim.world import World
from isthmus.types import Role


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
    size = config.engine.block_size
    nodes = [msgspec.structs.replace(facts, rates=AT_ONCE) for facts in nodes_of(config, size, costs=costs)]
    return msgspec.structs.replace(deployment_of(config, size), nodes=tuple(nodes))


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
