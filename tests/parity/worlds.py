"""One workload through both drivers of conductor and nodes: the live cluster in virtual time, and the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec

from isthmus.config import Config
from isthmus.core.attempts import MemoryUsed, PrefillFinished, RequestFailed
from isthmus.core.conductor import Action, Event, Fail, Hold, HoldExpired, LinksMeasured
from isthmus.core.cost import Cost
from isthmus.core.types import Role
from isthmus.facts import nodes_of
from isthmus.lab.sim.deployment import Deployment, deployment_of
from isthmus.lab.sim.faults import Faults
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import Request, Workload
from tests.tape import Entry
from tests.virtual import Flight, VirtualCluster, VirtualRequest
from tests.virtual.carried import Transfer

from .books import Books

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


def simulated(
    config: Config, deployment: Deployment, requests: Sequence[VirtualRequest]
) -> tuple[list[Entry], dict[Transfer, int]]:
    """The same from the simulator: events and answers, and bytes of KV that came from node to node."""
    log: list[Entry] = []

    def hear(now: int, event: Event, actions: list[Action]) -> None:
        log.append(Entry(now, event, tuple(actions)))

    simulation = Simulation(deployment, _workload(config, deployment, requests), log=hear, check=True)
    books = Books()
    with books.kept(simulation):
        simulation.run()
    return log, books.bytes_moved


def same_worlds(config: Config, deployment: Deployment, requests: Sequence[VirtualRequest]) -> Flight:
    """The live flight, whose log and whose transfers the simulator's are. Logs are compared entry by entry, so that a
    failure shows the first that differs."""
    flight = live(config, deployment, requests)
    log, bytes_moved = simulated(config, deployment, requests)
    ours, theirs = until_over(flight.log), until_over(log)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        same = _wordless(one) == _wordless(other)
        assert same, f"entry {number} of {len(ours)} live and {len(theirs)} simulated ones differs"
    assert len(ours) == len(theirs)
    moved, booked = set(flight.bytes_moved.items()), set(bytes_moved.items())
    assert not moved ^ booked, f"live {sorted(moved - booked)}, simulated {sorted(booked - moved)}"
    landed = [entry for entry in ours if isinstance(entry.event, PrefillFinished)]
    assert len([transfer for transfer in bytes_moved if transfer.purpose == "handover"]) >= len(landed)
    return flight


def _wordless(entry: Entry) -> Entry:
    """Without the words in which a failure is told: a session knows addresses."""
    event, actions = entry.event, entry.actions
    if isinstance(event, RequestFailed):
        event = msgspec.structs.replace(event, reason="")
    actions = tuple(
        [
            msgspec.structs.replace(each, reason="") if isinstance(each, Fail | Hold) else each
            for each in actions
        ]
    )
    return Entry(entry.at_ns, event, actions)


def until_over(log: Sequence[Entry]) -> list[Entry]:
    """Without what was measured or is in use, and which waits were up, after the last request had ended; and without
    failures of attempts that were over by then: both of its nodes may tell of one, and one of them may hear first that
    it is."""
    log = [entry for entry in log if not isinstance(entry.event, RequestFailed) or entry.actions]
    last = max(
        (
            at
            for at, entry in enumerate(log)
            if not isinstance(entry.event, LinksMeasured | MemoryUsed | HoldExpired)
        ),
        default=-1,
    )
    kept: list[Entry] = []
    for told, group in groupby(log[: last + 1], _is_told):
        entries = list(group)
        if told is not None:  # in whatever order their timers were set
            entries.sort(key=lambda entry: entry.event.node)  # type: ignore[union-attr]
        kept += entries
    return kept


def _is_told(entry: Entry) -> int | None:
    """Of entries in which nodes say alone what their memory is used for: when."""
    return entry.at_ns if isinstance(entry.event, MemoryUsed) and not entry.actions else None


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
                content=cluster.content(request),
                answer=cluster.names(tokens, request.salt)[len(names) : full],
            )
        )
    return Workload("parity", size, made)
