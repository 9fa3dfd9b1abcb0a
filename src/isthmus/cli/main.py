"""The `isthmus` command. Verbs import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
from collections.abc import Callable

import typer

from isthmus.cli import (
    bench,
    compare,
    key,
    link,
    node,
    plan,
    profile,
    replay,
    reproduce,
    serve,
    simulate,
    status,
)
from isthmus.core.errors import IsthmusError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="KVCache-centric, disaggregated LLM serving.",
)
app.command("serve")(serve.serve)
app.command("node")(node.node)
app.command("link", hidden=True)(link.link)
app.command("key")(key.key)
app.command("status")(status.status)
app.command("profile")(profile.profile)
app.command("replay")(replay.replay)
app.command("simulate")(simulate.simulate)
app.command("compare")(compare.compare)
app.command("plan")(plan.plan)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(bench.app, name="bench")


def main(command: Callable[[], None] = app) -> None:
    """Runs a command; a user's mistake is one line on standard error and a non-zero exit."""
    atexit.register(gc.freeze)  # Python would look through all that is left for cycles as it ends, twice
    logging.basicConfig(level=logging.WARNING, format="isthmus: %(message)s")
    try:
        command()
    except IsthmusError as error:
        print(f"isthmus: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
