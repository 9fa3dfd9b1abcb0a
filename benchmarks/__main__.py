"""`python -m benchmarks NAME`: measurements against other people's software, validations, and decisions' figures.

What a user runs on his own machine is `isthmus bench NAME`.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from isthmus.bench.transfer_peers import Direction
from isthmus.cli import amounts
from isthmus.cli.bench import JsonFile
from isthmus.cli.main import main
from isthmus.cli.models import find_model
from isthmus.cli.outputs import check_writable, write_json
from isthmus.cli.tables import show
from isthmus.core.errors import ConfigError

if TYPE_CHECKING:
    from isthmus.bench.store_peers import Blocks, BlockStore

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

_say: Callable[[str], None] = partial(print, flush=True)
MooncakePython = Annotated[
    str | None,
    typer.Option(help="A Python with Mooncake installed; default: this one, if it has Mooncake."),
]
VllmPython = Annotated[str | None, typer.Option(help="A Python with vLLM.")]
ServeOptions = Annotated[str, typer.Option(help="More options of isthmus serve, e.g. '--mixed 1'.")]


@app.command()
def engine(
    model: Annotated[Path, typer.Option(help="Model folder.")],
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the model's.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of both sides.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured turns of each side.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """`isthmus bench engine`, beside transformers on the same model."""
    from benchmarks.peers.transformers import Transformers
    from isthmus.bench import engine as bench

    check_writable("--json", json_file)
    ours = bench.Ours(model, dtype, threads)
    results = bench.run(ours, {"transformers": Transformers(model, dtype or ours.dtype)}, rounds, _say)
    show(bench.table(results))
    write_json(json_file, bench.as_json(results))


@app.command()
def messenger(
    direction: Annotated[Direction, typer.Option(help="pull: a request answered by a push.")] = Direction.PUSH,
    sizes: Annotated[str, typer.Option(help="Bytes of a transfer.")] = "1MiB,16MiB,1GiB",
    rounds: Annotated[int, typer.Option(min=1, help="Measured turns of each side.")] = 5,
    mooncake_python: MooncakePython = None,
    json_file: JsonFile = None,
) -> None:
    """`isthmus bench messenger`, beside Mooncake's transfer engine."""
    from benchmarks.peers.mooncake import MooncakeEngine, find_mooncake
    from isthmus.bench import messenger as bench

    check_writable("--json", json_file)
    python = find_mooncake(mooncake_python)
    if python is None:
        raise ConfigError("--mooncake-python: this Python has no Mooncake; name one that has")
    plan = bench.Plan(direction, amounts.sizes("--sizes", sizes), rounds=rounds)
    with closing(MooncakeEngine(python, max(plan.sizes))) as mooncake:
        result = bench.run(plan, _say, {"mooncake": mooncake})
    show(*bench.tables(result))
    write_json(json_file, bench.as_json(result))


