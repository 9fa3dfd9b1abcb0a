"""One entry for every source of requests."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.core.errors import ConfigError
from isthmus.lab.sim.workloads import azure, mooncake, record
from isthmus.lab.sim.workloads.generators import ARRIVALS, generate, is_spec
from isthmus.lab.sim.workloads.lines import read_lines
from isthmus.lab.sim.workloads.workload import AS_IT_STANDS, Replay, Workload


def load(source: str | Path, replay: Replay = AS_IT_STANDS) -> Workload:
    """The workload of a specification (`poisson:rate=8,...`) or of a file, whose first line tells what it is.

    Raises ConfigError, one line.
    """
    if isinstance(source, str) and is_spec(source):
        return _generated(source, replay)
    path = Path(source)
    lines = read_lines(path)
    first = next(filter(bytes.strip, lines)).lstrip()
    if first.startswith(b"{") and b'"rules"' in first:
        return record.read(path, lines, replay)
    if first.startswith(b"{") or not {".json", ".jsonl"}.isdisjoint(path.suffixes):
        return mooncake.read(path, lines, replay)
    if azure.columns_of(first) or ".csv" in path.suffixes:
        return azure.read(path, lines, replay)
    raise ConfigError(
        f"{path}: no workload; expected a Mooncake trace (one JSON object a line), an Azure trace (CSV with "
        f"{azure.HEADER}), a flight recording, or in place of a file {', '.join(ARRIVALS)} and a colon"
    )


def _generated(source: str, replay: Replay) -> Workload:
    replay.refuse_spread(source)
    return replayed(generate(source), replay)


def replayed(workload: Workload, replay: Replay) -> Workload:
    """A workload that was loaded as it stands, as `load` would give it for this replay."""
    requests = workload.requests[: replay.limit]
    arrivals = replay.arrivals([request.arrival_ns for request in requests])
    if replay.speed != 1.0 or replay.spread_seed is not None:
        requests = [
            msgspec.structs.replace(request, arrival_ns=arrival)
            for arrival, request in zip(arrivals, requests, strict=True)
        ]
    return msgspec.structs.replace(workload, requests=requests)
