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
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
import yaml
from rich.table import Table

from benchmarks.models import BENCH_MODELS, make_random_model
from benchmarks.served import last_line, served
from isthmus.bench import BenchError, serve
from isthmus.config import load_config
from isthmus.core.types import NS_PER_S
from isthmus.lab.sim.deployment import deployment_of
from isthmus.lab.sim.records import RequestRecord, Status
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.spread import nearest_rank
from isthmus.lab.sim.workloads import Request, Workload, load

BLOCK_SIZE, NUM_NODES = 16, 2
KV_MEMORY = 256 << 20
NUM_WARM, NUM_IDLE = 3, 9
"""Requests one after another before the load: the first only warm up, of the others the overhead is taken."""
QUANTITIES = {"TTFT": "ttft_s", "TBT (longest tenth)": "tbt_s", "TPOT": "tpot_s"}


class Plan(msgspec.Struct, frozen=True):
    """The load. `prompt`, `output`: lengths as a workload specification writes them; `model`: its folder
    or file, None for one with random weights.

    `prefixes` shared beginnings of `prefix_tokens` tokens leave some prompts partly cached. `cost`: a curve's
    file, None measures one first. `threads`: of each node.
    """

    model: Path | None
    requests: int = 150
    rate: float = 4.0
    prompt: str = "lognormal(p50=150,p99=900,max=1500)"
    output: str = "lognormal(p50=40,p99=120)"
    prefixes: int = 10
    prefix_tokens: int = 128
    emulated: bool = False
    threads: int = 1
    seed: int = 0
    cost: Path | None = None

    def workload(self) -> Workload:
        """Raises ConfigError for lengths or a rate that cannot be read."""
        return load(
            f"poisson:rate={self.rate},num={self.requests},input={self.prompt},output={self.output},"
            f"prefixes={self.prefixes},prefix_tokens={self.prefix_tokens},"
            f"block_size={BLOCK_SIZE},seed={self.seed}"
        )


class Times(msgspec.Struct, frozen=True):
    """One request, in seconds: to its first token, its mean gap, and the mean of its longest tenth of gaps."""

    ttft_s: float
    tpot_s: float
    tbt_s: float


class Figures(msgspec.Struct, frozen=True):
    """Mean and P90 over the requests, in milliseconds."""

    mean_ms: float
    p90_ms: float


class Row(msgspec.Struct, frozen=True):
    """One quantity. Errors are those of the simulated figures, in percent; `corrected`: overhead added."""

    quantity: str
    live: Figures
    simulated: Figures
    error_mean_percent: float
    error_p90_percent: float
    corrected: Figures
    corrected_error_mean_percent: float
    corrected_error_p90_percent: float


class Accuracy(msgspec.Struct, frozen=True):
    """`overhead_first_ms`, `overhead_gap_ms`: of an idle request, live less simulated.

    `curve_error`: of the cost curve against its own measurements, None if it does not say. `core_wait`: time the
    nodes' threads waited for a core under load, over the time they ran, None where the system does not tell; a
    machine that is busy with something else shows here.
    """

    requests: int
    rate: float
    curve: str
    curve_error: float | None
    core_wait: float | None
    overhead_first_ms: float
    overhead_gap_ms: float
    rows: list[Row]


def run(plan: Plan, report: Callable[[str], None] = lambda line: None) -> Accuracy:
    """Profiles, serves, replays, compares. Raises ConfigError or BenchError."""
    workload = plan.workload()
    with tempfile.TemporaryDirectory(prefix="isthmus-accuracy-") as name:
        folder = Path(name)
        plan = msgspec.structs.replace(plan, model=(plan.model or _random_model(folder / "model")).resolve())
        curve = plan.cost.resolve() if plan.cost is not None else _profile(plan, folder, report)
        config = _write_config(plan, folder, curve)
        report(f"serving {len(workload.requests)} requests, {plan.rate:g} a second")
        live, core_wait = asyncio.run(_serve(config, folder, workload))
        report("replaying the recording in the simulator")
        simulated = _replay(config, folder / "recording.jsonl")
        facts = yaml.safe_load(curve.read_text())
    if len(simulated) != len(live):
        raise BenchError(f"{len(live)} requests were answered, {len(simulated)} recorded and replayed")
    found = compare(plan, live, simulated)
    origin, error = str(facts.get("origin", "")), facts.get("error")
    return msgspec.structs.replace(found, curve=origin, curve_error=error, core_wait=core_wait)


# The live cluster.


def _random_model(folder: Path) -> Path:
    make_random_model(folder, **BENCH_MODELS["llama-256x8"], dtype="bfloat16")
    return folder


def _profile(plan: Plan, folder: Path, report: Callable[[str], None]) -> Path:
    """The curve of this machine's engine, measured in a process of its own, with a node's threads and core."""
    report(f"profiling the engine, {plan.threads} threads")
    curve = folder / "curve.yaml"
    arguments = ("--model", str(plan.model), "--threads", str(plan.threads), "--kv-memory", str(KV_MEMORY))
    core = cores_for(NUM_NODES)[:1]
    done = subprocess.run(
        [sys.executable, "-m", "isthmus", "profile", "--out", str(curve), *arguments],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=(lambda: os.sched_setaffinity(0, core)) if core else None,
    )
    if done.returncode:
        raise BenchError(f"isthmus profile failed: {last_line(done.stderr)}")
    report(done.stderr.strip().splitlines()[-2])
    return curve


