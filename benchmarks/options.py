"""Options of the studies: the fields of a study's `Plan`, so that each is written once.

A field is `Annotated[type, typer.Option(help=...)]`, with a `Text` between them where the command line has one text for
several values. Options that several studies have stand here.
"""

from __future__ import annotations

import dataclasses
import inspect
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from isthmus.bench.study import Outcome, Report, say
from isthmus.bench.transfer_peers import shown_bytes
from isthmus.cli import amounts, bench
from isthmus.cli.bench import JsonFile, finish
from isthmus.cli.outputs import check_writable


class Text(NamedTuple):
    """How a value stands on the command line. `parse` is told the option, for what it says of a mistake."""

    parse: Callable[[str, str], Any]
    shown: Callable[[Any], str]


def _commas(values: tuple[Any, ...]) -> str:
    return ",".join(map(str, values))


COUNTS = Text(amounts.counts, _commas)
NUMBERS = Text(partial(amounts.numbers, kind=float), lambda values: ",".join(f"{value:g}" for value in values))
SIZE = Text(amounts.size, lambda size: shown_bytes(size).replace(" ", ""))
SIZES = Text(amounts.sizes, lambda sizes: ",".join(map(SIZE.shown, sizes)))
WORDS = Text(lambda option, text: tuple(text.split(",")), _commas)
WORDS_OF_SHELL = Text(lambda option, text: tuple(shlex.split(text)), shlex.join)

Rounds = bench.Rounds
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


def command(run: Callable[[Any, Report], Outcome]) -> Callable[..., None]:
    """A command of `run(plan, report)`: an option for each field of the plan, and `--json`."""
    plan = get_type_hints(run)["plan"]
    hints, texts, parameters = get_type_hints(plan, include_extras=True), dict[str, Text](), []
    for field in dataclasses.fields(plan):
        hint, default = hints[field.name], field.default
        text = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Text)), None)
        if text is not None:
            texts[field.name] = text
            option = next(each for each in hint.__metadata__ if not isinstance(each, Text))
            hint = Annotated[str | None if default is None else str, option]
            if default not in (None, dataclasses.MISSING):
                default = text.shown(default)
        if default is dataclasses.MISSING:
            default = inspect.Parameter.empty
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        )
    json_option = inspect.Parameter(
        "json_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=JsonFile
    )

    def call(json_file: Path | None = None, **given: Any) -> None:
        check_writable("--json", json_file)
        for name, text in texts.items():
            if given[name] is not None:
                given[name] = text.parse(f"--{name.replace('_', '-')}", given[name])
        outcome = run(plan(**given), say)
        finish(outcome, json_file)
        if not outcome.is_good:
            raise typer.Exit(1)

    call.__doc__, call.__annotations__ = run.__doc__, {}
    call.__signature__ = inspect.Signature([*parameters, json_option])  # type: ignore[attr-defined]
    return call
