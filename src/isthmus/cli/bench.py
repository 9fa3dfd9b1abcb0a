"""`isthmus bench NAME`: the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

app = typer.Typer(no_args_is_help=True, help="Measure the parts of Isthmus, or a running server.")

Number = TypeVar("Number", int, float)
MooncakePython = Annotated[
    str | None,
    typer.Option(help="A Python with Mooncake installed; default: this one, if it has Mooncake."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results here as JSON.")]


def _finish(table: Any, rows: Any, file: Path | None) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # in a file or a pipe, wide enough for every column
        console = Console(width=200)
    for each in table if isinstance(table, list) else [table]:
        console.print(each)
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf8")


@app.command()
def engine(
    model: Annotated[Path, typer.Option(help="Model folder.")],
    against: Annotated[str | None, typer.Option(help="transformers")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the model's.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of both sides.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured turns of each side.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Prefill and decode speed of the engine, beside transformers on the same model."""
    from isthmus.benchmarks import engine as bench
    from isthmus.errors import ConfigError

    if against not in (None, "transformers"):
        raise ConfigError(f"--against {against}: only transformers is known")
    results = bench.run(
        model,
        against_transformers=against is not None,
        dtype=dtype,
        threads=threads,
        rounds=rounds,
        report=lambda line: print(line, flush=True),
    )
    _finish(bench.table(results), bench.as_json(results), json_file)


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server.")],
    against_url: Annotated[str | None, typer.Option(help="A second server, measured in turns.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name; default: the first each server lists.")] = None,
    row: Annotated[
        list[str] | None, typer.Option(help="PROMPT/OUTPUT/CONCURRENCY/REQUESTS; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured turns of each server.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """The same streaming load on one server, or on two in turns: TTFT, TBT, tokens/s and ratios."""
    from isthmus.benchmarks import serve as bench

    rows = [_row(text) for text in row] if row else bench.DEFAULT_ROWS
    urls = [url] if against_url is None else [url, against_url]
    results = bench.run(urls, model=model, rows=rows, rounds=rounds, seed=seed)
    _finish(bench.table(results), bench.as_json(results), json_file)


def _row(text: str) -> Any:
    from isthmus.benchmarks.serve import Row
    from isthmus.errors import ConfigError

    try:
        return Row(*map(int, text.split("/")))
    except (ValueError, TypeError):
        raise ConfigError(f"--row {text}: expected four numbers, e.g. 64/128/8/32") from None


@app.command("make-model")
def make_model(
    folder: Annotated[Path, typer.Argument(help="Where to write the model folder.")],
    preset: Annotated[str, typer.Option(help="llama-256x8 or llama-512x12.")] = "llama-256x8",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write a Llama folder with random weights, for the benchmarks."""
    from isthmus.benchmarks.models import BENCH_MODELS, make_random_model
    from isthmus.errors import ConfigError

    if preset not in BENCH_MODELS:
        raise ConfigError(f"--preset {preset}: known are {', '.join(BENCH_MODELS)}")
    make_random_model(folder, **BENCH_MODELS[preset], dtype=dtype)
    print(f"wrote {folder}")


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    from isthmus.errors import ConfigError

    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text}: expected numbers with commas between them") from None


def _size(option: str, text: str | None) -> int | None:
    from isthmus.config import parse_bytes
    from isthmus.errors import ConfigError

    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def _sizes(option: str, text: str) -> tuple[int, ...]:
    from isthmus.errors import ConfigError

    sizes = tuple(_size(option, part) or 0 for part in text.split(","))
    if 0 in sizes:
        raise ConfigError(f"{option} {text}: 0 is no size")
    return sizes


def _counts(option: str, text: str) -> tuple[int, ...]:
    from isthmus.errors import ConfigError

    counts = _numbers(option, text, int)
    if min(counts) < 1:
        raise ConfigError(f"{option} {text}: must be 1 or more")
    return counts


@app.command()
def policies(
    trace: Annotated[
        list[str],
        typer.Option(help="A trace file, or a generated workload, e.g. poisson:rate=8,...; may be repeated."),
    ],
    nodes: Annotated[str, typer.Option(help="Prefill nodes, for each size of cluster.")] = "8,16",
    speeds: Annotated[str, typer.Option(help="Replay speeds.")] = "1,1.5,2,2.5,3",
    links: Annotated[str, typer.Option(help="Each node's network link, GB/s each way.")] = "1.3,3,12,50",
    seeds: Annotated[str, typer.Option(help="Of the arrivals; a cell is the mean over them.")] = "1",
    policy: Annotated[str | None, typer.Option("--policies", help="Which compete; default: all.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Deployment file: costs, caches, limits. Default: Mooncake's cluster."),
    ] = None,
    decode: Annotated[int | None, typer.Option(help="Decode nodes; default: as many as prefill nodes.")] = None,
    ssd: Annotated[str | None, typer.Option(help="SSD cache of a prefill node, e.g. 1TB.")] = None,
    shared_links: Annotated[
        bool, typer.Option("--shared-links", help="Sweep again with KV handed over on the same links.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many requests of each trace.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once.")] = 2,
    json_file: JsonFile = None,
) -> None:
    """Every placement policy in every cell of a sweep, simulated: isthmus against the best other one."""
    from isthmus.benchmarks import policies as bench
    from isthmus.benchmarks.policy_cells import POLICIES
    from isthmus.cli.outputs import check_writable, write_bytes
    from isthmus.cli.simulate import progress_bar
    from isthmus.cli.tables import show

    check_writable("--json", json_file)
    sweep = bench.Sweep(
        tuple(trace),
        _numbers("--nodes", nodes, int),
        _numbers("--speeds", speeds, float),
        _numbers("--links", links, float),
        _numbers("--seeds", seeds, int),
        tuple(policy.split(",")) if policy else tuple(POLICIES),
        (False, True) if shared_links else (False,),
        str(config) if config else None,
        decode,
        _size("--ssd", ssd),
        limit,
    )
    with progress_bar("sweeping") as progress:
        cells = bench.run(sweep, jobs, progress)
    show(*bench.tables(sweep, cells))
    for line in bench.summary_lines(cells):
        print(line)
    if json_file is not None:
        write_bytes(json_file, (json.dumps(bench.as_json(sweep, cells), indent=1) + "\n").encode())


@app.command()
def conductor(
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster.")] = 100,
    blocks: Annotated[int, typer.Option(help="Distinct blocks in the prefix index.")] = 1_000_000,
    prompt_blocks: Annotated[int, typer.Option(help="Blocks of each prompt.")] = 250,
    decisions: Annotated[int, typer.Option(help="Requests placed.")] = 20_000,
    policy: Annotated[str, typer.Option(help="How requests are placed.")] = "isthmus",
    seed: Annotated[int, typer.Option(help="Of the prompts and arrivals.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """How long the conductor takes to place a request, on one core: decisions a second, P50, P99 and longest."""
    import msgspec

    from isthmus.benchmarks import conductor as bench
    from isthmus.cli.outputs import check_writable
    from isthmus.conductor.policies import POLICIES
    from isthmus.errors import ConfigError

    check_writable("--json", json_file)
    if policy not in POLICIES:
        raise ConfigError(f"--policy {policy}: known are {', '.join(POLICIES)}")
    load = bench.Load(nodes, blocks, prompt_blocks, decisions, policy, seed)
    found = bench.run(load, lambda line: print(line, flush=True))
    _finish(bench.table(found), msgspec.to_builtins(found), json_file)


@app.command()
def chunking(json_file: JsonFile = None) -> None:
    """Chunks of a fixed size or of a fixed time, one prompt or several at once, on a simulated node."""
    from isthmus.benchmarks import chunking as bench
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    rows = bench.run()
    _finish(bench.table(rows), bench.as_json(rows), json_file)


@app.command()
def cost(
    profiles: Annotated[
        Path, typer.Option(help="Folder with the published measurements (docs/cost-model.md).")
    ],
    json_file: JsonFile = None,
) -> None:
    """The cost model against published measurements: errors of every table, whether it fits or not."""
    from isthmus.benchmarks import cost as bench
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    bench.main(profiles, json_file)


@app.command()
def accuracy(
    model: Annotated[str | None, typer.Option(help="Model folder or hub id; default: the demo model.")] = None,
    requests: Annotated[int, typer.Option(min=10, help="Requests of the load.")] = 150,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second, in the mean.")] = 4.0,
    cost_file: Annotated[
        Path | None,
        typer.Option("--cost", exists=True, dir_okay=False, help="A curve; default: one is measured first."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each node.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and lengths.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """A live prefill and decode node under load, and the same load in the simulator: TTFT and TBT of both."""
    import msgspec

    from isthmus.benchmarks import accuracy as bench
    from isthmus.cli.models import find_model
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    plan = bench.Plan(find_model(model)[0], requests, rate, threads=threads, seed=seed, cost=cost_file)
    found = bench.run(plan, lambda line: print(line, flush=True))
    _finish(bench.table(found), msgspec.to_builtins(found), json_file)
    for line in bench.summary_lines(found):
        print(line)


@app.command()
def reuse(
    model: Annotated[
        Path | None, typer.Option(help="Model folder; default: the bench model, written now.")
    ] = None,
    prefix: Annotated[int, typer.Option(min=16, help="Tokens that two requests have in common.")] = 4000,
    suffix: Annotated[int, typer.Option(min=1, help="Tokens of their own.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of requests of each row.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each node.")] = 1,
    folder: Annotated[Path | None, typer.Option(help="A folder on the SSD, for the SSD tier.")] = None,
    seed: int = 0,
    json_file: JsonFile = None,
) -> None:
    """Time to first token with a prefix that is cached (DRAM, SSD after a restart, another node) and that is not."""
    from isthmus.benchmarks import reuse as bench
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    plan = bench.Plan(model, prefix, suffix, rounds, threads, seed, folder)
    found = bench.run(plan, lambda line: print(line, flush=True))
    _finish(bench.table(found), bench.as_json(found), json_file)
    for line in bench.summary_lines(found):
        print(line)


@app.command()
def faults(
    flips: Annotated[int, typer.Option(min=1, help="Faults on the wire, one to a move of blocks.")] = 10_000,
    seed: int = 0,
    json_file: JsonFile = None,
) -> None:
    """Flipped and missing bytes and lost connections while blocks move: what found them, and that no block is wrong."""
    from isthmus.benchmarks import faults as bench
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    found = bench.run(flips, seed, lambda line: print(line, flush=True))
    _finish(bench.table(found), bench.as_json(found), json_file)


@app.command()
def layerwise(
    model: Annotated[Path, typer.Option(help="Model folder.")],
    prefix: Annotated[int, typer.Option(min=1, help="Tokens whose KV is loaded.")] = 4000,
    suffix: Annotated[int, typer.Option(min=1, help="Tokens computed after them.")] = 512,
    shares: Annotated[
        str, typer.Option(help="Time of loading over time of computing, for sources of a fixed rate.")
    ] = "0.25,0.5,1,2,4",
    disk: Annotated[Path | None, typer.Option(help="A folder on the SSD, to load from it too.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the model's.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads that compute.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured turns of each row.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """A cached prefill loaded and stored layer by layer while it computes, beside the time of the parts in series."""
    from isthmus.benchmarks import layerwise as bench
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    results = bench.run(
        model,
        prefix=prefix,
        suffix=suffix,
        shares=_numbers("--shares", shares, float),
        disk=disk,
        dtype=dtype,
        threads=threads,
        rounds=rounds,
        report=lambda line: print(line, flush=True),
    )
    _finish(bench.table(results), bench.as_json(results), json_file)


@app.command()
def messenger(
    direction: Annotated[str, typer.Option(help="push, or pull: a request answered by a push.")] = "push",
    sizes: Annotated[str, typer.Option(help="Bytes of a transfer.")] = "1MiB,16MiB,1GiB",
    pieces: Annotated[str, typer.Option(help="Bytes of each piece of it.")] = "64KiB,256KiB,1MiB,2MiB",
    connections: Annotated[str, typer.Option(help="Connections of a session.")] = "1,2,4",
    rounds: Annotated[int, typer.Option(min=1, help="Measured turns of each side.")] = 5,
    pings: Annotated[int, typer.Option(min=1, help="4 KiB messages for the latency.")] = 2000,
    mooncake_python: MooncakePython = None,
    json_file: JsonFile = None,
) -> None:
    """Sealed bytes between two processes over loopback, beside bare sockets, memcpy and Mooncake: GB/s, latency."""
    from isthmus.benchmarks import messenger as bench
    from isthmus.cli.outputs import check_writable
    from isthmus.errors import ConfigError

    check_writable("--json", json_file)
    if direction not in tuple(bench.Direction):
        raise ConfigError(f"--direction {direction}: known are {', '.join(bench.Direction)}")
    plan = bench.Plan(
        bench.Direction(direction),
        _sizes("--sizes", sizes),
        _sizes("--pieces", pieces),
        _counts("--connections", connections),
        rounds,
        pings,
        mooncake_python,
    )
    result = bench.run(plan, lambda line: print(line, flush=True))
    _finish(bench.tables(result), bench.as_json(result), json_file)


@app.command()
def wan(
    rates: Annotated[str, typer.Option(help="Rates of the path, Gbit/s.")] = "1,2,5",
    connections: Annotated[str, typer.Option(help="Connections of the session.")] = "1,4,8,16",
    delay_ms: Annotated[float, typer.Option(help="Delay each way.")] = 30.0,
    jitter_ms: Annotated[float, typer.Option(help="Each chunk is late by up to this.")] = 2.0,
    stall_s: Annotated[
        float, typer.Option(help="How long one connection stands still, in rows of their own; 0: no such rows.")
    ] = 1.0,
    window: Annotated[
        str, typer.Option(help="Bytes on the way of one connection, as an untuned kernel's.")
    ] = "4MiB",
    seconds: Annotated[float, typer.Option(help="Length of a transfer, at the full rate.")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1, help="Transfers of each row.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """One session over a long path (a TCP proxy in user space): one connection against several."""
    from isthmus.benchmarks import wan as bench
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    plan = bench.Plan(
        _numbers("--rates", rates, float),
        _counts("--connections", connections),
        delay_ms,
        jitter_ms,
        stall_s,
        _size("--window", window) or 0,
        seconds,
        rounds,
    )
    result = bench.run(plan, lambda line: print(line, flush=True))
    _finish(bench.table(result), bench.as_json(result), json_file)


@app.command()
def store(
    sizes: Annotated[str, typer.Option(help="Bytes of a block.")] = "256KiB,1MiB,16MiB",
    total: Annotated[str, typer.Option(help="Bytes of all blocks of a case.")] = "256MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Measured turns of each side.")] = 5,
    folder: Annotated[
        Path | None, typer.Option(help="An existing folder on the SSD; default: the temporary folder.")
    ] = None,
    mooncake_python: MooncakePython = None,
    redis_server: Annotated[
        str | None, typer.Option(help="Redis or Valkey binary; default: the one on the path, if any.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Put and get of blocks in DRAM and on the SSD, beside memcpy, a plain file, the Mooncake store and Redis: GB/s."""
    from isthmus.benchmarks import store as bench
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    plan = bench.Plan(
        _sizes("--sizes", sizes),
        _size("--total", total) or 0,
        rounds,
        folder,
        mooncake_python,
        redis_server,
    )
    rows = bench.run(plan, lambda line: print(line, flush=True))
    _finish(bench.table(rows), bench.as_json(rows), json_file)


@app.command()
def offload(
    requests: Annotated[int, typer.Option(min=100, help="Requests of each simulation.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    capacity: Annotated[bool, typer.Option(help="Also search the highest rate each system sustains.")] = True,
    json_file: JsonFile = None,
) -> None:
    """Prefill in another datacenter, simulated: thresholds, control and baselines under bursts and link faults."""
    import msgspec

    from isthmus.benchmarks import offload as bench
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    cells = bench.run(requests, seed, capacity=capacity, report=lambda line: print(line, flush=True))
    _finish(bench.table(cells), msgspec.to_builtins(cells), json_file)
