"""One request's way through the cluster, phase by phase."""

from __future__ import annotations

from typing import NamedTuple

from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S
from isthmus.lab.sim.records import RequestRecord, RequestStatus, Result
from isthmus.lab.sim.report.words import percent, seconds
from isthmus.lab.sim.spread import nearest_rank


class GanttPhase(NamedTuple):
    name: str
    start_ns: int
    end_ns: int


def chosen(result: Result, index: int | None) -> list[tuple[str, RequestRecord]]:
    """Requests worth a look and why: the one asked for, else median and worst TTFT of those completed.

    Raises ConfigError if there is no request `index`.
    """
    if index is not None:
        found = next((each for each in result.records if each.index == index), None)
        if found is None:
            count = len(result.records)
            raise ConfigError(f"report: there is no request {index}; the workload has {count}, counted from 0")
        return [("As asked for", found)]
    completed = [each for each in result.records if each.status is RequestStatus.COMPLETED]
    if not completed:
        return []
    completed.sort(key=lambda each: (each.first_token_ns - each.arrival_ns, each.index))
    ranked = range(len(completed))
    return [
        ("Median time to first token", completed[nearest_rank(ranked, 50)]),
        ("Worst time to first token", completed[-1]),
    ]


def phases(record: RequestRecord, end_ns: int) -> list[GanttPhase]:
    """What a request went through, one phase where the one before ended. `end_ns`: of the simulation.

    From the start of its prefill to its first token, what was not node time of this prefill went into loading
    and fetching KV and into other requests' chunks. How the two alternate is not recorded: it is drawn first.
    """
    stations = [
        ("wait for prefill", record.prefill_start_ns),
        ("load, fetch, others", _computing_from(record)),
        ("prefill", record.first_token_ns),
        ("hand-over", record.landed_ns),
        ("wait for the batch", record.joined_ns),
        ("decode", record.end_ns),
    ]
    found: list[GanttPhase] = []
    start_ns = record.arrival_ns
    for name, reached_ns in stations:
        if reached_ns < 0 and name == "hand-over" and record.joined_ns >= 0:
            continue  # prefilled where it decodes: nothing was handed over
        if reached_ns < 0:
            stop_ns = record.end_ns if record.end_ns >= 0 else end_ns
            return [*found, GanttPhase(name, start_ns, max(start_ns, stop_ns))]
        found.append(GanttPhase(name, start_ns, max(start_ns, reached_ns)))
        start_ns = max(start_ns, reached_ns)
    return found


def _computing_from(record: RequestRecord) -> int:
    if record.first_token_ns < 0:
        return record.prefill_start_ns
    return max(record.prefill_start_ns, record.first_token_ns - record.prefill_ns)


def describe(record: RequestRecord, result: Result) -> str:
    """What the request was and how it went, in a sentence or two."""
    request = record.request
    words = [f"Request {record.index}: {request.num_tokens:,} tokens in, {request.output_tokens:,} out"]
    if record.prefill_start_ns >= 0:
        words.append(f"{percent(record.cached_tokens / request.num_tokens)} of the prompt cached")
        words.append(f"prefilled on {_node(result, record.prefill)}")
    if record.joined_ns >= 0:
        words.append(f"decoded on {_node(result, record.decode)}")
    if record.first_token_ns >= 0:
        words.append(f"first token after {seconds((record.first_token_ns - record.arrival_ns) / NS_PER_S)}")
    if record.status is RequestStatus.COMPLETED and record.tbt_ns:
        words.append(f"TBT {seconds(record.tbt_ns / NS_PER_S)}")
    ending = f"refused at {record.stage}" if record.status is RequestStatus.REFUSED else record.status.value
    return f"{', '.join(words)}; {ending}."


def _node(result: Result, index: int) -> str:
    return result.nodes[index].node if 0 <= index < len(result.nodes) else f"node {index}"
