"""One workload through both drivers of conductor and nodes: the live cluster in virtual time, and the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from isthmus.attempts import MemoryUsed
from isthmus.conductor import Action, Event, HoldExpired, LinksMeasured
from isthmus.config import Config
from isthmus.cost import Cost
from isthmus.deploy import nodes_of
from isthmus.sim.deployment import Deployment, deployment_of
from isthmus.sim.faults import Faults
from isthmus.sim.simulation import Simulation
from isthmus.sim.workloads import Request, Workload
from isthmus.types import Role
from tests.tape import Entry
from tests.virtual import Flight, VirtualCluster, VirtualRequest

NO_FAULTS = Faults()


def deployed(config: Config, costs: Mapping[Role, Cost] | None, faults: Faults = NO_FAULTS) -> Deployment:
    """As configured. A live scheduler plans so many iterations and chunks ahead: each run's end is rounded to
    nanoseconds, so the simulator's runs must be the same ones."""
    size = config.engine.block_size
    return msgspec.structs.replace(
        deployment_of(config, size), nodes=nodes_of(config, size, costs=costs), faults=faults
    )


def live(config: Config, deployment: Deployment, requests: Sequence[VirtualRequest]) -> Flight:
    """Every event of the conductor and its answer, from the live cluster, and what clients got."""
    return VirtualCluster(config, deployment).run(requests)


def simulated(config: Config, deployment: Deployment, requests: Sequence[VirtualRequest]) -> list[Entry]:
    """The same from the simulator."""
    log: list[Entry] = []

    def hear(now: int, event: Event, actions: list[Action]) -> None:
        log.append(Entry(now, event, tuple(actions)))

    Simulation(deployment, _workload(config, deployment, requests), log=hear, check=True).run()
    return log


def until_over(log: Sequence[Entry]) -> list[Entry]:
    """Without what was measured or is in use, and which waits were up, after the last request had ended."""
    last = max(
        (
            at
            for at, entry in enumerate(log)
            if not isinstance(entry.event, LinksMeasured | MemoryUsed | HoldExpired)
        ),
        default=-1,
    )
    return list(log[: last + 1])


def _workload(config: Config, deployment: Deployment, requests: Sequence[VirtualRequest]) -> Workload:
    cluster, size = VirtualCluster(config, deployment), config.engine.block_size
    made = []
    for request in requests:
        scored = request.sampling.prompt_logprobs is not None
        names = () if scored else cluster.names(request.tokens, request.salt)
        tokens = (*request.tokens, *cluster.answer(request))
        full = (len(tokens) - 1) // size  # the last token has no KV
        made.append(
            Request(
                arrival_ns=request.arrival_ns,
                num_tokens=len(request.tokens),
                output_tokens=request.output_tokens,
                blocks=names,
                tenant=request.tenant,
                priority=request.priority,
                ttft_slo_ms=request.ttft_ms,
                tbt_slo_ms=request.tbt_ms,
                answer=cluster.names(tokens, request.salt)[len(names) : full],
            )
        )
    return Workload("parity", size, made)
