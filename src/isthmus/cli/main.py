"""The `isthmus` command. A verb's module is imported when that verb is asked for, and imports what it needs when it
runs: so `--help` is quick, and a verb that computes nothing runs where what computes is not installed."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from isthmus import extras
from isthmus.core.errors import IsthmusError

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter

VERBS = {
    "serve": "Serve a model: gateway and conductor here, each node a process of its own.",
    "route": "One endpoint before OpenAI-compatible servers that already run.",
    "node": "Add one node to a running cluster.",
    "key": "Draw an API key for a tenant.",
    "status": "Show a running cluster.",
    "profile": "Measure this machine's engine and fit a cost curve to it.",
    "replay": "Replay a recording and compare every decision.",
    "simulate": "Run a trace or a workload through the same decisions, in virtual time.",
    "compare": "Two results of `simulate --json` beside each other.",
    "plan": "Size a fleet for a workload.",
    "reproduce": "A published table: published, ours, difference.",
    "bench": "Measure the parts of Isthmus, or a running server.",
}
"""Each has a module of its name, with a function of its name, or with an `app` where it has verbs of its own."""
STARTED_BY_OTHERS = ("link",)


class Verbs(TyperGroup):
    """Knows the verbs by name; `--help` lists them without a look at their modules."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(VERBS)  # type: ignore[assignment]  # names, of which one is suggested for a typo

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if cmd_name not in (*VERBS, *STARTED_BY_OTHERS):
            return None
        module = import_module(f"isthmus.cli.{cmd_name}")
        verb = getattr(module, "app", None)
        if verb is None:
            verb = typer.Typer(add_completion=False)
            verb.command(cmd_name)(getattr(module, cmd_name))
        return typer.main.get_command(verb)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


app = typer.Typer(
    cls=Verbs,
    callback=lambda: None,  # a group, though no verb is registered
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # loading rich takes longer than all else that `--help` does
    help="KVCache-centric, disaggregated LLM serving.",
)


def main(command: Callable[[], None] = app) -> None:
    """Runs a command; a user's mistake, or an extra that is not installed, is one line on standard error and a non-zero
    exit."""
    atexit.register(gc.freeze)  # Python would look through all that is left for cycles as it ends, twice
    logging.basicConfig(level=logging.WARNING, format="isthmus: %(message)s")
    try:
        command()
    except ModuleNotFoundError as error:
        _fail(extras.missing(error, "this command"))
    except IsthmusError as error:
        _fail(error)


def _fail(error: IsthmusError) -> None:
    print(f"isthmus: error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
