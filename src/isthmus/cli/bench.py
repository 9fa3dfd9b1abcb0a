"""`isthmus bench NAME`: what a user measures, on his own machine, server or trace; commands made of a study's plan."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter

    from isthmus.bench.study import Outcome, Report

STUDIES = {
    "attention": "Attention over KV that lies with other nodes, beside bare sockets and one memory: time, bytes.",
    "engine": "Prefill and decode speed of the engine on this machine: tokens/s.",
    "messenger": "Sealed bytes between two processes, beside bare sockets and memcpy: GB/s, latency.",
    "policies": "Every placement policy in every cell of a sweep, simulated: isthmus against the best other one.",
    "reuse": "Answers to prompts assembled of other prompts' KV, against the same in full: facts, ROUGE-L, KL, time.",
    "serve": "The same streaming load on one server, or on two in turns: TTFT, TBT, tokens/s and ratios.",
    "store": "Put and get of blocks in DRAM and on the SSD, beside memcpy and a plain file: GB/s.",
}
"""A study has a function here, or `run(plan, report)` in the module of its name in `isthmus.bench`."""


class Studies(TyperGroup):
    """Imports a study when it is asked for: some import torch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(STUDIES)  # type: ignore[assignment]  # names, one of which is suggested for a typo

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if cmd_name not in STUDIES:
            return None
        own: dict[str, Callable[..., None]] = {"policies": policies, "reuse": reuse, "serve": serve}
        function = own.get(cmd_name) or command(import_module(f"isthmus.bench.{cmd_name}").run)
        return one_command(cmd_name, function)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(STUDIES.items()))


app = typer.Typer(
    cls=Studies,
    callback=lambda: None,  # a group, though no study is registered
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's help would import every study
    help="Measure the parts of Isthmus, or a running server.",
)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results here as JSON.")]
Rounds = Annotated[int, typer.Option(min=1, help="Measured turns of each side.")]


def one_command(name: str, function: Callable[..., None]) -> Command:
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(function)
    return typer.main.get_command(alone)


def command(run: Callable[[Any, Report], Outcome]) -> Callable[..., None]:
    """A command of `run(plan, report)`: an option for each field of the plan, and `--json`."""
    from isthmus.bench.options import Text
    from isthmus.bench.study import say
    from isthmus.cli.outputs import check_writable

    plan = get_type_hints(run)["plan"]
    hints, texts, parameters = get_type_hints(plan, include_extras=True), dict[str, Text](), []

    def add(name: str, default: Any, hint: Any) -> None:
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        )

    for field in dataclasses.fields(plan):
        hint, default = hints[field.name], field.default
        text = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Text)), None)
        if text is not None:
            texts[field.name] = text
            option = next(each for each in hint.__metadata__ if not isinstance(each, Text))
            hint = Annotated[str | None if default is None else str, option]
            if default not in (None, dataclasses.MISSING):
                default = text.shown(default)
        add(field.name, inspect.Parameter.empty if default is dataclasses.MISSING else default, hint)
    add("json_file", None, JsonFile)

    def call(json_file: Path | None = None, **given: Any) -> None:
        check_writable("--json", json_file)
        for name, text in texts.items():
            if given[name] is not None:
                given[name] = text.parse(f"--{name.replace('_', '-')}", given[name])
        outcome = run(plan(**given), say)
        finish(outcome, json_file)
        if not outcome.is_good:
            raise typer.Exit(1)

    call.__doc__, call.__annotations__ = (run.__doc__ or "").partition("\n\n")[0], {}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def finish(outcome: Outcome, json_file: Path | None) -> None:
    """Shows what a study found, and writes it where that was asked for."""
    from isthmus.cli.outputs import show, write_json

    show(*outcome.tables)
    for line in outcome.notes:
        print(line)
    write_json(json_file, outcome.json)


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
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Answers to prompts assembled of other prompts' KV, against the same in full: facts, ROUGE-L, KL, time."""
    from isthmus.bench import reuse as bench
    from isthmus.bench.options import counts
    from isthmus.bench.study import say
    from isthmus.cli.models import find_model
    from isthmus.cli.outputs import check_writable

    check_writable("--json", json_file)
    plan = bench.Plan(texts, pairs, tokens, lengths=counts("--lengths", lengths), rounds=rounds, seed=seed)
    path, name = find_model(model)
    finish(bench.run(path, name, plan, threads, say), json_file)


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
    from isthmus.bench.options import numbers, size
    from isthmus.bench.policy_cells import POLICIES
    from isthmus.cli.outputs import check_writable
    from isthmus.cli.simulate import progress_bar
    from isthmus.core.errors import ConfigError
    from isthmus.workers import LocalPool, Pool

    check_writable("--json", json_file)
    if ray and jobs is not None:
        raise ConfigError("--jobs: with --ray the cores of the cluster say how many; leave it out")
    sweep = bench.Sweep(
        tuple(trace),
        numbers("--nodes", nodes, int),
        numbers("--speeds", speeds, float),
        numbers("--links", links, float),
        numbers("--seeds", seeds, int),
        tuple(policy.split(",")) if policy else tuple(POLICIES),
        (False, True) if shared_links else (False,),
        str(config) if config else None,
        decode,
        None if ssd is None else size("--ssd", ssd),
        limit,
    )
    pool: Pool = LocalPool(jobs or 2)
    if ray:
        from isthmus.live.cluster.launcher import with_ray

        pool = with_ray("--ray").RayPool()
    with progress_bar("sweeping") as progress:
        cells = bench.run(sweep, pool, progress)
    finish(bench.outcome(sweep, cells), json_file)
