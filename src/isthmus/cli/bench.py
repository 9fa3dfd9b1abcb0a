"""`isthmus bench NAME`: what a user measures, on his own machine, server or trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from isthmus.bench.study import Outcome

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure the parts of Isthmus, or a running server."
)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results here as JSON.")]
Rounds = Annotated[int, typer.Option(min=1, help="Measured turns of each side.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads that compute.")]


def finish(outcome: Outcome, json_file: Path | None) -> None:
    """Shows what a study found, and writes it where that was asked for."""
    from isthmus.cli.outputs import show, write_json

    show(*outcome.tables)
    for line in outcome.notes:
        print(line)
    write_json(json_file, outcome.json)


@app.command()
def engine(
    model: Annotated[Path, typer.Option(help="Model folder or GGUF file.")],
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the model's.")] = None,
    threads: Threads = None,
    rounds: Rounds = 3,
    json_file: JsonFile = None,
) -> None:
    """Prefill and decode speed of the engine on this machine: tokens/s."""
    from isthmus.bench import engine as bench
    from isthmus.bench.study import say
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    finish(bench.run(bench.Ours(model, dtype, threads), {}, rounds, say), json_file)


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server.")],
    against_url: Annotated[str | None, typer.Option(help="A second server, measured in turns.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name; default: the first each server lists.")] = None,
    row: Annotated[
        list[str] | None, typer.Option(help="PROMPT/OUTPUT/CONCURRENCY/REQUESTS; may be repeated.")
    ] = None,
    rounds: Rounds = 3,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    api_key: Annotated[
        str | None, typer.Option(help="Of the server at --url; default: ISTHMUS_API_KEY.")
    ] = None,
    against_api_key: Annotated[str | None, typer.Option(help="Of the second server.")] = None,
    json_file: JsonFile = None,
) -> None:
    """The same streaming load on one server, or on two in turns: TTFT, TBT, tokens/s and ratios."""
    from isthmus.bench import serve as bench
    from isthmus.bench.study import say
    from isthmus.cli.outputs import check_writable
    from isthmus.config import api_key as key_of

    check_writable("--json", json_file)
    second = None if against_api_key is None else key_of("--against-api-key", against_api_key)
    keys = key_of("--api-key", api_key), second
    rows = [_row(text) for text in row] if row else bench.DEFAULT_ROWS
    urls = [url] if against_url is None else [url, against_url]
    results = bench.run(urls, model=model, rows=rows, rounds=rounds, seed=seed, keys=keys, report=say)
    finish(bench.outcome(results), json_file)


def _row(text: str) -> Any:
    from isthmus.bench.serve import Row
    from isthmus.core.errors import ConfigError

    try:
        return Row(*map(int, text.split("/")))
    except (ValueError, TypeError):
        raise ConfigError(f"--row {text}: expected four numbers, e.g. 64/128/8/32") from None


@app.command()
def messenger(
    direction: Annotated[str, typer.Option(help="push, or pull: a request answered by a push.")] = "push",
    sizes: Annotated[str, typer.Option(help="Bytes of a transfer.")] = "1MiB,16MiB,1GiB",
    pieces: Annotated[str, typer.Option(help="Bytes of each piece of it.")] = "64KiB,256KiB,1MiB,2MiB",
    connections: Annotated[str, typer.Option(help="Connections of a session.")] = "1,2,4",
    rounds: Rounds = 5,
    pings: Annotated[int, typer.Option(min=1, help="4 KiB messages for the latency.")] = 2000,
    json_file: JsonFile = None,
) -> None:
    """Sealed bytes between two processes over loopback, beside bare sockets and memcpy: GB/s, latency."""
    from isthmus.bench import messenger as bench
    from isthmus.bench.study import say
    from isthmus.cli import amounts
    from isthmus.cli.outputs import check_writable
    from isthmus.core.errors import ConfigError

    check_writable("--json", json_file)
    if direction not in tuple(bench.Direction):
        raise ConfigError(f"--direction {direction}: known are {', '.join(bench.Direction)}")
    plan = bench.Plan(
        bench.Direction(direction),
        amounts.sizes("--sizes", sizes),
        amounts.sizes("--pieces", pieces),
        amounts.counts("--connections", connections),
        rounds,
        pings,
    )
    finish(bench.run(plan, say), json_file)


@app.command()
def attention(
    models: Annotated[
        str, typer.Option(help="Whose layers, by shape: smollm2-135m, llama-3.1-8b.")
    ] = "smollm2-135m,llama-3.1-8b",
    batches: Annotated[str, typer.Option(help="Requests of a step.")] = "1,8,32",
    contexts: Annotated[str, typer.Option(help="Tokens of each that lie elsewhere.")] = "512,2048,8192",
    holders: Annotated[str, typer.Option(help="Nodes that they lie with, in equal parts.")] = "1,2,4",
    dtype: Annotated[str, typer.Option(help="Of the KV: float32 or bfloat16.")] = "float32",
    layers: Annotated[int, typer.Option(min=1, help="Layers of a step.")] = 8,
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute, here and at each holder.")] = 1,
    rounds: Rounds = 5,
    json_file: JsonFile = None,
) -> None:
    """Attention over KV that lies with other nodes, on loopback, beside bare sockets and one memory: time, bytes."""
    from isthmus.bench import attention as bench
    from isthmus.bench.study import say
    from isthmus.cli import amounts
    from isthmus.cli.outputs import check_writable
    from isthmus.core.errors import ConfigError

    check_writable("--json", json_file)
    names = models.split(",")
    if unknown := [name for name in names if name not in bench.MODELS]:
        raise ConfigError(f"--models {unknown[0]}: known are {', '.join(bench.MODELS)}")
    if dtype not in bench.LIMITS:
        raise ConfigError(f"--dtype {dtype}: known are {', '.join(bench.LIMITS)}")
    plan = bench.Plan(
        tuple([bench.MODELS[name] for name in names]),
        dtype,
        amounts.counts("--batches", batches),
        amounts.counts("--contexts", contexts),
        amounts.counts("--holders", holders),
        layers,
        threads,
        rounds,
    )
    finish(bench.run(plan, say), json_file)


@app.command()
def reuse(
    model: Annotated[
        str | None, typer.Option(help="Model folder, GGUF file or hub id; default: SmolLM2.")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help="Folder of prose in .txt, .md, .rst or .py; default: what is installed with Python."),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Prompts of each kind; half as many are summarised.")] = 8,
    tokens: Annotated[int, typer.Option(min=200, help="Of such a prompt, about.")] = 700,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts that are timed.")] = "1000,2000,5000",
    rounds: Rounds = 3,
    seed: Annotated[int, typer.Option(help="Of texts and facts.")] = 0,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Answers to prompts assembled of other prompts' KV, against the same in full: facts, ROUGE-L, KL, time."""
    from isthmus.bench import reuse as bench
    from isthmus.bench.study import say
    from isthmus.cli import amounts
    from isthmus.cli.models import find_model
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    plan = bench.Plan(
        texts, pairs, tokens, lengths=amounts.counts("--lengths", lengths), rounds=rounds, seed=seed
    )
    path, name = find_model(model)
    finish(bench.run(path, name, plan, threads, say), json_file)


