"""`python -m benchmarks accuracy`: how far the simulator is from a live cluster on this machine.

One prefill and one decode node, each on a core of its own where there are as many, serve a Poisson load over HTTP while
the conductor records it. The recording then runs through the simulator: the same arrivals, lengths and block names, the
same limits, and the curve that `isthmus profile` measured on such a core. Both are measured alike: from a request to
its first token, and from token to token. Emulated engines wait as long as the curve says: what is left is not theirs.

The simulator has no HTTP, tokenizer, event loop or client, and none of them competes with its engines for a core.
What a request takes beyond the model when nothing else runs is measured: some idle requests go first, and the
difference of their medians is the overhead, of a first token and of a gap. Errors are given without it and with it
added to every simulated request; nothing that is measured under load is fed back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec
import yaml
from typer import Option

from benchmarks.models import BENCH_MODELS, make_random_model
from benchmarks.options import Seed, Threads
from benchmarks.served import served
from isthmus.bench import BenchError, serve
from isthmus.bench.study import Columns, Outcome, Report, silent, table
from isthmus.cli.models import find_model
from isthmus.config import load_config
from isthmus.core.types import NS_PER_S
from isthmus.lab.sim.deployment import deployment_of
from isthmus.lab.sim.records import RequestRecord, RequestStatus
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.spread import nearest_rank
from isthmus.lab.sim.workloads import Request, Workload, load

BLOCK_SIZE, NUM_NODES = 16, 2
KV_MEMORY = 256 << 20
NUM_WARM, NUM_IDLE = 3, 9
"""Requests one after another before the load: the first only warm up, of the others the overhead is taken."""
QUANTITIES = {"TTFT": "ttft_s", "TBT (longest tenth)": "tbt_s", "TPOT": "tpot_s"}


PROMPT, OUTPUT = "lognormal(p50=150,p99=900,max=1500)", "lognormal(p50=40,p99=120)"
PREFIXES = "prefixes=10,prefix_tokens=128"
"""Shared beginnings, which leave some prompts partly cached."""
COLUMNS: Columns = {
    "": lambda row: f"{row['quantity']}, {row['figure']}", "live ms": "live_ms", "simulated": "simulated_ms",
    "error": lambda row: f"{row['error_percent']:+.1f} %", "with idle overhead": "corrected_ms",
    "error, corrected": lambda row: f"{row['corrected_error_percent']:+.1f} %",
}  # fmt: skip
"""Of one quantity, its mean or P90 over the requests. Errors are those of the simulated figures; `corrected`: overhead
added."""


@dataclass(frozen=True)
class Plan:
    model: Annotated[str | None, Option(help="Model folder or hub id; default: llama-256x8, random.")] = None
    emulated: Annotated[bool, Option("--emulated", help="Emulated engines, at the curve's speed.")] = False
    requests: Annotated[int, Option(min=10, help="Requests of the load.")] = 150
    rate: Annotated[float, Option(min=0.01, help="Requests a second, in the mean.")] = 4.0
    cost: Annotated[
        Path | None, Option(exists=True, dir_okay=False, help="A curve's file; default: one is measured first.")
    ] = None
    threads: Threads = 1
    seed: Seed = 0

    def workload(self) -> Workload:
        return load(
            f"poisson:rate={self.rate},num={self.requests},input={PROMPT},output={OUTPUT},{PREFIXES},"
            f"block_size={BLOCK_SIZE},seed={self.seed}"
        )


class Times(msgspec.Struct, frozen=True):
    """One request, in seconds: to its first token, its mean gap, and the mean of its longest tenth of gaps."""

    ttft_s: float
    tpot_s: float
    tbt_s: float


def run(plan: Plan, report: Report = silent) -> Outcome:
    """A live prefill and decode node under load, and the same load in the simulator: TTFT and TBT of both.

    Profiles, serves, replays, compares. Raises ConfigError or BenchError.
    """
    workload = plan.workload()
    with tempfile.TemporaryDirectory(prefix="isthmus-accuracy-") as name:
        folder = Path(name)
        model = find_model(plan.model)[0].resolve() if plan.model else folder / "model"
        if plan.model is None:
            make_random_model(model, **BENCH_MODELS["llama-256x8"], dtype="bfloat16")
        curve = plan.cost.resolve() if plan.cost is not None else _profile(plan, model, folder, report)
        config = _write_config(plan, model, folder, curve)
        report(f"serving {len(workload.requests)} requests, {plan.rate:g} a second")
        live, core_wait = _serve(config, folder, workload)
        report("replaying the recording in the simulator")
        simulated = _replay(config, folder / "recording.jsonl")
        facts = yaml.safe_load(curve.read_text())
    if len(simulated) != len(live):
        raise BenchError(f"{len(live)} requests were answered, {len(simulated)} recorded and replayed")
    found = {"curve": str(facts.get("origin", "")), "curve_error": facts.get("error"), "core_wait": core_wait}
    found |= {"requests": plan.requests, "rate": plan.rate} | compare(live, simulated)
    title = f"python -m benchmarks accuracy: {plan.requests} requests, {plan.rate:g} a second"
    return Outcome([table(title, COLUMNS, found["rows"])], found, notes_of(found))


# The live cluster.


def _profile(plan: Plan, model: Path, folder: Path, report: Report) -> Path:
    """The curve of this machine's engine, measured in a process of its own, with a node's threads and core."""
    report(f"profiling the engine, {plan.threads} threads")
    curve = folder / "curve.yaml"
    arguments = ("--model", str(model), "--threads", str(plan.threads), "--kv-memory", str(KV_MEMORY))
    core = cores_for(NUM_NODES)[:1]
    done = subprocess.run(
        [sys.executable, "-m", "isthmus", "profile", "--out", str(curve), *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=(lambda: os.sched_setaffinity(0, core)) if core else None,
    )
    if done.returncode:
        raise BenchError(f"isthmus profile failed: {done.stderr.strip()}")
    report(done.stderr.strip().splitlines()[-2])
    return curve


def _write_config(plan: Plan, model: Path, folder: Path, curve: Path) -> Path:
    """The deployment, for `isthmus serve` and for the simulator."""
    values = {
        "model": str(model),
        "port": 0,
        "roles": {"prefill": 1, "decode": 1},
        "engine": {
            "kind": "emulated" if plan.emulated else "torch",
            "threads": plan.threads,
            "block_size": BLOCK_SIZE,
            "kv_memory": KV_MEMORY,
            "cost": str(curve),
        },
        "record": str(folder / "recording.jsonl"),
    }
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def _serve(config: Path, folder: Path, workload: Workload) -> tuple[list[Times], float | None]:
    """Idle requests one by one, then the workload at its times, in that order; and what `core_wait` says."""
    with served(config, folder / "serve.log") as (url, pid):
        return asyncio.run(_ask_all(url, pid, workload))


async def _ask_all(url: str, pid: int, workload: Workload) -> tuple[list[Times], float | None]:
    async with serve.connected() as session:
        server = serve.Server(url, await serve.ask_model(session, url))
        _pin(pid)
        idle = [await _ask(session, server, request, "idle") for request in _idle(workload)]
        loop = asyncio.get_running_loop()
        begin, before = loop.time(), _scheduled(pid)

        async def arrive(request: Request) -> Times:
            await asyncio.sleep(begin + request.arrival_ns / NS_PER_S - loop.time())
            return await _ask(session, server, request, "load")

        loaded = await serve.together(map(arrive, workload.requests))
        after = _scheduled(pid)
    ran, waited = (late - early for late, early in zip(after, before, strict=True))
    return [*idle, *loaded], waited / ran if ran else None


def _pin(pid: int) -> None:
    """A core of its own for each node, where there are as many; what else runs takes what they leave. Linux."""
    with contextlib.suppress(OSError):
        children = _children(pid)
        for child, core in zip(children, cores_for(len(children)), strict=False):
            for thread in Path(f"/proc/{child}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})


def cores_for(count: int) -> list[int]:
    """A core for each of `count` nodes; none if there are fewer cores."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[:count] if count <= len(cores) else []


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _scheduled(pid: int) -> tuple[int, int]:
    """(time on a core, time waiting for one) of all threads of a process's children so far, in ns; Linux."""
    ran = waited = 0
    with contextlib.suppress(OSError):
        for child in _children(pid):
            for thread in Path(f"/proc/{child}/task").iterdir():
                on, waiting, _ = map(int, (thread / "schedstat").read_text().split())
                ran, waited = ran + on, waited + waiting
    return ran, waited


