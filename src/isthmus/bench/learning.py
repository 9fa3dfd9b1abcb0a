"""Learns the speed of servers from a flight recording of the router before them.

Each server is simulated with the requests that it was sent, at the times when it was sent them, and the curve is
searched with which the simulator gives the times that were recorded. So what is learnt is what the simulator needs, be
it the engine's or its HTTP's. A server counts as a mixed node whose cache holds what the router believed; prompts
are as long as the recording says, by bytes or by tokens.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from isthmus.bench.guess import Answer, guessed
from isthmus.config import load_config
from isthmus.core.conductor import (
    Action,
    Event,
    FirstToken,
    NodeJoined,
    RequestArrived,
    RequestEnded,
    Route,
    Rules,
)
from isthmus.core.cost import Curve, to_mapping
from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S, BlockName, NodeId, RequestId, Role
from isthmus.facts import own_names
from isthmus.facts.reading import TRANSIT
from isthmus.lab.sim.deployment import deployment_of
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.spread import spread
from isthmus.lab.sim.workloads import Request, Workload
from isthmus.live.cluster.recorder import read

MAX_LEARNT = 600
"""Requests that are learnt from, from the start of the recording on: caches are empty then."""
MIN_LEARNT = 20
"""Streamed answers that make a fit."""
TOKEN_BUDGET, MAX_SEQUENCES = 2048, 256
"""Of an iteration of a server, as by vLLM's defaults: no server tells its own."""
NO_GBPS = 8e-9
"""A byte a second between servers, which send each other no KV."""
FACTORS = (1.5, 1.2, 1.1, 1.05)
"""By which a part is tried larger and smaller, one after another."""
MAX_MOVES = 12
"""Rounds of the search for each factor."""


class _Line(msgspec.Struct, frozen=True):
    at_ns: int
    event: Event
    actions: tuple[Action, ...]


class Served(msgspec.Struct, frozen=True):
    """A request that ended, as it was recorded. `node`: that answered; `num_computed`: prompt tokens believed not to be
    cached; `tbt_ns`: 0 where nobody measured, and then `ttft_ns` is what the router presumed.

    An answer that broke off and was continued elsewhere counts as the first server's, until it broke off, and as not
    measured: its tokens came of several servers."""

    node: NodeId
    request: Request
    num_computed: int
    ttft_ns: int
    decode_ns: int
    tbt_ns: int


class Recorded(msgspec.Struct, frozen=True):
    """A recording of servers. `servers`: as they joined first; `served`: in order of arrival."""

    name: str
    rules: Rules
    servers: dict[NodeId, NodeJoined]
    served: tuple[Served, ...]

    @property
    def measured(self) -> list[Served]:
        return [each for each in self.served if each.tbt_ns]


