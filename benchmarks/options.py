"""Options that several studies have; see `isthmus.bench.options`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.bench.options import WORDS_OF_SHELL

Threads = Annotated[int, typer.Option(min=1, help="Threads of each node.")]
Seed = Annotated[int, typer.Option(help="Of all that is drawn.")]
ModelFolder = Annotated[Path, typer.Option(help="Model folder.")]
VllmPython = Annotated[str, typer.Option(help="A Python with vLLM.")]
MooncakePython = Annotated[
    str | None, typer.Option(help="A Python with Mooncake installed; default: this one, if it has Mooncake.")
]
ServeOptions = Annotated[
    tuple[str, ...], WORDS_OF_SHELL, typer.Option(help="More options of isthmus serve, e.g. '--mixed 1'.")
]