@app.command()
def store(
    sizes: Annotated[str, typer.Option(help="Bytes of a block.")] = "256KiB,1MiB,16MiB",
    total: Annotated[str, typer.Option(help="Bytes of all blocks of a case.")] = "256MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Measured turns of each side.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="An existing folder on the SSD.")] = None,
    mooncake_python: MooncakePython = None,
    redis_server: Annotated[
        str | None, typer.Option(help="Redis or Valkey binary; default: the one on the path, if any.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """`isthmus bench store`, beside the Mooncake store and Redis, where there are such."""
    from isthmus.bench import store as bench

    check_writable("--json", json_file)
    plan = bench.Plan(amounts.sizes("--sizes", sizes), amounts.size("--total", total), rounds, folder)
    rows = bench.run(plan, _say, partial(_stores, mooncake_python, redis_server))
    show(bench.table(rows))
    write_json(json_file, bench.as_json(rows))


@contextmanager
def _stores(python: str | None, redis_server: str | None, blocks: Blocks) -> Iterator[Mapping[str, BlockStore]]:
    """Those that are here."""
    from benchmarks.peers.mooncake import MooncakeStore, find_mooncake
    from benchmarks.peers.redis import Redis, find_redis

    found: dict[str, Any] = {}
    if (python := find_mooncake(python)) is not None:
        for side, remote in (("mooncake", False), ("mooncake_remote", True)):
            found[side] = partial(MooncakeStore, python, blocks.size, blocks.count, remote=remote)
    if (binary := find_redis(redis_server)) is not None:
        found["redis"] = partial(Redis, binary, blocks)
    if not found:
        raise ConfigError(
            "there is neither Mooncake nor Redis here; --mooncake-python and --redis-server name one"
        )
    with ExitStack() as stack:
        yield {side: stack.enter_context(closing(start())) for side, start in found.items()}


@app.command("make-model")
def make_model(
    folder: Annotated[Path, typer.Argument(help="Where to write the model folder.")],
    preset: Annotated[str, typer.Option(help="llama-256x8 or llama-512x12.")] = "llama-256x8",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write a Llama folder with random weights, for the benchmarks."""
    from benchmarks.models import BENCH_MODELS, make_random_model

    if preset not in BENCH_MODELS:
        raise ConfigError(f"--preset {preset}: known are {', '.join(BENCH_MODELS)}")
    make_random_model(folder, **BENCH_MODELS[preset], dtype=dtype)
    print(f"wrote {folder}")


@app.command("unpack-model")
def unpack_model(
    folder: Annotated[Path, typer.Argument(help="Where to write the model folder.")],
    model: Annotated[Path | None, typer.Option(help="GGUF file; default: the default model's.")] = None,
) -> None:
    """Write a GGUF file as a folder in bfloat16, for servers that read no such files, by transformers."""
    from benchmarks.models import unpack_model

    unpack_model(model or find_model(None)[0], folder)
    print(f"wrote {folder}")


@app.command()
def accuracy(
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub id; default: llama-256x8, random.")
    ] = None,
    emulated: Annotated[
        bool, typer.Option("--emulated", help="Emulated engines, at the curve's speed.")
    ] = False,
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
    from benchmarks import accuracy as bench

    check_writable("--json", json_file)
    plan = bench.Plan(
        find_model(model)[0] if model else None,
        requests,
        rate,
        emulated=emulated,
        threads=threads,
        seed=seed,
        cost=cost_file,
    )
    found = bench.run(plan, _say)
    show(bench.table(found))
    write_json(json_file, msgspec.to_builtins(found))
    for line in bench.summary_lines(found):
        print(line)


@app.command()
def agreement(
    model: Annotated[Path, typer.Option(help="Model folder in bfloat16.")],
    folder: Annotated[Path, typer.Option(help="Where logs and the answers of transformers are kept.")],
    vllm_python: VllmPython = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Texts, one a line; default: what the standard library says of itself.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="How many of them.")] = 200,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    options: ServeOptions = "",
    json_file: JsonFile = None,
) -> None:
    """The share of real prompts whose greedy tokens in bfloat16 equal those of transformers: ours, and vLLM's."""
    from benchmarks import agreement as bench
    from benchmarks.peers import servers
    from benchmarks.texts import texts_of

    check_writable("--json", json_file)
    texts = texts_of(prompts)[:count]
    if len(texts) < count:
        raise ConfigError(f"--count {count}: there are only {len(texts)} texts")
    sides = [servers.isthmus("isthmus", model, shlex.split(options))]
    if vllm_python is not None:
        sides.append(servers.vllm(vllm_python, model, []))
    plan = bench.Plan(model, tuple(texts), tokens, folder)
    shares = bench.run(plan, sides, _say)
    show(bench.table(plan, shares))
    write_json(json_file, msgspec.to_builtins(shares))


@app.command()
def chunking(json_file: JsonFile = None) -> None:
    """Chunks of a fixed size or of a fixed time, one prompt or several at once, on a simulated node."""
    from benchmarks import chunking as bench

    check_writable("--json", json_file)
    rows = bench.run()
    show(bench.table(rows))
    write_json(json_file, bench.as_json(rows))


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
    from benchmarks import conductor as bench
    from isthmus.core.conductor.policies import POLICIES

    check_writable("--json", json_file)
    if policy not in POLICIES:
        raise ConfigError(f"--policy {policy}: known are {', '.join(POLICIES)}")
    load = bench.Load(nodes, blocks, prompt_blocks, decisions, policy, seed)
    found = bench.run(load, _say)
    show(bench.table(found))
    write_json(json_file, msgspec.to_builtins(found))


@app.command()
def context(
    model: Annotated[
        str | None, typer.Option(help="Model folder, GGUF file or hub id; default: isthmus serve's.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens that each node has KV memory for.")] = 512,
    nodes: Annotated[str, typer.Option(help="Nodes of each cluster.")] = "1,4",
    answer: Annotated[int, typer.Option(min=1, help="Tokens of the answer.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each node.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """The longest request that one node of small memory takes, and several: by asking, and with exact tokens."""
    from benchmarks import context as bench

    check_writable("--json", json_file)
    plan = bench.Plan(find_model(model)[0], tokens, amounts.counts("--nodes", nodes), answer, threads)
    rows = bench.run(plan, _say)
    show(bench.table(plan, rows))
    write_json(json_file, msgspec.to_builtins(rows))
    for row in rows:
        print(f"{row.nodes}: {row.refusal}")


@app.command()
def cost(
    profiles: Annotated[
        Path, typer.Option(help="Folder with the published measurements (docs/cost-model.md).")
    ],
    json_file: JsonFile = None,
) -> None:
    """The cost model against published measurements: errors of every table, whether it fits or not."""
    from benchmarks import cost as bench

    check_writable("--json", json_file)
    bench.main(profiles, json_file)


@app.command()
def turns(
    model: Annotated[Path, typer.Option(help="Model folder.")],
    rows: Annotated[int, typer.Option(min=2, help="Requests of the batch.")] = 16,
    attention: Annotated[
        str, typer.Option(help="Milliseconds that a holder takes for a layer of one row.")
    ] = "0,0.1,0.3,1",
    net: Annotated[float, typer.Option(min=0, help="Milliseconds to the holder and back.")] = 0.0,
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Measured turns of each number.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """A decode step whose KV lies elsewhere, as one batch and as several that take turns."""
    from benchmarks import turns as bench

    check_writable("--json", json_file)
    times = amounts.numbers("--attention", attention, float)
    plan = bench.Plan(rows=rows, attention_ms=times, net_ms=net, threads=threads, rounds=rounds)
    results = bench.run(model, plan, _say)
    show(bench.table(results))
    write_json(json_file, bench.as_json(results))


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
    from benchmarks import layerwise as bench

    check_writable("--json", json_file)
    results = bench.run(
        model,
        prefix=prefix,
        suffix=suffix,
        shares=amounts.numbers("--shares", shares, float),
        disk=disk,
        dtype=dtype,
        threads=threads,
        rounds=rounds,
        report=_say,
    )
    show(bench.table(results))
    write_json(json_file, bench.as_json(results))


@app.command()
def lending(
    policies: Annotated[str, typer.Option(help="The first one is what the others are set against.")] = (
        "none,isthmus"
    ),
    loads: Annotated[str, typer.Option(help="mixed (many short, few very long), equal.")] = "mixed,equal",
    nodes: Annotated[int, typer.Option(min=1, help="Of role mixed.")] = 4,
    tokens: Annotated[int, typer.Option(min=512, help="KV memory of each.")] = 2048,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second, in the mean.")] = 12.0,
    long_share: Annotated[float, typer.Option(min=0, max=1, help="Of the requests of the mixed load.")] = 0.03,
    seconds: Annotated[float, typer.Option(min=1, help="Of arrivals in each turn.")] = 20.0,
    ttft_s: Annotated[float, typer.Option(help="A request's limit.")] = 1.5,
    tbt_s: Annotated[float, typer.Option(help="Its limit for the mean time between tokens.")] = 0.1,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each policy and load.")] = 2,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="Model folder, GGUF file or hub id; default: an emulated engine.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Requests within their limits on nodes that lend each other KV memory, and on nodes that do not, live."""
    from benchmarks import lending as bench

    check_writable("--json", json_file)
    plan = bench.Plan(
        tuple(policies.split(",")), tuple(loads.split(",")), nodes, tokens, rate, long_share, seconds, ttft_s, tbt_s,
        rounds, seed, find_model(model)[0] if model else None,
    )  # fmt: skip
    turns = bench.run(plan, _say)
    show(bench.table(plan, turns))
    write_json(json_file, msgspec.to_builtins(turns))


@app.command()
def offload(
    requests: Annotated[int, typer.Option(min=100, help="Requests of each simulation.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    capacity: Annotated[bool, typer.Option(help="Also search the highest rate each system sustains.")] = True,
    json_file: JsonFile = None,
) -> None:
    """Prefill in another datacenter, simulated: thresholds, control and baselines under bursts and link faults."""
    from benchmarks import offload as bench

    check_writable("--json", json_file)
    cells = bench.run(requests, seed, capacity=capacity, report=_say)
    show(bench.table(cells))
    write_json(json_file, msgspec.to_builtins(cells))


@app.command()
def recall(
    folder: Annotated[
        Path, typer.Option(help="Of the model, which is trained and written there if it is not.")
    ],
    cases: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 60,
    threads: Annotated[int, typer.Option(min=1, help="Threads that train and compute.")] = 1,
    seed: Annotated[int, typer.Option(help="Of weights and texts.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Recall of a small model whose prompts are assembled: by selector, share recomputed and kind of donor."""
    from benchmarks import recall as bench

    check_writable("--json", json_file)
    rows = bench.run(bench.Plan(folder, cases, threads, seed), _say)
    show(bench.table(rows))
    write_json(json_file, msgspec.to_builtins(rows))


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
    from benchmarks import reuse as bench

    check_writable("--json", json_file)
    plan = bench.Plan(model, prefix, suffix, rounds, threads, seed, folder)
    found = bench.run(plan, _say)
    show(bench.table(found))
    write_json(json_file, bench.as_json(found))
    for line in bench.summary_lines(found):
        print(line)


@app.command()
def reuse_simulated(
    config: Annotated[Path, typer.Option(help="Deployment file.")] = Path("examples/reuse.yaml"),
    rates: Annotated[str, typer.Option(help="Requests a second.")] = "9,12",
    workload: Annotated[str, typer.Option(help="As of isthmus simulate, without rate and reuse.")] = (
        "poisson:num=1000,input=64,output=128,block_size=16,prefixes=1,prefix_tokens=256,"
        "documents=500,document_tokens=1000,retrieved=8,paraphrases=0.3,alike=0.9"
    ),
    json_file: JsonFile = None,
) -> None:
    """What KV of other prompts is worth to a deployment, in virtual time."""
    from benchmarks import reuse_simulated as bench

    check_writable("--json", json_file)
    turns = bench.run(bench.Plan(config, tuple([float(rate) for rate in rates.split(",")]), workload), _say)
    show(bench.table(turns))
    write_json(json_file, msgspec.to_builtins(turns))


@app.command()
def serving(
    model: Annotated[Path, typer.Option(help="Model folder in bfloat16.")],
    vllm_python: Annotated[str, typer.Option(help="A Python with vLLM, which the client is part of.")],
    folder: Annotated[
        Path, typer.Option(help="Where logs and what the client saved are kept; goes on if it is there.")
    ],
    gguf: Annotated[Path | None, typer.Option(help="The model as a GGUF file, for llama.cpp and ours.")] = None,
    llama_python: Annotated[str | None, typer.Option(help="A Python with llama-cpp-python[server].")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each server.")] = 3,
    rows: Annotated[
        str | None, typer.Option(help="Some of the rows, e.g. 64/128x8,chat; default: all.")
    ] = None,
    options: ServeOptions = "",
    vllm_options: Annotated[str, typer.Option(help="More options of vLLM's server.")] = "",
    llama_options: Annotated[str, typer.Option(help="More options of llama.cpp's server.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Ours beside vLLM, and beside llama.cpp, each alone and in turns, under `vllm bench serve`."""
    from benchmarks import serving as bench
    from benchmarks.peers import servers

    check_writable("--json", json_file)
    if (gguf is None) != (llama_python is None):
        raise ConfigError("--gguf and --llama-python go together")
    chosen = tuple(bench.rows_named(rows.split(",")) if rows else bench.ROWS)
    ours = shlex.split(options)
    peer = servers.vllm(vllm_python, model, shlex.split(vllm_options))
    pairs = [bench.Pair("bfloat16", model, servers.isthmus("isthmus", model, ours), peer, chosen)]
    if gguf is not None and llama_python is not None:
        peer = servers.llama(llama_python, gguf, bench.special_tokens(model), shlex.split(llama_options))
        half = tuple(row.fewer() for row in chosen)
        pairs.append(bench.Pair(gguf.name, model, servers.isthmus("isthmus-gguf", gguf, ours), peer, half))
    found = bench.run(pairs, vllm_python, folder, rounds, _say)
    show(*(bench.table(pair, found) for pair in pairs))
    write_json(json_file, msgspec.to_builtins(found))
    for line in (line for pair in pairs for line in bench.verdicts(pair, found)):
        print(line)


@app.command()
def structured(
    folder: Annotated[Path, typer.Option(help="Where logs are kept.")],
    model: Annotated[
        str | None, typer.Option(help="Model folder, GGUF file or hub id; default: isthmus serve's.")
    ] = None,
    schemas: Annotated[int, typer.Option(min=1, help="JSON schemas.")] = 100,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Turns with schemas and without.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the schemas.")] = 0,
    options: ServeOptions = "",
    death_options: Annotated[
        str, typer.Option(help="Of the server whose decode node is killed; empty: none is.")
    ] = "--prefill 1 --decode 2",
    json_file: JsonFile = None,
) -> None:
    """Generated JSON schemas: whether answers follow them, what a token takes, and a decode node that dies."""
    from benchmarks import structured as bench
    from benchmarks.peers import servers

    check_writable("--json", json_file)
    path, _ = find_model(model)
    plan = bench.Plan(schemas, concurrency, rounds, seed, folder)
    side = servers.isthmus("structured", path, shlex.split(options))
    killed = servers.isthmus("structured-death", path, shlex.split(death_options)) if death_options else None
    turns = bench.run(plan, side, killed, _say)
    show(bench.table(plan, turns))
    write_json(json_file, msgspec.to_builtins(turns))
    print(bench.verdict(turns))


@app.command()
def vllm_nodes(
    isthmus: Annotated[str, typer.Option(help="URL of a running cluster of vLLM nodes.")],
    vllm: Annotated[str, typer.Option(help="URL of a server like theirs, that no node has.")],
    model: Annotated[str, typer.Option(help="What the cluster calls its model.")],
    served_model: Annotated[str, typer.Option(help="What the server calls it.")] = "isthmus",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a turn.")] = 200,
    shortest: Annotated[int, typer.Option(min=1, help="Shortest prompt, in tokens.")] = 5,
    longest: Annotated[int, typer.Option(min=1, help="Longest prompt, in tokens.")] = 3000,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 16,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each side.")] = 3,
    vocabulary: Annotated[int, typer.Option(min=4, help="Token ids below this are drawn.")] = 250,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 1,
) -> None:
    """vLLM as a node of a running cluster, beside the same vLLM alone: equal tokens, and what a token costs more."""
    from benchmarks import vllm_nodes as bench

    sides = (bench.Side("isthmus", isthmus, model), bench.Side("vLLM alone", vllm, served_model))
    plan = bench.Plan(sides, prompts, shortest, longest, concurrency, tokens, rounds, vocabulary, seed)
    show(bench.table(plan, bench.run(plan, _say)))


@app.command()
def vllm_faults(
    url: Annotated[str, typer.Argument(help="URL of a running cluster of vLLM nodes on this machine.")],
    model: Annotated[str, typer.Option(help="What the cluster calls its model.")],
    kinds: Annotated[
        str, typer.Option(help="Kinds of faults, in turn; those joined by + are done at once.")
    ] = "prefill-server+decode-server,prefill-adapter+decode-adapter,socket,link,head-link,page,stall,abort",
    count: Annotated[int, typer.Option(min=1, help="How often each is done.")] = 2,
    clients: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, which are asked again and again.")] = 40,
    shortest: Annotated[int, typer.Option(min=1, help="Shortest prompt, in tokens.")] = 5,
    longest: Annotated[int, typer.Option(min=2, help="Longest prompt, in tokens.")] = 1500,
    pause: Annotated[float, typer.Option(min=0, help="Seconds between faults, about.")] = 3.0,
    settle: Annotated[
        float,
        typer.Option(min=0, help="Seconds that KV may stay after the last request; nixl: its lease of 30."),
    ] = 10.0,
    stall: Annotated[float, typer.Option(min=0, help="Seconds for which kind stall stops a process.")] = 2.0,
    most: Annotated[float, typer.Option(min=0, help="After so many seconds no fault begins.")] = float("inf"),
    disk: Annotated[Path | None, typer.Option(help="Where the nodes keep KV on SSD, for kind disk.")] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts and moments.")] = 11,
    json_file: JsonFile = None,
) -> None:
    """Kills, cuts and damage in a running cluster of vLLM nodes: every answer is compared, nothing may be left over."""
    from benchmarks import vllm_faults as bench

    check_writable("--json", json_file)
    plan = bench.Plan(
        url.rstrip("/"), model, tuple(kinds.split(",")), count, clients, prompts, shortest, longest, pause, settle,
        stall, most, disk, seed,
    )  # fmt: skip
    found = bench.run(plan, _say)
    show(bench.table(plan, found))
    write_json(json_file, msgspec.to_builtins(found))
    for line in bench.lines(found):
        print(line)
    if not found.is_good:
        raise typer.Exit(1)


@app.command()
def vllm_routing(
    model: Annotated[Path, typer.Option(help="Model folder.")],
    vllm_python: Annotated[str, typer.Option(help="A Python with vLLM and, for nixl and proxy, NIXL.")],
    trace: Annotated[Path, typer.Option(help="Mooncake's trace of conversations, or one of its form.")],
    folder: Annotated[Path, typer.Option(help="Where configurations, logs and metrics are kept.")],
    proxy: Annotated[Path | None, typer.Option(help="vLLM's toy_proxy_server.py.")] = None,
    cost: Annotated[
        Path | None, typer.Option(help="What isthmus profile --vllm wrote of such a server.")
    ] = None,
    sides: Annotated[str, typer.Option(help="MODE/POLICY of Isthmus, mode nixl or pool; proxy.")] = (
        "nixl/isthmus,nixl/round_robin,proxy,pool/isthmus,pool/round_robin"
    ),
    kv_memory: Annotated[str, typer.Option(help="Of each server; a turn of all sides for each.")] = "1GiB",
    dram: Annotated[str | None, typer.Option(help="Cache of each node in mode pool; default: as much.")] = None,
    every: Annotated[int, typer.Option(min=1, help="One conversation in so many is taken.")] = 40,
    speed: Annotated[float, typer.Option(help="Arrival times are divided by this.")] = 24.0,
    block: Annotated[int, typer.Option(min=1, help="Tokens of a block, for which one hash id stands.")] = 32,
    max_length: Annotated[int, typer.Option(min=2, help="Longer prompts are cut.")] = 2048,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 4,
    vocabulary: Annotated[int, typer.Option(min=4, help="Token ids below this are drawn.")] = 250,
    seed: Annotated[int, typer.Option(help="Of tokens and arrivals.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Which of two vLLM prefill servers gets a prompt: Isthmus's policies and vLLM's toy proxy, on a trace."""
    from benchmarks import vllm_routing as bench

    check_writable("--json", json_file)
    plan = bench.Plan(
        model, vllm_python, trace, folder, proxy, cost, tuple(sides.split(",")),
        amounts.sizes("--kv-memory", kv_memory), amounts.size("--dram", dram) if dram else None,
        every, speed, block, max_length, tokens, vocabulary, seed,
    )  # fmt: skip
    bench.check(plan)
    folder.mkdir(parents=True, exist_ok=True)
    turns = bench.run(plan, _say)
    show(bench.table(plan, turns))
    write_json(json_file, msgspec.to_builtins(turns))


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
    from benchmarks import wan as bench

    check_writable("--json", json_file)
    plan = bench.Plan(
        amounts.numbers("--rates", rates, float),
        amounts.counts("--connections", connections),
        delay_ms,
        jitter_ms,
        stall_s,
        amounts.size("--window", window),
        seconds,
        rounds,
    )
    result = bench.run(plan, _say)
    show(bench.table(result))
    write_json(json_file, bench.as_json(result))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as by Ctrl-C: what was started is ended
    main(app)