def _idle(workload: Workload) -> list[Request]:
    """Requests of the median size, which share nothing."""
    requests = workload.requests
    prompt = int(statistics.median(request.num_tokens for request in requests))
    output = max(2, int(statistics.median(request.output_tokens for request in requests)))
    blocks = -(-prompt // BLOCK_SIZE)
    return [
        Request(0, prompt, output, tuple(range(number * blocks, (number + 1) * blocks)))
        for number in range(NUM_WARM + NUM_IDLE)
    ]


async def _ask(session: aiohttp.ClientSession, server: serve.Server, request: Request, salt: str) -> Times:
    row = serve.Row(request.num_tokens, max(2, request.output_tokens), 1, 1)
    body = serve.body_of(server, row, prompt_of(request, salt))
    stream = serve.read_stream(await serve.ask(session, server, body), row)
    return times_of(stream.sent_s, stream.token_times_s, row.output_tokens)


def prompt_of(request: Request, salt: str) -> list[int]:
    """Token ids in the byte range; equal blocks are equal tokens, `salt` keeps workloads apart."""
    tokens: list[int] = []
    for block in request.blocks:
        tokens += random.Random(f"{salt}/{block}").randbytes(BLOCK_SIZE)
    return tokens[: request.num_tokens]


def times_of(sent_s: float, token_times_s: Sequence[float], num_tokens: int) -> Times:
    """Of a streamed answer; between tokens that came in one event there is no gap."""
    gaps = [after - before for before, after in itertools.pairwise(token_times_s)]
    gaps += [0.0] * (num_tokens - 1 - len(gaps))
    longest = sorted(gaps, reverse=True)[: -(-len(gaps) // 10)]
    return Times(token_times_s[0] - sent_s, statistics.fmean(gaps), statistics.fmean(longest))


# The simulated one, and both together.


def _replay(config: Path, recording: Path) -> list[Times]:
    workload = load(recording)
    settings = load_config(config, {})
    result = Simulation(deployment_of(settings, BLOCK_SIZE, config.parent), workload).run()
    return [_simulated(record) for record in result.records]


def _simulated(record: RequestRecord) -> Times:
    if record.status is not RequestStatus.COMPLETED:
        raise BenchError(f"request {record.index} was answered live, but is {record.status} in the simulator")
    gaps_ns = record.end_ns - record.first_token_ns
    return Times(
        (record.first_token_ns - record.arrival_ns) / NS_PER_S,
        gaps_ns / (record.request.output_tokens - 1) / NS_PER_S,
        record.tbt_ns / NS_PER_S,
    )


def compare(live: Sequence[Times], simulated: Sequence[Times]) -> dict[str, Any]:
    """Idle requests come first in both lists; only those after them are compared. Overheads are of an idle request."""
    first, gap = _overhead(live, simulated, "ttft_s"), _overhead(live, simulated, "tpot_s")
    rows = []
    for quantity, field in QUANTITIES.items():
        measured, ours = (
            sorted(getattr(times, field) for times in each[NUM_WARM + NUM_IDLE :]) for each in (live, simulated)
        )
        corrected = [each + (first if field == "ttft_s" else gap) for each in ours]
        for figure, of in (("mean", statistics.fmean), ("P90", _p90)):
            live_ms, simulated_ms, corrected_ms = (1000 * of(each) for each in (measured, ours, corrected))
            rows.append(
                {
                    "quantity": quantity,
                    "figure": figure,
                    "live_ms": live_ms,
                    "simulated_ms": simulated_ms,
                    "error_percent": 100 * (simulated_ms / live_ms - 1),
                    "corrected_ms": corrected_ms,
                    "corrected_error_percent": 100 * (corrected_ms / live_ms - 1),
                }
            )
    return {"overhead_first_ms": 1000 * first, "overhead_gap_ms": 1000 * gap, "rows": rows}


def _p90(ordered: Sequence[float]) -> float:
    return nearest_rank(ordered, 90)


def _overhead(live: Sequence[Times], simulated: Sequence[Times], field: str) -> float:
    idle = slice(NUM_WARM, NUM_WARM + NUM_IDLE)
    medians = [statistics.median(getattr(times, field) for times in each[idle]) for each in (live, simulated)]
    return medians[0] - medians[1]


def notes_of(found: Mapping[str, Any]) -> list[str]:
    """`curve_error`: of the cost curve against its own measurements, None if it does not say. `core_wait`: time the
    nodes' threads waited for a core under load, over the time they ran, None where the system does not tell; a
    machine that is busy with something else shows here."""
    error = "unknown" if found["curve_error"] is None else f"{100 * found['curve_error']:.1f} %"
    wait = "unknown" if found["core_wait"] is None else f"{100 * found['core_wait']:.0f} % of the time they ran"
    return [
        f"curve: {found['curve'] or 'of unknown origin'}; its own error against what was measured: {error}",
        f"overhead of an idle request, live less simulated: {found['overhead_first_ms']:.2f} ms to the first token, "
        f"{found['overhead_gap_ms']:.2f} ms a gap (HTTP, tokenizer, event loops, hand-over session, client)",
        f"the nodes waited for a core, beside gateway and client and whatever else runs here: {wait}",
    ]
