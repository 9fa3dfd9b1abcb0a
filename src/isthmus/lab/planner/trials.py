"""Plans in the simulator, at stated fractions of the rate that the equations promise: queues, bursts, transfers.

Every plan gets the same requests in the same order, only closer together or further apart, so that differences are
the plans' own. From a distribution, lengths are its evenly spaced quantiles in random order: their mean is exact.

Run as a module it is a worker: told a `TrialSetup` and a `Course`, it answers a `Found`.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable
from pathlib import Path

import msgspec

from isthmus.config import Config
from isthmus.core.types import NS_PER_S
from isthmus.facts import clusters_of
from isthmus.facts.rules import make_known
from isthmus.lab.planner import answer as say
from isthmus.lab.planner.demand import Demand
from isthmus.lab.planner.fleet import deployed
from isthmus.lab.sim.deployment import Deployment, deployment_of
from isthmus.lab.sim.records import Result
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.spread import spread
from isthmus.lab.sim.summary import within_limits
from isthmus.lab.sim.workloads import Request, Workload
from isthmus.lab.sim.workloads.workload import PLAIN_BLOCK_SIZE
from isthmus.workers import Pool, Progress, Work, serve

FRACTIONS = (0.7, 0.8, 0.9)
"""Of a plan's rate by the exact equations."""
BURST_CV = 3.0
"""Coefficient of variation of the gaps between bursty arrivals; Poisson arrivals have 1."""
WARM_UP = 0.25
"""Share of the requests, from the first, that fill the fleet and are not counted."""
_PRECISION = 0.02
_SEED = 0
_HIGHEST, _LOWEST, _STEP = 1.5, 0.1, 0.1


class TrialSetup(msgspec.Struct, frozen=True):
    """What all courses share: the requests, and when they come, by kind of arrivals, one in a unit of time."""

    workload: Workload
    gaps: dict[str, list[float]]


class Course(msgspec.Struct, frozen=True):
    """One plan under one kind of arrivals, on its nodes. `goodput`: the share of requests that must be inside both
    limits for a rate to count as sustained, None where there are no limits."""

    plan: say.DeploymentPlan
    arrivals: str
    deployment: Deployment
    goodput: float | None


class Found(msgspec.Struct, frozen=True):
    """What came of a course."""

    trials: list[say.Trial]
    sustained: say.Sustained | None


