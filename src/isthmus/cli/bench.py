"""`isthmus bench NAME`: the benchmarks."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Measure the engine or a running server.")
