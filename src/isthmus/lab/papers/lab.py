"""Where tables are measured: finds the published traces, runs simulations, each only once."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from isthmus.core.cost import Coefficients, compile_cost
from isthmus.core.types import NS_PER_S
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.records import RequestRecord, RequestStatus, Result
from isthmus.lab.sim.report.curves import Bins, binned, decoding, prefill_nodes_at_work
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.summary import Summary, summarize
from isthmus.lab.sim.workloads import Replay, Workload, load


class Trace(StrEnum):
    """A published trace."""

    CONVERSATION = "conversation"
    TOOLAGENT = "tool & agent"
    SYNTHETIC = "synthetic"
    ARXIV = "arXiv"


FILES = {
    Trace.CONVERSATION: "conversation_trace.jsonl",
    Trace.TOOLAGENT: "toolagent_trace.jsonl",
    Trace.SYNTHETIC: "synthetic_trace.jsonl",
    Trace.ARXIV: "mooncake_trace.jsonl",
}
"""As the Mooncake repository names them."""


class Variant(msgspec.Struct, frozen=True):
    """How a trace is replayed. `one_token`: nothing is left to decode; `shared`: prompts keep their block ids."""

    trace: Trace
    speed: float = 1.0
    one_token: bool = False
    shared: bool = True


class Loads(msgspec.Struct, frozen=True):
    """While requests arrive, in bins of `LOAD_BIN_S`: prefill nodes at work, requests in decode batches."""

    prefill: list[float]
    decode: list[float]


LOAD_BIN_S = 5


def loads_of(result: Result) -> Loads:
    length_ns = LOAD_BIN_S * NS_PER_S
    num_bins = (result.records[-1].arrival_ns - result.start_ns) // length_ns
    bins = Bins(result.start_ns, length_ns, num_bins)
    return Loads(binned(prefill_nodes_at_work(result), bins).mean, binned(decoding(result), bins).mean)


class PaperOutcome(msgspec.Struct, frozen=True):
    """What the tables need of one simulation.

    `ttft_s`, `tbt_s`: of each completed request, in order of arrival; `prefill_s`: GPU time of each prefill that
    began, by the cost model, for the chunks of what was not cached; `fetch_s`: of each fetch from another node.
    """

    summary: Summary
    ttft_s: array[float]
    tbt_s: array[float]
    prefill_s: array[float]
    fetch_s: array[float]
    loads: Loads

    def within(self, ttft_s: float, tbt_s: float) -> float:
        """Share of all requests that completed with TTFT and TBT inside these limits."""
        good = sum(
            1 for ttft, tbt in zip(self.ttft_s, self.tbt_s, strict=True) if ttft <= ttft_s and tbt <= tbt_s
        )
        return good / self.summary.requests


class Lab:
    """`folder` holds the traces, None for none; `limit`: requests of each, for trials; `report` hears what runs."""

    def __init__(self, folder: Path | None, *, limit: int | None = None) -> None:
        self._folder, self._limit = folder, limit
        self.report: Callable[[str], object] = lambda what: None
        self._variants: dict[Variant, Workload] = {}
        self._outcomes: dict[tuple[Variant, Deployment], PaperOutcome] = {}

    def has(self, trace: Trace) -> bool:
        return self._folder is not None and (self._folder / FILES[trace]).is_file()

    def absence(self, trace: Trace) -> str:
        """Why there is no figure of ours."""
        if self._folder is None:
            return f"needs {FILES[trace]}: name its folder with --traces"
        return f"no {FILES[trace]} in {self._folder}"

    def workload(self, variant: Variant) -> Workload:
        """The trace, which must be there, as this variant replays it. Raises ConfigError for a bad line."""
        found = self._variants.get(variant)
        if found is None:
            assert self._folder is not None
            replay = Replay(speed=variant.speed, limit=self._limit)
            found = _changed(load(self._folder / FILES[variant.trace], replay), variant)
            self._variants[variant] = found
        return found

    def run(self, variant: Variant, deployment: Deployment, what: str) -> PaperOutcome:
        """The trace on the deployment; the same pair is simulated once."""
        key = (variant, deployment)
        found = self._outcomes.get(key)
        if found is None:
            self.report(f"{what}, {variant.trace} trace")
            result = Simulation(deployment, self.workload(variant)).run()
            found = self._outcomes[key] = _outcome(result, deployment)
        return found


def _changed(workload: Workload, variant: Variant) -> Workload:
    requests = workload.requests
    if variant.one_token:
        requests = [msgspec.structs.replace(each, output_tokens=1) for each in requests]
    if not variant.shared:
        requests = [msgspec.structs.replace(each, blocks=()) for each in requests]
    return msgspec.structs.replace(workload, requests=requests)


def _outcome(result: Result, deployment: Deployment) -> PaperOutcome:
    costs = [compile_cost(facts.cost) for facts in deployment.nodes]
    budget = deployment.nodes[0].token_budget
    completed = [each for each in result.records if each.status is RequestStatus.COMPLETED]

    def prefill_s(record: RequestRecord) -> float:
        starts = range(record.cached_tokens, record.request.num_tokens, budget)
        chunks = [(min(budget, record.request.num_tokens - start), start) for start in starts]
        return sum(costs[record.prefill].prefill_ns(*chunk) for chunk in chunks) / NS_PER_S

    return PaperOutcome(
        summary=summarize(result),
        ttft_s=array("d", ((each.first_token_ns - each.arrival_ns) / NS_PER_S for each in completed)),
        tbt_s=array("d", (each.tbt_ns / NS_PER_S for each in completed)),
        prefill_s=array("d", (prefill_s(each) for each in result.records if each.prefill_start_ns >= 0)),
        fetch_s=array("d", (each.fetch_ns / NS_PER_S for each in result.records if each.fetch_ns)),
        loads=loads_of(result),
    )


# What systems are taken to reach of their hardware, where a paper does not say: the same for all of them.


ROOFLINE = Coefficients(
    matmul=0.6,
    weight_read=0.8,
    kv_read=0.8,
    link=1.0,
    layer_s=0.0,
    sequence_s=0.0,
    allreduce_s=0.0,
    step_s=0.0,
    origin="60 % of the peak, 80 % of the bandwidth, no overhead; chosen once, for all systems",
)
