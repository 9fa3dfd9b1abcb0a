"""`isthmus replay`: a flight recording through a new conductor or node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay(
    file: Annotated[Path, typer.Argument(help="Recording made with `serve --record`.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="FILE.py:FUNCTION, as it was recorded with a policy of your own.")
    ] = None,
) -> None:
    """Replay a recording, of the conductor or of a node, and compare every decision.

    Exit status 1 at the first that differs.
    """
    from isthmus.live.cluster.recorder import replay as replay_file

    count, difference = replay_file(file, policy or ())
    if difference is None:
        print(f"{count} events, identical decisions")
        return
    print(f"{file}: line {difference.line} differs after {count} events")
    for label in ("event", "recorded", "replayed"):
        print(f"  {label}: {getattr(difference, label)}")
    raise typer.Exit(1)