class Trials:
    """`goodput`: the share of requests that must be inside both limits for a rate to count as sustained."""

    def __init__(
        self, config: Config, folder: Path, demand: Demand, *, num_requests: int, goodput: float
    ) -> None:
        self._config, self._folder, self._demand = config, folder, demand
        self._goodput = goodput
        workload = _requests(demand, num_requests, _block_size(config))
        count = len(workload.requests)
        gaps = {"Poisson": _gaps(count, 1.0)}
        if demand.workload is None:
            gaps["bursts"] = _gaps(count, BURST_CV)
        else:
            gaps["as traced"] = _own_gaps(workload)
        self._common = TrialSetup(workload, gaps)

    def of(self, found: say.PlanAnswer, progress: Progress | None, pool: Pool | None = None) -> say.PlanAnswer:
        """The answer with simulations of its plans and baselines; of those that are the same, only the first. `pool`:
        where they run, None runs one after the other here."""
        home = next(cluster.name for cluster in found.clusters if cluster.home)
        limited = self._config.slo.ttft_ms is not None or self._config.slo.tbt_ms is not None
        courses = [
            Course(plan, arrivals, self._deployment(plan, home), self._goodput if limited else None)
            for plan, _ in found.distinct()
            if plan.exact.rate
            for arrivals in self._common.gaps
        ]
        run = self._here(courses, progress) if pool is None else self._away(courses, progress, pool)
        trials = [trial for each in run for trial in each.trials]
        sustained = [each.sustained for each in run if each.sustained is not None]
        notes = [*found.notes, *self._notes(limited)]
        best = _best({plan.name for plan in [*found.plans, found.paper]}, sustained)
        num_requests = len(self._common.workload.requests)
        simulated = say.Simulated(self._goodput, num_requests, trials, sustained, best)
        return msgspec.structs.replace(found, simulated=simulated, notes=notes)

    def _here(self, courses: list[Course], progress: Progress | None) -> list[Found]:
        found = []
        for course in courses:
            found.append(_run(self._common, course))
            if progress is not None:
                progress(len(found), len(courses))
        return found

    def _away(self, courses: list[Course], progress: Progress | None, pool: Pool) -> list[Found]:
        shared = msgspec.msgpack.encode(self._common)
        works = [Work(shared, msgspec.msgpack.encode(course)) for course in courses]
        answers = pool.run("isthmus.lab.planner.trials", works, progress)
        return [msgspec.msgpack.decode(each, type=Found) for each in answers]

    def _deployment(self, plan: say.DeploymentPlan, home: str) -> Deployment:
        block_size = self._common.workload.block_size
        return deployment_of(deployed(self._config, plan, home), block_size, self._folder)

    def simulate(self, plan: say.DeploymentPlan, home: str, arrivals: str, rate: float) -> Result:
        """The requests at `rate` on the plan's nodes."""
        return _simulated(self._common, self._deployment(plan, home), arrivals, rate)

    def _notes(self, limited: bool) -> list[str]:
        notes, count = [], len(self._common.workload.requests)
        if not limited:
            notes.append("no slo.ttft_ms and no slo.tbt_ms: every completed request counts as goodput")
        if self._demand.workload is not None and count < len(self._demand.workload.requests):
            notes.append(
                f"simulated with the first {count:,} requests of the trace, on caches that are empty at first"
            )
        return notes


def _simulated(common: TrialSetup, deployment: Deployment, arrivals: str, rate: float) -> Result:
    times = [round(at * NS_PER_S / rate) for at in common.gaps[arrivals]]
    requests = [
        msgspec.structs.replace(request, arrival_ns=time)
        for request, time in zip(common.workload.requests, times, strict=True)
    ]
    return Simulation(deployment, Workload(common.workload.name, common.workload.block_size, requests)).run()


def _run(common: TrialSetup, course: Course) -> Found:
    rates = _Rates(common, course)
    trials = [rates.trial(fraction) for fraction in FRACTIONS]
    return Found(trials, None if course.goodput is None else _sustained(course, rates.highest(course.goodput)))


def _sustained(course: Course, fraction: float) -> say.Sustained:
    plan = course.plan
    rate = fraction * plan.exact.rate
    return say.Sustained(
        plan=plan.name,
        arrivals=course.arrivals,
        rate=rate,
        formula=plan.exact.rate,
        representative=plan.representative.rate,
        optimism=plan.exact.rate / rate if rate else None,
    )


class _Rates:
    """Of one course: each rate is simulated once."""

    def __init__(self, common: TrialSetup, course: Course) -> None:
        self._common, self._course = common, course
        self._seen: dict[float, say.Trial] = {}

    def trial(self, fraction: float) -> say.Trial:
        found = self._seen.get(fraction)
        if found is None:
            course = self._course
            rate = fraction * course.plan.exact.rate
            result = _simulated(self._common, course.deployment, course.arrivals, rate)
            found = self._seen[fraction] = _trial(course.plan, course.arrivals, fraction, rate, result)
        return found

    def highest(self, goodput: float) -> float:
        """The largest fraction that meets the target, 0 if none does down to `_LOWEST`. Goodput falls as the rate
        rises, so it lies between two that were tried."""
        good = [fraction for fraction in FRACTIONS if self.trial(fraction).goodput >= goodput]
        low = max(good, default=0.0)
        if low == FRACTIONS[-1]:
            while low < _HIGHEST and self.trial(_tenth(low + _STEP)).goodput >= goodput:
                low = _tenth(low + _STEP)
            high = _tenth(low + _STEP)
        elif low:
            high = _tenth(low + _STEP)
        else:
            high = FRACTIONS[0]
            while high > _LOWEST and self.trial(_tenth(high - _STEP)).goodput < goodput:
                high = _tenth(high - _STEP)
            low = _tenth(high - _STEP)
        while low and high - low > _PRECISION:
            middle = (low + high) / 2
            if self.trial(middle).goodput >= goodput:
                low = middle
            else:
                high = middle
        return low


