"""`isthmus bench NAME`: the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Measure the engine or a running server.")

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results here as JSON.")]


def _finish(table: Any, rows: list[dict[str, Any]], file: Path | None) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # in a file or a pipe, wide enough for every column
        console = Console(width=200)
    console.print(table)
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