def recorded(path: Path) -> Recorded:
    """Reads a recording of `isthmus route`. Raises ConfigError for what is none."""
    header, lines = read(path)
    if header.rules is None:
        raise ConfigError(f"{path}: a recording of a node; take the router's own")
    reading, decode = _Reading(), msgspec.json.Decoder(_Line).decode
    for number, text in enumerate(lines, start=2):
        try:
            reading.take(decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{number}: no line of a recording: {error}") from None
    if not reading.servers:
        raise ConfigError(f"{path}: no server joined in this recording")
    if any(joined.cost is not None for joined in reading.servers.values()):
        raise ConfigError(
            f"{path}: not of `isthmus route`: these nodes say themselves what work costs; give the --config "
            "that they were started with"
        )
    found = sorted(reading.served, key=lambda each: each.request.arrival_ns)
    return Recorded(path.stem, header.rules, reading.servers, tuple(found))


class _Begun(msgspec.Struct):
    """The latest attempt at a request, or the first that gave a token. `first_ns`: of its first token; `broke_ns`: when
    another one went on, 0 if none did."""

    routed_ns: int
    route: Route
    first_ns: int = 0
    gave_tokens: bool = False
    broke_ns: int = 0


class _Reading:
    """The events of a recording read so far."""

    def __init__(self) -> None:
        self.servers: dict[NodeId, NodeJoined] = {}
        self.served: list[Served] = []
        self._numbers = count()
        self._ids: defaultdict[BlockName, int] = defaultdict(self._numbers.__next__)
        self._arrived: dict[RequestId, RequestArrived] = {}
        self._begun: dict[RequestId, _Begun] = {}
        self._start_ns = 0

    def take(self, line: _Line) -> None:
        match line.event:
            case NodeJoined() as joined:
                self.servers.setdefault(joined.node, joined)
            case RequestArrived() as arrived:
                self._start_ns = self._start_ns or line.at_ns
                self._arrived[arrived.request] = arrived
            case FirstToken() as first:
                begun = self._begun.get(first.request)
                if begun is not None and first.attempt == begun.route.attempt:
                    begun.first_ns, begun.gave_tokens = line.at_ns, not first.presumed
            case RequestEnded() as ended:
                self._ended(ended, line.at_ns)
        for action in line.actions:
            if isinstance(action, Route):
                self._route(action, line.at_ns)

    def _route(self, route: Route, now: int) -> None:
        begun = self._begun.get(route.request)
        if begun is None or not begun.gave_tokens:
            self._begun[route.request] = _Begun(now, route)
        elif not begun.broke_ns:
            begun.broke_ns = now

    def _ended(self, ended: RequestEnded, now: int) -> None:
        arrived, begun = self._arrived.pop(ended.request), self._begun.pop(ended.request)
        route, routed_ns, first_ns = begun.route, begun.routed_ns, begun.first_ns
        end_ns, tbt_ns = (begun.broke_ns, 0) if begun.broke_ns else (now, ended.tbt_ns)
        joined = self.servers[route.prefill]
        num_computed = max(1, arrived.num_tokens - route.num_cached * joined.block_size)
        blocks = [self._ids[name] for name in arrived.names]
        if arrived.num_tokens % joined.block_size:
            blocks.append(next(self._numbers))
        request = Request(
            routed_ns - self._start_ns,
            arrived.num_tokens,
            max(1, ended.num_generated),
            tuple(blocks),
            arrived.tenant,
        )
        self.served.append(
            Served(route.prefill, request, num_computed, first_ns - routed_ns, end_ns - first_ns, tbt_ns)
        )


def deployment(found: Recorded, curve: Curve) -> dict[str, Any]:
    """The servers of a recording as the values of a deployment file, with the rules by which they were routed to, but
    for a policy of somebody's own. A token of KV counts as one byte."""
    joined, rules = list(found.servers.values()), found.rules
    size, num_blocks = joined[0].block_size, min(each.cache_blocks for each in joined)
    values: dict[str, Any] = {"roles": {"mixed": len(joined)}}
    if not own_names(rules):
        values["policy"] = {"name": rules.policy, **dict(rules.policy_parameters)}
    values["scheduling"] = {"admission": {"name": rules.admission, **dict(rules.admission_parameters)}}
    slo = {"ttft_ms": rules.ttft_ms, "tbt_ms": rules.tbt_ms}
    values["slo"] = {name: limit for name, limit in slo.items() if limit is not None}
    cost = {name: value for name, value in to_mapping(curve).items() if value and name != "handling"}
    values["engine"] = {
        "block_size": size,
        "kv_memory": size * num_blocks,
        "token_budget": TOKEN_BUDGET,
        "max_sequences": MAX_SEQUENCES,
        "cost": cost,
    }
    values["cache"] = {"dram": -(-size * num_blocks * TRANSIT // (TRANSIT - 1))}
    values["network"] = {"node_gbps": NO_GBPS}
    values["limits"] = {"max_requests": rules.max_requests}
    return values


class Learnt(msgspec.Struct, frozen=True):
    """What a recording taught. `errors`: relative, by name of figure, of the simulated servers with their recorded
    requests; `num_requests`: streamed answers that were learnt from."""

    curve: Curve
    errors: dict[str, float]
    num_requests: int


def learn(found: Recorded) -> Learnt:
    """Searches the curve with which the simulated servers take the recorded times. Raises ConfigError for a recording
    with too few streamed answers, or of servers that each do a part of the work."""
    if any(joined.role is not Role.MIXED for joined in found.servers.values()):
        raise ConfigError(
            f"{found.name}: a recording of servers with --prefill or --decode is not learnt from yet"
        )
    served = found.served[:MAX_LEARNT]
    num_measured = sum(1 for each in served if each.tbt_ns)
    if num_measured < MIN_LEARNT:
        raise ConfigError(
            f"{found.name}: {num_measured} streamed answers ended in this recording; {MIN_LEARNT} or more teach "
            "what the servers take"
        )
    servers = _Servers(found, served)
    parts = searched(lambda parts: servers.loss(_curve(parts)), servers.guessed())
    curve = msgspec.structs.replace(
        _curve(parts),
        origin=f"learnt from {num_measured} answers in {found.name}",
        measured_tokens=max(each.request.num_tokens + each.request.output_tokens for each in served),
    )
    return Learnt(curve, servers.errors(curve), num_measured)


def predicted(found: Recorded, curve: Curve) -> dict[str, float]:
    """Relative errors, as in `Learnt`, of servers of this curve with the requests of a recording."""
    return _Servers(found, found.served).errors(curve)


def _curve(parts: Mapping[str, float]) -> Curve:
    return msgspec.structs.replace(_ANY, **parts)


def searched(loss: Callable[[Mapping[str, float]], float], start: Mapping[str, float]) -> dict[str, float]:
    """Returns the positive values of least loss that a pattern search finds (Hooke and Jeeves, 1961): each value is
    tried larger and smaller by a factor, and a round that helped is repeated as a whole. The search needs no
    derivatives: in a queue a small change can move a request to another iteration."""
    best = dict(start)
    least = loss(best)
    for factor in FACTORS:
        for _ in range(MAX_MOVES):
            before, was = dict(best), least
            for name in best:
                for tried in (best[name] * factor, best[name] / factor):
                    trial = {**best, name: tried}
                    if (found := loss(trial)) < least:
                        best, least = trial, found
                        break
            if was - least <= 1e-4 * was:
                break
            onward = {name: best[name] ** 2 / before[name] for name in best}
            if (found := loss(onward)) < least:
                best, least = onward, found
    return best


_ANY = Curve(kv_token_bytes=1, num_layers=1, prefill_token_s=1.0)
Times = tuple[Served, int, int, float]
"""A request as recorded, and simulated its TTFT, its time of decoding and its TBT in ns."""


class _Servers:
    """Recorded servers in virtual time, each with its own requests."""

    def __init__(self, found: Recorded, served: Sequence[Served]) -> None:
        self._parts: list[tuple[list[Served], Workload]] = []
        for node in found.servers:
            mine = [each for each in served if each.node == node]
            if mine:
                size = found.servers[node].block_size
                self._parts.append((mine, Workload(found.name, size, [each.request for each in mine])))
        alone = {**deployment(found, _ANY), "roles": {"mixed": 1}, "policy": "least_loaded"}
        alone["scheduling"], alone["limits"] = {}, {"max_requests": len(served)}
        self._deployment = deployment_of(load_config(None, alone), self._parts[0][1].block_size)

    def guessed(self) -> dict[str, float]:
        """Returns a first guess of what is learnt."""
        return guessed([[_answer(each) for each in served] for served, _ in self._parts])

    def times(self, curve: Curve) -> list[Times]:
        """Of the streamed answers."""
        (facts,) = self._deployment.nodes
        facts = msgspec.structs.replace(facts, cost=curve)
        deployed = msgspec.structs.replace(self._deployment, nodes=(facts,))
        found = []
        for served, workload in self._parts:
            result = Simulation(deployed, workload).run()
            for each, record in zip(served, result.records, strict=True):
                if each.tbt_ns and record.end_ns >= 0:
                    first_ns = record.first_token_ns
                    found.append((each, first_ns - record.arrival_ns, record.end_ns - first_ns, record.tbt_ns))
        return found

    def loss(self, curve: Curve) -> float:
        """Mean of the logarithms of simulated over recorded times, without their signs: of all requests, and of what is
        read of them."""
        times = self.times(curve)
        pairs: list[tuple[float, int]] = [(ttft_ns, each.ttft_ns) for each, ttft_ns, _, _ in times]
        pairs += [(decode_ns, each.decode_ns) for each, _, decode_ns, _ in times]
        pairs += [(tbt_ns, each.tbt_ns) for each, _, _, tbt_ns in times]
        whole = [abs(math.log1p(error)) for error in _errors(times).values()]
        return statistics.fmean([_apart(*pair) for pair in pairs]) + statistics.fmean(whole)

    def errors(self, curve: Curve) -> dict[str, float]:
        return _errors(self.times(curve))


def _answer(served: Served) -> Answer:
    request, sent_s = served.request, served.request.arrival_ns / NS_PER_S
    first_s = sent_s + served.ttft_ns / NS_PER_S
    end_s = first_s + served.decode_ns / NS_PER_S
    return Answer(
        sent_s,
        first_s,
        end_s,
        request.num_tokens,
        served.num_computed,
        request.output_tokens,
        served.tbt_ns > 0,
    )


def _apart(simulated: float, measured: float) -> float:
    return abs(math.log(max(1, simulated) / max(1, measured)))


def _errors(times: Sequence[Times]) -> dict[str, float]:
    """Relative errors of figures."""
    found = dict[str, float]()
    for name, measured, simulated in (
        ("TTFT", [each.ttft_ns for each, *_ in times], [ttft_ns for _, ttft_ns, _, _ in times]),
        ("TBT", [each.tbt_ns for each, *_ in times], [tbt_ns for *_, tbt_ns in times]),
    ):
        was, now = spread(measured), spread(simulated)
        assert was is not None and now is not None
        found |= {f"{name} mean": now.mean / was.mean - 1, f"{name} P90": now.p90 / was.p90 - 1}
    return found