@app.command()
def store(
    sizes: Annotated[str, typer.Option(help="Bytes of a block.")] = "256KiB,1MiB,16MiB",
    total: Annotated[str, typer.Option(help="Bytes of all blocks of a case.")] = "256MiB",
    rounds: Rounds = 5,
    folder: Annotated[
        Path | None, typer.Option(help="An existing folder on the SSD; default: the temporary folder.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Put and get of blocks in DRAM and on the SSD, beside memcpy and a plain file: GB/s."""
    from isthmus.bench import store as bench
    from isthmus.bench.study import say
    from isthmus.cli import amounts
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    plan = bench.Plan(
        amounts.sizes("--sizes", sizes),
        amounts.size("--total", total),
        rounds,
        folder,
    )
    finish(bench.run(plan, say), json_file)


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
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at once; 2 if not given.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="On the machines of a Ray cluster.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Every placement policy in every cell of a sweep, simulated: isthmus against the best other one."""
    from isthmus.bench import policies as bench
    from isthmus.bench.policy_cells import POLICIES
    from isthmus.cli import amounts
    from isthmus.cli.outputs import check_writable
    from isthmus.cli.simulate import progress_bar
    from isthmus.core.errors import ConfigError
    from isthmus.live.cluster.with_ray import with_ray
    from isthmus.workers import LocalPool

    check_writable("--json", json_file)
    if ray and jobs is not None:
        raise ConfigError("--jobs: with --ray the cores of the cluster say how many; leave it out")
    sweep = bench.Sweep(
        tuple(trace),
        amounts.numbers("--nodes", nodes, int),
        amounts.numbers("--speeds", speeds, float),
        amounts.numbers("--links", links, float),
        amounts.numbers("--seeds", seeds, int),
        tuple(policy.split(",")) if policy else tuple(POLICIES),
        (False, True) if shared_links else (False,),
        str(config) if config else None,
        decode,
        None if ssd is None else amounts.size("--ssd", ssd),
        limit,
    )
    pool = with_ray("--ray").RayPool() if ray else LocalPool(jobs or 2)
    with progress_bar("sweeping") as progress:
        cells = bench.run(sweep, pool, progress)
    finish(bench.outcome(sweep, cells), json_file)
