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

    Console().print(table)
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