def _write_config(plan: Plan, folder: Path, curve: Path) -> Path:
    """The deployment, for `isthmus serve` and for the simulator."""
    values = {
        "model": str(plan.model),
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


async def _serve(config: Path, folder: Path, workload: Workload) -> tuple[list[Times], float | None]:
    """Idle requests one by one, then the workload at its times, in that order; and the nodes' `core_wait`."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        served(config, folder / "serve.log") as (url, pid),
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
    ):
        server = serve.Server(url, await serve.ask_model(session, url))
        _pin(pid)
        idle = [await _ask(session, server, request, "idle") for request in _idle(workload)]
        loop = asyncio.get_running_loop()
        begin, before = loop.time(), _scheduled(pid)

        async def arrive(request: Request) -> Times:
            await asyncio.sleep(begin + request.arrival_ns / NS_PER_S - loop.time())
            return await _ask(session, server, request, "load")

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(arrive(request)) for request in workload.requests]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        after = _scheduled(pid)
    ran, waited = (late - early for late, early in zip(after, before, strict=True))
    return [*idle, *(task.result() for task in tasks)], waited / ran if ran else None


def _pin(pid: int) -> None:
    """A core of its own for each node, where there are as many; what else runs takes what they leave. Linux."""
    with contextlib.suppress(OSError):
        children = _children(pid)
        for child, core in zip(children, cores_for(len(children)), strict=False):
            for thread in Path(f"/proc/{child}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})


def cores_for(count: int) -> list[int]:
    """A core for each of so many nodes; none where there are fewer."""
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
    stream = serve.read_stream(await serve.ask(session, server.url, body), row)
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
    if record.status is not Status.COMPLETED:
        raise BenchError(f"request {record.index} was answered live, but is {record.status} in the simulator")
    gaps_ns = record.end_ns - record.first_token_ns
    return Times(
        (record.first_token_ns - record.arrival_ns) / NS_PER_S,
        gaps_ns / (record.request.output_tokens - 1) / NS_PER_S,
        record.tbt_ns / NS_PER_S,
    )


def compare(plan: Plan, live: Sequence[Times], simulated: Sequence[Times]) -> Accuracy:
    """Idle requests come first in both lists; only those after them are compared. The curve is yet to name."""
    first = _overhead(live, simulated, "ttft_s")
    gap = _overhead(live, simulated, "tpot_s")
    load_live, load_simulated = live[NUM_WARM + NUM_IDLE :], simulated[NUM_WARM + NUM_IDLE :]
    rows = []
    for quantity, field in QUANTITIES.items():
        ours = [getattr(times, field) for times in load_simulated]
        more = first if field == "ttft_s" else gap
        rows.append(
            _row(
                quantity,
                _figures([getattr(times, field) for times in load_live]),
                _figures(ours),
                _figures([each + more for each in ours]),
            )
        )
    return Accuracy(len(load_live), plan.rate, "", None, None, 1000 * first, 1000 * gap, rows)


def _overhead(live: Sequence[Times], simulated: Sequence[Times], field: str) -> float:
    idle = slice(NUM_WARM, NUM_WARM + NUM_IDLE)
    medians = [statistics.median(getattr(times, field) for times in each[idle]) for each in (live, simulated)]
    return medians[0] - medians[1]


def _row(quantity: str, live: Figures, simulated: Figures, corrected: Figures) -> Row:
    return Row(
        quantity,
        live,
        simulated,
        _error(simulated.mean_ms, live.mean_ms),
        _error(simulated.p90_ms, live.p90_ms),
        corrected,
        _error(corrected.mean_ms, live.mean_ms),
        _error(corrected.p90_ms, live.p90_ms),
    )


def _figures(values_s: Sequence[float]) -> Figures:
    return Figures(1000 * statistics.fmean(values_s), 1000 * nearest_rank(sorted(values_s), 90))


def _error(ours: float, live: float) -> float:
    return 100 * (ours / live - 1)


def table(found: Accuracy) -> Table:
    shown = Table(title=f"python -m benchmarks accuracy: {found.requests} requests, {found.rate:g} a second")
    for head in ("", "live ms", "simulated", "error", "with idle overhead", "error"):
        shown.add_column(head, justify="left" if not head else "right")
    for row in found.rows:
        for name, at in (("mean", "mean_ms"), ("P90", "p90_ms")):
            live, simulated, corrected = (
                getattr(each, at) for each in (row.live, row.simulated, row.corrected)
            )
            shown.add_row(
                f"{row.quantity}, {name}",
                *(f"{live:.2f}", f"{simulated:.2f}", f"{_error(simulated, live):+.1f} %"),
                *(f"{corrected:.2f}", f"{_error(corrected, live):+.1f} %"),
            )
    return shown


def summary_lines(found: Accuracy) -> list[str]:
    error = "unknown" if found.curve_error is None else f"{100 * found.curve_error:.1f} %"
    wait = "unknown" if found.core_wait is None else f"{100 * found.core_wait:.0f} % of the time they ran"
    return [
        f"curve: {found.curve or 'of unknown origin'}; its own error against what was measured: {error}",
        f"overhead of an idle request, live less simulated: {found.overhead_first_ms:.2f} ms to the first token, "
        f"{found.overhead_gap_ms:.2f} ms a gap (HTTP, tokenizer, event loops, hand-over session, client)",
        f"the nodes waited for a core, beside gateway and client and whatever else runs here: {wait}",
    ]