def _best(names: Container[str], sustained: Iterable[say.Sustained]) -> str | None:
    """Of the plans so named, in the order of the simulations where they are equal."""
    lowest: dict[str, float] = {}
    for each in sustained:
        if each.plan in names:
            lowest[each.plan] = min(each.rate, lowest.get(each.plan, each.rate))
    return max(lowest, key=lambda name: lowest[name], default=None)


def _tenth(fraction: float) -> float:
    return round(fraction, 1)


def _trial(plan: say.DeploymentPlan, arrivals: str, fraction: float, rate: float, result: Result) -> say.Trial:
    records = result.records[int(WARM_UP * len(result.records)) :]
    remote = [
        each for each in records if each.prefill >= 0 and result.nodes[each.prefill].cluster in plan.remote
    ]
    started = [each for each in records if each.first_token_ns >= 0]
    crossed = sum(link.bytes_moved for link in result.links if link.kind == "cluster")
    span_ns = result.end_ns - result.start_ns
    return say.Trial(
        plan=plan.name,
        arrivals=arrivals,
        fraction=fraction,
        rate=rate,
        requests=len(result.records),
        goodput=sum(map(within_limits, records)) / len(records),
        offloaded=len(remote) / len(records),
        ttft=spread([each.first_token_ns - each.arrival_ns for each in started]),
        queue=spread([each.prefill_start_ns - each.arrival_ns for each in started]),
        prefill=spread([each.first_token_ns - each.prefill_start_ns for each in started]),
        transfer=spread([each.joined_ns - each.first_token_ns for each in started if each.joined_ns >= 0]),
        egress_gbps=8 * crossed / span_ns if span_ns else 0.0,
    )


def _block_size(config: Config) -> int:
    """Tokens a block where nothing is shared: that of live nodes if attention nodes hold what is full, for what a home
    keeps of each request is counted in blocks; else what makes fewer of them."""
    attending = any(cluster.config.roles.attention.count for cluster in clusters_of(config))
    return config.engine.block_size if attending else PLAIN_BLOCK_SIZE


def _requests(demand: Demand, count: int, block_size: int) -> Workload:
    """The first of a trace, or made from a distribution."""
    if demand.workload is not None:
        return msgspec.structs.replace(demand.workload, requests=demand.workload.requests[:count])
    lengths = [max(1, round(demand.lengths.quantile((index + 0.5) / count))) for index in range(count)]
    random.Random(_SEED).shuffle(lengths)
    output = max(1, round(demand.output_tokens))
    return Workload(demand.source, block_size, [Request(0, length, output) for length in lengths])


def _gaps(count: int, cv: float) -> list[float]:
    """Times of arrivals, one in a unit of time in the mean; gaps are gamma distributed, which with 1 is exponential."""
    rng, time, times = random.Random(_SEED), 0.0, []
    for _ in range(count):
        time += rng.gammavariate(cv**-2, cv**2)
        times.append(time)
    return [each * count / time for each in times]


def _own_gaps(workload: Workload) -> list[float]:
    """The trace's own arrivals, with that mean."""
    first = workload.requests[0].arrival_ns
    span = max(1, workload.requests[-1].arrival_ns - first)
    return [(each.arrival_ns - first) * len(workload.requests) / span for each in workload.requests]


def answer(shared: bytes, own: bytes) -> bytes:
    course = msgspec.msgpack.decode(own, type=Course)
    make_known(course.deployment.rules)
    return msgspec.msgpack.encode(_run(msgspec.msgpack.decode(shared, type=TrialSetup), course))


if __name__ == "__main__":
    serve(answer)
