"""One entry for every source of requests."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.errors import ConfigError
from isthmus.sim.workloads import azure, mooncake, record
from isthmus.sim.workloads.generators import ARRIVALS, generate, is_spec
from isthmus.sim.workloads.lines import wrong_line
from isthmus.sim.workloads.workload import AS_IT_STANDS, Replay, Workload


def load(source: str | Path, replay: Replay = AS_IT_STANDS, *, block_size: int | None = None) -> Workload:
    """The workload of a specification (`poisson:rate=8,...`) or of a file, whose first line tells what it is.

    `block_size`: tokens per block id of a Mooncake trace, None takes the trace's own. Raises ConfigError, one
    line.
    """
    if isinstance(source, str) and is_spec(source):
        _refuse_block_size(source, block_size)
        return _generated(source, replay)
    path = Path(source)
    first = _first_line(path)
    if not first.strip():
        raise wrong_line(path, 1, "the line is empty; a workload has one request a line")
    recorded = first.startswith(b"{") and b'"rules"' in first
    if not recorded and (first.startswith(b"{") or path.suffix in (".json", ".jsonl")):
        return mooncake.read(path, replay, block_size)
    _refuse_block_size(path, block_size)
    if recorded:
        return record.read(path, replay)
    if azure.HEADER in first or path.suffix == ".csv":
        return azure.read(path, replay)
    raise ConfigError(
        f"{path}: no workload; expected a Mooncake trace (one JSON object a line), an Azure trace (CSV with "
        f"{azure.HEADER.decode()}), a flight recording, or in place of a file {', '.join(ARRIVALS)} and a colon"
    )


def _first_line(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.readline(1 << 20)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _refuse_block_size(source: str | Path, block_size: int | None) -> None:
    if block_size is not None:
        raise ConfigError(f"{source}: only a Mooncake trace takes a block size from outside; leave it out")


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
    return Workload(workload.name, workload.block_size, requests)
